"""The official `openai` package, unmodified, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.answers import HELLO
from tests.server.conftest import API_KEY, TIMEOUT_S
from tests.server.serving import Server

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]


def options(server: Server, key: str = "none") -> dict[str, Any]:
    url = f"{server.url}/v1"
    return {"base_url": url, "api_key": key, "timeout": TIMEOUT_S, "max_retries": 0}


@pytest.fixture(scope="module")
def client(tiny_server: Server) -> Iterator[OpenAI]:
    with OpenAI(**options(tiny_server)) as made:
        yield made


@pytest.fixture(scope="module")
def keyholder(guarded_server: Server) -> Iterator[OpenAI]:
    with OpenAI(**options(guarded_server, API_KEY)) as made:
        yield made


def greedy(**changes: Any) -> Any:
    return {"model": "tiny", "temperature": 0, "max_tokens": 12, **changes}


def chat(**changes: Any) -> Any:
    return greedy(messages=HELLO, **changes)


# ---- a real model -------------------------------------------------------------------------------


def test_a_real_model_answers_the_same_streamed_or_not(demo_server: Server) -> None:
    body: Any = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 12}
    with OpenAI(**options(demo_server)) as demo:
        [only] = demo.models.list().data
        assert only.id == "smollm2"
        whole = demo.chat.completions.create(**body)
        chunks = list(demo.chat.completions.create(**body, stream=True))
    text = whole.choices[0].message.content
    assert text is not None and "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


# ---- answers ------------------------------------------------------------------------------------


def test_chat(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "more than the cache's page: " * 3}]
    answer = client.chat.completions.create(**greedy(messages=messages))
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.model == "tiny" and answer.created > 1.7e9 and answer.system_fingerprint
    [choice] = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant"
    assert isinstance(choice.message.content, str) and choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is None
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = client.chat.completions.create(**greedy(messages=messages)).usage
    assert again is not None and again.prompt_tokens_details is not None
    cached = again.prompt_tokens_details.cached_tokens
    assert cached is not None and 0 < cached < usage.prompt_tokens


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(**greedy(prompt=["the ", "fox"], n=2, echo=True))
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] and texts[0].startswith("the ")
    assert texts[2] == texts[3] and texts[2].startswith("fox")


def test_streams_add_up_to_the_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(**chat())
    with client.chat.completions.create(
        **chat(), stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    plain = client.completions.create(**greedy(prompt="the "))
    pieces = list(client.completions.create(**greedy(prompt="the "), stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text


def test_the_streaming_helper_gathers_the_final_answer(client: OpenAI) -> None:
    ended = {"logit_bias": {"319": 100}, "extra_body": {"min_tokens": 5}}  # it wants an end
    whole = client.chat.completions.create(**chat(**ended))
    with client.chat.completions.stream(**chat(**ended)) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_logprobs(client: OpenAI) -> None:
    [choice] = client.chat.completions.create(**chat(logprobs=True, top_logprobs=2)).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2 and entry.bytes
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
    [text] = client.completions.create(**greedy(prompt="the ", logprobs=2)).choices
    shown = text.logprobs
    assert shown is not None and shown.tokens is not None and shown.top_logprobs is not None
    assert shown.token_logprobs is not None and shown.text_offset is not None
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.text_offset)
    assert all(len(top) == 2 for top in shown.top_logprobs)


def test_seeds_repeat_and_choices_differ(client: OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(**chat(temperature=1.0, seed=seed, n=3))
        return [choice.message.content for choice in answer.choices]

    once = texts(1)
    assert len(set(once)) == 3
    assert texts(1) == once != texts(2)


def test_stop_and_the_parameters_of_other_engines(client: OpenAI) -> None:
    body = chat(temperature=1.0, seed=11, max_tokens=40, extra_body={"ignore_eos": True})
    text = client.chat.completions.create(**body).choices[0].message.content
    assert text is not None
    stop = next(char for char in text[4:] if char.isascii() and char.isalpha())
    [choice] = client.chat.completions.create(**body, stop=[stop]).choices
    assert choice.message.content == text.partition(stop)[0]
    assert choice.finish_reason == "stop" and choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop


def test_request_ids_come_back(client: OpenAI) -> None:
    create = client.chat.completions.with_raw_response.create
    raw = create(**chat(), extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.parse().id.startswith("chatcmpl-")
    own, other = create(**chat()), create(**chat())
    assert own.request_id and own.request_id != other.request_id
    with client.chat.completions.with_streaming_response.create(**chat(stream=True)) as streamed:
        assert streamed.request_id


def test_models(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "minisgl")
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 256
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


# ---- errors -------------------------------------------------------------------------------------


def test_errors_have_their_classes(client: OpenAI, guarded_server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(**chat(temperature=3))
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="gpt") as missing:
        client.chat.completions.create(**chat(model="gpt"))
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError):  # before the stream begins
        client.chat.completions.create(**chat(stream=True, top_p=0))
    with (
        OpenAI(**options(guarded_server, "wrong")) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_full_server_says_when_to_come_again(keyholder: OpenAI) -> None:
    long = chat(max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    with keyholder.chat.completions.create(**long) as running:
        chunks = iter(running)  # kept: a stream ends when it is forgotten
        next(chunks)
        with pytest.raises(openai.InternalServerError) as full:
            keyholder.chat.completions.create(**chat())
    assert full.value.status_code == 503
    assert int(full.value.response.headers["retry-after"]) >= 1
    # The client's own retries wait that long and get through.
    patient = keyholder.with_options(max_retries=5)
    assert patient.chat.completions.create(**chat()).choices


# ---- async --------------------------------------------------------------------------------------


def test_async_requests_run_side_by_side(tiny_server: Server, client: OpenAI) -> None:
    prompts = [f"the {word}" for word in ("fox", "dog", "house", "rain", "end", "user")]
    expected = [client.completions.create(**greedy(prompt=p)).choices[0].text for p in prompts]

    async def stream(made: AsyncOpenAI, prompt: str) -> str:
        text = ""
        async for chunk in await made.completions.create(**greedy(prompt=prompt), stream=True):
            text += chunk.choices[0].text
        return text

    async def both() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(**options(tiny_server)) as made:
            answers = [made.completions.create(**greedy(prompt=p)) for p in prompts]
            streams = [stream(made, prompt) for prompt in prompts]
            whole = await asyncio.gather(*answers)
            return [answer.choices[0].text for answer in whole], await asyncio.gather(*streams)

    assert asyncio.run(both()) == (expected, expected)


def test_async_errors_have_their_classes(tiny_server: Server) -> None:
    async def ask(**changes: Any) -> None:
        async with AsyncOpenAI(**options(tiny_server)) as made:
            await made.chat.completions.create(**chat(**changes))

    with pytest.raises(openai.BadRequestError):
        asyncio.run(ask(max_tokens=0))
    with pytest.raises(openai.NotFoundError):
        asyncio.run(ask(model="gpt"))
