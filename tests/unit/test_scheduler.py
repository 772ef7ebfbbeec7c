"""The scheduler's policy on a fake executor: batches, budget, retraction, ends."""

from __future__ import annotations

import pytest

from minisgl.errors import InvalidRequestError
from tests.unit.scheduling import EOS, drain, expected_output, make, make_req, next_token, outputs


def test_prompts_fill_the_budget_and_the_next_is_cut():
    scheduler, executor, *_ = make(budget=16)
    for uid, length in enumerate((6, 6, 9)):
        scheduler.add(make_req(uid, [5 + uid] * length, 3))
    scheduler.step()
    assert executor.steps[0] == [(0, 6), (1, 6), (2, 4)]
    scheduler.step()  # two decode, and the third's rest fits beside them
    assert executor.steps[1] == [(0, 1), (1, 1), (2, 5)]


def test_decoding_goes_on_beside_a_long_prompt():
    scheduler, executor, *_ = make(budget=9)
    scheduler.add(make_req(0, [5, 6], 30))
    scheduler.step()
    scheduler.add(make_req(1, [7] * 40, 2))
    scheduler.step()
    assert executor.steps[-1] == [(0, 1), (1, 8)]


def test_output_and_finish_reasons():
    scheduler, *_ = make()
    prompts = {uid: [uid + 2, 5, 9 - uid] for uid in range(6)}
    for uid, prompt in prompts.items():
        scheduler.add(make_req(uid, prompt, 12))
    updates = drain(scheduler)
    for uid, prompt in prompts.items():
        want = expected_output(prompt, 12)
        assert outputs(updates)[uid] == want
        [end] = [u.finish_reason for u in updates if u.uid == uid and u.finish_reason]
        assert end == ("stop" if want[-1] == EOS else "length")


def test_retracted_requests_end_as_if_undisturbed():
    scheduler, _, cache, _ = make(num_pages=9, rows=4, budget=16, max_len=36)
    prompts = {uid: [3 + uid] * 5 for uid in range(4)}
    for uid, prompt in prompts.items():
        scheduler.add(make_req(uid, prompt, 20))
    updates = drain(scheduler)
    assert scheduler.stats.num_retractions > 0, "the pool was meant to be too small"
    for uid, prompt in prompts.items():
        assert outputs(updates)[uid] == expected_output(prompt, 20)
    assert cache.num_available_pages == 9


def test_a_retracted_request_comes_before_those_that_never_ran():
    scheduler, executor, *_ = make(num_pages=5, rows=2, budget=16, max_len=16)
    for uid in range(3):
        scheduler.add(make_req(uid, [3 + uid] * 7, 9, ignore_eos=True))
    drain(scheduler)
    assert scheduler.stats.num_retractions > 0
    first = [next(i for i, s in enumerate(executor.steps) if uid in dict(s)) for uid in range(3)]
    last = [max(i for i, s in enumerate(executor.steps) if uid in dict(s)) for uid in range(3)]
    assert last[1] < last[2] and first[1] < first[2], "2 was admitted before 1 came back"


def test_no_stop_id_ends_a_request_before_min_tokens():
    prompt = next([a, b] for a in range(2, 20) for b in range(2, 20) if next_token([a, b]) == EOS)
    scheduler, *_ = make()
    scheduler.add(make_req(0, prompt, 5))
    scheduler.add(make_req(1, prompt, 5, min_tokens=2))
    got = outputs(drain(scheduler))
    assert got[0] == [EOS]
    assert len(got[1]) > 1


def test_a_pool_of_one_request_serves_many():
    """No livelock at the smallest pool that can hold a request at all."""
    scheduler, *_ = make(num_pages=3, page_size=4, rows=4, max_len=12)
    for uid in range(5):
        scheduler.add(make_req(uid, [4 + uid] * 8, 50))
    updates = drain(scheduler)
    assert [u.uid for u in updates if u.finish_reason] == [0, 1, 2, 3, 4]


def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    scheduler, *_ = make(num_pages=3, page_size=4, max_len=100)
    with pytest.raises(InvalidRequestError, match="12 tokens.*longest sequence of 12"):
        scheduler.add(make_req(0, [4] * 12, 1))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add(make_req(1, [], 1))
    assert not scheduler.has_work
    scheduler.add(make_req(2, [4] * 11, 1))
    assert [u.finish_reason for u in drain(scheduler)] == ["length"]


def test_abort_queued_chunked_and_running():
    scheduler, _, cache, _ = make(rows=2, budget=8)
    scheduler.add(make_req(0, [4] * 3, 60))
    scheduler.add(make_req(1, [5] * 30, 60))
    scheduler.add(make_req(2, [6] * 3, 60))
    scheduler.step()  # 0 runs, 1 is chunked, 2 waits for a row
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    for uid in (2, 1, 0):
        assert scheduler.abort(uid)
        assert not scheduler.abort(uid), "one end only"
    ends = scheduler.step()
    assert [(u.uid, u.finish_reason) for u in ends] == [(2, "abort"), (1, "abort"), (0, "abort")]
    assert not scheduler.has_work
    assert cache.num_available_pages == cache.num_pages


