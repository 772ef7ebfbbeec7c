"""The two OpenAI endpoints, over an engine that plays scripts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.errors import BusyError, ChatTemplateError, RequestFailedError
from minisgl.message import SequenceDelta
from minisgl.server import large, openai
from minisgl.server.choices import Piece, Prompt, TextChoice, TextOptions
from minisgl.server.context import ServerContext
from minisgl.server.errors import install_error_handlers
from minisgl.server.generation import Generation
from minisgl.server.logprobs import TextColumns, TextOffsets, TokenTexts, prompt_logprobs
from minisgl.server.openai import OpenAIService, router
from minisgl.server.protocol import ChatCompletionRequest
from minisgl.server.responses import ChatCompletion, ChatCompletionChunk, Completion
from minisgl.server.submitted import merged
from tests.unit.fake_async_engine import (
    END,
    FakeAsyncEngine,
    Step,
    answer,
    byte_tokenizer,
    fake_context,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
Json = dict[str, Any]


def app_of(context: ServerContext) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(router(context))
    return app


async def post(
    engine: FakeAsyncEngine, path: str, body: Json, headers: Json | None = None, **config: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(fake_context(engine, **config)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body, headers=headers)


def ask(
    engine: FakeAsyncEngine, path: str, body: Json, headers: Json | None = None, **config: Any
) -> httpx.Response:
    return asyncio.run(post(engine, path, body, headers, **config))


def events(text: str) -> list[Json]:
    """The events of a stream without the `[DONE]` that ends it."""
    *data, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in data)
    return [json.loads(event.removeprefix("data: ")) for event in data]


def stream(engine: FakeAsyncEngine, path: str, body: Json) -> list[Json]:
    response = ask(engine, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return events(response.text)


def error_of(response: httpx.Response) -> Json:
    body = response.json()
    assert set(body) == {"error"}
    error: Json = body["error"]
    return error


def plain(value: Any) -> Any:
    """What clients read of a part of an answer."""
    return json.loads(msgspec.json.encode(value))


class Connection:
    """A client of an ASGI app, one message at a time."""

    def __init__(self, app: FastAPI, path: str, body: Json) -> None:
        self.sent: asyncio.Queue[Json] = asyncio.Queue()
        self._received: asyncio.Queue[Json] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        }
        call: Any = app(scope, self._received.get, self.sent.put)
        self.task: asyncio.Task[None] = asyncio.ensure_future(call)

    def leave(self) -> None:
        self._received.put_nowait({"type": "http.disconnect"})


async def until(condition: Callable[[], object]) -> None:
    """Let everything else run until something holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


# -- whole answers -----------------------------------------------------------------------------


def test_a_chat_is_answered_in_the_shape_of_openai() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("Hé"), num_cached_tokens=5)
    response = ask(engine, CHAT, {"model": "fake", "messages": HELLO})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    TypeAdapter(ChatCompletion).validate_python(body, strict=True)
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint").endswith("-float32-cpu")
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hé", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len("user: Hi\n"),
            "completion_tokens": 4,  # three bytes, and the token that ended it
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }


def test_a_completion_is_answered_in_the_shape_of_openai() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("abc", "stop", "d"))
    body = ask(engine, TEXT, {"prompt": "Hi"}).json()
    TypeAdapter(Completion).validate_python(body, strict=True)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "fake")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "abc",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "d",
        }
    ]
    assert body["usage"]["prompt_tokens"] == 3  # with the token that begins a text


def test_choices_are_numbered_by_prompt_first() -> None:
    engine = FakeAsyncEngine(lambda ids, choice: answer(f"{chr(ids[-1])}{choice}"))
    body = ask(engine, TEXT, {"prompt": ["x", "y"], "n": 2}).json()
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "x0"), (1, "x1"), (2, "y0"), (3, "y1")]
    assert body["usage"]["prompt_tokens"] == 4, "each prompt counts once"
    assert body["usage"]["completion_tokens"] == 4 * 3


def test_a_chat_may_fill_the_context_and_a_completion_ends_after_16_tokens() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("a" * 500))
    chat = ask(engine, CHAT, {"messages": HELLO}).json()
    text = ask(engine, TEXT, {"prompt": [65]}).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["total_tokens"] == engine.ready.max_model_len
    assert text["usage"]["completion_tokens"] == 16


