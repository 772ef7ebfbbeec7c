"""`QuantizedWeight`, which weights are kept or quantized, and loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minisgl.distributed import DistributedInfo
from minisgl.errors import CheckpointError, ConfigError
from minisgl.kernel.quant import dequantize, quantize
from minisgl.layers import (
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearReplicated,
    MoELayer,
    ParallelLMHead,
    VocabParallelEmbedding,
    set_rope_device,
)
from minisgl.models import (
    create_model,
    load_model_config,
    load_model_info,
    load_weight,
    plan_storage,
    set_storage,
)
from minisgl.utils import torch_dtype
from tests.helpers import save, tiny_hf_model
from tests.unit.checkpoints import checkpoint
from tests.unit.gguf_files import HIDDEN, VOCAB, Written

LAYER = "model.layers.1"
MIXED = {
    "token_embd.weight": "Q6_K",
    "output.weight": "Q8_0",
    "blk.1.attn_q.weight": "Q4_K",
    "blk.1.attn_k.weight": "Q5_K",
    "blk.1.attn_v.weight": "Q6_K",
    "blk.1.attn_output.weight": "Q5_0",
    "blk.1.ffn_gate.weight": "Q4_1",
    "blk.1.ffn_up.weight": "F16",
    "blk.1.ffn_down.weight": "Q4_0",
}


def build(path: str, quantization: str, dtype: torch.dtype = torch.float32) -> Any:
    """What the engine does: the model on meta, its storage, then its weights."""
    config = load_model_config(path)
    storage = plan_storage(path, quantization, config)
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(dtype):
        model = create_model(config)
    set_storage(model, storage)
    model.load_state_dict(dict(load_weight(path, "cpu", dtype=dtype, storage=storage)))
    return model


def weights(state: dict[str, torch.Tensor], op: str, types: tuple[str, ...]) -> torch.Tensor:
    """The whole weight of an op, whose parts are dequantized, in float32."""
    parts = [(state[f"{op}.weight.{index}"], kind) for index, kind in enumerate(types)]
    return torch.cat([t.float() if kind == "dense" else dequantize(t, kind) for t, kind in parts])


def small_linear() -> LinearColParallelMerged:
    op = LinearColParallelMerged(64, [3, 5], has_bias=True)
    op.set_storage(["Q8_0", "dense"])
    return op


def test_parts_are_named_and_checked_like_any_weight():
    op = small_linear()
    described = {name: (tuple(t.shape), t.dtype) for name, t in op.state_dict().items()}
    assert described == {
        "bias": ((8,), torch.float32),
        "weight.0": ((3, 68), torch.uint8),
        "weight.1": ((5, 64), torch.float32),
    }
    state = {name: torch.ones_like(t) for name, t in op.state_dict().items()}
    op.load_state_dict(dict(state))
    assert all(op.state_dict()[name] is tensor for name, tensor in state.items())
    with pytest.raises(CheckpointError, match=r"Missing key in state_dict: weight.1 \(5, 64\)"):
        op.load_state_dict({name: t for name, t in state.items() if name != "weight.1"})
    with pytest.raises(CheckpointError, match=r"weight.0: the model has \(3, 68\) torch.uint8, "):
        op.load_state_dict({**state, "weight.0": torch.ones(3, 68)})
    with pytest.raises(CheckpointError, match="weight.1: the model has"):
        op.load_state_dict({**state, "weight.1": torch.ones(5, 63)})
    with pytest.raises(CheckpointError, match=r"Unexpected keys .*'weight.2'"):
        op.load_state_dict({**state, "weight.2": torch.ones(1)})


def test_parameters_are_counted_as_weights_and_bytes_as_stored():
    op = small_linear()
    assert op.num_params() == 8 * 64 + 8
    assert op.num_bytes() == 3 * 68 + 4 * (5 * 64 + 8)
    assert op.weight.shape == (8, 64)
    embedding = VocabParallelEmbedding(10, 64)
    embedding.set_storage(["Q4_0"])
    assert (embedding.num_params(), embedding.num_bytes()) == (640, 10 * 36)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_in_parts_computes_with_the_dequantized_weights(dtype):
    torch.manual_seed(0)
    with torch_dtype(dtype):
        op = LinearQKVMerged(64, 8, 4, 2, has_bias=True)
    assert op.part_rows == (32, 16, 16)
    whole = torch.randn(64, 64)
    op.set_storage(["Q8_0", "dense", "Q4_1"])
    q, k, v = whole.split(op.part_rows)
    parts = {"weight.0": quantize(q, "Q8_0"), "weight.1": k.to(dtype)}
    op.load_state_dict(
        {**parts, "weight.2": quantize(v, "Q4_1"), "bias": torch.randn(64).to(dtype)}
    )
    op.pack()  # leaves it alone
    weight = weights(op.state_dict(prefix="op."), "op", ("Q8_0", "dense", "Q4_1"))
    x = torch.randn(5, 64).to(dtype)
    expected = x.float() @ weight.to(dtype).float().T + op.bias.float()
    found = op.forward(x)
    assert found.dtype == dtype
    # float32: sums of 64 products of about 1. bfloat16: two roundings of values up to 40.
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)


def test_a_tied_head_uses_the_embedding_s_blocks():
    embedding = VocabParallelEmbedding(50, 64)
    head = ParallelLMHead(50, 64, tied=embedding)
    embedding.set_storage(["Q8_0"])
    embedding.load_state_dict({"weight.0": quantize(torch.randn(50, 64), "Q8_0")})
    head.pack()
    table = dequantize(embedding.weight.parts[0].tensor, "Q8_0")
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(embedding.forward(ids), table[ids])
    x = torch.randn(3, 64)
    torch.testing.assert_close(head.project(x), x @ table.T, rtol=1e-4, atol=1e-4)
    assert head.state_dict() == {}


def test_blocks_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="rows of 48 can't be Q8_0, whose blocks are 32"):
        LinearReplicated(48, 4).set_storage(["Q8_0"])
    with pytest.raises(ValueError, match="zip"):
        LinearReplicated(64, 4).set_storage(["Q8_0", "Q8_0"])
    monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(0, 2))
    with pytest.raises(ConfigError, match="on one rank only"):
        LinearReplicated(64, 4).set_storage(["Q8_0"])


def test_a_file_s_types_are_planned_part_by_part(tmp_path):
    path = Written(tmp_path / "m.gguf", kinds=MIXED).path
    assert plan_storage(path, "keep", load_model_config(path)) == {
        "model.embed_tokens": ("Q6_K",),
        "lm_head": ("Q8_0",),
        f"{LAYER}.self_attn.qkv_proj": ("Q4_K", "dense", "Q6_K"),
        f"{LAYER}.mlp.gate_up_proj": ("Q4_1", "dense"),
        f"{LAYER}.mlp.down_proj": ("Q4_0",),
    }
    assert plan_storage(path, "none", load_model_config(path)) == {}
    assert load_model_info(path).facts().quantized
    plain = Written(tmp_path / "plain.gguf", kind="Q5_K").path
    assert not load_model_info(plain).facts().quantized
    assert plan_storage(plain, "keep", load_model_config(plain)) == {}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_weights_are_the_dequantized_ones(tmp_path, arch, dtype):
    """Names, order of parts, and rows of rotary heads: all weights equal those loaded as ever."""
    path = Written(tmp_path / "m.gguf", arch, kinds=MIXED).path
    config = load_model_config(path)
    plain = dict(load_weight(path, "cpu", dtype=dtype))
    model = build(path, "keep", dtype)
    state = model.state_dict()
    storage = plan_storage(path, "keep", config)
    for op, types in storage.items():
        assert torch.equal(weights(state, op, types).to(dtype), plain.pop(f"{op}.weight")), op
        state = {name: t for name, t in state.items() if not name.startswith(f"{op}.weight")}
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_blocks_are_views_of_the_file_unless_rows_move(tmp_path):
    path = Written(tmp_path / "m.gguf", kind="Q8_0").path
    storage = plan_storage(path, "keep", load_model_config(path))
    state = dict(load_weight(path, "cpu", storage=storage))
    spans = _mappings(path)
    blocks = {name: t.data_ptr() for name, t in state.items() if t.dtype == torch.uint8}
    assert len(blocks) == 2 + 2 * 7
    copied = {name for name, at in blocks.items() if not any(at in span for span in spans)}
    assert copied == {
        f"model.layers.{i}.self_attn.qkv_proj.weight.{j}" for i in (0, 1) for j in (0, 1)
    }


def _mappings(path: str) -> list[range]:
    """Addresses at which this process has the file mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [words[0].split("-") for words in lines if words[-1] == path]
    return [range(int(start, 16), int(stop, 16)) for start, stop in spans]


