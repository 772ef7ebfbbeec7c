"""Requests made from `/openapi.json`, and answers held against it: it is true, and nothing fails.

valid     by the schema, and by `servable` most of what the schema can't say
invalid   by the schema, so that they must be refused
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import GenerationMode, checks

from tests.server.answers import CHAT, COMPLETIONS, HELLO
from tests.server.serving import Server

TIMEOUT_S = 30
V = 320
"""The tiny model's vocabulary."""
HELD = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
WITH_BODY = [
    *(CHAT, COMPLETIONS, "/generate", "/abort_request"),
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
]
WITHOUT_BODY = [
    *("/health", "/health_generate", "/version", "/metrics", "/flush_cache"),
    *("/v1/models", "/v1/models/{model_id}"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info"),
]
OPERATIONS = [
    *(("POST", path) for path in WITH_BODY),
    *(("GET", path) for path in WITHOUT_BODY),
    ("POST", "/flush_cache"),
]

NEEDED: dict[str, Any] = {
    CHAT: {"max_completion_tokens": 8},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 8}},
    "/abort_request": {"rid": "mine"},
    "/tokenize": {"messages": HELLO},
    "/v1/tokenize": {"messages": HELLO},
}


@pytest.fixture(scope="module")
def schema(tiny_server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{tiny_server.url}/openapi.json")


def conform(operation: Any, mode: GenerationMode, examples: int) -> Counter[int]:
    """Try an operation; returns how often each status came."""
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def holds(case: Any) -> None:
        if mode is GenerationMode.NEGATIVE:
            # A null is "not given", whatever the name: the schema can't say that of all names.
            assume("None" not in repr(case.body))
        elif isinstance(case.body, dict):
            case.body = servable(operation.path, case.body)
        response = case.call_and_validate(checks=HELD, timeout=TIMEOUT_S)
        statuses[response.status_code] += 1

    holds()
    return statuses


def servable(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The request with ids of the vocabulary, few choices, and one of what excludes each other.

    The schema's integers have 1.0 among them, which the server does not take.
    """
    body = json.loads(json.dumps(body), parse_float=lambda digits: whole(float(digits)))
    body = {**NEEDED.get(path, {}), **{k: v for k, v in body.items() if v is not None}}
    for name in ("model", "chat_template_kwargs", "min_tokens", "max_tokens"):
        body.pop(name, None)
    for message in body.get("messages") or []:
        message["content"] = message.get("content") or "hello"
        message["role"] = message["role"].replace("tool", "user")
    for name, excluded in (("text", "input_ids"), ("messages", "prompt"), ("rid", "abort_all")):
        if name in body:
            body.pop(excluded, None)
    for params in (body, body.get("sampling_params")):
        if isinstance(params, dict):
            for name in params.keys() & {"prompt", "input_ids", "tokens", "stop_token_ids"}:
                params[name] = in_vocabulary(params[name])
            if params.get("logit_bias"):
                params["logit_bias"] = {str(int(k) % V): 1 for k in params["logit_bias"]}
            if params.get("n"):
                params["n"] = min(params["n"], 3)
                params.pop("best_of", None)
    return body


def whole(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [in_vocabulary(item) for item in value]
    return value % V if isinstance(value, int) else value


def test_all_operations_are_tried(schema: Any) -> None:
    found = [result.ok() for result in schema.get_all_operations()]
    assert sorted((one.method.upper(), one.path) for one in found) == sorted(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_valid_requests_get_what_the_schema_says(schema: Any, method: str, path: str) -> None:
    statuses = conform(schema[path][method], GenerationMode.POSITIVE, 25)
    assert statuses[200] * 2 > statuses.total() or "{" in path


@pytest.mark.parametrize("path", WITH_BODY)
def test_invalid_requests_are_refused(schema: Any, path: str) -> None:
    assert conform(schema[path]["POST"], GenerationMode.NEGATIVE, 20)[400]
