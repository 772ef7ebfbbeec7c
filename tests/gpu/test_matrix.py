"""The matrix of what must not matter, on a device that really is asynchronous."""

from __future__ import annotations

import pytest

from tests.model.invariance import MATRIX, Model, check_cell, make_model

pytestmark = pytest.mark.gpu  # needs a CUDA device


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Its requests ran alone on the CPU."""
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("page_size", "budget", "cache", "retraction", "overlap"), MATRIX)
def test_matrix(
    llama: Model, page_size: int, budget: int, cache: str, retraction: bool, overlap: bool
) -> None:
    check_cell(llama, page_size, budget, cache, retraction, overlap, device="cuda")
