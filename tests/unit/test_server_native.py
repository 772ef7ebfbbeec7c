"""SGLang's native API over HTTP, on a fake engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

import minisgl
from minisgl.errors import BusyError, EngineDeadError, RequestFailedError
from minisgl.server import large, native
from minisgl.server.large import JsonList
from tests.unit.fake_async_engine import BEGIN, END, FakeAsyncEngine, Step, answer
from tests.unit.observed import stats
from tests.unit.routes import Routes, error_of


def routes(engine: FakeAsyncEngine | None = None, **options: Any) -> Routes:
    return Routes(native.router, engine, **options)


def generate(server: Routes, **body: Any) -> Any:
    response = server.post("/generate", {"text": "ab", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Routes, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, without its end, which must be there."""
    response = server.post("/generate", {"text": "ab", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


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


# -- log-probabilities -----------------------------------------------------------------------


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


# -- streams ---------------------------------------------------------------------------------


def test_a_stream_has_all_so_far_in_each_event() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: answer("a€b")))
    got = events(server, rid="r")
    assert [one["text"] for one in got] == ["a", "a", "a", "a€", "a€b", "a€b"]
    assert got[-1]["output_ids"] == [97, *"€".encode(), 98, END]
    for count, one in enumerate(got, 1):
        assert one["output_ids"] == got[-1]["output_ids"][:count]
        assert one["meta_info"]["completion_tokens"] == count
        assert one["meta_info"]["id"] == "r"
        assert "index" not in one
    assert [one["meta_info"]["finish_reason"] for one in got[:-1]] == [None] * 5
    assert got[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert "e2e_latency" not in got[0]["meta_info"]
    assert got[-1]["meta_info"]["e2e_latency"] >= 0


def test_the_last_event_is_the_whole_answer() -> None:
    options = {"return_logprob": True, "top_logprobs_num": 2, "rid": "r"}
    last, whole = events(routes(), **options)[-1], generate(routes(), **options)
    for one in (last, whole):
        del one["meta_info"]["e2e_latency"]
    assert last == whole


def test_a_stream_of_several_says_whose_each_event_is() -> None:
    server = routes(FakeAsyncEngine(script=lambda ids, choice: answer(f"{chr(ids[1])}{choice}")))
    got = events(server, text=["a", "b"], sampling_params={"n": 2})
    last = {one["index"]: one["text"] for one in got}
    assert last == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


def test_deltas_that_came_together_make_one_event() -> None:
    async def scenario() -> str:
        server = routes(FakeAsyncEngine(manual=True, script=lambda _i, _c: answer("abc", "length")))
        body = {"text": "p", "stream": True}
        request = asyncio.ensure_future(server.call("POST", "/generate", json=body))
        while not server.engine.submitted:
            await asyncio.sleep(0)
        server.engine.step(3)
        return (await request).text

    text = asyncio.run(scenario())
    assert text.count("data: ") == 2
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["text"] == "abc"


def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error() -> None:
    steps = [Step("a", (97,)), Step("", (), "error")]
    got = events(routes(FakeAsyncEngine(script=lambda _ids, _choice: list(steps))))
    assert got[0]["text"] == "a"
    assert got[-1]["error"]["code"] == "request_failed"


def test_an_engine_that_fails_before_the_first_event_gives_an_error_status() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: [Step("", (), "error")]))
    error_of(server.post("/generate", {"text": "a", "stream": True}), 500)
    error_of(server.post("/generate", {"text": "a"}), 500)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted(stream: bool) -> None:
    async def scenario() -> FakeAsyncEngine:
        server = routes(FakeAsyncEngine(manual=True))
        body = json.dumps({"text": ["a", "b"], "rid": ["x", "y"], "stream": stream})
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await gone.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(_message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/generate",
            "raw_path": b"/generate",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        call = asyncio.ensure_future(server.app(scope, receive, send))
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0)
        server.engine.step()
        assert server.engine.num_live == 2
        gone.set()
        await call
        return server.engine

    engine = asyncio.run(scenario())
    assert sorted(engine.aborted) == ["x", "y"]
    assert engine.num_live == 0


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


