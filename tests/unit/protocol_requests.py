"""Requests of the two OpenAI endpoints as their bodies are parsed, and their refusals."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.errors import InvalidRequestError
from minisgl.server.errors import ApiError, to_api_error
from minisgl.server.protocol import ChatCompletionRequest, CompletionRequest

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "Hi", **fields})


def refusal(make: Any, **fields: Any) -> ApiError:
    with pytest.raises((ValidationError, InvalidRequestError)) as caught:
        make(**fields).to_params()
    error = to_api_error(caught.value)
    assert error.status == 400
    return error
