"""The matrix of what must not matter, on a device that really is asynchronous."""

from __future__ import annotations

import itertools

import pytest

from tests.model.invariance import Model, check_cell, make_model

pytestmark = pytest.mark.gpu  # needs a CUDA device

# Of the 128 combinations of seven things, 16 in which any three of them meet in all eight ways (a
# fractional factorial design: each of the last three is decided by three of the first four).
CELLS = [
    (
        16 if a else 1,
        4096 if b else 16,
        "radix" if c else "naive",
        d,
        a ^ b ^ c,
        b ^ c ^ d,
        "mistral-window" if a ^ b ^ d else "llama",
    )
    for a, b, c, d in itertools.product((False, True), repeat=4)
]
"""Page size, token budget, cache, retraction forced, overlap, CUDA graphs, model."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Their requests ran alone on the CPU."""
    names = sorted({name for *_, name in CELLS})
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize(
    ("page_size", "budget", "cache", "retraction", "overlap", "graphs", "name"), CELLS
)
def test_matrix(
    models: dict[str, Model],
    page_size: int,
    budget: int,
    cache: str,
    retraction: bool,
    overlap: bool,
    graphs: bool,
    name: str,
) -> None:
    model = models[name]
    if not graphs:
        model = model._replace(config={**model.config, "cuda_graph_max_bs": 0})
    check_cell(model, page_size, budget, cache, retraction, overlap, device="cuda")