def test_what_concerns_the_engine_is_passed_on() -> None:
    engine = FakeAsyncEngine()
    body = {
        "messages": HELLO,
        "continue_final_message": True,
        "chat_template_kwargs": {"thinking": False},
        "priority": -3,
        "cache_salt": "s",
        "temperature": 0.5,
        "seed": 7,
    }
    assert ask(engine, CHAT, body).status_code == 200
    [chat], [options], [generation] = engine.chats, engine.options, engine.submitted
    assert chat["messages"] == HELLO
    assert chat["continue_final_message"] is True and chat["add_generation_prompt"] is None
    assert chat["template_kwargs"] == {"thinking": False}
    assert (options["priority"], options["cache_salt"]) == (-3, "s")
    assert (generation.params.temperature, generation.params.seed) == (0.5, 7)


def test_the_service_answers_without_http() -> None:
    async def run() -> Json:
        service = OpenAIService(fake_context(FakeAsyncEngine()))
        request = ChatCompletionRequest.model_validate({"messages": HELLO})
        async with await service.chat(request, "mine") as call:
            assert call.request_id == "mine"
            return await call.response()

    assert asyncio.run(run())["choices"][0]["message"]["content"] == "Hello 0"


# -- streams -----------------------------------------------------------------------------------


def test_a_stream_has_the_headers_of_one() -> None:
    response = ask(FakeAsyncEngine(), CHAT, {"messages": HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "n": 3, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {"prompt": ["a", "bé"], "n": 2, "logprobs": 2}),
        (TEXT, {"prompt": ["a", "bé"], "n": 2, "logprobs": 0, "echo": True}),
        (TEXT, {"prompt": [[65, 256, 66]], "echo": True}),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(path: str, body: Json) -> None:
    def script(ids: list[int], choice: int) -> list[Step]:
        return answer("né" * choice + chr(ids[-1] % 128) + "€", "length" if choice else "stop")

    whole = ask(FakeAsyncEngine(script), path, body).json()
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = stream(FakeAsyncEngine(script), path, {**body, **options})
    assert last["usage"] == whole["usage"]
    sums: dict[int, Json] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        so_far = sums.setdefault(choice["index"], {"text": "", "logprobs": {}})
        text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        so_far["text"] += text
        for name, entries in (choice["logprobs"] or {}).items():
            so_far["logprobs"][name] = so_far["logprobs"].get(name, []) + (entries or [])
        assert "finish_reason" not in so_far, "a chunk after the last one"
        if choice["finish_reason"] is not None:
            so_far["finish_reason"] = choice["finish_reason"]
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert sums[choice["index"]]["text"] == text
        assert sums[choice["index"]]["finish_reason"] == choice["finish_reason"]
        wanted = {name: entries or [] for name, entries in (choice["logprobs"] or {}).items()}
        assert sums[choice["index"]]["logprobs"] == wanted
    assert len(sums) == len(whole["choices"])


def test_the_role_comes_with_each_choices_first_token_and_never_again() -> None:
    async def run() -> list[Json]:
        script = [Step(), *answer("ab")]  # a part of the prompt is computed first
        engine = FakeAsyncEngine(lambda _ids, _choice: list(script), manual=True)
        body = {"messages": HELLO, "n": 2, "stream": True}
        client = Connection(app_of(fake_context(engine)), CHAT, body)
        await until(lambda: engine.submitted)
        engine.step()
        for _ in range(50):
            await asyncio.sleep(0)
        assert client.sent.empty(), "something was sent before the first token"
        engine.step(3)
        await client.task
        messages = [client.sent.get_nowait() for _ in range(client.sent.qsize())]
        return events(b"".join(message.get("body", b"") for message in messages).decode())

    chunks = asyncio.run(run())
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("ab"))
    apart = stream(engine, CHAT, {"messages": HELLO, "n": 2})
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in apart]
    first = {"role": "assistant", "content": "a"}
    assert deltas[:2] == [(0, first), (1, first)]
    assert deltas[2:] == [(i, d) for d in ({"content": "b"}, {}) for i in (0, 1)]
    # What came together is one chunk a choice.
    together = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in together] == [{"role": "assistant", "content": "ab"}] * 2
    assert [choice["finish_reason"] for choice in together] == ["stop", "stop"]


