"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from minisgl.errors import InvalidRequestError

from ..errors import shorten
from .base import Neutral
from .compat import ENGINES, STRUCTURED_OUTPUT, TOOLS
from .sampling import Logprobs, SamplingBody

__all__ = ["ChatCompletionRequest", "ChatMessage"]


class TextPart(BaseModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


def _text_content(value: Any) -> Any:
    """Content as given, if it is text; parts are left to the tokenizer to join."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"has {shorten(part if kind in (None, 'text') else kind)} at [{index}]: this "
                'model takes parts {"type": "text", "text": "..."} only, no images or audio'
            )
    return value


class ChatMessage(BaseModel):
    """A message; further keys are given to the model's chat template as they are."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, use_attribute_docstrings=True
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is the same as `system`."""
    content: Annotated[
        str | list[dict[str, Any]] | None,
        PlainValidator(_text_content, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    """Text, or parts of text, which are joined with nothing between them. Only an assistant's
    message with `tool_calls` or `reasoning_content` may be without."""
    name: str | None = None
    """Given to the chat template."""
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Calls of an earlier answer; given to the chat template."""
    tool_call_id: str | None = None
    """Which call a `tool` message answers; given to the chat template."""
    reasoning_content: str | None = None
    """Thoughts of an earlier answer; given to the chat template."""

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        other = self.tool_calls or self.reasoning_content
        if self.content is None and not (self.role == "assistant" and other):
            raise ValueError("needs content")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The message for the chat template, without what is null."""
        message = {name: value for name, value in self if value is not None}
        if self.role == "developer":
            message["role"] = "system"
        return message


class ChatCompletionRequest(SamplingBody):
    """A conversation to go on with."""

    neutral = {
        **TOOLS,
        **STRUCTURED_OUTPUT,
        **ENGINES,
        "add_special_tokens": Neutral("way to add them: the chat template does", (False,)),
        "audio": Neutral("audio"),
        "chat_template": Neutral("chat template of a client's"),
        "documents": Neutral("use of documents in the chat template", ([],)),
        "echo": Neutral("echo of a conversation", (False,)),
        "modalities": Neutral("output other than text", (["text"],)),
        "prediction": Neutral("predicted output"),
        "verbosity": Neutral("control of verbosity", ("medium",)),
        "web_search_options": Neutral("web search"),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    """The conversation so far, oldest first."""
    logprobs: bool = False
    """Return the log-probability of each token."""
    top_logprobs: Logprobs | None = None
    """And those of this many most likely tokens; only with `logprobs`."""
    add_generation_prompt: bool | None = None
    """Begin an answer after the messages. Default: unless `continue_final_message`."""
    continue_final_message: bool = False
    """Go on with the text of the last message; excludes `add_generation_prompt`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, such as `enable_thinking`: those that the server's
    `--template-kwargs` names."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Given to the chat template as the variable `reasoning_effort`, in place of writing it in
    `chat_template_kwargs`; without effect where the template does not read it."""
    separate_reasoning: bool = True
    """Split what a thinking model thinks off its answer, as `reasoning_content`; false leaves
    it in `content`, between its tags. Without effect where the server's `--reasoning-parser`
    is off."""
    include_reasoning: bool = True
    """False leaves the reasoning that is split off out of the response."""

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs = true", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other: set one",
                "continue_final_message",
            )
        if not self.include_reasoning and not self.separate_reasoning:
            raise InvalidRequestError(
                "include_reasoning = false needs separate_reasoning = true", "include_reasoning"
            )
        effort = self.reasoning_effort
        given = self.chat_template_kwargs.get("reasoning_effort", effort)
        if effort is not None and given != effort:
            raise InvalidRequestError(
                f"reasoning_effort = {effort!r} and {shorten(given)} in chat_template_kwargs "
                "differ: give one",
                "reasoning_effort",
            )
        return self

    def template_kwargs(self) -> dict[str, Any]:
        """The variables for the chat template."""
        if self.reasoning_effort is None:
            return dict(self.chat_template_kwargs)
        return {**self.chat_template_kwargs, "reasoning_effort": self.reasoning_effort}

    def check_template_kwargs(self, allowed: Collection[str]) -> None:
        """Raise `InvalidRequestError` for a template variable that is not in `allowed`."""
        for name in self.template_kwargs():
            if name not in allowed:
                raise InvalidRequestError(
                    f"the template variable {shorten(name)} may not be set: this server's "
                    f"--template-kwargs allows {', '.join(sorted(allowed)) or 'none'}",
                    "chat_template_kwargs"
                    if name in self.chat_template_kwargs
                    else "reasoning_effort",
                )

    def to_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        return [message.to_dict() for message in self.messages]

    def final_text(self) -> str:
        """The text of the last message, with which the prompt ends if it is to be continued."""
        content = self.messages[-1].content or ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def _logprobs(self) -> dict[str, Any]:
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        return {"logprobs": wanted, "prompt_logprobs": self.prompt_logprobs}
