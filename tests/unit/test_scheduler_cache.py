"""What requests share, who waits for whom, and in which order they start."""

from __future__ import annotations

import pytest

from minisgl.scheduler.queue import LPM_MAX_WAIT
from tests.unit.scheduling import drain, ends, expected_output, make, make_req, outputs


def started(fake, count: int) -> list[int]:
    """The requests in the order of their first step."""
    order = list(dict.fromkeys(uid for step in fake.steps for uid, _ in step))
    assert len(order) == count
    return order


def test_a_shared_prefix_is_computed_once():
    shared = [3 + i % 7 for i in range(512)]
    prompts = {uid: shared + [30 + uid] * 32 for uid in range(32)}
    made = make(num_pages=600, page_size=16, rows=32, budget=1024, max_len=640)
    for uid, prompt in prompts.items():
        made.scheduler.add(make_req(uid, prompt, 4, ignore_eos=True))
    updates = drain(made.scheduler)
    stats = made.scheduler.stats
    assert stats.num_prefill_tokens == 512 + 32 * 32
    assert stats.num_hit_tokens == 31 * 512
    assert stats.num_queried_tokens == 32 * 544
    assert made.fake.steps[0] == [(0, 544)], "the others wait for what the first one computes"
    assert len(made.fake.steps[1]) == 32
    for uid, prompt in prompts.items():
        assert outputs(updates)[uid] == expected_output(prompt, 4, ignore_eos=True)


def test_without_a_cache_nobody_waits_and_nothing_is_shared():
    made = make(num_pages=600, page_size=16, rows=32, budget=1024, max_len=640, cache="naive")
    for uid in range(3):
        made.scheduler.add(make_req(uid, [5] * 48, 4))
    drain(made.scheduler)
    assert made.fake.steps[0] == [(0, 48), (1, 48), (2, 48)]
    assert made.scheduler.stats.num_hit_tokens == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_that_is_cached_whole_computes_its_last_token(length: int, page_size: int):
    prompt = list(range(2, 2 + length))
    made = make(page_size=page_size)
    for uid in range(2):
        made.scheduler.add(make_req(uid, prompt, 3, ignore_eos=True))
        assert outputs(drain(made.scheduler))[uid] == expected_output(prompt, 3, ignore_eos=True)
    cached = (length - 1) // page_size * page_size
    assert dict(next(s for s in made.fake.steps if s[0][0] == 1)) == {1: length - cached}
    assert made.scheduler.stats.num_hit_tokens == cached


def test_finished_chunks_are_shared_before_the_request_ends():
    """The second follows a step behind, reading what the first one computed, to where they part."""
    made = make(page_size=4, rows=2, budget=8)
    shared = [5 + i % 3 for i in range(24)]
    made.scheduler.add(make_req(0, [*shared, 9, 9, 9], 2, ignore_eos=True))
    made.scheduler.step()
    made.scheduler.add(make_req(1, [*shared, 8, 8], 2, ignore_eos=True))
    updates = drain(made.scheduler)
    assert made.fake.steps[:3] == [[(0, 8)], [(0, 8)], [(0, 8)]]
    assert made.fake.steps[3] == [(0, 3), (1, 2)], "all that is shared was read, not computed"
    assert outputs(updates)[1] == expected_output([*shared, 8, 8], 2, ignore_eos=True)


def test_who_parts_from_the_others_does_not_wait():
    """The budget that a long prompt leaves is for whoever shares no page of this step's chunk."""
    made = make(page_size=4, rows=3, budget=10)
    shared = [5 + i % 3 for i in range(20)]
    made.scheduler.add(make_req(0, [*shared, 9], 1))
    made.scheduler.step()
    made.scheduler.add(make_req(1, [*shared, 8], 1))  # its next page is the next of 0's
    made.scheduler.add(make_req(2, [*shared[:8], 7, 7, 7, 7, 7], 1))  # parts from them at 8
    made.scheduler.step()
    assert made.fake.steps == [[(0, 8)], [(0, 8), (2, 2)]]
    drain(made.scheduler)
    assert made.scheduler.stats.num_hit_tokens == 20 + 8


def test_requests_of_another_salt_share_nothing():
    made = make(page_size=4)
    for uid, salt in enumerate((None, "a", "b", "a", None)):
        made.scheduler.add(make_req(uid, [5] * 9, 2, cache_salt=salt, ignore_eos=True))
        drain(made.scheduler)
    computed = {step[0][0]: step[0][1] for step in reversed(made.fake.steps)}
    assert computed == {0: 9, 1: 9, 2: 9, 3: 1, 4: 1}


def test_a_request_for_prompt_logprobs_reads_no_cache_but_fills_it():
    made = make(page_size=4, budget=16)
    for uid in range(3):
        params = {"prompt_logprobs": 0} if uid < 2 else {}
        made.scheduler.add(make_req(uid, [5] * 9, 2, ignore_eos=True, **params))
        updates = drain(made.scheduler)
        scored = [e.rank for u in updates for e in u.prompt_logprobs or ()]
        assert scored == (list(range(1, 9)) if uid < 2 else [])
    computed = {step[0][0]: step[0][1] for step in reversed(made.fake.steps)}
    assert computed == {0: 9, 1: 9, 2: 1}