def test_a_stream_of_several_prompts_that_is_closed_leaves_no_task() -> None:
    async def run() -> None:
        engine = FakeAsyncEngine(manual=True)
        generations = engine.submit([[65], [66]], SamplingParams(), request_id="r")
        arrivals = merged(generations)
        engine.step()
        assert {(await anext(arrivals)).prompt, (await anext(arrivals)).prompt} == {0, 1}
        assert len(asyncio.all_tasks()) == 3
        await arrivals.aclose()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_text_that_is_held_back_makes_no_chunk_but_the_first() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("€€", "length"))  # 6 bytes
    chunks = stream(engine, TEXT, {"prompt": "x"})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "€", "€"]
    with_logprobs = stream(engine, TEXT, {"prompt": "x", "logprobs": 0})
    assert len(with_logprobs) == 6, "each token's logprobs are due"
    TypeAdapter(Completion).validate_python(with_logprobs[1], strict=True)


def test_the_last_text_comes_with_the_finish_reason() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("ab", "stop", "c"))
    last = stream(engine, CHAT, {"messages": HELLO})[-1]["choices"][0]
    assert last["delta"] == {"content": "b"}
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "c")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_usage_is_streamed_as_asked_for(path: str, at_end: bool, always: bool) -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("abc"), num_cached_tokens=2)
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    options = {"include_usage": at_end, "continuous_usage_stats": always}
    chunks = stream(engine, path, {**body, "stream_options": options})
    if path == CHAT:
        for chunk in chunks:
            TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
    if at_end:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    if always:
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
    elif at_end:
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)


# -- logprobs and echo -------------------------------------------------------------------------


def test_logprobs_of_a_chat_name_tokens_by_text_and_bytes() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("aé", "length"))
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 3}
    logprobs = ask(engine, CHAT, body).json()["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, second, _ = logprobs["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -1.5)
    assert first["top_logprobs"] == [
        {"token": "b", "bytes": [98], "logprob": -0.25},
        {"token": "a", "bytes": [97], "logprob": -1.5},
        {"token": "bytes:\\x93", "bytes": [147], "logprob": -9999.0},  # minus infinity
    ]
    assert (second["token"], second["bytes"]) == ("bytes:\\xc3", [0xC3])
    bare = ask(engine, CHAT, {"messages": HELLO, "logprobs": True}).json()
    assert [e["top_logprobs"] for e in bare["choices"][0]["logprobs"]["content"]] == [[], [], []]


def test_logprobs_of_a_completion_are_four_lists() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("aéz"))
    body = ask(engine, TEXT, {"prompt": "x", "logprobs": 1}).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "z", "<|end|>"],
        "token_logprobs": [-1.5] * 5,
        "top_logprobs": [
            {"a": -1.5, "b": -0.25},
            {"bytes:\\xc3": -1.5, "bytes:\\xc4": -0.25},
            {"bytes:\\xa9": -1.5, "bytes:\\xaa": -0.25},
            {"z": -1.5, "{": -0.25},
            {"<|end|>": -1.5, "token_id:258": -0.25},
        ],
        "text_offset": [0, 1, 2, 2, 3],
    }


def test_tokens_of_the_same_text_stay_apart() -> None:
    texts = TokenTexts(byte_tokenizer())
    texts._known[5] = texts[97]  # another token that is shown as "a"
    # 290 and 291 are ids beyond the tokenizer, which have no text at all.
    entry = TokenLogprobs(97, -1.0, 2, ((5, -0.5), (290, -3.0), (291, float("-inf"))))
    columns = TextColumns(texts, top=3)
    columns.add([97], [entry], [0])
    [by_text] = plain(columns.shape())["top_logprobs"]
    wanted = {"a": -1.0, "token_id:5": -0.5, "token_id:290": -3.0, "token_id:291": -9999.0}
    assert by_text == wanted


def test_a_model_without_tokenizer_names_tokens_by_id() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("", (9,), "length")], tokenizer=None)
    body = ask(engine, TEXT, {"prompt": [1, 2], "logprobs": 0}).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:9"]
    assert body["choices"][0]["text"] == ""


