"""The batches that a GPU's memory is measured on, and the room left for what they can't show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.config import EngineConfig, ModelFacts, ResolvedConfig
from minisgl.engine.memory import _gathered_bytes
from minisgl.engine.profile import profile_batches
from minisgl.kvcache import KVShape
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware

GPU = Hardware(4, 1 << 34, has_cuda=True, has_triton=True, num_gpus=1)


def config(attn: str, context: int, **options: int) -> ResolvedConfig:
    return resolve(EngineConfig(attn=attn, **options), GPU, ModelFacts(torch.bfloat16, context))


@pytest.mark.parametrize("attn", ["triton", "torch"])
@pytest.mark.parametrize("context", [2, 100, 8192, 50_000])
@pytest.mark.parametrize("running", [1, 256])
def test_batches_are_as_large_as_a_step_can_be(attn: str, context: int, running: int) -> None:
    found = config(attn, context, max_running_requests=running)
    batches = profile_batches(found)
    budget = found.max_prefill_length
    held = {page for req in batches[0] for page in req.pages}
    for reqs in batches:
        assert 1 <= len(reqs) <= running
        assert sum(req.device_len - req.cached_len for req in reqs) <= budget
        for req in reqs:
            assert 0 <= req.cached_len < req.device_len <= context
            assert len(req.pages) == -(-req.device_len // found.page_size)
    assert max(len(reqs) for reqs in batches) == running
    if attn == "torch":
        [late] = batches[-1]
        assert late.device_len == context
        assert late.cached_len == max(1, context - budget)
        assert {*late.pages} <= held


def test_what_the_plain_backend_gathers_has_room() -> None:
    shape, found = KVShape(28, 8, 128, 16), config("torch", 4096)
    assert _gathered_bytes(found, shape) * 14 == shape.page_bytes(torch.bfloat16)
    assert _gathered_bytes(replace(found, attn="triton"), shape) == 0
