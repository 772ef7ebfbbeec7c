"""The two OpenAI endpoints over an engine that plays scripts: whole answers, ids, schema."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import TypeAdapter

from minisgl.server.openai import OpenAIService
from minisgl.server.protocol import ChatCompletionRequest
from minisgl.server.responses import ChatCompletion, Completion
from tests.unit.fake_async_engine import END, FakeAsyncEngine, Step, answer, fake_context
from tests.unit.openai_calls import CHAT, HELLO, TEXT, Json, app_of, ask, error_of, post, until

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


def test_end_is_counted_as_a_token_but_not_shown() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("", (END,), "stop")])
    body = ask(engine, CHAT, {"messages": HELLO}).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens"] == 1


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
