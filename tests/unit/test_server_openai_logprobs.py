"""Logprobs and echo of the two OpenAI endpoints: their shapes, and the limits on their size."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.message import SequenceDelta
from minisgl.server import large
from minisgl.server.choices import Piece, Prompt, TextChoice, TextOptions
from minisgl.server.generation import Generation
from minisgl.server.logprobs import TextColumns, TextOffsets, TokenTexts, prompt_logprobs
from tests.unit.fake_async_engine import FakeAsyncEngine, Step, answer, byte_tokenizer
from tests.unit.openai_calls import CHAT, HELLO, TEXT, Json, ask, error_of, stream


def plain(value: Any) -> Any:
    """What clients read of a part of an answer."""
    return json.loads(msgspec.json.encode(value))


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


def test_offsets_count_special_tokens_where_the_text_shows_them() -> None:
    texts = TokenTexts(byte_tokenizer())
    ids = [256, 97, 257, 98]
    assert TextOffsets(texts, text="a<|end|>b").place(ids) == [0, 0, 1, 8]
    assert TextOffsets(texts, skip_special_tokens=True, begin=4).place(ids) == [4, 4, 5, 5]
    assert TextOffsets(texts, skip_special_tokens=False).place(ids) == [0, 9, 10, 17]
