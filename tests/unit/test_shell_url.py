"""The chat with a server: what it sends, what it reads, and what it makes of failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from aiohttp import web

from minisgl.params import SamplingParams
from minisgl.shell.url_backend import UrlBackend
from tests.unit.chat_server import BREAK, DONE, HANG, Stub, event, said, usage
from tests.unit.scripted_chat import heeding_ctrl_c, press_ctrl_c, talk

LIMIT_S = 30


@pytest.fixture
def stub() -> Iterator[Stub]:
    with closing(Stub()) as stub:
        yield stub


def chat(stub: Stub, *lines: str, model: str | None = None, **options: Any) -> str:
    with closing(UrlBackend(stub.url, model)) as backend:
        return talk(backend, *lines, **options)


# -- answers ---------------------------------------------------------------------------------


def test_an_answer_however_its_bytes_are_cut() -> None:
    whole = (
        said(None, role="assistant") + said("Grüß") + b": ping\n\n" + said("e!\n", "stop")
    ) + usage(11, 5)
    whole = whole.replace(b"\n\n", b"\r\n\r\n", 2) + DONE
    for size in (1, 2, 7, 50, len(whole)):
        with closing(Stub()) as stub:
            stub.answers = [[whole[i : i + size] for i in range(0, len(whole), size)]]
            printed = chat(stub, "hi", "/stats")
        assert printed.startswith("Grüße!\nconversation  16 of 64 tokens\n")
        assert "total         11 prompt + 5 output tokens, " in printed


def test_the_conversation_and_all_that_is_set_are_sent(stub: Stub) -> None:
    stub.answers = [[said("one", "stop"), DONE], [said("two", "stop"), DONE]]
    params = SamplingParams(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=-4,
        stop=["a", "b"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        logit_bias={5: -100},
        skip_special_tokens=False,
    )
    chat(stub, "hi", "/params temperature=none", "/system -", "bye", params=params, system="S")
    first, second = stub.bodies
    common = {
        "model": "first",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    expected = {**common, **vars(params), "stop": ["a", "b"], "stop_token_ids": [5]}
    expected["logit_bias"] = {"5": -100}
    for name in ("n", "logprobs", "prompt_logprobs"):
        del expected[name]
    system, hi = {"role": "system", "content": "S"}, {"role": "user", "content": "hi"}
    assert first == {**expected, "messages": [system, hi]}
    del expected["temperature"]
    assert second == {**expected, "messages": [{"role": "user", "content": "bye"}]}


def test_the_answer_goes_back_and_defaults_stay_the_servers(stub: Stub) -> None:
    stub.answers = [[said("one", "stop"), DONE], [said("two", "stop"), DONE]]
    assert chat(stub, "hi", "bye") == "one\ntwo\n"
    assert [message["content"] for message in stub.bodies[1]["messages"]] == ["hi", "one", "bye"]
    assert set(stub.bodies[1]) == {"model", "messages", "stream", "stream_options"}


def test_a_server_that_counts_nothing_and_does_not_say_why_it_ended(stub: Stub) -> None:
    stub.answers = [[said("a"), said("b"), said(""), DONE]]
    printed = chat(stub, "hi", "/stats", model="other")
    assert printed.startswith("ab\nconversation  unknown tokens\n")
    assert "total         unknown prompt + 2 output tokens, " in printed


def test_a_last_event_without_its_blank_line(stub: Stub) -> None:
    stub.answers = [[said("a", "stop"), usage(9, 1).rstrip()]]
    assert "9 prompt + 1 output tokens" in chat(stub, "hi", "/stats")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_shown_and_not_sent_back(stub: Stub, name: str) -> None:
    thought = said(None, **{name: "let me see"})
    stub.answers = [[thought, said("yes", "stop"), DONE], [said("two", "stop"), DONE]]
    assert chat(stub, "hi", "bye") == "let me see\nyes\ntwo\n"
    assert stub.bodies[1]["messages"][1]["content"] == "yes"


def test_what_the_server_sends_moves_no_cursor(stub: Stub) -> None:
    refusal = web.json_response({"error": {"message": "no\x1b[2J"}}, status=400)
    thought = said(None, reasoning="\x1b[31m")
    stub.answers = [[thought, said("\x1b]0;x\x07", "stop"), DONE], refusal]
    assert chat(stub, "hi", "bye") == "[31m\n]0;x\nerror: HTTP 400: no[2J\n"


# -- failures --------------------------------------------------------------------------------


def refused(status: int, body: Any) -> web.Response:
    text = body if isinstance(body, str) else json.dumps(body)
    return web.Response(text=text, status=status)


TOO_LONG = {"message": "too long", "code": "context_length_exceeded", "param": "messages"}


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (refused(400, {"error": {"message": "top_k = 9\nis bad"}}), "HTTP 400: top_k = 9 is bad"),
        (refused(400, {"error": TOO_LONG}), "HTTP 400: too long; /reset begins anew"),
        (refused(404, {"object": "error", "message": "which?"}), "HTTP 404: which?"),
        (refused(422, {"detail": [{"loc": "x"}]}), 'HTTP 422: [{"loc": "x"}]'),
        (refused(429, {"error": {"message": "slow down"}}), "HTTP 429: slow down"),
        (refused(500, "<b>oops</b>"), "HTTP 500: <b>oops</b>"),
        (refused(503, {"error": "loading"}), "HTTP 503: loading"),
        ([event({"error": {"message": "lost"}}), DONE], "the server failed: lost"),
        ([event({"error": {"code": 5}}), DONE], 'the server failed: {"code": 5}'),
        ([b"data: {oops\n\n"], "the server sent what is no chunk: JSON is malformed"),
        ([event({"choices": 5})], "the server sent what is no chunk: Expected `array`"),
        ([b"{}"], "the server ended in the middle of the answer"),
        ([BREAK], "no server answers at http://127.0.0.1:"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_is_one_line_and_the_chat_goes_on(stub: Stub, answer: Any, line: str) -> None:
    stub.answers = [[said("one", "stop"), DONE], answer, [said("three", "stop"), DONE]]
    first, error, third = chat(stub, "1", "2", "3").splitlines()
    assert error.startswith(f"error: {line}")
    assert (first, third) == ("one", "three")
    assert [message["content"] for message in stub.bodies[2]["messages"]] == ["1", "one", "3"]


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (event({"error": {"message": "lost"}}), "error: the server failed: lost"),
        (BREAK, "error: the connection to http://127.0.0.1:"),
        (b"", "error: the server ended in the middle of the answer"),
    ],
    ids=["error", "broken", "ended"],
)
def test_a_failure_in_mid_stream_drops_the_message(stub: Stub, end: Any, line: str) -> None:
    stub.answers = [[said("par"), said("t"), end], [said("two", "stop"), DONE]]
    part, error, second = chat(stub, "1", "2").splitlines()
    assert (part, second) == ("part", "two")
    assert error.startswith(line)
    assert [message["content"] for message in stub.bodies[1]["messages"]] == ["2"]


def test_a_server_that_goes_away_does_not_end_the_chat(stub: Stub) -> None:
    stub.answers = [[said("one", "stop"), DONE]]
    with closing(UrlBackend(stub.url)) as backend:
        assert talk(backend, "1") == "one\n"
        stub.stop_listening()
        printed = talk(backend, "2", "/stats")
    assert printed.startswith(f"error: no server answers at {stub.url} (")
    assert "minisgl serve" in printed.splitlines()[0]
    assert "conversation  0 of 64" in printed


# -- Ctrl-C ----------------------------------------------------------------------------------


def test_ctrl_c_before_the_first_token_hangs_up(stub: Stub) -> None:
    stub.answers = [[HANG]]
    stub.on_request = press_ctrl_c
    with closing(UrlBackend(stub.url)) as backend, heeding_ctrl_c():
        assert "[stopped before the answer began" in talk(backend, "hi")
        assert stub.client_left.wait(LIMIT_S)
        stub.on_request = lambda: None
        stub.answers = [[said("ok", "stop"), DONE]]
        assert talk(backend, "again") == "ok\n"


def test_a_closed_stream_hangs_up(stub: Stub) -> None:
    stub.answers = [[said("a"), HANG]]
    with closing(UrlBackend(stub.url)) as backend:
        stream = backend.stream([{"role": "user", "content": "hi"}], SamplingParams())
        assert next(stream).text == "a"
        assert not stub.client_left.is_set()
        stream.close()
        assert stub.client_left.wait(LIMIT_S)