SIZES = {"hidden_size": 64, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
def test_any_checkpoint_is_quantized_as_it_is_read(tmp_path, quantization, kind):
    folder = checkpoint(tmp_path / "m", **SIZES, intermediate_size=50)
    config = load_model_config(str(folder))
    storage = plan_storage(str(folder), quantization, config)
    per_layer = {"self_attn.qkv_proj": 3, "self_attn.o_proj": 1, "mlp.gate_up_proj": 2}
    expected = {"model.embed_tokens": ("Q8_0",)} | {
        f"model.layers.{i}.{op}": (kind,) * n for i in (0, 1) for op, n in per_layer.items()
    }
    assert config.tie_word_embeddings
    assert storage == expected  # not down_proj, whose rows of 50 no blocks divide
    original = load_file(folder / "model.safetensors")
    state = build(str(folder), quantization).state_dict()
    for name, part in (("q", 0), ("k", 1), ("v", 2)):
        blocks = state[f"{LAYER}.self_attn.qkv_proj.weight.{part}"]
        assert torch.equal(
            blocks, quantize(original[f"{LAYER}.self_attn.{name}_proj.weight"], kind)
        )
    gate_up = [state[f"{LAYER}.mlp.gate_up_proj.weight.{i}"] for i in (0, 1)]
    for found, name in zip(gate_up, ("gate", "up"), strict=True):
        assert torch.equal(found, quantize(original[f"{LAYER}.mlp.{name}_proj.weight"], kind))
    dense = f"{LAYER}.mlp.down_proj.weight"
    assert torch.equal(state[dense], original[dense])
    assert torch.equal(
        state[f"{LAYER}.self_attn.q_norm.weight"], original[f"{LAYER}.self_attn.q_norm.weight"]
    )


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_quantized_as_they_are_read(tmp_path, quantization, kind, shared):
    more = {"shared_expert_intermediate_size": 96, "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"]} if shared else {}  # fmt: skip
    folder = checkpoint(tmp_path / "m", moe=True, **SIZES, moe_intermediate_size=32, **more)
    storage = plan_storage(str(folder), quantization, load_model_config(str(folder)))
    ops = {name.removeprefix("model.layers.0.") for name in storage if "layers.1" not in name}
    in_all = {"model.embed_tokens", "lm_head", "self_attn.qkv_proj", "self_attn.o_proj"}
    every_token = {"mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"}
    assert ops == in_all | {"mlp.experts"} | (every_token if shared else set())
    assert storage[f"{LAYER}.mlp.experts"] == (kind, kind)
    original = load_file(folder / "model.safetensors")
    model = build(str(folder), quantization)
    state = model.state_dict()
    for expert in range(4):
        gate, up, down = (
            quantize(original[f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight"], kind)
            for part in ("gate", "up", "down")
        )
        assert torch.equal(
            state[f"{LAYER}.mlp.experts.gate_up_proj"][expert], torch.cat((gate, up))
        )
        assert torch.equal(state[f"{LAYER}.mlp.experts.down_proj"][expert], down)
    assert state[f"{LAYER}.mlp.gate.weight"].dtype == torch.float32
    assert model.num_params() == sum(tensor.numel() for tensor in original.values())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_packed_experts_are_quantized_like_single_ones(tmp_path, name):
    sizes = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 32}
    model = tiny_hf_model(name, **sizes, num_experts_per_tok=2, num_hidden_layers=1)
    single = build(save(model, tmp_path / "single"), "int4").state_dict()
    model.save_pretrained(tmp_path / "packed", save_original_format=False)
    packed = build(str(tmp_path / "packed"), "int4").state_dict()
    assert packed["model.layers.0.mlp.experts.down_proj"].dtype == torch.uint8
    assert packed.keys() == single.keys()
    assert all(torch.equal(packed[name], single[name]) for name in single)


def test_experts_whose_rows_no_blocks_divide_stay_dense(tmp_path):
    folder = checkpoint(tmp_path / "m", moe=True, **SIZES, moe_intermediate_size=40)
    storage = plan_storage(str(folder), "int8", load_model_config(str(folder)))
    assert storage[f"{LAYER}.mlp.experts"] == ("Q8_0", "dense")
    state = build(str(folder), "int8").state_dict()
    assert state[f"{LAYER}.mlp.experts.gate_up_proj"].shape == (4, 80, 68)
    assert state[f"{LAYER}.mlp.experts.down_proj"].shape == (4, 64, 40)


def test_a_file_s_experts_are_kept_where_gate_and_up_are_alike(tmp_path):
    kinds = {"blk.1.ffn_down_exps.weight": "Q6_K", "blk.0.ffn_gate_exps.weight": "Q8_0"}
    written = Written(tmp_path / "m.gguf", "qwen3moe", "Q4_K", kinds=kinds)
    storage = plan_storage(written.path, "keep", load_model_config(written.path))
    assert storage["model.layers.0.mlp.experts"] == ("dense", "Q4_K")
    assert storage[f"{LAYER}.mlp.experts"] == ("Q4_K", "Q6_K")
    state = build(written.path, "keep").state_dict()
    for name, parts, kind in (
        ("gate_up_proj", ("gate", "up"), "Q4_K"), ("down_proj", ("down",), "Q6_K"),
    ):  # fmt: skip
        expected = [written.value(f"blk.1.ffn_{part}_exps.weight") for part in parts]
        found = dequantize(state[f"{LAYER}.mlp.experts.{name}"].flatten(0, 1), kind)
        assert torch.equal(found.view(3, -1, 256), torch.cat(expected, dim=1))


def test_experts_in_blocks_run_on_one_rank_only(monkeypatch):
    experts = MoELayer(4, 2, 64, 32, renormalize=True)
    with pytest.raises(ConfigError, match="rows of 32 can't be Q4_K, whose blocks are 256"):
        experts.set_storage(["Q8_0", "Q4_K"])
    monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(0, 2))
    with pytest.raises(ConfigError, match="on one rank only"):
        MoELayer(4, 2, 64, 32, renormalize=True).set_storage(["Q8_0", "dense"])


