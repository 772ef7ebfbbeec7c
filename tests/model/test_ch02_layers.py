"""The op layer against `transformers`: one decoder layer's names, RMSNorm, RoPE, the embedding.

RMSNorm and RoPE are compared exactly in float32: the reference ops keep Hugging Face's order
of operations, so any difference at all is a mistake.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from minisgl.errors import UnsupportedModelError
from minisgl.kernel import indexing
from minisgl.layers import RMSNorm, RMSNormFused, VocabParallelEmbedding, get_rope, set_rope_device
from minisgl.layers.rotary import clear_rope_cache, max_context
from minisgl.models import ModelConfig
from minisgl.models.decoder import DecoderLayer
from minisgl.utils import torch_dtype
from tests.helpers import assert_close

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
POSITIONS = torch.arange(8192)


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the RoPE device that another one set; every run draws the same numbers."""
    torch.manual_seed(0)
    monkeypatch.setattr("minisgl.layers.rotary._rope_device", None)


def model_config(name: str) -> ModelConfig:
    """The config of a published model."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return ModelConfig.from_hf(SimpleNamespace(**raw))


def test_decoder_layer_of_qwen3_has_exactly_these_weights() -> None:
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(torch.bfloat16):
        layer = DecoderLayer(
            model_config("qwen3-0.6b"), layer_id=0, has_qk_norm=True, use_moe=False
        )
    weights = layer.state_dict()
    assert [(name, tuple(tensor.shape)) for name, tensor in weights.items()] == [
        ("self_attn.qkv_proj.weight", (4096, 1024)),
        ("self_attn.q_norm.weight", (128,)),
        ("self_attn.k_norm.weight", (128,)),
        ("self_attn.o_proj.weight", (1024, 2048)),
        ("mlp.gate_up_proj.weight", (6144, 1024)),
        ("mlp.down_proj.weight", (1024, 3072)),
        ("input_layernorm.weight", (1024,)),
        ("post_attention_layernorm.weight", (1024,)),
    ]
    assert {(t.device.type, t.dtype) for t in weights.values()} == {("meta", torch.bfloat16)}
    # The layer inside attention uses the block's norms, and lists them no second time.
    assert layer.self_attn.attn.state_dict() == {}


# -- the vocabulary ------------------------------------------------------------------------


def test_vocab_parallel_indexing_masks_other_shards() -> None:
    weight = torch.arange(20).view(10, 2)
    ids = torch.tensor([3, 5, 14, 15, 9])
    rows = indexing(weight, ids, vocab_range=(5, 10))
    # Row i of this shard is vocabulary entry 5 + i; 3 and 15 belong to other ranks.
    assert rows.tolist() == [[0, 0], [0, 1], [18, 19], [0, 0], [8, 9]]
    assert weight.tolist() == torch.arange(20).view(10, 2).tolist()  # not masked in place


def test_indexing_without_a_range_is_a_lookup() -> None:
    weight = torch.randn(7, 3)
    ids = torch.tensor([6, 0, 0, 3])
    assert torch.equal(indexing(weight, ids), weight[ids])


@pytest.mark.parametrize(("vocab", "size"), [(12, 3), (10, 4), (5, 4), (2, 4)])
def test_shards_of_a_vocabulary_add_up(
    vocab: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10 over 4 is 3, 3, 3, 1 and 2 over 4 leaves two ranks empty.
    from minisgl.distributed import DistributedInfo

    full, ids = torch.randn(vocab, 3), torch.randint(vocab, (20,))
    total = torch.zeros(20, 3)
    for rank in range(size):
        monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(rank, size))
        embedding = VocabParallelEmbedding(vocab, 3)
        start, length = embedding.vocab_range
        assert embedding.weight.shape == (length, 3)
        total += indexing(full[start : start + length], ids, embedding.vocab_range)
    assert torch.equal(total, full[ids])  # one addend is the row, the others are zeros


# -- RMSNorm -------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs_type", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("shape", [(5, 1024), (3, 8, 128), (1, 48)])
def test_rmsnorm_equals_transformers_exactly(theirs_type: Any, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    theirs = theirs_type(shape[-1], eps=1e-5)
    theirs.weight.data = weight
    expected = theirs(x).detach()
    ours = RMSNorm(shape[-1], eps=1e-5)
    ours.weight = weight
    before = x.clone()
    assert_close(ours.forward(x), expected, atol=0.0)
    assert torch.equal(x, before)
    ours.forward_inplace(x)
    assert_close(x, expected, atol=0.0)


def test_rmsnorm_in_place_on_a_view_leaves_the_rest_alone() -> None:
    qkv = torch.randn(4, 10, 16)
    before = qkv.clone()
    norm = RMSNorm(16, eps=1e-6)
    norm.weight = torch.randn(16)
    norm.forward_inplace(qkv[:, :3])
    assert torch.equal(qkv[:, 3:], before[:, 3:])
    assert torch.equal(qkv[:, :3], norm.forward(before[:, :3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rmsnorm_rounds_where_transformers_does(dtype: torch.dtype) -> None:
    # Statistics in float32, rounded before the weight: also equal to the last bit.
    x, weight = torch.randn(6, 256).to(dtype), torch.randn(256).to(dtype)
    theirs = LlamaRMSNorm(256, eps=1e-6)
    theirs.weight.data = weight
    ours = RMSNorm(256, eps=1e-6)
    ours.weight = weight
    assert_close(ours.forward(x), theirs(x).detach(), atol=0.0)


def test_fused_add_and_rmsnorm_equals_transformers_exactly() -> None:
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    theirs = LlamaRMSNorm(64, eps=1e-6)
    theirs.weight.data = weight
    ours = RMSNormFused(64, eps=1e-6)
    ours.weight = weight
    normed, first = ours.forward(x.clone())
    assert_close(normed, theirs(x).detach(), atol=0.0)
    assert_close(first, x, atol=0.0)  # with no residual yet, x is the residual
    total = residual + x
    normed, new = ours.forward(x.clone(), residual.clone())
    assert_close(normed, theirs(total).detach(), atol=0.0)
    assert_close(new, total, atol=0.0)


# -- RoPE ----------------------------------------------------------------------------------

ORIGINAL = {"original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 8.0, **ORIGINAL}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "base": {"rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **ORIGINAL, "rope_theta": 500000.0,
    },
    "yarn": YARN,
    "yarn-factor": {**YARN, "factor": 3.7, "rope_theta": 1e6},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.7},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-mscale-alone": {**YARN, "mscale": 0.7},
    "yarn-betas": {**YARN, "beta_fast": 20.0, "beta_slow": 3.0},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-factor-one": {**YARN, "factor": 1.0},
}  # fmt: skip


def hf_config(model_type: str, variant: dict[str, Any], **changes: Any) -> Any:
    """A `transformers` config with this RoPE and a context of 8192."""
    fields = {
        "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **variant},
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **{**fields, **changes})


def assert_rope_equal(config: Any, theirs: Any) -> None:
    """Query and key of all positions, rotated by both; heads are cut at `rotary_dim`."""
    rotary = ModelConfig.from_hf(config).rotary_config
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(len(POSITIONS), heads, rotary.head_dim, generator=generator) for heads in (2, 1)
    )
    cos, sin = theirs(q, POSITIONS[None])
    turned, rest = q[..., : rotary.rotary_dim], q[..., rotary.rotary_dim :]
    turned_k, rest_k = k[..., : rotary.rotary_dim], k[..., rotary.rotary_dim :]
    expected_q, expected_k = apply_rotary_pos_emb(
        turned.transpose(0, 1)[None], turned_k.transpose(0, 1)[None], cos, sin
    )
    expected_q = torch.cat((expected_q[0].transpose(0, 1), rest), dim=-1)
    expected_k = torch.cat((expected_k[0].transpose(0, 1), rest_k), dim=-1)
    rope = get_rope(
        rotary.head_dim, rotary.rotary_dim, rotary.max_position, rotary.base, rotary.scaling
    )
    rope.forward(POSITIONS, q, k)
    assert_close(q, expected_q, atol=0.0, what="query")
    assert_close(k, expected_k, atol=0.0, what="key")


@pytest.mark.parametrize("variant", VARIANTS)
def test_rope_equals_transformers_exactly(variant: str) -> None:
    config = hf_config("llama", VARIANTS[variant])
    assert_rope_equal(config, LlamaRotaryEmbedding(config))


def test_rope_of_the_published_configs_equals_transformers_exactly() -> None:
    for name, theirs_type in (
        ("qwen3-0.6b", Qwen3RotaryEmbedding),
        ("llama-3.2-1b-instruct", LlamaRotaryEmbedding),
    ):
        raw = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
        config = AutoConfig.for_model(**raw)
        assert_rope_equal(config, theirs_type(config))


@pytest.mark.parametrize("variant", ["default", "linear", "yarn"])
def test_partial_rotary_equals_transformers_exactly(variant: str) -> None:
    scaling = {**VARIANTS[variant], "partial_rotary_factor": 0.5}
    config = hf_config("phi", scaling)
    assert ModelConfig.from_hf(config).rotary_config.rotary_dim == 32
    assert_rope_equal(config, PhiRotaryEmbedding(config))


def test_a_scaling_changes_the_angles() -> None:
    # Errors at position 0 would be zero even if a scaling were ignored: look at 1k and 8k.
    plain = get_rope(64, 64, 8192, 10000.0)._cos_sin_cache
    for name in ("linear", "llama3", "yarn"):
        table = get_rope(64, 64, 8192, 10000.0, VARIANTS[name])._cos_sin_cache
        assert (table[[1024, 8191]] - plain[[1024, 8191]]).abs().amax(dim=-1).min() > 0.1
        assert table.dtype == torch.float32


def test_tables_reach_over_the_extended_context() -> None:
    def length(max_position: int, name: str) -> int:
        return len(get_rope(64, 64, max_position, 10000.0, VARIANTS[name])._cos_sin_cache)

    assert length(1024, "default") == 1024
    assert length(1024, "dynamic") == 1024  # beyond it the angles depend on the batch
    assert length(1024, "linear") == 4096
    assert length(1024, "yarn") == length(1024, "llama3") == 8192
    assert length(8192, "yarn") == 8192  # the config names the extended context already
    # What the model promises is another thing: llama3's configs name the context themselves.
    assert max_context(1024, VARIANTS["yarn"]) == 8192
    assert max_context(1024, VARIANTS["llama3"]) == 1024


def test_both_spellings_of_the_type_are_read() -> None:
    fields = {"factor": 4.0}
    new = get_rope(64, 64, 512, 10000.0, {"rope_type": "linear", **fields})
    old = get_rope(64, 64, 512, 10000.0, {"type": "linear", **fields})
    assert torch.equal(new._cos_sin_cache, old._cos_sin_cache)
    assert not torch.equal(new._cos_sin_cache[:512], get_rope(64, 64, 512, 10000.0)._cos_sin_cache)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_an_unknown_type_is_an_error(key: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match="Unsupported RoPE type: 'su'; supported: .*yarn"
    ):
        get_rope(64, 64, 512, 10000.0, {key: "su", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="Unsupported RoPE type: 'su'"):
        ModelConfig.from_hf(
            SimpleNamespace(
                **json.loads((CONFIGS / "qwen3-0.6b.json").read_text("utf-8"))
                | {"rope_scaling": {key: "su"}}
            )
        )


def test_a_missing_factor_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError, match="RoPE type 'linear' needs 'factor'"):
        get_rope(64, 64, 512, 10000.0, {"rope_type": "linear"})
    with pytest.raises(UnsupportedModelError, match="RoPE type 'llama3' needs 'low_freq_factor'"):
        get_rope(64, 64, 512, 10000.0, {"rope_type": "llama3", "factor": 2.0})


def test_layers_share_one_table() -> None:
    assert get_rope(128, 128, 4096, 1e6) is get_rope(128, 128, 4096, 1e6)
    assert get_rope(128, 128, 4096, 1e6) is not get_rope(128, 128, 4096, 1e5)
    factors = [1.0] * 32  # lists are not hashable
    scaling = {"rope_type": "freq_factors", "factors": factors}
    assert get_rope(64, 64, 64, 1e4, scaling) is get_rope(64, 64, 64, 1e4, {**scaling})


def test_tables_do_not_depend_on_the_default_dtype() -> None:
    factors = [1.0 + i / 7 for i in range(32)]
    for scaling in (*VARIANTS.values(), {"rope_type": "freq_factors", "factors": factors}):
        wide = get_rope(64, 64, 300, 12345.0, scaling)._cos_sin_cache
        clear_rope_cache()
        with torch_dtype(torch.bfloat16):
            narrow = get_rope(64, 64, 300, 12345.0, scaling)._cos_sin_cache
        assert torch.equal(wide, narrow)
    angles = torch.arange(300).double()[:, None] / 12345.0 ** (torch.arange(0, 64, 2) / 64).double()
    expected = (angles / torch.tensor(factors, dtype=torch.float64)).cos()
    # Angles reach 300: float32 has 3e-5 there, and its powers err a little more.
    assert (narrow[:, :32] - expected).abs().max() < 1e-4


def test_building_on_meta_needs_a_real_device_for_the_table() -> None:
    message = r"^Call set_rope_device\(\) before building a model on meta device$"
    with torch.device("meta"), pytest.raises(RuntimeError, match=message):
        get_rope(64, 64, 512, 10000.0)
    set_rope_device(torch.device("cpu"))
    with torch.device("meta"):
        rope = get_rope(64, 64, 512, 10000.0)
    assert rope._cos_sin_cache.device.type == "cpu"
    assert rope._cos_sin_cache.shape == (512, 64)
    assert rope is get_rope(64, 64, 512, 10000.0)
    assert rope.state_dict() == {}
