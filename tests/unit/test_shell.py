"""The terminal chat: the conversation, Ctrl-C, refusals, and where lines come from."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from minisgl.errors import (
    BusyError,
    ChatTemplateError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)
from minisgl.params import SamplingParams
from minisgl.shell import Shell
from minisgl.shell.shell import COMMANDS
from minisgl.shell.terminal import prompt_reader
from tests.unit.scripted_chat import FakeBackend, heeding_ctrl_c, press_ctrl_c, talk


def test_answers_are_printed_and_become_part_of_the_conversation() -> None:
    backend = FakeBackend(["Hel", "lo", "!\n"], ["Bye"])
    assert talk(backend, "hi", "  ", "", "bye") == "Hello!\nBye\n"
    assert backend.prompts == [
        [("user", "hi")],
        [("user", "hi"), ("assistant", "Hello!\n"), ("user", "bye")],
    ]


def test_each_piece_is_printed_before_the_next_is_computed() -> None:
    out = io.StringIO()
    seen: list[str] = []

    def look() -> None:
        seen.append(out.getvalue())

    lines = iter(["hi"])

    def read() -> str:
        for line in lines:
            return line
        raise EOFError

    backend = FakeBackend(["a ", look, "b", look])
    Shell(backend, SamplingParams(), console=Console(file=out), read=read).run()
    assert seen == ["a ", "a b"]


def test_line_breaks_within_a_message_stay() -> None:
    backend = FakeBackend(["ok"])
    talk(backend, "two\n\nlines  ")
    assert backend.prompts == [[("user", "two\n\nlines  ")]]


def test_a_leading_space_sends_what_looks_like_a_command() -> None:
    backend = FakeBackend(["a directory"])
    assert talk(backend, " /usr") == "a directory\n"


def test_model_text_is_neither_markup_nor_control_sequences() -> None:
    sent = "[red]x[/red] :smile:\ttab \x1b[31mred\x1b]0;title\x07 \x9b2J\x00\x7f\r\nend  "
    backend = FakeBackend([sent], ["ok"])
    printed = talk(backend, "hi", "and?")
    assert printed == "[red]x[/red] :smile:\ttab [31mred]0;title 2J\nend  \nok\n"
    assert backend.prompts[1][1] == ("assistant", sent)  # the model sees what it said


def test_long_lines_are_not_wrapped() -> None:
    text = "word " * 50
    assert talk(FakeBackend([text]), "hi") == text + "\n"


def test_an_interrupted_answer_stays_and_its_stream_is_closed() -> None:
    backend = FakeBackend(["Once ", "upon", KeyboardInterrupt()], ["ok"])
    assert talk(backend, "story", "more") == "Once upon\n[stopped]\nok\n"
    assert backend.prompts[1] == [("user", "story"), ("assistant", "Once upon"), ("user", "more")]


def test_an_interrupt_before_the_first_token_drops_the_message() -> None:
    backend = FakeBackend([KeyboardInterrupt()], ["ok"])
    assert "[stopped before the answer began" in talk(backend, "story", "hi")
    assert backend.prompts[1] == [("user", "hi")]


def test_a_real_ctrl_c_ends_the_answer_at_once() -> None:
    backend = FakeBackend(["a", press_ctrl_c, "never"], [press_ctrl_c, "never"], ["ok"])
    with heeding_ctrl_c():
        said = talk(backend, "one", "two", "three")
    assert said == (
        "a\n[stopped]\n[stopped before the answer began; the message is forgotten]\nok\n"
    )
    assert [text for _, text in backend.prompts[2]] == ["one", "a", "three"]


def test_ctrl_c_within_a_command_does_not_end_the_chat() -> None:
    backend = FakeBackend(["ok"])

    def interrupted(messages: list[dict[str, Any]], params: SamplingParams) -> None:
        if messages[0]["content"] == "slow":
            press_ctrl_c()

    backend.check = interrupted  # type: ignore[method-assign]
    with heeding_ctrl_c():
        assert talk(backend, "/system slow", "hi") == "ok\n"
    assert backend.prompts == [[("user", "hi")]]


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_tells_the_way_out() -> None:
    hint = "Type /exit or press Ctrl-D to leave.\n"
    assert talk(FakeBackend(), KeyboardInterrupt) == ""
    assert talk(FakeBackend(), *[KeyboardInterrupt] * 3) == hint
    assert talk(FakeBackend(["x"]), KeyboardInterrupt, "hi", KeyboardInterrupt) == "x\n"


def test_a_refused_message_is_one_line_and_the_next_attempt_works() -> None:
    refusal = InvalidRequestError("the prompt has 99 tokens,\nwhich is too long", param="prompt")
    backend = FakeBackend(["a"], refusal, ["b"])
    said = talk(backend, "one", "[b]long" * 9, "two")
    assert said == (
        "a\nerror: the prompt has 99 tokens, which is too long; /reset begins anew\nb\n"
    )
    assert backend.prompts[1] == [("user", "one"), ("assistant", "a"), ("user", "two")]


def test_an_error_in_the_middle_of_an_answer_drops_both() -> None:
    backend = FakeBackend(["part", InvalidRequestError("no")], ["b"])
    assert talk(backend, "one", "two") == "part\nerror: no\nb\n"
    assert backend.prompts[1] == [("user", "two")]


@pytest.mark.parametrize(
    "error", [BusyError("the queue is full"), RequestFailedError("lost"), ConfigError("no server")]
)
def test_what_may_work_the_next_time_does_not_end_the_chat(error: Exception) -> None:
    backend = FakeBackend(["part", error], ["b"])
    assert talk(backend, "one", "two") == f"part\nerror: {error}\nb\n"
    assert backend.prompts[1] == [("user", "two")]


@pytest.mark.parametrize("error", [RuntimeError("lost pages"), EngineDeadError("killed")])
def test_a_fault_of_the_engine_ends_it(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        talk(FakeBackend(["a", error]), "hi")


@pytest.mark.parametrize(
    ("pieces", "finish", "note"),
    [
        (["x"], "length", "[cut at max_tokens = 2]"),
        ([], "length", "[cut by a default limit (/params max_tokens=N sets it) or a full context"),
        (["x"], "abort", "[stopped]"),
        (["x"], "content_filter", "[ended by content_filter]"),
    ],
)
def test_an_answer_that_did_not_just_stop_says_why(
    pieces: list[str], finish: str, note: str
) -> None:
    backend = FakeBackend(pieces, finish=finish)
    assert note in talk(backend, "hi", params=SamplingParams(max_tokens=2))


def test_a_full_context_is_said_to_be_full() -> None:
    backend = FakeBackend(["x"] * 53, finish="length")
    said = talk(backend, "hi", params=SamplingParams(max_tokens=99))
    assert "[the context of 64 tokens is full: /reset begins anew]\n" in said


def test_thoughts_are_printed_but_not_remembered() -> None:
    thoughts = [{"thought": "hm"}, {"thought": "m\x07"}]
    backend = FakeBackend([*thoughts, "Yes", "."], [*thoughts, KeyboardInterrupt()], ["ok"])
    said = talk(backend, "really?", "sure?", "hi")
    assert said.startswith("hmm\nYes.\nhmm\n[stopped before the answer began")
    assert [text for _, text in backend.prompts[2]] == ["really?", "Yes.", "hi"]


def test_an_empty_answer_is_said_to_be_one() -> None:
    assert talk(FakeBackend([]), "hi") == "[an empty answer]\n"


@pytest.mark.parametrize(
    "error",
    [ChatTemplateError("no chat template"), InvalidRequestError("no tokenizer, so it can't chat")],
)
def test_a_model_that_cannot_chat_is_refused_before_the_first_prompt(error: Exception) -> None:
    def refuse(messages: list[dict[str, Any]], params: SamplingParams) -> None:
        raise error

    backend = FakeBackend()
    backend.check = refuse  # type: ignore[method-assign]
    with pytest.raises(type(error), match=str(error)):
        talk(backend, "never read")


def test_parameters_outside_the_vocabulary_are_refused_before_the_first_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="100 is outside the vocabulary of 100"):
        talk(FakeBackend(), "never read", params=SamplingParams(stop_token_ids=[100]))


def test_piped_lines_are_read_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\r\n\nlast"))
    backend = FakeBackend(["a"], ["b"])
    Shell(backend, SamplingParams()).run()
    assert capsys.readouterr().out == "a\nb\n"
    assert backend.prompts[1][-1] == ("user", "last")


def test_ctrl_c_ends_a_chat_whose_input_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, readline=interrupted))
    with pytest.raises(KeyboardInterrupt):
        Shell(FakeBackend(), SamplingParams(), console=Console(file=io.StringIO())).run()


def test_piped_bytes_that_are_no_text_are_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(InvalidRequestError, match="stdin is not UTF-8 text"):
        Shell(FakeBackend(), SamplingParams(), console=Console(file=io.StringIO())).run()


def test_the_terminals_prompt_takes_pastes_completes_commands_and_knows_ctrl_c() -> None:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = prompt_reader(list(COMMANDS))
        keys.send_text("hi\r")
        assert read() == "hi"
        keys.send_text("\x1b[200~two\nlines\x1b[201~\r")  # a bracketed paste
        assert read() == "two\nlines"
        keys.send_text("\x1b[A\r")  # up: the history
        assert read() == "two\nlines"
        keys.send_text("half a line\x03")
        with pytest.raises(KeyboardInterrupt):
            read()
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            read()
