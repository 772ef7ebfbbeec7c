"""Chat templates: the text that transformers renders, in a sandbox, with clear errors."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from minisgl.errors import ChatTemplateError, InvalidRequestError
from minisgl.tokenizer import ChatTemplate, check_template_kwargs

USER = {"role": "user", "content": "Hi <b>&"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Hello! "}, {"role": "user", "content": "  next\n"}],
    [USER, {"role": "assistant", "content": " It is "}],
    [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": 1}}}],
        },
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "So", "reasoning": "why"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<a> & 'é'"}}]

PLAIN = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}\n"
    "  T:{{ m.content }}\n"
    "    {%- else %}\n"
    "<{{ m['role'] }}>{{ m.content }}{{ eos_token }}\n"
    "    {% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = PLAIN.replace("m.content", "m.content | trim")
RICH = (
    "{%- set ns = namespace(count=0, last='') -%}{% if tools %}{{ tools | tojson }}|"
    "{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{% if loop.index > 5 %}"
    "{% break %}{% endif %}{% set ns.count = ns.count + 1 %}{{ m.role }}:"
    "{% generation %}{% set local = 1 %}{{ m.content }}{% endgeneration %}{{ local }}"
    "{{ m.reasoning_content }}{{ m.thinking }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{{ c.function.arguments.items() | list }}{% endfor %}"
    "{% endfor %}{{ ns.count }}{{ dict(a=1).a }}{{ documents is none }}{{ flag }}{{ unk_token }}"
)


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages, **options
    )


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("source", [PLAIN, TRIMMING, RICH], ids=["plain", "trimming", "rich"])
@pytest.mark.parametrize("mode", ["prompt", "no prompt", "continue"])
def test_equals_transformers(source: str, messages: list[dict[str, Any]], mode: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    options: dict[str, Any] = {
        "add_generation_prompt": mode == "prompt",
        "continue_final_message": mode == "continue",
        "tools": TOOLS if len(messages) > 2 else None,
    }
    given = [{k: v for k, v in m.items() if v is not None} for m in messages]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    want, _ = render_jinja_template([given], chat_template=source, flag=True, **options, **tokens)
    assert render(source, messages, template_kwargs={"flag": True}, **options) == want[0]


def test_rendering_leaves_the_callers_messages_alone() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "x": None}
    before = repr(message)
    render(PLAIN, [message], continue_final_message=True)
    assert repr(message) == before


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a b"


def test_generation_prompt_is_the_default_unless_continuing() -> None:
    assert render(PLAIN).endswith("<assistant>")
    assert render(PLAIN, CHATS[3], continue_final_message=True).endswith("<assistant> It is ")
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(PLAIN, add_generation_prompt=True, continue_final_message=True)


def test_strftime_now() -> None:
    year = str(datetime.datetime.now().year)
    assert render("{{ strftime_now('%Y') }}") in (year, str(int(year) + 1))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        ([USER, "hi"], r"messages\[1\] must be a dict"),
        ([{"content": "hi"}], r"messages\[0\] needs a role"),
        ([USER, {"role": 3, "content": "hi"}], r"messages\[1\] needs a role"),
        ([{"role": "user"}], r"messages\[0\].*no content"),
        ([{"role": "user", "content": None}], r"messages\[0\].*no content"),
        ([USER, {"role": "user", "content": 5}], r"messages\[1\]: content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content part 0"),
        ([{"role": "user", "content": "a", "x": object()}], r"messages\[0\] holds a object"),
    ],
)
def test_malformed_messages(messages: Any, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(PLAIN, messages)


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="nested"):
        render(PLAIN, [{"role": "user", "content": "a", "x": deep}])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages[0].role + 1 }}", "TypeError"),
        ("{{ messages[9].role }}", "messages|undefined"),
        ("{% for %}", "line 1"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_templates_failure_is_the_requests_error(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words) as caught:
        render(source)
    assert isinstance(caught.value, InvalidRequestError)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ ('{0.__class__.__mro__}').format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ dict.__base__ }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_sandbox(source: str) -> None:
    try:
        text = render(source)
    except ChatTemplateError:
        return
    assert text == ""  # Jinja renders some forbidden attributes as undefined


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "raise_exception", "bos_token"]
)
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=name):
        render(PLAIN, template_kwargs={name: "x"})
    with pytest.raises(ChatTemplateError, match=name):
        check_template_kwargs({name: "x", "enable_thinking": True})


def test_continue_needs_the_final_message_in_the_prompt() -> None:
    with pytest.raises(ChatTemplateError, match="no content to continue"):
        render(PLAIN, [USER, {"role": "assistant", "tool_calls": []}], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="leaves out or changes"):
        render("{{ messages[0].content }}", CHATS[3], continue_final_message=True)


def test_tools_must_be_dicts() -> None:
    with pytest.raises(ChatTemplateError, match="tools"):
        render(PLAIN, tools=["f"])
