"""The commands of the terminal chat: /reset, /system, /params, /stats, /help and /exit."""

from __future__ import annotations

from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from minisgl.errors import ChatTemplateError
from minisgl.params import SamplingParams
from minisgl.shell.shell import COMMANDS
from minisgl.shell.terminal import completer
from tests.unit.scripted_chat import FakeBackend, talk


def test_reset_forgets_messages_and_keeps_the_system_message() -> None:
    backend = FakeBackend(["one"], ["two"])
    talk(backend, "hi", "/reset", "again", system="Be brief.")
    assert backend.prompts[1] == [("system", "Be brief."), ("user", "again")]


def test_system_shows_sets_and_removes() -> None:
    backend = FakeBackend(["a"], ["b"], ["c"])
    said = talk(
        backend, "/system", "x", "/system Talk [b]like\x07 this", "/system", "y", "/system -", "z"
    )
    assert backend.prompts == [
        [("user", "x")],
        [("system", "Talk [b]like\x07 this"), ("user", "y")],
        [("user", "z")],
    ]
    assert said.startswith("(no system message)\n")
    assert "\nTalk [b]like this\n" in said


def test_a_system_message_that_the_template_refuses_changes_nothing() -> None:
    backend = FakeBackend(["a"], ["b"])

    def refuse(messages: list[dict[str, Any]], params: SamplingParams) -> None:
        if messages[0]["content"] == "bad":
            raise ChatTemplateError("System role not supported", "messages")

    backend.check = refuse  # type: ignore[method-assign]
    said = talk(backend, "hi", "/system bad", "go on", system="good")
    assert "error: System role not supported\n" in said
    assert [role for role, _ in backend.prompts[1]] == ["system", "user", "assistant", "user"]
    assert backend.prompts[1][0] == ("system", "good")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature=0.5", "temperature", 0.5),
        ("temperature=1", "temperature", 1),
        ("top_k = 2", "top_k", 2),
        ("temperature=none", "temperature", None),
        ("max_tokens=12", "max_tokens", 12),
        ("seed=-5", "seed", -5),
        ("ignore_eos=true", "ignore_eos", True),
        ("ignore_eos=False", "ignore_eos", False),
        ("stop=END", "stop", ("END",)),
        ("stop=two words", "stop", ("two words",)),
        ("stop=5", "stop", ("5",)),
        ('stop="\\n\\n"', "stop", ("\n\n",)),
        ('stop=["a", "b"]', "stop", ("a", "b")),
        ("stop=none", "stop", ()),
        ("stop_token_ids=5", "stop_token_ids", (5,)),
        ("stop_token_ids=[5, 6]", "stop_token_ids", (5, 6)),
        ('logit_bias={"5": -100}', "logit_bias", {5: -100}),
        ("logit_bias=none", "logit_bias", {}),
    ],
)
def test_params_takes_the_right_types(line: str, name: str, value: object) -> None:
    backend = FakeBackend(["x"])
    before = SamplingParams(temperature=0.25, stop=["s"], logit_bias={1: 1.0})
    assert talk(backend, f"/params {line}", "hi", params=before) == "x\n"
    got = getattr(backend.params[0], name)
    assert got == value
    assert type(got) is type(value)
    assert before == SamplingParams(temperature=0.25, stop=["s"], logit_bias={1: 1.0})