def test_prompt_logprobs_are_by_token_id_and_the_first_token_has_none() -> None:
    body = {"prompt": [65, 66], "prompt_logprobs": 2}
    wanted = [
        None,
        {
            "67": {"logprob": -0.25, "rank": 1, "decoded_token": "C"},
            "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
        },
    ]
    text = ask(FakeAsyncEngine(), TEXT, body).json()
    assert text["choices"][0]["prompt_logprobs"] == wanted
    chat = ask(FakeAsyncEngine(), CHAT, {"messages": HELLO, "prompt_logprobs": 2}).json()
    assert len(chat["prompt_logprobs"]) == len("user: Hi\n")
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"][1]) == 2


def test_a_token_of_the_prompt_that_was_unlikely_is_there_with_its_rank() -> None:
    entry = TokenLogprobs(66, -8.0, 40, ((67, -0.25), (68, -0.5)))
    [shaped] = plain(prompt_logprobs([entry], TokenTexts(byte_tokenizer()), top=1))
    assert shaped == {
        "67": {"logprob": -0.25, "rank": 1, "decoded_token": "C"},
        "66": {"logprob": -8.0, "rank": 40, "decoded_token": "B"},
    }


def test_echo_puts_the_prompt_before_each_text() -> None:
    engine = FakeAsyncEngine(lambda _ids, choice: answer(str(choice), "length"))
    given = ask(engine, TEXT, {"prompt": "é=", "echo": True, "n": 2}).json()
    assert [choice["text"] for choice in given["choices"]] == ["é=0", "é=1"]
    ids = ask(engine, TEXT, {"prompt": [256, 65, 61], "echo": True}).json()
    assert ids["choices"][0]["text"] == "A=0"
    shown = {"prompt": [256, 65, 61], "echo": True, "skip_special_tokens": False}
    assert ask(engine, TEXT, shown).json()["choices"][0]["text"] == "<|begin|>A=0"


def test_echo_with_logprobs_has_the_prompts_tokens_too() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("z", "length"))
    body = {"prompt": "éb", "echo": True, "logprobs": 0, "prompt_logprobs": 2}
    choice = ask(engine, TEXT, body).json()["choices"][0]
    tokens = ["<|begin|>", "bytes:\\xc3", "bytes:\\xa9", "b", "z"]
    assert choice["logprobs"]["tokens"] == tokens
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5]
    assert choice["logprobs"]["top_logprobs"] == [None, *({t: -1.5} for t in tokens[1:])]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]
    assert choice["text"] == "ébz"
    assert len(choice["prompt_logprobs"]) == 4


