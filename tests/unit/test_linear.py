"""The packed linear against the plain one, and that packing changes nothing but the layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel.linear import can_pack, linear, pack_linear_weight
from minisgl.layers import LinearReplicated, ParallelLMHead, VocabParallelEmbedding
from tests.helpers import assert_close

needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(8, 8, dtype=torch.bfloat16)),
    reason="this CPU or torch has no packed bfloat16 layout",
)


@needs_packing
@pytest.mark.parametrize("rows", [1, 3, 32, 257])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (576, 960), (33, 7), (1, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_equals_plain(rows, inputs, outputs, has_bias):
    torch.manual_seed(0)
    x = torch.randn(rows, inputs).bfloat16()
    weight = torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    ours = linear(x, pack_linear_weight(weight), bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Both sum in float32 and round once to bfloat16 (8 bits): half a unit in the last place of
    # the largest partial sums, which stay below 4 * sqrt(inputs) here.
    assert_close(ours.double(), exact, 4 * inputs**0.5 * 2**-8)
    assert_close(F.linear(x, weight, bias).double(), exact, 4 * inputs**0.5 * 2**-8)


@needs_packing
def test_pack_keeps_shape_dtype_and_values():
    weight = torch.randn(48, 64).bfloat16()
    packed = pack_linear_weight(weight)
    assert (packed.shape, packed.dtype) == (weight.shape, weight.dtype)
    assert torch.equal(packed.to_dense(), weight)


def test_float32_and_other_devices_stay_plain():
    assert not can_pack(torch.empty(8, 8))
    assert not can_pack(torch.empty(8, 8, dtype=torch.bfloat16, device="meta"))
    assert not can_pack(torch.empty(2, 8, 8, dtype=torch.bfloat16))
    layer = LinearReplicated(8, 4)
    layer.weight = plain = torch.randn(4, 8)
    layer.pack()
    assert layer.weight is plain


@needs_packing
def test_a_tied_head_packs_a_copy_and_leaves_the_embedding_alone():
    embedding = VocabParallelEmbedding(20, 16)
    embedding.weight = table = torch.randn(20, 16).bfloat16()
    head = ParallelLMHead(20, 16, tied=embedding)
    x = torch.randn(3, 16).bfloat16()
    before = head.project(x)
    head.pack()
    assert embedding.weight is table
    assert head.state_dict() == {}
    assert_close(head.project(x), before, 2**-5)  # one unit in the last place at magnitude 8
    assert torch.equal(embedding.forward(torch.tensor([7])), table[7:8])
