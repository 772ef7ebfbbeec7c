"""`BaseOP`: a tree of named weights, and nothing else.

Three rules say what a `BaseOP`'s attributes mean:

1. a tensor whose name does not begin with `_` is a weight, named by its attribute path;
2. a `BaseOP` without a leading `_` is a child;
3. whatever has a leading `_` takes no part (tables, communicators).

    self.qkv_proj = LinearQKVMerged(...)     ->  "qkv_proj.weight"
    self.layers   = OPList([...])            ->  "layers.0. ...", "layers.1. ..."
    self._rope    = get_rope(...)            ->  not listed

There is no autograd, no hooks, no train or eval, and no moving between devices: a model is
built on the meta device, and loading swaps real tensors in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from minisgl.errors import CheckpointError

__all__ = ["BaseOP", "OPList", "StateLessOP"]

StateDict = dict[str, torch.Tensor]


class BaseOP:
    """An operation with weights; subclasses add `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operation."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def state_dict(self, *, prefix: str = "", result: StateDict | None = None) -> StateDict:
        """The weights by name, each once, in attribute order; the tensors themselves, no copies."""
        result = {} if result is None else result
        for name, tensor in self._weights():
            result[prefix + name] = tensor
        for name, child in self._children():
            child.state_dict(prefix=f"{prefix}{name}.", result=result)
        return result

    def load_state_dict(self, state_dict: StateDict, *, prefix: str = "") -> None:
        """Replace every weight by the tensor of its name, taking the names out of `state_dict`.

        The tensors are not copied. A missing name, another shape or another dtype raise
        `CheckpointError` with both sides; so do names left over at the end
        (`Unexpected keys in state_dict: [...]`). Errors found before the left-over check leave
        earlier weights replaced: load into a fresh model.
        """
        self._take(state_dict, prefix)
        if state_dict:
            raise CheckpointError(f"Unexpected keys in state_dict: {sorted(state_dict)}")

    def num_params(self) -> int:
        """Elements of all weights; a tensor that appears under several names counts once."""
        return sum({id(t): op._numel(name, t) for op, name, t in self._every_weight()}.values())

    def num_bytes(self) -> int:
        """Bytes of all weights as they are stored, each tensor once."""
        return sum({id(t): t.nbytes for _, _, t in self._every_weight()}.values())

    def named_ops(self, prefix: str = "") -> Iterator[tuple[str, BaseOP]]:
        """All ops below this one by their paths, as in `("model.layers.0.mlp", op)`."""
        for name, child in self._children():
            yield prefix + name, child
            yield from child.named_ops(f"{prefix}{name}.")

    def pack(self) -> None:
        """Bring loaded weights into the layouts of the fast paths; for all ops below this one.

        Weights keep shape and dtype, but code other than their op may not read them any more.
        """
        for _, child in self._children():
            child.pack()

    def _take(self, state_dict: StateDict, prefix: str) -> None:
        for name, old in list(self._weights()):
            key = prefix + name
            if key not in state_dict:
                raise CheckpointError(
                    f"Missing key in state_dict: {key} {tuple(old.shape)} {old.dtype}"
                )
            new = state_dict.pop(key)
            if new.shape != old.shape or new.dtype != old.dtype:
                raise CheckpointError(
                    f"{key}: the model has {tuple(old.shape)} {old.dtype}, "
                    f"the checkpoint {tuple(new.shape)} {new.dtype}"
                )
            self._replace(name, new)
        for name, child in self._children():
            child._take(state_dict, f"{prefix}{name}.")

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        """Put a loaded tensor in the place of a weight."""
        setattr(self, name, tensor)

    def _numel(self, name: str, tensor: torch.Tensor) -> int:
        """How many weights the tensor of this name holds."""
        return tensor.numel()

    def _every_weight(self) -> Iterator[tuple[BaseOP, str, torch.Tensor]]:
        """(owner, name, tensor) for this op and all below."""
        for name, tensor in self._weights():
            yield self, name, tensor
        for _, child in self._children():
            yield from child._every_weight()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor) and not name.startswith("_"):
                yield name, value

    def _children(self) -> Iterator[tuple[str, BaseOP]]:
        for name, value in vars(self).items():
            if isinstance(value, BaseOP) and not name.startswith("_"):
                yield name, value


class StateLessOP(BaseOP):
    """An operation that never has weights of its own, such as attention over the KV cache.

    It may hold operations that others own (the attention layer uses the block's `q_norm`):
    they are listed by their owner only.
    """

    def state_dict(self, *, prefix: str = "", result: StateDict | None = None) -> StateDict:
        """Nothing is added to `result`."""
        return {} if result is None else result

    def named_ops(self, prefix: str = "") -> Iterator[tuple[str, BaseOP]]:
        """Nothing: what it holds is named by its owner."""
        return iter(())

    def _take(self, state_dict: StateDict, prefix: str) -> None:
        pass

    def _every_weight(self) -> Iterator[tuple[BaseOP, str, torch.Tensor]]:
        return iter(())


Op = TypeVar("Op", bound=BaseOP)


class OPList(BaseOP, Generic[Op]):
    """Children named `0`, `1`, ... as checkpoints name their layers."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.op_list = list(ops)

    def __len__(self) -> int:
        return len(self.op_list)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.op_list)

    def __getitem__(self, index: int) -> Op:
        return self.op_list[index]

    def _children(self) -> Iterator[tuple[str, BaseOP]]:
        for index, op in enumerate(self.op_list):
            yield str(index), op