def test_a_sequence_ahead_of_the_prompts_logprobs_waits_for_them() -> None:
    def delta(uid: int, token: int, scored: list[TokenLogprobs]) -> SequenceDelta:
        entry = TokenLogprobs(token, -1.0, 1, ())
        return SequenceDelta(uid, chr(token), [token], [entry], prompt_logprobs=scored)

    async def run() -> None:
        params = SamplingParams(n=2, logprobs=0, prompt_logprobs=0, max_tokens=2)
        generation = Generation("r", 0, [65, 66], params, lambda _generation: None)
        prompt = Prompt(generation, TextOptions(TokenTexts(byte_tokenizer()), 0), "AB")
        choice = TextChoice(1, prompt)
        piece, early = Piece(), delta(1, 97, [])
        generation.push(early)
        piece.add(early)
        await prompt.prepare()
        assert choice.delta(piece) is None
        generation.push(delta(0, 98, [TokenLogprobs(66, -2.0, 1, ())]))
        await prompt.prepare()
        shape = plain(choice.delta(piece))
        assert shape["text"] == "ABa"
        assert shape["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_of_a_prompt_are_written_once_for_all_its_choices(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def add(self: TextColumns, ids: list[int], *rest: Any) -> None:
        written.append(ids)
        original(self, ids, *rest)

    original = TextColumns.add
    monkeypatch.setattr(TextColumns, "add", add)
    engine = FakeAsyncEngine(lambda _ids, choice: answer(str(choice), "length"))
    body = {"prompt": [65, 66], "echo": True, "logprobs": 0, "n": 3}
    if streamed:
        choices = [chunk["choices"][0] for chunk in stream(engine, TEXT, body)]
    else:
        choices = ask(engine, TEXT, body).json()["choices"]
    assert [c["logprobs"]["tokens"] for c in choices] == [["A", "B", str(i)] for i in range(3)]
    assert sorted(written) == [[48], [49], [50], [65, 66]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "n": 2, "logprobs": True, "prompt_logprobs": 2}),
        (TEXT, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ],
)
def test_a_large_answer_is_made_in_threads_and_is_the_same(
    path: str, body: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(texts: TokenTexts, token_id: int) -> Any:
        in_loop.add(threading.current_thread() is threading.main_thread())
        return original(texts, token_id)

    original = TokenTexts._look_up
    monkeypatch.setattr(TokenTexts, "_look_up", look_up)
    in_loop: set[bool] = set()
    small = ask(FakeAsyncEngine(), path, body).json()
    assert in_loop == {True}
    in_loop.clear()
    monkeypatch.setattr(large, "LARGE", 1)
    made = ask(FakeAsyncEngine(), path, body).json()
    assert in_loop == {False}
    assert (made["choices"], made["usage"]) == (small["choices"], small["usage"])
    assert made.get("prompt_logprobs") == small.get("prompt_logprobs")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "n": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 11}, "top_logprobs"),
        (TEXT, {"prompt": "x", "logprobs": 1, "max_tokens": 51}, "logprobs"),
        (TEXT, {"prompt": [1] * 51, "prompt_logprobs": 0, "n": 2}, "logprobs"),
    ],
)
def test_an_answer_that_would_be_too_large_is_refused_before_anything_runs(
    path: str, body: Json, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "MAX_ENTRIES", 100)
    engine = FakeAsyncEngine()
    response = ask(engine, path, body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert "prompt_logprobs or max_tokens or n" in error["message"]
    assert not engine.submitted
    # What is streamed is sent as it comes.
    if "prompt_logprobs" not in body:
        assert stream(engine, path, body)


def test_prompts_are_not_repeated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "MAX_ECHO", 6)
    engine = FakeAsyncEngine()
    body = {"prompt": ["a", "bc"], "echo": True}
    assert ask(engine, TEXT, {**body, "n": 2}).status_code == 200
    response = ask(engine, TEXT, {**body, "n": 3})
    assert (response.status_code, error_of(response)["param"]) == (400, "echo")
    assert ask(engine, TEXT, {**body, "n": 3, "echo": False}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": ["a", "b"]})]
)
def test_a_failure_behind_the_submission_leaves_nothing_running(
    path: str, body: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RequestFailedError("here")

    monkeypatch.setattr(openai, "OpenAICall", fail)
    engine = FakeAsyncEngine(manual=True)
    assert ask(engine, path, {**body, "n": 2}).status_code == 500
    assert len(engine.submitted) > 0
    assert engine.num_live == 0


def test_offsets_count_special_tokens_where_the_text_shows_them() -> None:
    texts = TokenTexts(byte_tokenizer())
    ids = [256, 97, 257, 98]
    assert TextOffsets(texts, text="a<|end|>b").place(ids) == [0, 0, 1, 8]
    assert TextOffsets(texts, skip_special_tokens=True, begin=4).place(ids) == [4, 4, 5, 5]
    assert TextOffsets(texts, skip_special_tokens=False).place(ids) == [0, 9, 10, 17]


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [
        (CHAT, {"model": "other"}, 404, "model"),
        (TEXT, {"model": "other"}, 404, "model"),
        (CHAT, {"n": 5}, 400, "n"),
        (TEXT, {"n": 5}, 400, "n"),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, 400, "chat_template_kwargs"),
        (TEXT, {"prompt": [1] * 100}, 400, "prompt"),
        (TEXT, {"prompt": [[1], [999]]}, 400, "prompt"),
        (TEXT, {"prompt": [[1]] * 30, "n": 4}, 400, "prompt"),
        (TEXT, {"min_tokens": 3, "max_tokens": 2}, 400, "min_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    path: str, change: Json, status: int, param: str, streamed: bool
) -> None:
    engine = FakeAsyncEngine(max_queued=100)
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    body = {**body, **change, "stream": streamed}
    response = ask(engine, path, body, max_n=4)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
    assert engine.submitted == []


def test_a_bad_prompt_among_several_is_named() -> None:
    response = ask(FakeAsyncEngine(), TEXT, {"prompt": [[1], [999]]})
    assert "prompt 1: token id 999" in error_of(response)["message"]


def test_prompt_logprobs_are_refused_in_a_stream() -> None:
    body = {"prompt": "Hi", "prompt_logprobs": 1, "stream": True}
    response = ask(FakeAsyncEngine(), TEXT, body)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_a_503_that_says_when_to_come_back(streamed: bool) -> None:
    engine = FakeAsyncEngine(submit_error=BusyError("the queue is full"))
    response = ask(engine, CHAT, {"messages": HELLO, "stream": streamed})
    assert response.status_code == 503
    assert "retry-after" in response.headers


def test_a_server_that_is_loading_serves_nothing() -> None:
    async def run() -> httpx.Response:
        context = fake_context(FakeAsyncEngine())
        context.state.loading = True
        transport = httpx.ASGITransport(app_of(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(CHAT, json={"messages": HELLO, "model": "any"})

    response = asyncio.run(run())
    assert response.status_code == 503 and "loading" in error_of(response)["message"]


def test_a_templates_refusal_is_a_400() -> None:
    engine = FakeAsyncEngine(template_error=ChatTemplateError("roles must alternate", "messages"))
    response = ask(engine, CHAT, {"messages": HELLO})
    assert response.status_code == 400
    assert error_of(response)["message"] == "roles must alternate"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_failure_before_the_first_token_is_a_500(streamed: bool, prompt: Any) -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("", (), "error")])
    response = ask(engine, TEXT, {"prompt": prompt, "stream": streamed})
    assert response.status_code == 500
    assert error_of(response)["code"] == "request_failed"


def test_a_failure_in_mid_stream_is_an_event_and_then_the_end() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("a", (97,)), Step("", (), "error")])
    chunks = stream(engine, CHAT, {"messages": HELLO})
    assert chunks[0]["choices"][0]["delta"]["content"] == "a"
    assert chunks[1]["error"]["code"] == "request_failed"
    assert len(chunks) == 2