def test_sequences_that_generate_the_same_tokens_keep_their_own_pages():
    """Two greedy copies fill pages with the same tokens: one of each goes to the tree in the end,
    the other is freed; no page table changes under a running request (the guard looks)."""
    made = make(num_pages=20, page_size=2)
    for uid in range(3):
        made.scheduler.add(make_req(uid, [5] * 5, 9, ignore_eos=True))
    updates = drain(made.scheduler)
    assert len({tuple(o) for o in outputs(updates).values()}) == 1
    assert made.cache.num_cached_pages == 13 // 2
    assert made.cache.num_available_pages == 20


def test_a_retracted_request_reads_its_own_pages_back():
    made = make(num_pages=9, rows=4, budget=16, max_len=36)
    for uid in range(4):
        made.scheduler.add(make_req(uid, [3 + uid] * 5, 20, ignore_eos=True))
    drain(made.scheduler)
    stats = made.scheduler.stats
    assert stats.num_retractions > 0
    assert stats.num_hit_tokens > 0, "what it had computed was still cached"


def test_tokens_of_a_retracted_request_are_not_counted_as_the_prompts_hits():
    made = make(num_pages=9, rows=4, budget=16, max_len=36)
    reqs = [make_req(uid, [3 + uid] * 5, 20, ignore_eos=True) for uid in range(4)]
    for req in reqs:
        made.scheduler.add(req)
    drain(made.scheduler)
    assert [req.num_cached_tokens for req in reqs] == [0, 0, 0, 0]


def test_flush_forgets_all_but_what_runs():
    made = make(page_size=4)
    made.scheduler.add(make_req(0, [5] * 12, 2))
    drain(made.scheduler)
    made.scheduler.add(make_req(1, [6] * 12, 9, ignore_eos=True))
    updates = made.scheduler.step()
    assert made.scheduler.flush_cache() == 3
    made.scheduler.check_integrity()
    assert made.cache.num_cached_pages == 3  # of the running request
    updates += drain(made.scheduler)
    assert outputs(updates)[1] == expected_output([6] * 12, 9, ignore_eos=True)
    made.scheduler.flush_cache()
    assert made.cache.num_cached_pages == 0


def test_cached_pages_give_way_to_those_in_need_the_oldest_first():
    made = make(num_pages=8, page_size=4, rows=1, budget=32, max_len=32)
    for uid in range(3):
        made.scheduler.add(make_req(uid, [5 + uid] * 9, 2, ignore_eos=True))
        drain(made.scheduler)
    assert made.cache.num_cached_pages == 6
    made.scheduler.add(make_req(3, [9] * 15, 2, ignore_eos=True))  # 4 pages, 2 are free
    drain(made.scheduler)
    left = [made.cache.match(make_req(9, [5 + uid] * 9, 1)).num_tokens for uid in range(3)]
    assert left == [0, 8, 8]


def test_priority_comes_before_arrival():
    made = make(rows=1, budget=16)
    for uid, priority in enumerate((0, 5, -1, 0, -1)):
        made.scheduler.add(make_req(uid, [3 + uid] * 3, 2, priority=priority))
    drain(made.scheduler)
    assert started(made.fake, 5) == [2, 4, 0, 3, 1]


def test_the_least_urgent_is_retracted_first():
    made = make(num_pages=9, rows=4, budget=20, max_len=36)
    for uid, priority in enumerate((3, 2, 1, 0)):
        made.scheduler.add(make_req(uid, [3 + uid] * 5, 20, priority=priority, ignore_eos=True))
    updates = drain(made.scheduler)
    assert made.scheduler.stats.num_retractions > 0
    assert list(ends(updates)) == [3, 2, 1, 0]


def test_lpm_starts_the_longest_cached_prefix_first():
    made = make(num_pages=64, page_size=4, rows=1, budget=64, policy="lpm")
    long, short = [5] * 16, [6] * 8
    made.scheduler.add(make_req(0, [*long, 9], 1))
    made.scheduler.add(make_req(1, [*short, 9], 1))
    drain(made.scheduler)
    for uid, prompt in enumerate(([8] * 20, [*short, 7], [*long, 7], [*long, 8]), 2):
        made.scheduler.add(make_req(uid, prompt, 1))
    drain(made.scheduler)
    assert started(made.fake, 6)[2:] == [4, 5, 3, 2]


def test_lpm_takes_priority_first():
    made = make(num_pages=64, page_size=4, rows=1, budget=64, policy="lpm")
    made.scheduler.add(make_req(0, [5] * 16, 1))
    drain(made.scheduler)
    made.scheduler.add(make_req(1, [5] * 16, 1))
    made.scheduler.add(make_req(2, [6] * 16, 1, priority=-1))
    drain(made.scheduler)
    assert started(made.fake, 3) == [0, 2, 1]


