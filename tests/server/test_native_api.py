"""SGLang's endpoints, tokenization, and what the server says of itself."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import minisgl
from tests.server.answers import CHAT, COMPLETIONS, HELLO, events, ok, refused
from tests.server.serving import PROSE

GREEDY = {"temperature": 0, "max_new_tokens": 12}
V = 320
TEXTS = [
    "",
    "hello",
    PROSE,
    "  lead",
    "\n\n",
    "é中😀",
    "a<|im_start|>b",
    "\x00",
    "e\u0301",
]


def generate(client: httpx.Client, **body: Any) -> Any:
    return ok(client.post("/generate", json={"sampling_params": GREEDY, **body}))


def tokens(client: httpx.Client, text: str) -> list[int]:
    return ok(client.post("/tokenize", json={"prompt": text}))["tokens"]


# ---- /generate ----------------------------------------------------------------------------------


def test_generate_says_what_completions_say(tiny: httpx.Client) -> None:
    body = {"prompt": "the fox", "temperature": 0, "max_tokens": 12}
    expected = ok(tiny.post(COMPLETIONS, json=body))
    answer = generate(tiny, text="the fox", rid="mine")
    assert answer.keys() == {"text", "output_ids", "meta_info"}
    assert answer["text"] == expected["choices"][0]["text"]
    info = answer["meta_info"]
    assert info["id"] == "mine" and info["e2e_latency"] > 0
    for name in ("prompt_tokens", "completion_tokens"):
        assert info[name] == expected["usage"][name]
    assert info["completion_tokens"] == len(answer["output_ids"])
    assert info["finish_reason"] == {"type": "length", "length": 12}
    assert generate(tiny, input_ids=tokens(tiny, "the fox"))["output_ids"] == answer["output_ids"]


def test_a_stream_carries_everything_so_far(tiny: httpx.Client) -> None:
    whole = generate(tiny, text="the fox")
    body = {"text": "the fox", "sampling_params": GREEDY, "stream": True}
    chunks = events(tiny.post("/generate", json=body).text)
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
        old, new = before["output_ids"], after["output_ids"]
        assert len(old) < len(new) and new[: len(old)] == old
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_lists_of_prompts_and_of_parameters(tiny: httpx.Client) -> None:
    single = [generate(tiny, text=text)["text"] for text in ("the ", "fox")]
    assert [one["text"] for one in generate(tiny, text=["the ", "fox"])] == single
    each = [GREEDY, {**GREEDY, "max_new_tokens": 2}]
    both = generate(tiny, text=["the ", "fox"], sampling_params=each, rid=["a", "b"])
    assert [one["meta_info"]["id"] for one in both] == ["a", "b"]
    assert [one["meta_info"]["completion_tokens"] for one in both] == [12, 2]
    several = generate(tiny, text="the ", sampling_params={"n": 3, "max_new_tokens": 4})
    assert len(several) == 3
    body = {"text": ["the ", "fox"], "sampling_params": GREEDY, "stream": True}
    chunks = events(tiny.post("/generate", json=body).text)
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert [last[0], last[1]] == single


def test_what_stopped_an_answer_is_named(tiny: httpx.Client) -> None:
    plain = generate(tiny, text="the fox", sampling_params={**GREEDY, "ignore_eos": True})
    second = plain["output_ids"][1]
    by_id = generate(tiny, text="the fox", sampling_params={**GREEDY, "stop_token_ids": [second]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": second}
    stop = next(char for char in plain["text"] if char.isascii())
    by_text = generate(tiny, text="the fox", sampling_params={**GREEDY, "stop": stop})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert by_text["text"] == plain["text"].partition(stop)[0]
    kept = {**GREEDY, "stop": [stop], "no_stop_trim": True}
    assert generate(tiny, text="the fox", sampling_params=kept)["text"].endswith(stop)


def test_logprobs_of_output_and_input(tiny: httpx.Client) -> None:
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    answer = generate(tiny, text="the fox", logprob_start_len=0, **wanted)
    info = answer["meta_info"]
    assert [entry[1] for entry in info["output_token_logprobs"]] == answer["output_ids"]
    assert [entry[1] for entry in info["input_token_logprobs"]] == tokens(tiny, "the fox")
    assert info["input_token_logprobs"][0][0] is None
    for entry, top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True):
        assert len(top) == 2 and top[0] == entry and entry[0] <= 0  # greedy
    assert "".join(entry[2] for entry in info["input_token_logprobs"]) == "the fox"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"text": "a", "input_ids": [1]}, None),
        ({"text": ""}, "text"),
        ({"text": 1}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [V]}, "input_ids"),
        ({"input_ids": [[1], [V]]}, "input_ids"),
        ({"input_ids": [1] * 256}, "input_ids"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 129}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["a"]}, "rid"),
        ({"text": "a", "rid": "\n"}, "rid"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_generate_refuses(tiny: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    refused(tiny.post("/generate", json=body), param=param)


# ---- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_to_tokens_and_back(tiny: httpx.Client, prefix: str, text: str) -> None:
    body = {"prompt": text, "return_token_strs": True}
    answer = ok(tiny.post(f"{prefix}/tokenize", json=body))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    back = ok(tiny.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]}))
    assert back == {"prompt": text}


def test_messages_to_tokens(tiny: httpx.Client) -> None:
    answer = ok(tiny.post("/tokenize", json={"messages": HELLO}))
    text = ok(tiny.post("/detokenize", json={"tokens": answer["tokens"]}))["prompt"]
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    body = {"messages": HELLO, "max_tokens": 1}
    assert ok(tiny.post(CHAT, json=body))["usage"]["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, None),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [V]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
    ],
)
def test_tokenization_refuses(
    tiny: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    refused(tiny.post(path, json=body), param=param)


# ---- the server itself --------------------------------------------------------------------------


def test_information(tiny: httpx.Client, tiny_model: str) -> None:
    assert ok(tiny.get("/version")) == {"version": minisgl.__version__}
    assert ok(tiny.get("/health")) == ok(tiny.get("/health_generate")) == {"status": "ok"}
    info = ok(tiny.get("/get_model_info"))
    assert info == ok(tiny.get("/model_info"))
    assert (info["model_path"], info["is_generation"]) == (tiny_model, True)
    server = ok(tiny.get("/get_server_info"))
    assert server.keys() == ok(tiny.get("/server_info")).keys()
    assert server["version"] == minisgl.__version__ and server["tp_size"] == server["dp_size"] == 1
    assert server["max_total_num_tokens"] == 256 * 16 and server["dtype"] == "float32"
    [load] = server["internal_states"]
    assert 0 <= load["token_usage"] <= 1 and load["num_waiting_reqs"] >= 0


def test_docs_and_schema(tiny: httpx.Client) -> None:
    assert "text/html" in tiny.get("/docs").headers["content-type"]
    schema = ok(tiny.get("/openapi.json"))
    assert schema["info"]["version"] == minisgl.__version__
    chat = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    temperature = next(kind for kind in chat["temperature"]["anyOf"] if kind["type"] == "number")
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert chat["n"]["default"] == 1 and all("description" in field for field in chat.values())
    paths = set(schema["paths"])
    assert paths >= {CHAT, COMPLETIONS, "/v1/models", "/health", "/metrics", "/tokenize"}
    assert paths >= {"/generate", "/get_model_info", "/flush_cache", "/abort_request", "/version"}


def test_flushing_forgets_the_cached_prefixes(tiny: httpx.Client) -> None:
    def cached() -> int:
        return generate(tiny, text=PROSE)["meta_info"]["cached_tokens"]

    cached()
    assert cached() > 0
    for method in ("POST", "GET"):
        response = tiny.request(method, "/flush_cache")
        assert response.status_code == 200 and "flushed" in response.text
    assert cached() == 0


def test_a_request_is_aborted_by_its_id(guarded: httpx.Client) -> None:
    params = {"max_new_tokens": 4000, "ignore_eos": True}
    body = {"text": "a", "sampling_params": params, "rid": "long", "stream": True}
    with guarded.stream("POST", "/generate", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        assert ok(guarded.post("/abort_request", json={"rid": "other"})) == {"aborted": 0}
        assert ok(guarded.post("/abort_request", json={"rid": "long"})) == {"aborted": 1}
        *_, last, done = filter(None, lines)
    assert done == "data: [DONE]" and '"type":"abort"' in last
    assert ok(guarded.post("/abort_request", json={"rid": "long"})) == {"aborted": 0}
    refused(guarded.post("/abort_request", json={}), param="rid")