def test_a_gguf_file_is_quantized_anew_from_float32(tmp_path):
    """Even when the model is bfloat16; what has the wanted type already is taken as it is."""
    kinds = MIXED | {"blk.1.ffn_gate.weight": "Q4_0", "blk.1.ffn_down.weight": "Q4_1"}
    written = Written(tmp_path / "m.gguf", "qwen3", kinds=kinds)
    state = build(written.path, "int4", torch.bfloat16).state_dict()
    for name, stored in (
        ("mlp.gate_up_proj.weight.0", "ffn_gate"),
        ("mlp.gate_up_proj.weight.1", "ffn_up"),
        ("self_attn.qkv_proj.weight.1", "attn_k"),
        ("self_attn.o_proj.weight.0", "attn_output"),
    ):
        value = written.value(f"blk.1.{stored}.weight")
        assert torch.equal(state[f"{LAYER}.{name}"], quantize(value, "Q4_1")), name
    for name, stored in (
        (f"{LAYER}.mlp.down_proj.weight.0", "blk.1.ffn_down.weight"),
        ("lm_head.weight.0", "output.weight"),
    ):
        assert torch.equal(state[name], torch.from_numpy(written.stored[stored][0])), name
    assert state["model.embed_tokens.weight.0"].shape == (VOCAB, HIDDEN // 32 * 34)


def test_every_weight_is_still_counted(tmp_path):
    path = Written(tmp_path / "m.gguf", kinds=MIXED).path
    kept, plain = build(path, "keep"), build(path, "none")
    assert kept.num_params() == plain.num_params()
    assert plain.num_bytes() == 4 * plain.num_params()
    assert kept.num_bytes() == sum(t.nbytes for t in kept.state_dict().values())
    assert kept.num_bytes() < plain.num_bytes()


def test_weights_that_have_no_scale_name_their_tensor(tmp_path):
    name = f"{LAYER}.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 5] = float("inf")

    folder = checkpoint(tmp_path / "m", spoil, **SIZES)
    with pytest.raises(CheckpointError, match=f"{name}: .* use --quantization none"):
        build(str(folder), "int8")


def test_bytes_in_a_safetensors_file_are_not_taken_for_blocks(tmp_path):
    name = f"{LAYER}.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(50, 68, dtype=torch.uint8)

    folder = checkpoint(tmp_path / "m", spoil, **SIZES)
    with pytest.raises(CheckpointError, match="stored as torch.uint8, which is not supported"):
        build(str(folder), "int8")
