"""What the parameters do, as a client sees it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.answers import CHAT, COMPLETIONS, HELLO, events, ok, prompt_of

CONTEXT = 256
END = 319
"""The tiny model's end of text."""


def complete(client: httpx.Client, path: str = COMPLETIONS, **body: Any) -> Any:
    return ok(client.post(path, json={**prompt_of(path), **body}))


def text_of(client: httpx.Client, **body: Any) -> str:
    return complete(client, **body)["choices"][0]["text"]


def token(client: httpx.Client, text: str) -> int:
    [found] = ok(client.post("/tokenize", json={"prompt": text}))["tokens"]
    return found


def only(client: httpx.Client, text: str) -> dict[str, Any]:
    """Parameters by which every token is this one."""
    return {"logit_bias": {token(client, text): 100}, "temperature": 0}


# ---- sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "least_random",
    [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1}],
    ids=lambda values: next(iter(values)),
)
def test_all_ways_to_take_the_most_likely_token_agree(
    tiny: httpx.Client, least_random: dict[str, Any]
) -> None:
    greedy = text_of(tiny, temperature=0)
    assert text_of(tiny, **{"temperature": 1, "seed": 3, **least_random}) == greedy
    assert text_of(tiny, temperature=1, seed=3) != greedy


def test_a_seed_repeats_the_answer_and_the_choices_of_a_request_differ(tiny: httpx.Client) -> None:
    def texts(**body: Any) -> list[str]:
        return [choice["text"] for choice in complete(tiny, **body)["choices"]]

    once = texts(seed=-5, n=4)
    assert len(set(once)) == 4
    assert texts(seed=-5, n=4) == once
    assert texts(seed=6, n=4) != once
    assert texts() != texts()  # no seed: a new one


def test_logit_bias_forces_and_forbids(tiny: httpx.Client) -> None:
    assert text_of(tiny, max_tokens=5, **only(tiny, "z")) == "zzzzz"
    first = complete(tiny, temperature=0, max_tokens=1, logprobs=2)["choices"][0]
    ids = ok(tiny.post("/generate", json={"text": "hello", "sampling_params": {"temperature": 0}}))
    forbidden = {ids["output_ids"][0]: -100}
    other = complete(tiny, temperature=0, max_tokens=1, logit_bias=forbidden, logprobs=2)
    ranked = sorted(first["logprobs"]["top_logprobs"][0].items(), key=lambda pair: -pair[1])
    assert other["choices"][0]["logprobs"]["tokens"] == [ranked[1][0]]


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 5}]
)
def test_penalties_end_a_repetition(tiny: httpx.Client, penalty: dict[str, float]) -> None:
    # Three tokens that are equally likely: without a penalty the first of them, for ever.
    bias = {token(tiny, letter): 60 for letter in "xyz"}
    body = {"temperature": 0, "logit_bias": bias, "max_tokens": 12, "min_tokens": 12}
    plain, varied = text_of(tiny, **body), text_of(tiny, **body, **penalty)
    assert set(plain) <= set("xyz") and set(varied) <= set("xyz")
    assert varied != plain


# ---- length and stopping ------------------------------------------------------------------------


