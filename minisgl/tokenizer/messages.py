"""The messages of a chat, checked and copied into the plain data that a template may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ChatTemplateError

__all__ = ["checked_messages", "checked_tools", "plain_data"]


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy of the messages with text content; keys whose value is None are left out.

    Raises ChatTemplateError naming the index of a message that has no role, no content (but
    for an assistant's, which may be tool calls alone) or content other than text.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ChatTemplateError(
            f"messages must be a non-empty list of dicts, not {_kind(messages)}", "messages"
        )
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be a dict, not {_kind(message)}", "messages")
    copy = {key: value for key, value in plain_data(message, where).items() if value is not None}
    if not isinstance(copy.get("role"), str) or not copy["role"]:
        raise ChatTemplateError(
            f"{where} needs a role, a string such as 'user'; it is {copy.get('role')!r}", "messages"
        )
    if "content" in copy:
        copy["content"] = _content_text(copy["content"], where)
    elif copy["role"] != "assistant":  # an answer may be tool calls alone
        raise ChatTemplateError(f"{where} (role {copy['role']!r}) has no content", "messages")
    return _with_reasoning(copy)


def _content_text(content: Any, where: str) -> str:
    """Content as one string; text parts are joined without anything between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(
            f"{where}: content must be a string or a list of text parts, not {_kind(content)}",
            "messages",
        )
    texts = []
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ChatTemplateError(
                f"{where}: content part {index} is {kind!r}; only parts "
                '{"type": "text", "text": "..."} are supported',
                "messages",
            )
        texts.append(text)
    return "".join(texts)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Offer the reasoning of an earlier answer under the names that templates read it by."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A plain copy of the tools' descriptions; ChatTemplateError unless a list of dicts."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ChatTemplateError(f"tools must be a list of dicts, not {_kind(tools)}", "tools")
    return [plain_data(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """`value` rebuilt of JSON's types: other objects' methods are not for templates to call.

    `where` names it in the ChatTemplateError for what JSON has no type for.
    """
    if depth > 100:
        raise ChatTemplateError(f"{where} is nested more than 100 deep", "messages")
    if value is None or isinstance(value, bool):
        return value
    # Subclasses of these (enums, numpy's floats) lose their further methods.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, where, depth + 1) for item in value]
    raise ChatTemplateError(
        f"{where} holds a {_kind(value)}; only strings, numbers, booleans, lists and dicts go "
        "into a chat template",
        "messages",
    )


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