# -- information and control -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info_tells_where_the_tokenizer_can_be_had(path: str) -> None:
    assert routes(FakeAsyncEngine(model="org/name")).get(path).json() == {
        "model_path": "org/name",
        "tokenizer_path": "org/name",
        "is_generation": True,
        "max_model_len": 100,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
    assert routes(FakeAsyncEngine(tokenizer=None)).get(path).json()["tokenizer_path"] is None


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_server_info_tells_what_was_resolved_and_the_load(path: str) -> None:
    server = routes()
    info = server.get(path).json()
    expected = {
        "served_model_name": "fake",
        "model_path": "/models/fake",
        "version": minisgl.__version__,
        "dtype": "float32",  # not "auto"
        "max_running_requests": 8,  # not null
        "max_total_num_tokens": 1600,
        "page_size": 16,
        "tp_size": 1,
        "dp_size": 1,
        "schedule_policy": "fcfs",
    }
    assert {name: info[name] for name in expected} == expected
    idle = {"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}
    assert info["internal_states"] == [idle]
    server.engine.stats = stats(1.0, 1, num_running=3, num_waiting=2, num_used_pages=50)
    busy = {"num_running_reqs": 3, "num_waiting_reqs": 2, "token_usage": 0.5}
    assert server.get(path).json()["internal_states"] == [busy]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_cache_is_flushed(method: str) -> None:
    server = routes()
    response = asyncio.run(server.call(method, "/flush_cache"))
    assert response.status_code == 200
    assert response.text == "Cache flushed: 3 pages freed.\n"
    assert response.headers["content-type"].startswith("text/plain")
    assert server.engine.num_flushes == 1


def test_a_request_is_aborted_by_its_id_and_its_client_told() -> None:
    async def scenario(body: dict[str, Any]) -> tuple[int, list[str]]:
        server = routes(FakeAsyncEngine(manual=True))
        calls = [
            asyncio.ensure_future(server.call("POST", "/generate", json={"text": "a", "rid": rid}))
            for rid in ("x", "y")
        ]
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0)
        server.engine.step()
        response = await server.call("POST", "/abort_request", json=body)
        assert response.status_code == 200
        while server.engine.num_live:
            server.engine.step()
        answers = [(await call).json() for call in calls]
        reasons = [one["meta_info"]["finish_reason"]["type"] for one in answers]
        return response.json()["aborted"], reasons

    assert asyncio.run(scenario({"rid": "y"})) == (1, ["stop", "abort"])
    assert asyncio.run(scenario({"rid": "", "abort_all": True})) == (2, ["abort", "abort"])
    assert asyncio.run(scenario({"rid": "z", "abort_all": False})) == (0, ["stop", "stop"])


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": "x", "abort_all": True}])
def test_an_abort_must_say_of_what(body: dict[str, Any]) -> None:
    assert "either" in error_of(routes().post("/abort_request", body))["message"]


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("GET", "/get_model_info"),
        ("GET", "/get_server_info"),
        ("POST", "/flush_cache"),
    ],
)
def test_a_server_that_is_not_ready_answers_503(method: str, path: str, state: str) -> None:
    server = routes()
    server.context.state.loading = state == "loading"
    server.context.state.draining = state == "draining"
    server.context.state.error = EngineDeadError("gone") if state == "dead" else None
    options = {"json": {"text": "a"}} if path == "/generate" else {}
    error_of(asyncio.run(server.call(method, path, **options)), 503)


def test_the_schema_names_every_parameter_with_its_range() -> None:
    schemas = routes().app.openapi()["components"]["schemas"]
    sampling = schemas["NativeSampling"]["properties"]
    assert sampling["max_new_tokens"]["default"] == 128
    text = json.dumps(sampling["temperature"])
    assert '"maximum": 2' in text
    assert '"minimum": 0' in text
    assert {"text", "input_ids", "sampling_params", "rid"} <= set(
        schemas["GenerateRequest"]["properties"]
    )
