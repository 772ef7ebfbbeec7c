"""Random requests: a stream adds up to the whole answer, and usage counts what there is.

In float32, where what runs beside a request does not change its tokens; its log-probabilities
may differ in their last digits.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.server.answers import CHAT, COMPLETIONS, events, strict_json
from tests.server.conftest import ONE_THREAD, TIMEOUT_S, TINY_FLAGS
from tests.server.serving import Server, start_server

NUM_REQUESTS = 200
AT_ONCE = 8
ATOL = 1e-4
WORDS = ("the ", "fox", " and", "\n", "é", "中文", "😀", "<|im_end|>", "  ", "!", "user", "\x00")
STOPS = ("e", "a", "in", "\n", " ", "n", "us", "�", "ck", "\u0000", "z", "o", "�a", "?", "the", "=")


# ---- requests -----------------------------------------------------------------------------------


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 8)))


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An endpoint and a body whose answer is the same each time."""
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "n": rng.choice((1, 1, 2))}
    body |= {"temperature": 0} if rng.random() < 0.4 else {"seed": rng.randint(-9, 9)}
    if rng.random() < 0.6:
        body["stop"] = rng.sample(STOPS, rng.randint(1, 4))
        body["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.3:
        body["stop_token_ids"] = rng.sample(range(320), 8)
    if rng.random() < 0.3:
        body["logit_bias"] = {str(rng.randrange(320)): rng.choice((-100, 3, 8)) for _ in range(4)}
    for name in ("ignore_eos", "skip_special_tokens"):
        if rng.random() < 0.5:
            body[name] = rng.random() < 0.5
    if rng.random() < 0.2:
        body["min_tokens"] = rng.randint(0, body["max_tokens"])
    if rng.random() < 0.2:
        body |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        body |= {"top_k": 20, "top_p": 0.9}
    return random_chat(rng, body) if rng.random() < 0.5 else random_completion(rng, body)


def random_chat(rng: random.Random, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 2))}
    roles = rng.choice((["user"], ["system", "user"], ["user", "assistant", "user"]))
    return CHAT, {**body, "messages": [{"role": r, "content": random_text(rng)} for r in roles]}


