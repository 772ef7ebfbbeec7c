"""`BaseOP` and the blocks built on it: which weights exist, how they are loaded and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl.distributed import DistributedInfo, get_tp_info, set_tp_info
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.layers import (
    BaseOP,
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
    MoELayer,
    OPList,
    ParallelLMHead,
    RMSNorm,
    StateLessOP,
    VocabParallelEmbedding,
    get_gated_activation,
    local_heads,
)
from minisgl.utils import torch_dtype
from tests.helpers import assert_close


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every run draws the same numbers."""
    torch.manual_seed(0)


class Table(StateLessOP):
    """Has a tensor and a child, and still no weights."""

    def __init__(self, norm: RMSNorm) -> None:
        self.table = torch.zeros(3)
        self.norm = norm


class Block(BaseOP):
    """One of everything an attribute can be."""

    def __init__(self) -> None:
        self.scale = torch.zeros(2)
        self._cache = torch.zeros(4)
        self.norm = RMSNorm(3, eps=1e-6)
        self._hidden = RMSNorm(3, eps=1e-6)
        self.table = Table(self.norm)
        self.layers = OPList([LinearReplicated(2, 3, has_bias=True), RMSNorm(5, eps=1e-6)])
        self.size = 7
        self.nothing = None


NAMES = ["scale", "norm.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight"]


def given(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """A state dict that fits `Block`, with some tensors replaced."""
    fitting = {name: torch.randn_like(tensor) for name, tensor in Block().state_dict().items()}
    return {**fitting, **{name.replace("__", "."): t for name, t in changes.items()}}


def test_weights_are_named_by_their_attribute_paths() -> None:
    block = Block()
    weights = block.state_dict()
    assert list(weights) == NAMES
    assert weights["scale"] is block.scale  # the tensor itself
    assert weights["layers.1.weight"] is block.layers[1].weight
    assert list(block.state_dict(prefix="model.")) == [f"model.{name}" for name in NAMES]
    result = {"other": torch.zeros(1)}
    assert block.state_dict(result=result) is result
    assert list(result) == ["other", *NAMES]


def test_a_list_is_a_sequence_of_its_ops() -> None:
    ops = [RMSNorm(2, eps=1e-6) for _ in range(12)]
    children = OPList(ops)
    assert (len(children), list(children), children[11]) == (12, ops, ops[11])
    assert children.op_list == ops
    assert list(children.state_dict()) == [f"{i}.weight" for i in range(12)]


def test_loading_replaces_tensors_without_copying() -> None:
    block, tensors = Block(), given()
    cache, hidden, table = block._cache, block._hidden.weight, block.table.table
    remaining = dict(tensors)
    block.load_state_dict(remaining)
    assert remaining == {}  # consumed
    for name, tensor in block.state_dict().items():
        assert tensor is tensors[name]
        assert tensor.data_ptr() == tensors[name].data_ptr()
    assert block.table.norm.weight is tensors["norm.weight"]  # who shares it, sees it
    assert (block._cache, block._hidden.weight, block.table.table) == (cache, hidden, table)


def test_loading_takes_only_its_own_prefix() -> None:
    block = Block()
    tensors = {f"a.{name}": tensor for name, tensor in given().items()}
    block.load_state_dict(dict(tensors), prefix="a.")
    assert block.scale is tensors["a.scale"]
    with pytest.raises(CheckpointError, match=r"Missing key in state_dict: b.scale"):
        block.load_state_dict(dict(tensors), prefix="b.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers__0__weight": torch.zeros(3, 4)},
            r"layers.0.weight: the model has \(3, 2\) torch.float32, "
            r"the checkpoint \(3, 4\) torch.float32",
        ),
        (
            {"norm__weight": torch.zeros(3, dtype=torch.bfloat16)},
            r"norm.weight: the model has \(3,\) torch.float32, "
            r"the checkpoint \(3,\) torch.bfloat16",
        ),
        (
            {"norm__bias": torch.zeros(3), "_cache": torch.zeros(4)},
            r"Unexpected keys in state_dict: \['_cache', 'norm.bias'\]",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_sides(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message) as caught:
        Block().load_state_dict(given(**changes))
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_weight_is_named_with_its_shape(name: str) -> None:
    tensors = given()
    shape = tuple(tensors.pop(name).shape)
    with pytest.raises(RuntimeError) as caught:
        Block().load_state_dict(tensors)
    assert str(caught.value) == f"Missing key in state_dict: {name} {shape} torch.float32"


def test_parameters_are_counted_once() -> None:
    assert Block().num_params() == 2 + 3 + 6 + 3 + 5

    class Tied(BaseOP):
        def __init__(self) -> None:
            self.a = torch.zeros(10)
            self.b = self.a

    assert Tied().num_params() == 10
    # Tensors on meta have no memory to tell them apart by, and still are two.
    with torch.device("meta"):
        assert OPList([RMSNorm(4, 1e-6), RMSNorm(4, 1e-6)]).num_params() == 8


def test_ops_without_forward_say_so() -> None:
    with pytest.raises(NotImplementedError, match="Block has no forward"):
        Block().forward()


# -- blocks --------------------------------------------------------------------------------


def test_weights_have_the_default_dtype() -> None:
    with torch.device("meta"), torch_dtype(torch.float16):
        layer = LinearReplicated(4, 6, has_bias=True)
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float16, torch.float16)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_is_one_linear_map(has_bias: bool) -> None:
    x = torch.randn(3, 8)
    layers: list[Any] = [
        LinearReplicated(8, 5, has_bias),
        LinearColParallelMerged(8, [6, 4], has_bias),
        LinearQKVMerged(8, 2, 4, 1, has_bias),
        LinearRowParallel(8, 5, has_bias),
        LinearOProj(4, 2, 5, has_bias),
    ]
    for layer, outputs in zip(layers, (5, 10, 12, 5, 5), strict=True):
        names = ["weight", "bias"] if has_bias else ["weight"]
        assert list(layer.state_dict()) == names
        assert (layer.full_input_size, layer.full_output_size) == (8, outputs)
        assert layer.weight.shape == (outputs, 8)
        layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})
        expected = F.linear(x, layer.weight, layer.bias if has_bias else None)
        assert_close(layer.forward(x), expected, atol=0.0)