def test_params_changes_several_at_once_and_shows_them() -> None:
    backend = FakeBackend(["x"])
    said = talk(backend, "/params top_k=3 stop=a b  seed=1", "hi", "/params")
    assert backend.params[0] == SamplingParams(top_k=3, stop=["a b"], seed=1)
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines()[1:]}
    assert shown["top_k"] == "3"
    assert shown["stop"] == "['a b']"
    assert shown["temperature"] == "0.6 (default)"
    assert shown["max_tokens"] == "what fits (default)"
    assert set(shown) == set(SamplingParams.names()) - {"n", "logprobs", "prompt_logprobs"}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("top_k=2 temperature=3", "3"),
        ("top_k=2 temperature=hot", "'hot'"),
        ("top_k=2 temperature=NaN", "nan"),
        ("top_k=2 temperature=", "''"),
        ("top_k=2 top_p=0", "0"),
        ("top_k=2.5", "2.5"),
        ("top_k=true", "True"),
        ("top_k=2 max_tokens=0", "0"),
        ("top_k=2 stop=", "''"),
        ("top_k=2 ignore_eos=1", "1"),
        ("top_k=2 presence_penalty=none min_p=2", "2"),
        ("top_k=2 stop_token_ids=100", "100"),
        ("top_k=2 stop_token_ids=[1,", "'[1,'"),
        ('top_k=2 logit_bias={"x": 1}', "'x'"),
        ("top_k=2 n=2", "'n'"),
        ("top_k=2 heat=1", "'heat'"),
        ("temperature", "'temperature'"),
        ("top_k 2", "'top_k 2'"),
    ],
)
def test_a_bad_parameter_is_one_line_and_changes_nothing(line: str, named: str) -> None:
    backend = FakeBackend(["x"])
    said = talk(backend, f"/params {line}", "hi", params=SamplingParams(top_k=9))
    error, answer, end = said.split("\n")
    assert error.startswith("error: ")
    assert named in error
    assert (answer, end) == ("x", "")
    assert backend.params == [SamplingParams(top_k=9)]


def test_stats_count_the_last_answer_and_all() -> None:
    backend = FakeBackend(["a", "b"], ["c"])
    said = talk(backend, "/stats", "one", "two", "/stats", "/reset", "/stats")
    stats = [line for line in said.splitlines() if "tokens" in line]
    zero, _, _, context, last, total, after = stats[:7]
    assert zero == after == "conversation  0 of 64 tokens"
    assert context == "conversation  32 of 64 tokens"
    assert last.startswith("last answer   30 prompt + 2 output tokens, prefill ")
    assert total.startswith("total         40 prompt + 5 output tokens, prefill ")
    assert total.endswith(" tok/s")


def test_stats_and_params_tell_what_a_server_leaves_unknown() -> None:
    backend = FakeBackend(["a", "b"], ["c"])
    backend.context_len, backend.knows_defaults = None, False
    talked = talk(backend, "one", "/stats", "/params temperature=0.5", "/params")
    assert "conversation  13 tokens\n" in talked
    assert "temperature                0.5\n" in talked
    assert "top_p                      of the server (default)\n" in talked
    assert "seed                       random (default)\n" in talked
    backend.knows_prompts = False

    def know() -> None:
        backend.knows_prompts = True

    backend.answers = [["a"], [know], ["b"]]
    said = talk(backend, "one", "/stats", "two", "three", "/stats")
    assert "conversation  unknown tokens\n" in said
    assert "last answer   unknown prompt + 2 output tokens, " in said
    assert "total         50 + unknown prompt + 5 output tokens, " in said


def test_unknown_commands_list_the_known_ones() -> None:
    backend = FakeBackend(["x"])
    said = talk(backend, "/rest", "/Exit", "/", "/reset now", "/exit now", "hi")
    lines = said.splitlines()
    assert len(lines) == 6
    for line, name in zip(lines, ("/rest", "/Exit", "/"), strict=False):
        assert line.startswith(f"error: unknown command {name};")
        assert "/reset /system /params /stats /help /exit" in line
    assert lines[3] == "error: /reset takes no argument, it was given 'now'"
    assert lines[4] == "error: /exit takes no argument, it was given 'now'"
    assert backend.prompts == [[("user", "hi")]]


def test_help_names_every_command() -> None:
    said = talk(FakeBackend(), "/help")
    for name in ("/reset", "/system", "/params", "/stats", "/help", "/exit", "/quit", "Ctrl-C"):
        assert name in said


@pytest.mark.parametrize("way_out", ["/exit", "/quit", "/exit  ", EOFError])
def test_ways_to_leave(way_out: str | type[BaseException]) -> None:
    assert talk(FakeBackend(), way_out) == ""


@pytest.mark.parametrize(
    ("typed", "offered"), [("/re", ["/reset"]), ("/s", ["/system", "/stats"]), ("see /s", [])]
)
def test_only_a_leading_slash_completes(typed: str, offered: list[str]) -> None:
    found = completer(list(COMMANDS)).get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == offered