def test_a_failure_of_one_prompt_ends_the_others() -> None:
    def script(ids: list[int], _choice: int) -> list[Step]:
        if ids[-1] == ord("b"):
            return [Step("x", (120,)), Step("", (), "error")]
        return answer("long" * 20, "length")

    engine = FakeAsyncEngine(script)
    *_, last = stream(engine, TEXT, {"prompt": ["a", "b"], "max_tokens": 80})
    assert last["error"]["code"] == "request_failed"
    assert engine.aborted == [engine.submitted[0].request_id]


@pytest.mark.parametrize("streamed", [False, True])
def test_the_engines_death_ends_live_requests(streamed: bool) -> None:
    async def run() -> list[Json]:
        engine = FakeAsyncEngine(manual=True)
        body = {"messages": HELLO, "stream": streamed}
        client = Connection(app_of(fake_context(engine)), CHAT, body)
        await until(lambda: engine.submitted)
        engine.die()
        await client.task
        return [client.sent.get_nowait() for _ in range(client.sent.qsize())]

    start, *bodies = asyncio.run(run())
    assert start["status"] == 503
    assert json.loads(bodies[0]["body"])["error"]["code"] == "engine_dead"


# -- clients that go away ----------------------------------------------------------------------


def gone(
    body: Json, before: Callable[[Connection, FakeAsyncEngine], Awaitable[None]]
) -> tuple[FakeAsyncEngine, Connection]:
    """What is left after a client has done `before` and has left."""

    async def run() -> tuple[FakeAsyncEngine, Connection]:
        engine = FakeAsyncEngine(manual=True)
        path = CHAT if "messages" in body else TEXT
        client = Connection(app_of(fake_context(engine)), path, body)
        await before(client, engine)
        client.leave()
        await asyncio.wait_for(client.task, 10)
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"
        return engine, client

    return asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_client_that_leaves_aborts_its_sequences(streamed: bool, several: bool) -> None:
    async def before(client: Connection, engine: FakeAsyncEngine) -> None:
        await until(lambda: len(engine.submitted) == (2 if several else 1))

    body = {"prompt": ["a", "b"] if several else "a", "n": 2, "stream": streamed}
    engine, client = gone(body, before)
    assert engine.aborted == [generation.request_id for generation in engine.submitted]
    assert engine.num_live == 0
    assert client.sent.empty()


def test_a_client_that_leaves_a_running_stream_aborts_it() -> None:
    async def before(client: Connection, engine: FakeAsyncEngine) -> None:
        await until(lambda: engine.submitted)
        engine.step()
        assert (await client.sent.get())["type"] == "http.response.start"
        assert b"assistant" in (await client.sent.get())["body"]

    engine, client = gone({"messages": HELLO, "stream": True}, before)
    assert len(engine.aborted) == 1
    assert client.sent.empty(), "something was sent to a client that had gone"