def test_default_lengths(tiny: httpx.Client) -> None:
    forever = {**only(tiny, "z"), "ignore_eos": True}
    assert complete(tiny, **forever)["usage"]["completion_tokens"] == 16
    chat = complete(tiny, CHAT, **forever)
    assert chat["usage"]["total_tokens"] == CONTEXT
    assert chat["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_max_tokens_is_cut_to_what_fits(tiny: httpx.Client, path: str) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = complete(tiny, path, **only(tiny, "z"), **{name: 10**9})
        assert answer["usage"]["total_tokens"] == CONTEXT


def test_end_of_text_ends_unless_ignored_or_too_early(tiny: httpx.Client) -> None:
    body = {"logit_bias": {END: 100}, "temperature": 0, "max_tokens": 6}
    ended = complete(tiny, **body)
    assert ended["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert ended["usage"]["completion_tokens"] == 1
    assert complete(tiny, **body, min_tokens=3)["usage"]["completion_tokens"] == 4
    ignored = complete(tiny, **body, ignore_eos=True)
    assert ignored["usage"]["completion_tokens"] == 6
    assert ignored["choices"][0]["finish_reason"] == "length"
    shown = text_of(tiny, **body, ignore_eos=True, skip_special_tokens=False)
    assert shown == "<|im_end|>" * 6


def test_stop_token_ids_end_the_text_and_are_named(tiny: httpx.Client) -> None:
    z = token(tiny, "z")
    choice = complete(tiny, **only(tiny, "z"), stop_token_ids=[z], min_tokens=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", z)


def test_stop_strings_end_the_text_across_tokens(tiny: httpx.Client) -> None:
    body = {**only(tiny, "z"), "max_tokens": 9}
    choice = complete(tiny, **body, stop=["never", "zzz"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "zzz")
    kept = complete(tiny, **body, stop="zzz", include_stop_str_in_output=True)["choices"][0]
    assert (kept["text"], kept["stop_reason"]) == ("zzz", "zzz")
    held = complete(tiny, **body, stop="zzzzzzzzzz")["choices"][0]  # it needs one more
    assert (held["text"], held["finish_reason"], held["stop_reason"]) == ("z" * 9, "length", None)


# ---- logprobs and echo --------------------------------------------------------------------------


def test_echo_puts_the_prompt_and_its_logprobs_first(tiny: httpx.Client) -> None:
    ids = ok(tiny.post("/tokenize", json={"prompt": "the quick "}))["tokens"]
    body = {**only(tiny, "z"), "max_tokens": 2, "echo": True, "logprobs": 0}
    choices = complete(tiny, prompt=["the quick ", "hello"], **body)["choices"]
    assert [choice["text"] for choice in choices] == ["the quick zz", "hellozz"]
    from_ids = complete(tiny, prompt=ids, **body)["choices"][0]
    logprobs = choices[0]["logprobs"]
    for name in ("tokens", "text_offset"):
        assert from_ids["logprobs"][name] == logprobs[name]
    assert "".join(logprobs["tokens"]) == "the quick zz"
    assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
    places = [len("".join(logprobs["tokens"][:i])) for i in range(len(ids) + 2)]
    assert logprobs["text_offset"] == places


def test_chat_logprobs_have_the_tokens_bytes_and_the_most_likely_ones(tiny: httpx.Client) -> None:
    body = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": True}
    choice = complete(tiny, CHAT, **body, top_logprobs=3)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    for entry in content:
        tops = entry["top_logprobs"]
        assert len(tops) == 3 and tops[0]["token"] == entry["token"]  # greedy
        logprobs = [top["logprob"] for top in tops]
        assert logprobs == sorted(logprobs, reverse=True) and logprobs[0] <= 0
    spelled = bytes(byte for entry in content for byte in entry["bytes"])
    assert spelled.decode("utf-8", "replace") == choice["message"]["content"]
    without = complete(tiny, CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in without] == [[]] * 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs_are_by_token_id(tiny: httpx.Client, path: str) -> None:
    answer = complete(tiny, path, max_tokens=1, prompt_logprobs=2)
    scored = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    question = prompt_of(path)
    ids = ok(tiny.post("/tokenize", json=question))["tokens"]
    assert len(scored) == len(ids) == answer["usage"]["prompt_tokens"]
    assert scored[0] is None
    for token_id, entry in zip(ids[1:], scored[1:], strict=True):
        assert str(token_id) in entry and 2 <= len(entry) <= 3
        assert {1, 2} <= {one["rank"] for one in entry.values()}


# ---- chats --------------------------------------------------------------------------------------


def test_a_final_message_is_continued_or_answered(tiny: httpx.Client) -> None:
    def count(**body: Any) -> int:
        return complete(tiny, CHAT, max_tokens=1, **body)["usage"]["prompt_tokens"]

    def tokens(text: str) -> int:
        return ok(tiny.post("/tokenize", json={"prompt": text}))["count"]

    messages = [*HELLO, {"role": "assistant", "content": "the"}]
    user = "<|im_start|>user\nhello<|im_end|>\n"
    assert count(messages=messages, continue_final_message=True) == tokens(
        user + "<|im_start|>assistant\nthe"
    )
    assert count(messages=HELLO) == tokens(user + "<|im_start|>assistant\n")
    assert count(messages=HELLO, add_generation_prompt=False) == tokens(user)


def test_content_may_be_parts_and_a_developer_is_the_system(tiny: httpx.Client) -> None:
    def ids(*messages: dict[str, Any]) -> list[int]:
        return ok(tiny.post("/tokenize", json={"messages": messages}))["tokens"]

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert ids({"role": "user", "content": parts}) == ids(*HELLO)
    assert ids({"role": "developer", "content": "x"}) == ids({"role": "system", "content": "x"})
    complete(tiny, CHAT, messages=[{"role": "user", "content": parts}], max_tokens=1)


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_in_a_stream_only_as_it_was_asked_for(tiny: httpx.Client, path: str) -> None:
    def chunks(**options: bool) -> list[Any]:
        body = {**prompt_of(path), **only(tiny, "z"), "max_tokens": 3, "stream": True}
        response = tiny.post(path, json={**body, "stream_options": options})
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.text)

    plain = chunks(include_usage=False)
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    *before, last = chunks(include_usage=True)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    steady = chunks(continuous_usage_stats=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in steady][-1] == 3
    assert all(chunk["choices"] for chunk in steady)
    counts = [chunk["usage"]["completion_tokens"] for chunk in steady]
    assert counts == sorted(counts) and counts[0] >= 1


def test_the_first_chunk_of_a_chat_has_the_role_and_the_last_the_reason(tiny: httpx.Client) -> None:
    body = {"messages": HELLO, "stream": True, "n": 2, "seed": 1, "max_tokens": 8}
    chunks = events(tiny.post(CHAT, json=body).text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True] + [False] * (len(own) - 1)
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[:-1] == [None] * (len(own) - 1) and reasons[-1] in ("stop", "length")
