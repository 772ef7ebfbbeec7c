"""Which implementation an op takes, and that the choice ends with its block."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

import pytest
import torch

from minisgl import kernel
from minisgl.kernel import dispatch, torch_ops
from minisgl.kernel.dispatch import OpTable, active_ops, reference_ops, triton_ops, using
from minisgl.kernel.linear import linear as torch_linear

OPS = [item.name for item in fields(OpTable) if item.name != "name"]


def test_using_nests_and_restores() -> None:
    outer, inner = OpTable("outer"), OpTable("inner")
    assert active_ops() is reference_ops()
    with using(outer):
        assert active_ops() is outer
        with using(inner):
            assert active_ops() is inner
        assert active_ops() is outer
        with using(outer):
            assert active_ops() is outer
        assert active_ops() is outer
    assert active_ops() is reference_ops()


def test_using_restores_after_an_error() -> None:
    outer = OpTable("outer")
    with using(outer):
        with pytest.raises(KeyError), using(OpTable("inner")):
            raise KeyError
        assert active_ops() is outer
    assert active_ops() is reference_ops()


@pytest.mark.parametrize("op", OPS)
def test_an_op_passes_all_it_was_given_to_the_active_table(op) -> None:
    function, calls, result = getattr(dispatch, op), [], object()

    def record(*given: object) -> object:
        calls.append(given)
        return result

    arguments = tuple(object() for _ in inspect.signature(function).parameters)
    with using(replace(reference_ops(), name="recorder", **{op: record})):
        found = function(*arguments)
    assert calls == [arguments]
    in_place = inspect.signature(function).return_annotation == "None"
    assert found is (None if in_place else result)


def test_outside_of_any_block_an_op_is_the_reference() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(dispatch.rmsnorm(x, weight, 1e-6), torch_ops.rmsnorm(x, weight, 1e-6))


def test_layers_import_the_dispatched_ops() -> None:
    assert {*OPS} <= {*kernel.__all__}
    for op in OPS:
        assert getattr(kernel, op) is getattr(dispatch, op)


def test_reference_table() -> None:
    table = reference_ops()
    assert table is reference_ops()
    for op in OPS:
        assert getattr(table, op) is (torch_linear if op == "linear" else getattr(torch_ops, op))


def test_triton_tables() -> None:
    pytest.importorskip("triton")
    plain, deterministic = triton_ops(), triton_ops(deterministic=True)
    assert plain is triton_ops()
    for op in OPS:
        if op != "linear":
            assert getattr(plain, op).__module__.startswith("minisgl.kernel.triton."), op
            assert getattr(plain, op).__name__ == op
            assert getattr(plain, op) is getattr(deterministic, op)
    assert plain.linear is torch_linear
    assert deterministic.linear.__module__ == "minisgl.kernel.triton.gemm"


@pytest.mark.parametrize("name", ["reference", "triton", "deterministic"])
def test_describe_names_each_op_once(name) -> None:
    if name != "reference":
        pytest.importorskip("triton")
    table = reference_ops() if name == "reference" else triton_ops(name == "deterministic")
    found: dict[str, str] = {}
    for part in table.describe().split("; "):
        ops, path = part.split(": ")
        for op in ops.split(", "):
            assert op not in found, op
            found[op] = path
    expected = {op: getattr(table, op).__module__.removeprefix("minisgl.") for op in OPS}
    assert found == expected
