"""The C structs of `csrc/`, field by field."""

from __future__ import annotations

import ctypes

__all__ = ["Experts", "Layer", "Linear", "Sizes", "Step", "Weight"]

_Pointer = ctypes.c_void_p


class Weight(ctypes.Structure):
    """Packed weights `[n, k]`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("data", _Pointer),
    ]


class Linear(ctypes.Structure):
    """Up to three weights whose outputs lie side by side, and their bias."""

    _fields_ = [("count", ctypes.c_int), ("weights", Weight * 3), ("bias", _Pointer)]


class Experts(ctypes.Structure):
    """A mixture of experts; the one that every token passes, if there is one, is the last."""

    _fields_ = [
        ("count", ctypes.c_int),
        ("chosen", ctypes.c_int),
        ("renormalize", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("router", Linear),
        ("gate_up", ctypes.POINTER(Linear)),
        ("down", ctypes.POINTER(Linear)),
    ]


class Layer(ctypes.Structure):
    """One decoder layer; norms and biases are float32, keys and values its part of the pool.

    It has `gate_up` and `down`, or `experts`.
    """

    _fields_ = [
        ("input_norm", _Pointer),
        ("post_norm", _Pointer),
        ("q_norm", _Pointer),
        ("k_norm", _Pointer),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("experts", ctypes.POINTER(Experts)),
        ("window", ctypes.c_int64),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("key_scales", _Pointer),
        ("value_scales", _Pointer),
    ]


class Sizes(ctypes.Structure):
    """The whole model."""

    _fields_ = [
        ("layers", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("q_heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("dim", ctypes.c_int),
        ("rotary", ctypes.c_int),
        ("act", ctypes.c_int),
        ("kv_type", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("compute", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("rope", _Pointer),
        ("final_norm", _Pointer),
        ("embedding", Weight),
        ("head", Linear),
        ("layer", ctypes.POINTER(Layer)),
    ]


class Step(ctypes.Structure):
    """One step's requests and the tables that their rows lie in."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("rows", _Pointer),
        ("cached", _Pointer),
        ("lengths", _Pointer),
        ("tokens", _Pointer),
        ("token_stride", ctypes.c_int64),
        ("pages", _Pointer),
        ("page_stride", ctypes.c_int64),
    ]