def test_a_tied_head_uses_the_embedding_and_drops_its_own_weight() -> None:
    embedding = VocabParallelEmbedding(10, 4)
    head = ParallelLMHead(10, 4, embedding)
    assert head.state_dict() == {}
    table, other = torch.randn(10, 4), torch.randn(10, 4)
    embedding.load_state_dict({"weight": table})
    head.load_state_dict({"lm_head.weight": other}, prefix="lm_head.")
    head.load_state_dict({}, prefix="lm_head.")  # absent is as well
    x = torch.randn(2, 4)
    assert_close(head.project(x), F.linear(x, table), atol=0.0)
    own = ParallelLMHead(10, 4)
    own.load_state_dict({"weight": other})
    assert_close(own.project(x), F.linear(x, other), atol=0.0)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gated_activations(name: str, reference: Any) -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    ours = get_gated_activation(name)(torch.cat((gate, up), dim=-1))
    # One unit in the last place: a strided half takes another path through the same function.
    assert_close(ours, reference(gate) * up, atol=1e-6)


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^Unsupported activation: 'swish2'; supported: silu,"):
        get_gated_activation("swish2")
    assert issubclass(UnsupportedModelError, ValueError)


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_equal_a_loop_over_tokens(renormalize: bool) -> None:
    tokens, hidden, inner, experts, top_k = 9, 8, 6, 5, 2
    layer = MoELayer(experts, top_k, hidden, inner, renormalize=renormalize)
    layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, experts)
    logits[:, 3] = -50.0  # an expert without a token
    expected = torch.zeros(tokens, hidden)
    for t in range(tokens):
        probs = logits[t].softmax(-1)
        chosen = probs.sort(descending=True).indices[:top_k]
        total = probs[chosen].sum() if renormalize else 1.0
        for e in chosen.tolist():
            gate, up = (layer.gate_up_proj[e] @ x[t]).chunk(2)
            expected[t] += probs[e] / total * (layer.down_proj[e] @ (F.silu(gate) * up))
    # Sums of 8 and 6 products in another order, of magnitude about 10: a few times 1e-6.
    assert_close(layer.forward(x, logits), expected, atol=2e-5)


# -- tensor parallelism --------------------------------------------------------------------


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets rank and size for the rest of the test."""

    def set_rank(rank: int, size: int) -> None:
        monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(rank, size))

    return set_rank


def test_rank_and_size_are_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.distributed.info._info", None)
    assert get_tp_info() == DistributedInfo(0, 1)
    assert get_tp_info().is_primary()
    set_tp_info(DistributedInfo(1, 2))
    set_tp_info(DistributedInfo(1, 2))
    assert get_tp_info() == DistributedInfo(1, 2)
    assert not get_tp_info().is_primary()
    with pytest.raises(RuntimeError, match="already"):
        set_tp_info(DistributedInfo(0, 2))
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        DistributedInfo(2, 2)


def test_local_heads(rank_of: Any) -> None:
    for size, expected in ((1, (12, 2)), (2, (6, 1)), (4, (3, 1)), (12, (1, 1))):
        rank_of(size - 1, size)
        assert local_heads(12, 2) == expected
    rank_of(0, 5)
    with pytest.raises(ValueError, match="num_qo_heads = 12 is not divisible by 5"):
        local_heads(12, 1)
    rank_of(0, 3)
    with pytest.raises(ValueError, match="is not divisible by 2"):
        local_heads(12, 2)


def test_local_sizes(rank_of: Any) -> None:
    rank_of(2, 4)  # of 10 over 4: 3, 3, 3, 1
    assert LinearColParallelMerged(8, [10, 10]).weight.shape == (6, 8)
    assert LinearRowParallel(10, 8).weight.shape == (8, 3)
    assert LinearReplicated(8, 10).weight.shape == (10, 8)
    assert LinearQKVMerged(8, 16, 8, 2).weight.shape == ((2 + 1 + 1) * 16, 8)
    assert LinearOProj(8, 16, 24).weight.shape == (24, 32)
    experts = MoELayer(3, 2, 8, 10, renormalize=True)
    assert experts.gate_up_proj.shape == (3, 6, 8)
    assert experts.down_proj.shape == (3, 8, 3)
    rank_of(3, 4)
    assert LinearColParallelMerged(8, [10, 10]).weight.shape == (2, 8)
    layer = LinearRowParallel(10, 8)
    assert (layer.full_input_size, layer.local_input_size) == (10, 1)
