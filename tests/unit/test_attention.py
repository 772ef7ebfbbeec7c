"""The paged backend on random mixed batches against plain full attention, one token at a time."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minisgl.attention import TorchBackend
from minisgl.core import Batch, Req, SamplingParams
from minisgl.kernel import torch_attention
from minisgl.kvcache import KVPool, KVShape
from tests.helpers import assert_close

HQ, HK, D = 6, 2, 8


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """One query `[Hq, D]` at `position` over keys `[L, Hk, D]`, in float64 from the definition."""
    first = 0 if window is None else max(0, position + 1 - window)
    keys = k[first : position + 1].double().repeat_interleave(HQ // HK, dim=1)
    values = v[first : position + 1].double().repeat_interleave(HQ // HK, dim=1)
    scores = torch.einsum("hd,lhd->hl", q.double(), keys) / math.sqrt(D)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


class Sequence:
    """A request with all of its keys, values and queries known from the start."""

    def __init__(self, row: int, length: int, layers: int) -> None:
        self.q, self.k, self.v = (torch.randn(layers, length, h, D) for h in (HQ, HK, HK))
        self.req = Req(
            uid=row,
            token_ids=[0] * length,
            prompt_len=length,
            params=SamplingParams(),
            max_len=length,
            row=row,
        )


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 9)], ids=str)
def test_mixed_batches_equal_full_attention(page_size, windows):
    rng, layers = random.Random(page_size), len(windows)
    torch.manual_seed(page_size)
    lengths = [3, 40, 17, 70, 1]
    pages_each = math.ceil(70 / page_size)
    order = list(range(len(lengths) * pages_each))
    rng.shuffle(order)  # pages of a request are not neighbours
    pool = KVPool(KVShape(layers, HK, D, page_size), len(order), torch.float32, torch.device("cpu"))
    table = torch.tensor(order, dtype=torch.int32).view(len(lengths), pages_each)
    backend = TorchBackend(pool, table, windows)
    sequences = [Sequence(row, length, layers) for row, length in enumerate(lengths)]
    kinds = set()
    while live := [s for s in sequences if s.req.cached_len < len(s.req.token_ids)]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        for s in chosen:
            rest = len(s.req.token_ids) - s.req.cached_len
            s.req.device_len = s.req.cached_len + rng.choice([1, 1, min(rest, 13)])
        kinds.add(Batch([s.req for s in chosen]).is_prefill)
        run_step(backend, table, page_size, chosen, windows)
    assert kinds == {True, False}


def run_step(backend, table, page_size, chosen, windows):
    batch = Batch([s.req for s in chosen])
    positions = [range(s.req.cached_len, s.req.device_len) for s in chosen]
    batch.out_loc = torch.cat(
        [
            torch.tensor(
                [int(table[s.req.row, p // page_size]) * page_size + p % page_size for p in ps]
            )
            for s, ps in zip(chosen, positions, strict=True)
        ]
    )
    batch.attn_metadata = metadata = backend.prepare_metadata(batch)
    counts = [len(ps) for ps in positions]
    last = metadata.get_last_indices(batch.size).tolist()
    assert last == [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
    assert metadata.seq_lens.tolist() == [s.req.device_len for s in chosen]
    for layer, window in enumerate(windows):
        q, k, v = (
            torch.cat([getattr(s, n)[layer, ps] for s, ps in zip(chosen, positions, strict=True)])
            for n in "qkv"
        )
        ours = backend.forward(q, k, v, layer, batch)
        theirs = torch.stack(
            [
                full_attention(s.q[layer, p], s.k[layer], s.v[layer], p, window)
                for s, ps in zip(chosen, positions, strict=True)
                for p in ps
            ]
        )
        # float32 with at most 70 keys of magnitude about 1
        assert_close(ours.double(), theirs, 1e-5)
    for s in chosen:
        s.req.cached_len = s.req.device_len


@pytest.mark.parametrize("rows", [1, 3, 7, 20])
def test_a_chunk_in_pieces_is_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose scores would take too much memory at once."""
    torch.manual_seed(rows)
    q, (k, v) = torch.randn(20, HQ, D), torch.randn(2, 50, HK, D)
    mask = torch.zeros(20, 50).masked_fill_(torch.ones(20, 50).triu(31).bool(), float("-inf"))
    whole = torch_attention.prefill_attention(q, k, v, mask)
    monkeypatch.setattr(torch_attention, "_rows_at_once", lambda q, k: rows)
    assert_close(torch_attention.prefill_attention(q, k, v, mask), whole, 1e-6)
