"""SGLang's native API over HTTP, on a fake engine: whole answers, and what clients send."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from minisgl.errors import BusyError, RequestFailedError
from minisgl.server import native
from tests.unit.fake_async_engine import BEGIN, END, FakeAsyncEngine, Step, answer
from tests.unit.native_calls import events, generate, routes
from tests.unit.routes import error_of

# -- whole answers ---------------------------------------------------------------------------


def test_a_text_gives_text_ids_and_their_counts() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: answer("Hi"), num_cached_tokens=2))
    body = generate(server, rid="r1", sampling_params={"max_new_tokens": 8})
    info = body.pop("meta_info")
    assert body == {"text": "Hi", "output_ids": [72, 105, END]}
    assert info.pop("e2e_latency") >= 0
    assert info == {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 2,
    }
    assert server.engine.submitted[0].prompt_token_ids == [BEGIN, 97, 98]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (answer("Hi", "length"), {"type": "length", "length": 2}),
        (answer("Hi", "stop", "H"), {"type": "stop", "matched": "H"}),
        (answer("Hi", "stop", 105), {"type": "stop", "matched": 105}),
        ([Step("", (), "stop")], {"type": "stop", "matched": None}),
        (
            [Step("", (), "abort")],
            {"type": "abort", "message": "the request was aborted"},
        ),
    ],
)
def test_the_reason_of_the_end_is_told(steps: list[Step], reason: dict[str, Any]) -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: list(steps)))
    assert generate(server)["meta_info"]["finish_reason"] == reason


def test_token_ids_are_a_prompt_as_they_are() -> None:
    server = routes()
    assert generate(server, text=None, input_ids=[7, 8])["text"] == "Hello 0"
    assert server.engine.submitted[0].prompt_token_ids == [7, 8]


@pytest.mark.parametrize(
    "prompts", [{"text": ["a", "bc"]}, {"text": None, "input_ids": [[BEGIN, 1], [BEGIN, 2, 3]]}]
)
def test_a_list_of_prompts_gives_a_list_in_order(prompts: dict[str, Any]) -> None:
    server = routes(FakeAsyncEngine(script=lambda ids, _choice: answer("x" * (20 - 5 * len(ids)))))
    first, second = generate(server, rid="r", **prompts)
    assert (len(first["text"]), len(second["text"])) == (10, 5)  # the second ended first
    assert [one["meta_info"]["id"] for one in (first, second)] == ["r-0", "r-1"]
    assert [one["meta_info"]["prompt_tokens"] for one in (first, second)] == [2, 3]


def test_a_list_of_one_gives_a_list() -> None:
    assert len(generate(routes(), text=["a"])) == 1


def test_sequences_of_a_prompt_stand_next_to_each_other() -> None:
    server = routes(FakeAsyncEngine(script=lambda ids, choice: answer(f"{chr(ids[1])}{choice}")))
    body = generate(server, text=["a", "b"], sampling_params={"n": 2})
    assert [one["text"] for one in body] == ["a0", "a1", "b0", "b1"]
    assert [one["text"] for one in generate(server, text="c", sampling_params={"n": 2})] == [
        "c0",
        "c1",
    ]


def test_prompts_may_have_sampling_parameters_and_ids_of_their_own() -> None:
    server = routes()
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 3}]
    body = generate(server, text=["a", "b"], sampling_params=params, rid=["x", "y"])
    assert [one["meta_info"]["completion_tokens"] for one in body] == [1, 3]
    assert [one["meta_info"]["id"] for one in body] == ["x", "y"]


def test_prompts_of_their_own_ids_are_queued_all_or_none() -> None:
    server = routes(FakeAsyncEngine(max_queued=1, manual=True))
    response = server.post("/generate", {"text": ["a", "b"], "rid": ["x", "y"]})
    assert error_of(response, 503)["code"] == "server_busy"
    assert server.engine.aborted == ["x"]
    assert server.engine.num_live == 0


@pytest.mark.parametrize("rid", ["r", ["x", "y"]])
def test_a_failure_behind_the_submission_leaves_nothing_running(
    rid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RequestFailedError("here")

    monkeypatch.setattr(native, "NativeCall", fail)
    server = routes(FakeAsyncEngine(manual=True))
    assert server.post("/generate", {"text": ["a", "b"], "rid": rid}).status_code == 500
    assert len(server.engine.submitted) == 2
    assert server.engine.num_live == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"text": ["a"] * 20}, "text"),
        ({"text": None, "input_ids": [[1]] * 20}, "input_ids"),
        ({}, "n"),
    ],
)
def test_more_sequences_than_ever_fit_are_refused_for_good(
    change: dict[str, Any], param: str
) -> None:
    server = routes(FakeAsyncEngine(max_queued=100))
    body = {"text": "a", "sampling_params": {"n": 128}, **change}
    assert error_of(server.post("/generate", body))["param"] == param
    assert not server.engine.options


def test_every_sampling_parameter_reaches_the_engine() -> None:
    server = routes()
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": -1,
        "min_p": 0.125,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "stop": "x",
        "stop_token_ids": [5],
        "no_stop_trim": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "n": 2,
        "sampling_seed": 42,
    }
    generate(server, sampling_params=given, priority=-3, extra_key="tenant")
    (generation,) = server.engine.submitted
    params = generation.params
    for name, value in given.items():
        renamed = {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "no_stop_trim": "include_stop_str_in_output",
            "sampling_seed": "seed",
        }
        expected = ("x",) if name == "stop" else (5,) if name == "stop_token_ids" else value
        assert getattr(params, renamed.get(name, name)) == expected, name
    (options,) = server.engine.options
    assert (options["priority"], options["cache_salt"]) == (-3, "tenant")


def test_defaults_are_sglang_s_length_and_the_model_s_sampling() -> None:
    server = routes(FakeAsyncEngine(generation_defaults={"temperature": 0.25}))
    server.engine.ready = msgspec.structs.replace(server.engine.ready, max_model_len=1000)
    generate(server)
    params = server.engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.logprobs) == (128, 0.25, None)


# -- what clients send -----------------------------------------------------------------------


def test_the_body_of_sglang_s_benchmark_is_taken() -> None:
    got = events(
        routes(),
        sampling_params={"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        lora_path=None,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
    )
    assert got[-1]["meta_info"]["completion_tokens"] == 4


def test_the_body_of_sglang_s_router_is_taken() -> None:
    body = generate(
        routes(),
        model="unknown",  # its way to say that the client named none
        sampling_params={"max_new_tokens": 2, "spaces_between_special_tokens": True},
        return_text_in_logprobs=False,
        stream=False,
        log_metrics=True,
        return_hidden_states=False,
        background=False,
        no_logs=False,
        return_bytes=False,
        return_entropy=False,
        bootstrap_host=None,
        routed_experts_start_len=0,
    )
    assert body["text"] == "He"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"text": None}, None, "either text or input_ids"),
        ({"input_ids": [1]}, None, "either text or input_ids"),
        ({"text": 3}, "text", "text = 3"),
        ({"text": []}, "text", "must be a string"),
        ({"text": ["a", 3]}, "text", "3 at [1]"),
        ({"text": ["a"] * 1025}, "text", "1025 prompts"),
        ({"text": None, "input_ids": []}, "input_ids", "list of token ids"),
        ({"text": None, "input_ids": [[1], []]}, "input_ids", "list of token ids"),
        ({"text": None, "input_ids": [1, "a"]}, "input_ids", "'a', which is no token id"),
        ({"text": None, "input_ids": [1, True]}, "input_ids", "true, which is no token id"),
        ({"text": None, "input_ids": [[1], [-1]]}, "input_ids", "-1, which is no token id"),
        ({"text": None, "input_ids": [1, 300]}, "input_ids", "300 is not in the vocabulary"),
        ({"text": "x" * 200}, "text", "201 tokens"),
        ({"text": ["a", "x" * 200]}, "text", "201 tokens"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params", "max_new_tokens = 0"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params", "temperature = -1"),
        ({"sampling_params": {"temperature": "1"}}, "sampling_params", "temperature = '1'"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params", "top_p = 0"),
        ({"sampling_params": {"n": 129}}, "sampling_params", "n = 129"),
        (
            {"sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}},
            "sampling_params",
            "min_new_tokens = 2 is above max_new_tokens = 1",
        ),
        ({"sampling_params": {"stop": [""]}}, "sampling_params", "stop"),
        ({"sampling_params": {"regex": "a+"}}, "sampling_params", "structured output"),
        ({"sampling_params": {"json_schema": "{}"}}, "sampling_params", "structured output"),
        (
            {"sampling_params": {"spaces_between_special_tokens": False}},
            "sampling_params",
            "spaces_between_special_tokens",
        ),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params", "max_tokens"),
        ({"sampling_params": []}, "sampling_params", "sampling_params"),
        ({"sampling_params": [{}, {}]}, "sampling_params", "2 entries for 1 prompts"),
        ({"lora_path": "adapter"}, "lora_path", "LoRA"),
        ({"image_data": "http://x/y.png"}, "image_data", "images"),
        ({"return_hidden_states": True}, "return_hidden_states", "hidden states"),
        ({"top_logprobs_num": 2}, "top_logprobs_num", "needs return_logprob"),
        ({"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num", "21"),
        ({"logprob_start_len": -2}, "logprob_start_len", "-2"),
        ({"stream": 1}, "stream", "stream = 1"),
        ({"priority": 2**31}, "priority", "priority"),
        ({"extra_key": ""}, "extra_key", "extra_key"),
        ({"rid": ""}, "rid", "1 to 128 printable"),
        ({"rid": "a\nb"}, "rid", "1 to 128 printable"),
        ({"rid": "ä"}, "rid", "1 to 128 printable"),
        ({"rid": 7}, "rid", "1 to 128 printable"),
        ({"rid": ["a", "b"]}, "rid", "2 entries for 1 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "twice"),
        ({"prompt": "a"}, "prompt", "unknown parameter 'prompt'"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    body: dict[str, Any], param: str | None, words: str
) -> None:
    server = routes()
    error = error_of(server.post("/generate", {"text": "ab", **body}))
    assert words in error["message"]
    assert error["param"] == param
    assert not server.engine.submitted


def test_more_sequences_than_the_server_allows_are_refused() -> None:
    body = {"text": "a", "sampling_params": {"n": 3}}
    error = error_of(routes(max_n=2).post("/generate", body))
    assert "n = 3 must be at most 2" in error["message"]


def test_another_model_is_not_here() -> None:
    error_of(routes().post("/generate", {"text": "a", "model": "other"}), 404)
    assert generate(routes(), model="fake")["text"]


def test_a_full_queue_is_a_503_with_retry_after() -> None:
    server = routes(FakeAsyncEngine(submit_error=BusyError("full")))
    response = server.post("/generate", {"text": "a"})
    error_of(response, 503)
    assert response.headers["retry-after"]


def test_the_request_s_id_is_the_client_s_header_unless_it_has_a_rid() -> None:
    async def ids(body: dict[str, Any]) -> tuple[str, str]:
        headers = {"x-request-id": "from-header"}
        response = await routes().call("POST", "/generate", json=body, headers=headers)
        return response.json()["meta_info"]["id"], response.headers["x-request-id"]

    assert asyncio.run(ids({"text": "a"})) == ("from-header", "from-header")
    assert asyncio.run(ids({"text": "a", "rid": "mine"})) == ("mine", "mine")


def test_requests_without_an_id_get_different_ones() -> None:
    server = routes()
    first, second = (generate(server)["meta_info"]["id"] for _ in range(2))
    assert first != second