def test_a_budget_below_the_rows_is_refused():
    with pytest.raises(ValueError, match="token budget 3"):
        make(rows=4, budget=3)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_do_not_depend_on_max_tokens(overlap: bool):
    """Nothing is reserved for tokens that may never come: a careless limit costs nothing."""
    every = [[a, b, 5] for a in range(2, 9) for b in range(2, 9)]
    prompts = [prompt for prompt in every if expected_output(prompt, 30)[-1] == EOS][:12]
    lengths = [len(expected_output(prompt, 30)) for prompt in prompts]
    assert len(prompts) == 12 and max(lengths) > 8
    steps = []
    for careless in (False, True):
        scheduler, fake, *_ = make(num_pages=30, rows=6, budget=24, overlap=overlap)
        for uid, prompt in enumerate(prompts):
            scheduler.add(make_req(uid, prompt, 110 if careless else lengths[uid] + 1))
        got = outputs(drain(scheduler))
        assert [len(got[uid]) for uid in range(12)] == lengths
        steps.append(fake.steps)
    assert steps[0] == steps[1]
    assert max(map(len, steps[0])) == 6, "reserving 113 tokens for each would let one run"


def test_a_request_starts_only_beside_the_pages_that_others_need_next():
    """One page for its next token for each that runs, and what running prompts still lack."""
    scheduler, fake, cache, _ = make(num_pages=8, page_size=4, rows=4, budget=8, max_len=32)
    scheduler.add(make_req(0, [3] * 20, 4, ignore_eos=True))  # 6 pages with the first token
    scheduler.add(make_req(1, [4] * 3, 2, ignore_eos=True))  # needs one, and one is kept for 0
    scheduler.step()
    assert [uid for uid, _ in fake.steps[0]] == [0], "the budget is used up"
    scheduler.step()
    scheduler.step()
    assert [uid for uid, _ in fake.steps[2]] == [0, 1], "6 + 1, and one page is kept"
    scheduler, fake, cache, _ = make(num_pages=7, page_size=4, rows=4, budget=32, max_len=28)
    scheduler.add(make_req(0, [3] * 20, 4, ignore_eos=True))
    scheduler.add(make_req(1, [4] * 3, 2, ignore_eos=True))
    scheduler.step()
    assert fake.steps[0] == [(0, 20)], "one page is left, which is kept for the first one"
    drain(scheduler)
    assert scheduler.stats.num_retractions == 0


def test_running_prompts_keep_the_pages_that_they_still_need():
    """Chunks end at a page's end, so each step leaves budget, but not always pages."""
    scheduler, fake, *_ = make(num_pages=8, page_size=4, rows=4, budget=14, max_len=32)
    scheduler.add(make_req(0, [3] * 24, 2, ignore_eos=True))  # 7 pages with the first token
    scheduler.add(make_req(1, [4] * 2, 2, ignore_eos=True))  # one, and one is kept for 0
    scheduler.step()
    assert fake.steps[0] == [(0, 12)], "5 pages are left, of which 0 needs 4"
    scheduler.step()
    assert fake.steps[1] == [(0, 12)], "2 pages are left, of which 0 needs one"
    drain(scheduler)
    assert scheduler.stats.num_retractions == 0


def test_a_request_as_large_as_the_pool_runs():
    scheduler, *_ = make(num_pages=3, page_size=4, max_len=12)
    scheduler.add(make_req(0, [4] * 11, 9, ignore_eos=True))
    assert outputs(drain(scheduler))[0] == expected_output([4] * 11, 1, ignore_eos=True)


def test_the_longest_sequence_is_a_limit_of_its_own():
    scheduler, *_ = make(num_pages=64, page_size=4, max_len=10)
    with pytest.raises(InvalidRequestError, match="longest sequence of 10 .--max-model-len 10"):
        scheduler.add(make_req(0, [4] * 10, 1))
    scheduler.add(make_req(1, [4] * 7, 50, ignore_eos=True))
    assert len(outputs(drain(scheduler))[1]) == 3


def test_the_token_at_min_tokens_may_be_the_last():
    prompt = next(
        [a, b]
        for a in range(2, 20)
        for b in range(2, 20)
        if expected_output([a, b], 9)[-1] == EOS and len(expected_output([a, b], 9)) == 3
    )
    for min_tokens, stops in ((2, True), (3, True), (4, False)):
        scheduler, *_ = make()
        scheduler.add(make_req(0, prompt, 9, min_tokens=min_tokens))
        assert (len(outputs(drain(scheduler))[0]) == 3) == stops
