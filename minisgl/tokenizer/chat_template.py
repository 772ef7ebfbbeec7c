"""Chat templates: messages to one prompt text, by the Jinja template the model came with.

A template is a program from wherever the model is from, so it runs in Jinja's immutable sandbox
and sees plain data only. Its environment is the one that templates are written for (Hugging
Face, "chat templating"): block tags eat the white space around them, loops have `break` and
`continue`, and there are `raise_exception`, `strftime_now`, a `tojson` that leaves `<` and `&`
alone, and `{% generation %}`, which marks text for training and does nothing here. A template
may loop for long: whoever serves strangers has it rendered by `renderer.py`, in a process that
can be killed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ChatTemplateError
from .messages import checked_messages, checked_tools, plain_data
from .parts import TOKEN_NAMES

__all__ = ["ChatTemplate", "RunTemplate", "check_template_kwargs", "run_template"]

RunTemplate = Callable[[str, dict[str, Any]], str]
"""Renders a template's source with its variables, which are plain data; see `run_template`."""

_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "raise_exception",
        "strftime_now",
        "namespace",
        "dict",
        *TOKEN_NAMES,
    }
)
# Put after the final message's text to find its end in the rendered prompt. The blank at the
# end is there to notice that the template strips messages.
_END_MARK = "\u2063minisgl:end-of-final-message\u2063 "


class ChatTemplate:
    """One template; compiled when first used, so that a broken one only harms chat requests."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        run: RunTemplate | None = None,
    ) -> str:
        """The prompt for `messages`, each a dict with `role` and `content`.

        `add_generation_prompt` appends the head of the answer (default: unless
        `continue_final_message`). `continue_final_message` ends the prompt right after the
        final message's text, for the model to go on with it. `template_kwargs` are further
        variables of the template, for example `enable_thinking`. `run` runs the template's code
        (default: `run_template`, in this process).

        Raises ChatTemplateError for messages that are malformed (naming the index), for
        variables that may not be set, and with the template's own words when it fails.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "add_generation_prompt and continue_final_message exclude each other; set one",
                "continue_final_message",
            )
        variables = dict(template_kwargs or {})
        check_template_kwargs(variables)
        conversation = checked_messages(messages)
        final = _mark_final_message(conversation) if continue_final_message else ""
        text = (run or run_template)(
            self.source,
            {
                "documents": None,
                **self._special_tokens,
                **plain_data(variables, "chat_template_kwargs"),
                "messages": conversation,
                "tools": checked_tools(tools),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_mark(text, final) if continue_final_message else text


def run_template(source: str, variables: dict[str, Any]) -> str:
    """The text of a template; nothing but this runs code that is not the engine's own.

    Raises ChatTemplateError if the template is not valid, refuses the messages or fails.
    """
    template = _compile(source)
    try:
        return template.render(variables)
    except ChatTemplateError:
        raise
    except jinja2.TemplateError as error:
        raise ChatTemplateError(
            f"The chat template refused the messages: {error.message or error}", "messages"
        ) from error
    except Exception as error:  # a template is a program: any operation in it may fail
        raise ChatTemplateError(
            f"The chat template failed on these messages ({type(error).__name__}): {error}",
            "messages",
        ) from error


@functools.lru_cache(maxsize=8)  # a model has one or two
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"The model's chat template is not valid Jinja, line {error.lineno}: {error.message}",
            "messages",
        ) from error
    except Exception as error:  # for example nested too deeply for Jinja or for Python
        raise ChatTemplateError(
            f"The model's chat template can't be compiled ({type(error).__name__}): {error}",
            "messages",
        ) from error


def check_template_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    """Raise ChatTemplateError if a variable would take the place of one the engine sets."""
    taken = sorted(_RESERVED.intersection(template_kwargs))
    if taken:
        raise ChatTemplateError(
            f"chat_template_kwargs may not set {', '.join(taken)}; use the parameter of that name",
            "chat_template_kwargs",
        )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_Namespace,
        dict=_Dict(),
    )
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: its body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that Python or Jinja give a meaning (`__html__`, ...)."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)` without the type's methods that change dicts."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold the name {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _mark_final_message(conversation: list[dict[str, Any]]) -> str:
    """Append the mark to the last message; returns its text without the mark."""
    content: str | None = conversation[-1].get("content")
    if content is None:
        raise ChatTemplateError(
            "continue_final_message is set, but the final message has no content to continue",
            "continue_final_message",
        )
    conversation[-1]["content"] = content + _END_MARK
    return content


def _cut_at_mark(text: str, final: str) -> str:
    """The rendered prompt up to the end of the final message's text."""
    position = text.rfind(_END_MARK.rstrip())
    if position < 0 or final.strip() not in text[:position]:
        raise ChatTemplateError(
            "continue_final_message is set, but the chat template leaves out or changes the "
            "final message's text",
            "continue_final_message",
        )
    head = text[:position]
    # A template that strips messages has stripped the mark's blank; had there been no mark,
    # it would have stripped the text's own.
    return head if text.startswith(_END_MARK, position) else head.rstrip()
