"""The terminal chat: the conversation, Ctrl-C, refusals, and where lines come from."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from minisgl.errors import ChatTemplateError, InvalidRequestError
from minisgl.params import SamplingParams
from minisgl.shell import Shell
from minisgl.shell.shell import _terminal_reader
from tests.unit.scripted_chat import FakeLLM, talk


def test_answers_are_printed_and_become_part_of_the_conversation() -> None:
    llm = FakeLLM(["Hel", "lo", "!\n"], ["Bye"])
    assert talk(llm, "hi", "  ", "", "bye") == "Hello!\nBye\n"
    assert llm.prompts == [
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

    llm = FakeLLM(["a ", look, "b", look])
    Shell(llm, SamplingParams(), console=Console(file=out), read=read).run()  # type: ignore[arg-type]
    assert seen == ["a ", "a b"]


def test_line_breaks_within_a_message_stay() -> None:
    llm = FakeLLM(["ok"])
    talk(llm, "two\n\nlines  ")
    assert llm.prompts == [[("user", "two\n\nlines  ")]]


def test_a_leading_space_sends_what_looks_like_a_command() -> None:
    llm = FakeLLM(["a directory"])
    assert talk(llm, " /usr") == "a directory\n"


def test_model_text_is_neither_markup_nor_control_sequences() -> None:
    sent = "[red]x[/red] :smile:\ttab \x1b[31mred\x1b]0;title\x07 \x9b2J\x00\x7f\r\nend  "
    llm = FakeLLM([sent], ["ok"])
    printed = talk(llm, "hi", "and?")
    assert printed == "[red]x[/red] :smile:\ttab [31mred]0;title 2J\nend  \nok\n"
    assert llm.prompts[1][1] == ("assistant", sent)  # the model sees what it said


def test_long_lines_are_not_wrapped() -> None:
    text = "word " * 50
    assert talk(FakeLLM([text]), "hi") == text + "\n"


def test_an_interrupted_answer_stays_and_its_stream_is_closed() -> None:
    llm = FakeLLM(["Once ", "upon", KeyboardInterrupt()], ["ok"])
    assert talk(llm, "story", "more") == "Once upon\n[stopped]\nok\n"
    assert llm.prompts[1] == [("user", "story"), ("assistant", "Once upon"), ("user", "more")]


def test_an_interrupt_before_the_first_token_drops_the_message() -> None:
    llm = FakeLLM([KeyboardInterrupt()], ["ok"])
    assert "[stopped before the answer began" in talk(llm, "story", "hi")
    assert llm.prompts[1] == [("user", "hi")]


def press(times: int) -> Callable[[], None]:
    def now() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    return now


def test_a_real_ctrl_c_ends_the_answer_after_the_step_at_work() -> None:
    llm = FakeLLM(["a", press(1), "b", "never"], ["ok"])
    assert talk(llm, "one", "two") == "ab\n[stopped]\nok\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_step_itself() -> None:
    llm = FakeLLM(["a", press(2), "never"], ["ok"])
    assert talk(llm, "one", "two") == "a\n[stopped]\nok\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_with_the_last_token_stops_nothing() -> None:
    llm = FakeLLM(["a", press(1)])
    assert talk(llm, "one") == "a\n"


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_tells_the_way_out() -> None:
    hint = "Type /exit or press Ctrl-D to leave.\n"
    assert talk(FakeLLM(), KeyboardInterrupt) == ""
    assert talk(FakeLLM(), *[KeyboardInterrupt] * 3) == hint
    assert talk(FakeLLM(["x"]), KeyboardInterrupt, "hi", KeyboardInterrupt) == "x\n"


def test_a_refused_message_is_one_line_and_the_next_attempt_works() -> None:
    refusal = InvalidRequestError("the prompt has 99 tokens,\nwhich is too long", param="prompt")
    llm = FakeLLM(["a"], refusal, ["b"])
    said = talk(llm, "one", "[b]long" * 9, "two")
    assert said == (
        "a\nerror: the prompt has 99 tokens, which is too long; /reset begins anew\nb\n"
    )
    assert llm.prompts[1] == [("user", "one"), ("assistant", "a"), ("user", "two")]


def test_an_error_in_the_middle_of_an_answer_drops_both() -> None:
    llm = FakeLLM(["part", InvalidRequestError("no")], ["b"])
    assert talk(llm, "one", "two") == "part\nerror: no\nb\n"
    assert llm.prompts[1] == [("user", "two")]


def test_a_fault_of_the_engine_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="lost pages"):
        talk(FakeLLM([RuntimeError("lost pages")]), "hi")


@pytest.mark.parametrize(
    ("params", "finish", "note"),
    [
        (SamplingParams(max_tokens=2), "length", "[cut at max_tokens = 2]\n"),
        (SamplingParams(max_tokens=50), "length", "[the context of 64 tokens is full: /reset"),
    ],
)
def test_a_cut_answer_says_what_cut_it(params: SamplingParams, finish: str, note: str) -> None:
    assert note in talk(FakeLLM(["x"], finish=finish), "hi", params=params)


def test_an_empty_answer_is_said_to_be_one() -> None:
    assert talk(FakeLLM([]), "hi") == "[an empty answer]\n"


@pytest.mark.parametrize(
    "error",
    [ChatTemplateError("no chat template"), InvalidRequestError("no tokenizer, so it can't chat")],
)
def test_a_model_that_cannot_chat_is_refused_before_the_first_prompt(error: Exception) -> None:
    llm = FakeLLM()
    llm.encode_error = error
    with pytest.raises(type(error), match=str(error)):
        talk(llm, "never read")


def test_parameters_outside_the_vocabulary_are_refused_before_the_first_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="100 is outside the vocabulary of 100"):
        talk(FakeLLM(), "never read", params=SamplingParams(stop_token_ids=[100]))


def test_piped_lines_are_read_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\r\n\nlast"))
    llm = FakeLLM(["a"], ["b"])
    Shell(llm, SamplingParams()).run()  # type: ignore[arg-type]
    assert capsys.readouterr().out == "a\nb\n"
    assert llm.prompts[1][-1] == ("user", "last")


def test_ctrl_c_ends_a_chat_whose_input_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, readline=interrupted))
    with pytest.raises(KeyboardInterrupt):
        Shell(FakeLLM(), SamplingParams(), console=Console(file=io.StringIO())).run()  # type: ignore[arg-type]


def test_piped_bytes_that_are_no_text_are_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(InvalidRequestError, match="stdin is not UTF-8 text"):
        Shell(FakeLLM(), SamplingParams(), console=Console(file=io.StringIO())).run()  # type: ignore[arg-type]


def test_the_terminals_prompt_takes_pastes_completes_commands_and_knows_ctrl_c() -> None:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = _terminal_reader()
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