def test_lpm_lets_nobody_starve():
    """While requests with a long cached prefix keep coming, two others get their turn."""
    made = make(num_pages=64, page_size=4, rows=1, budget=64, policy="lpm")
    hot = [5] * 16
    made.scheduler.add(make_req(0, hot, 1))
    drain(made.scheduler)
    cold = {1: [6] * 9, 2: [7] * 9}
    for uid, prompt in cold.items():
        made.scheduler.add(make_req(uid, prompt, 1))
    uid, ended = 3, {}
    while not cold.keys() <= ended.keys():
        while made.scheduler.num_waiting < 6:
            made.scheduler.add(make_req(uid, [*hot, uid], 1))
            uid += 1
        for update in made.scheduler.step():
            ended[update.uid] = made.scheduler.stats.num_steps
        assert uid < 10 * LPM_MAX_WAIT, "starved"
    assert LPM_MAX_WAIT <= ended[1] <= LPM_MAX_WAIT + 5
    assert ended[1] + LPM_MAX_WAIT <= ended[2] <= 2 * LPM_MAX_WAIT + 10


def test_lpm_lets_nobody_starve_who_is_passed_by_the_urgent_too():
    """Urgent requests come now and then and stand first; the others' turn comes all the same."""
    made = make(num_pages=64, page_size=4, rows=1, budget=64, policy="lpm")
    hot = [5] * 16
    made.scheduler.add(make_req(0, hot, 1))
    drain(made.scheduler)
    made.scheduler.add(make_req(1, [6] * 9, 1))
    uid, ended = 2, set()
    while 1 not in ended:
        made.scheduler.add(make_req(uid, [*hot, uid], 1, priority=-1 if uid % 20 == 0 else 0))
        uid += 1
        ended |= {update.uid for update in made.scheduler.step()}
        assert uid < 10 * LPM_MAX_WAIT, "starved"


def test_lpm_looks_at_a_window_of_the_queue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minisgl.scheduler.queue.LPM_WINDOW", 2)
    made = make(num_pages=64, page_size=4, rows=1, budget=64, policy="lpm")
    made.scheduler.add(make_req(0, [5] * 16, 1))
    drain(made.scheduler)
    for uid, prompt in enumerate(([8] * 9, [7] * 9, [5] * 17), 1):
        made.scheduler.add(make_req(uid, prompt, 1))
    drain(made.scheduler)
    assert started(made.fake, 4) == [0, 1, 3, 2]


def test_full_pages_of_an_answer_are_shared_while_it_is_generated():
    made = make(page_size=4)
    made.scheduler.add(make_req(0, [5] * 5, 30, ignore_eos=True))
    for _ in range(12):
        made.scheduler.step()
    answer = expected_output([5] * 5, 12, ignore_eos=True)
    # 16 of its tokens are computed; a page is offered when the next one is needed.
    assert made.cache.match(make_req(1, [5] * 5 + answer, 1)).num_tokens == 12
    drain(made.scheduler)


def test_nobody_waits_for_a_page_that_must_be_computed_anyway():
    """The prompt's last token is computed by everyone: two prompts of one page run together."""
    made = make(page_size=4)
    for uid in range(2):
        made.scheduler.add(make_req(uid, [5] * 4, 2))
    made.scheduler.step()
    assert made.fake.steps[0] == [(0, 4), (1, 4)]
    drain(made.scheduler)


def test_a_retracted_request_for_prompt_logprobs_reads_what_was_scored():
    made = make(num_pages=13, rows=2, budget=4, max_len=36)
    made.scheduler.add(make_req(0, [3] * 5, 30, ignore_eos=True))
    made.scheduler.add(make_req(1, [4] * 13, 20, prompt_logprobs=0, ignore_eos=True))
    updates = drain(made.scheduler)
    assert made.scheduler.stats.num_retractions == 1
    assert made.scheduler.stats.num_hit_tokens == 16, (
        "all of its prompt was scored, and more cached"
    )
    scored = [entry.rank for update in updates for entry in update.prompt_logprobs or ()]
    assert scored == list(range(1, 13))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'sjf': choose from fcfs, lpm"):
        make(policy="sjf")


def test_a_uid_that_lives_is_refused():
    made = make()
    made.scheduler.add(make_req(0, [5], 1))
    with pytest.raises(ValueError, match="uid 0"):
        made.scheduler.add(make_req(0, [5], 1))
    drain(made.scheduler)
    made.scheduler.add(make_req(0, [5], 1))


def test_lost_pages_are_told_when_idle_and_nobody_is_hurt(caplog: pytest.LogCaptureFixture):
    made = make()
    made.cache.allocator.allocate(1)
    made.scheduler.add(make_req(0, [5] * 9, 2, ignore_eos=True))
    updates = [update for _ in range(2) for update in made.scheduler.step()]
    assert outputs(updates)[0] == expected_output([5] * 9, 2, ignore_eos=True)
    assert "Pages lost: " in caplog.text and "of 64" in caplog.text
    with pytest.raises(RuntimeError, match="Pages lost: .* of 64"):
        made.scheduler.check_integrity()
