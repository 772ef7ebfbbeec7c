"""A launch that failed is tried again: what it did before is not done twice, or kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.core import PageWrites, Req, SamplingParams
from minisgl.engine.sampler import Sampler
from minisgl.engine.triton_drawer import CountedPenalties, TritonDrawer

from .test_engine import make_engine, save_model


def test_a_token_counts_once_for_penalties(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, row, position = 40, np.zeros(1, dtype=np.int64), np.full(1, 3)
    pool = torch.tensor([[1, 2, 3, 0]], dtype=torch.int32, device=device)
    params = SamplingParams(temperature=0, presence_penalty=1.0, logprobs=1).resolve_defaults({})
    req = Req(uid=0, row=0, token_ids=[1, 2, 3], prompt_len=3, params=params, max_len=4)
    sampler = Sampler(vocab, device, pool, "raw", TritonDrawer(device, vocab))
    sampler.attach(req)
    logits = torch.zeros(1, vocab, device=device)
    logits[0, 7] = 1.0
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_with_logprobs", lambda *_: 1 / 0)  # as if memory had run out
        with pytest.raises(ZeroDivisionError):
            sampler.sample(logits, [req], row, position)
    sampled = sampler.sample(logits, [req], row, position)
    sampler.count(sampled.tokens, row)
    penalties = sampler._penalties
    assert isinstance(penalties, CountedPenalties)
    # The low bits count outputs; the sign says that a token is in the prompt.
    assert (penalties._made()[0].long() & 0x7FFF).tolist() == [int(i == 7) for i in range(vocab)]


def test_pages_told_for_a_launch_that_failed_are_told_anew(tmp_path: Path) -> None:
    engine = make_engine(save_model("llama", tmp_path), triton=True, page_size=4, num_pages=12)
    engine.set_pages(PageWrites([1, 1], [0, 1], [7, 8], [7, 8]))
    engine.set_pages(PageWrites([1], [0], [9], [9]))  # the launch between them failed
    assert engine._forward._writes.tolist() == [[1], [0], [9]]
    engine.close()