def random_completion(rng: random.Random, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.4:
        body["logprobs"] = rng.choice((0, 2))
    body["echo"] = rng.random() < 0.3
    prompts = [random_text(rng) for _ in range(rng.choice((1, 1, 1, 3)))]
    return COMPLETIONS, {**body, "prompt": prompts if len(prompts) > 1 else prompts[0]}


# ---- answers ------------------------------------------------------------------------------------


@dataclass
class Choice:
    """A choice, whole or added up from its chunks."""

    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    ends: list[tuple[str, Any]] = field(default_factory=list)
    """The reasons of all chunks that have one: there must be one such, the last."""

    def add(self, shape: dict[str, Any]) -> None:
        assert not self.ends, "a chunk after the end"
        part = shape.get("message") or shape.get("delta")
        self.text += shape["text"] if part is None else (part.get("content") or "")
        if shape["logprobs"] is not None:
            self.logprobs = self.logprobs or {}
            for name, entries in shape["logprobs"].items():
                self.logprobs.setdefault(name, []).extend(entries or [])
        if shape["finish_reason"] is not None:
            self.ends.append((shape["finish_reason"], shape["stop_reason"]))


def gathered(answers: list[Any]) -> dict[int, Choice]:
    choices: dict[int, Choice] = {}
    for answer in answers:
        for shape in answer["choices"]:
            choices.setdefault(shape["index"], Choice()).add(shape)
    return choices


def assert_same(whole: Any, streamed: Any) -> None:
    """Equal but for the last digits of numbers."""
    if isinstance(whole, dict):
        assert whole.keys() == streamed.keys()
        for name, value in whole.items():
            assert_same(value, streamed[name])
    elif isinstance(whole, list):
        assert len(whole) == len(streamed)
        for one, other in zip(whole, streamed, strict=True):
            assert_same(one, other)
    elif isinstance(whole, float):
        assert whole == pytest.approx(streamed, abs=ATOL)
    else:
        assert whole == streamed


class Client:
    """Asks one server, a few requests at a time."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._places = asyncio.Semaphore(AT_ONCE)

    async def post(self, path: str, body: Any) -> str:
        async with self._places, self._session.post(path, json=body) as response:
            text = await response.text()
            assert response.status == 200, (text, body)
            return text

    async def count(self, **body: Any) -> int:
        found = strict_json(await self.post("/tokenize", body))
        assert isinstance(found["count"], int) and found["count"] == len(found["tokens"])
        return found["count"]

    async def prompt_tokens(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            return await self.count(messages=body["messages"])
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        return sum([await self.count(prompt=prompt) for prompt in prompts])


async def whole_and_streamed(client: Client, path: str, body: dict[str, Any]) -> Any:
    """The answer, once it is known to be the same in both ways and to be counted right."""
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    texts = await asyncio.gather(client.post(path, body), client.post(path, stream))
    answer = strict_json(texts[0])
    *chunks, last = events(texts[1])
    assert {chunk["id"] for chunk in chunks} == {last["id"]} and last["choices"] == []
    whole, streamed = gathered([answer]), gathered(chunks)
    assert whole.keys() == streamed.keys()
    for index, choice in whole.items():
        other = streamed[index]
        assert (other.text, other.ends) == (choice.text, choice.ends)
        assert len(choice.ends) == 1 and choice.ends[0][0] in ("stop", "length")
        assert_same(choice.logprobs, other.logprobs)
    for usage in (answer["usage"], last["usage"]):
        await check_usage(client, usage, body, whole)
    assert answer["usage"]["completion_tokens"] == last["usage"]["completion_tokens"]
    return whole


async def check_usage(
    client: Client, usage: dict[str, Any], body: dict[str, Any], choices: dict[int, Choice]
) -> None:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    assert prompt == await client.prompt_tokens(body)
    assert usage["total_tokens"] == prompt + completion
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= prompt
    assert len(choices) <= completion <= body["max_tokens"] * len(choices)
    assert completion >= body.get("min_tokens", 0) * len(choices)
    if all(choice.ends == [("length", None)] for choice in choices.values()):
        assert completion == body["max_tokens"] * len(choices)
    if all(choice.logprobs is not None for choice in choices.values()):
        shown = [
            len(choice.logprobs.get("content") or choice.logprobs["tokens"])
            for choice in choices.values()
            if choice.logprobs
        ]
        echoed = prompt * body["n"] if body.get("echo") else 0
        assert sum(shown) == completion + echoed


async def ask(server: Server, requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        client = Client(session)
        return await asyncio.gather(*(whole_and_streamed(client, *one) for one in requests))


def random_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(0)
    return [random_request(rng) for _ in range(count)]


def test_streams_add_up_to_the_whole_answers(tiny_server: Server) -> None:
    requests = random_requests(NUM_REQUESTS)
    answers = asyncio.run(ask(tiny_server, requests))
    ends = [end for choices in answers for choice in choices.values() for end in choice.ends]
    # The requests are such that all ways to end are among them.
    assert {reason for reason, _ in ends} == {"stop", "length"}
    assert {type(why) for _, why in ends} == {str, int, type(None)}


def test_tokenizer_workers_give_the_same_answers(tiny_model: str, tiny_server: Server) -> None:
    requests = random_requests(40)
    expected = asyncio.run(ask(tiny_server, requests))
    flags = (*TINY_FLAGS, "--tokenizer-workers", "2")
    with start_server(tiny_model, *flags, env=ONE_THREAD) as server:
        answers = asyncio.run(ask(server, requests))
        assert server.stop() == 0
    for ours, theirs in zip(answers, expected, strict=True):
        assert_same(
            {i: vars(one) for i, one in ours.items()}, {i: vars(one) for i, one in theirs.items()}
        )
