"""Log-probabilities of SGLang's native API: their shapes, and the limits on their size."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.server import large
from minisgl.server.large import JsonList
from tests.unit.fake_async_engine import BEGIN, FakeAsyncEngine, answer
from tests.unit.native_calls import events, generate, routes
from tests.unit.routes import error_of


def test_logprobs_of_the_output_are_triples() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: answer("Hi", "length")))
    info = generate(server, return_logprob=True)["meta_info"]
    assert info["output_token_logprobs"] == [[-1.5, 72, None], [-1.5, 105, None]]
    assert info["input_token_logprobs"] == []
    assert "output_top_logprobs" not in info


def test_the_most_likely_tokens_come_with_text_when_asked_for() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: answer("H", "length")))
    info = generate(server, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)[
        "meta_info"
    ]
    assert info["output_token_logprobs"] == [[-1.5, 72, "H"]]
    # The fake engine's last one is minus infinity, which JSON can't say.
    assert info["output_top_logprobs"] == [[[-0.25, 73, "I"], [-1.5, 72, "H"], [None, 122, "z"]]]
    assert info["input_top_logprobs"] == []


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [[None, BEGIN, None], [-1.5, 97, None], [-1.5, 98, None]]),
        (1, [[None, 97, None], [-1.5, 98, None]]),
        (2, [[None, 98, None]]),
        (3, []),
        (-1, []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_the_prompt_begin_where_asked_for(
    start: int, expected: list[Any], stream: bool
) -> None:
    options = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
    whole = events(routes(), **options)[-1] if stream else generate(routes(), **options)
    assert whole["meta_info"]["input_token_logprobs"] == expected
    top = whole["meta_info"]["input_top_logprobs"]
    assert [entry is None for entry in top] == [row[0] is None for row in expected]


def test_without_return_logprob_there_are_none() -> None:
    server = routes()
    info = generate(server, logprob_start_len=0)["meta_info"]
    assert not any("logprobs" in name for name in info)
    assert server.engine.submitted[0].params.prompt_logprobs is None


def test_a_large_answer_is_made_in_a_thread_and_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "rid": "r"}
    options |= {"top_logprobs_num": 2, "sampling_params": {"n": 2}}
    small = generate(routes(), **options)
    monkeypatch.setattr(large, "LARGE", 1)
    made = generate(routes(), **options)
    for one in (*small, *made):
        del one["meta_info"]["e2e_latency"]
    assert made == small


def test_each_log_probability_of_a_stream_is_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def extend(self: JsonList, items: Any) -> None:
        items = list(items)
        written.append(len(items))
        original(self, items)

    original = JsonList.extend
    monkeypatch.setattr(JsonList, "extend", extend)
    written: list[int] = []
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: answer("abcdef", "length")))
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    got = events(server, input_ids=[1, 2, 3], text=None, sampling_params={"n": 2}, **options)
    assert len(got) == 12
    assert got[-1]["meta_info"]["input_token_logprobs"] == [
        [None, 1, None],
        [-1.5, 2, None],
        [-1.5, 3, None],
    ]
    assert len(got[-1]["meta_info"]["output_top_logprobs"]) == 6
    assert sum(written) == 2 * (3 + 6 + 6)  # the tokens themselves and the most likely ones


@pytest.mark.parametrize(("stream", "name"), [(False, "MAX_ENTRIES"), (True, "MAX_REPEATED")])
def test_an_answer_that_would_be_too_large_is_refused(
    stream: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, name, 100)
    server = routes()
    params = {"max_new_tokens": 6, "n": 3}
    body = {"text": "ab", "return_logprob": True, "top_logprobs_num": 5, "sampling_params": params}
    error = error_of(server.post("/generate", {**body, "stream": stream}))
    assert error["param"] == "top_logprobs_num"
    assert "108 log-probabilities" in error["message"]
    assert not server.engine.submitted