def test_a_client_that_leaves_while_its_prompt_is_encoded_is_never_submitted() -> None:
    class Slow(FakeAsyncEngine):
        encoding = False

        async def encode_chat(self, messages: list[Json], **options: Any) -> list[int]:
            self.encoding = True
            await asyncio.Event().wait()
            raise AssertionError

    async def run() -> FakeAsyncEngine:
        engine = Slow()
        client = Connection(app_of(fake_context(engine)), CHAT, {"messages": HELLO})
        await until(lambda: engine.encoding)
        client.leave()
        await asyncio.wait_for(client.task, 10)
        return engine

    assert asyncio.run(run()).submitted == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_handler_that_is_cancelled_aborts_its_sequences(streamed: bool) -> None:
    async def run() -> FakeAsyncEngine:
        engine = FakeAsyncEngine(manual=True)
        body = {"messages": HELLO, "stream": streamed}
        client = Connection(app_of(fake_context(engine)), CHAT, body)
        await until(lambda: engine.submitted)
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        return engine

    assert len(asyncio.run(run()).aborted) == 1


def test_a_finished_request_aborts_nothing() -> None:
    engine = FakeAsyncEngine()
    ask(engine, CHAT, {"messages": HELLO})
    stream(engine, CHAT, {"messages": HELLO})
    assert engine.aborted == []


# -- ids and schema ----------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_the_clients_request_id_is_the_engines_and_comes_back(streamed: bool) -> None:
    engine = FakeAsyncEngine()
    body = {"messages": HELLO, "stream": streamed}
    response = ask(engine, CHAT, body, {"x-request-id": "my id"})
    assert response.headers["x-request-id"] == "my id"
    assert engine.submitted[0].request_id == "my id"


def test_without_one_the_request_id_is_the_responses() -> None:
    engine = FakeAsyncEngine()
    response = ask(engine, CHAT, {"messages": HELLO})
    assert response.headers["x-request-id"] == response.json()["id"]
    assert engine.submitted[0].request_id == response.json()["id"]


@pytest.mark.parametrize("bad", ["", "x" * 129, "caf\xe9", "a\tb"])
def test_a_request_id_that_headers_or_logs_cannot_hold_is_refused(bad: str) -> None:
    headers = {"x-request-id": bad.encode("latin-1")}
    response = ask(FakeAsyncEngine(), CHAT, {"messages": HELLO}, headers)
    assert response.status_code == 400
    assert "x-request-id" in error_of(response)["message"]


def test_an_aborted_request_says_so() -> None:
    async def run() -> Json:
        engine = FakeAsyncEngine(manual=True)
        body = {"messages": HELLO}
        waiting = asyncio.ensure_future(post(engine, CHAT, body, {"x-request-id": "r"}))
        await until(lambda: engine.submitted)
        engine.step()
        assert engine.abort("r") == 1
        answer: Json = (await waiting).json()
        return answer

    choice = asyncio.run(run())["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "H")


def test_the_schema_describes_bodies_answers_and_errors() -> None:
    schema = app_of(fake_context(FakeAsyncEngine())).openapi()
    shapes = schema["components"]["schemas"]
    for path, request, answered in (
        (CHAT, "ChatCompletionRequest", "ChatCompletion"),
        (TEXT, "CompletionRequest", "Completion"),
    ):
        operation = schema["paths"][path]["post"]
        [body] = operation["requestBody"]["content"].values()
        assert body["schema"]["$ref"].endswith(f"/{request}")
        content = operation["responses"]["200"]["content"]
        assert content["application/json"]["schema"]["$ref"].endswith(f"/{answered}")
        assert set(content) == {"application/json", "text/event-stream"}
        assert set(shapes[answered]["properties"]) > {"id", "object", "choices", "usage"}
        for status in ("400", "401", "404", "413", "500", "503"):
            error = operation["responses"][status]["content"]["application/json"]
            assert error["schema"]["$ref"].endswith("/ErrorBody")
        assert "422" not in operation["responses"]


def test_end_is_counted_as_a_token_but_not_shown() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("", (END,), "stop")])
    body = ask(engine, CHAT, {"messages": HELLO}).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens"] == 1
