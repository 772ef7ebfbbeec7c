"""The terminal chat over a scripted model and a scripted user."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from minisgl.errors import ChatTemplateError, InvalidRequestError
from minisgl.params import SamplingParams
from minisgl.shell import Shell, _completer, _terminal_reader

VOCABULARY = 100


class FakeLLM:
    """Answers with scripted pieces, one token each; an exception among them is raised there.

    A piece may also be a callable, called between two chunks. `prompts` records the messages of
    each stream, `open` the streams that were neither finished nor closed.
    """

    max_model_len = 64
    model_info = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY))

    def __init__(self, *answers: Sequence[Any], finish: str = "stop") -> None:
        self.answers = list(answers)
        self.finish = finish
        self.encode_error: Exception | None = None
        self.prompts: list[list[tuple[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.open = 0

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        if self.encode_error is not None:
            raise self.encode_error
        self.encoded = [(message["role"], message["content"]) for message in messages]
        return list(range(10 * len(messages)))

    def default_params(self) -> SamplingParams:
        return SamplingParams().resolve_defaults({"temperature": 0.6})

    def stream(
        self, prompt: list[int], params: SamplingParams, *, fill_context: bool = False
    ) -> Iterator[Any]:
        assert fill_context
        assert prompt == list(range(10 * len(self.encoded)))
        pieces = self.answers.pop(0)
        if isinstance(pieces, Exception):  # as LLM.stream refuses: at the call
            raise pieces
        self.prompts.append(self.encoded)
        self.params.append(params)
        return self._chunks(pieces)

    def _chunks(self, pieces: Sequence[Any]) -> Iterator[Any]:
        self.open += 1
        try:
            for piece in pieces:
                if isinstance(piece, BaseException):
                    raise piece
                if callable(piece):
                    piece()
                    continue
                yield SimpleNamespace(text=piece, token_ids=[7], finish_reason=None)
            yield SimpleNamespace(text="", token_ids=[2], finish_reason=self.finish)
        finally:
            self.open -= 1


def talk(
    llm: FakeLLM,
    *lines: str | type[BaseException],
    params: SamplingParams | None = None,
    system: str | None = None,
) -> str:
    """What the shell prints when the user types these lines, then Ctrl-D."""
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    out = io.StringIO()
    console = Console(file=out, width=60)
    Shell(llm, params or SamplingParams(), system=system, console=console, read=read).run()  # type: ignore[arg-type]
    assert next(script, None) is None, "the shell left before the last line"
    assert llm.open == 0, "a stream was not closed"
    return out.getvalue()


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


def test_reset_forgets_messages_and_keeps_the_system_message() -> None:
    llm = FakeLLM(["one"], ["two"])
    talk(llm, "hi", "/reset", "again", system="Be brief.")
    assert llm.prompts[1] == [("system", "Be brief."), ("user", "again")]


def test_system_shows_sets_and_removes() -> None:
    llm = FakeLLM(["a"], ["b"], ["c"])
    said = talk(
        llm, "/system", "x", "/system Talk [b]like\x07 this", "/system", "y", "/system -", "z"
    )
    assert llm.prompts == [
        [("user", "x")],
        [("system", "Talk [b]like\x07 this"), ("user", "y")],
        [("user", "z")],
    ]
    assert said.startswith("(no system message)\n")
    assert "\nTalk [b]like this\n" in said


def test_a_system_message_that_the_template_refuses_changes_nothing() -> None:
    llm = FakeLLM(["a"], ["b"])
    encode = llm.encode_chat

    def refuse(messages: Sequence[dict[str, Any]]) -> list[int]:
        if messages[0]["content"] == "bad":
            raise ChatTemplateError("System role not supported", "messages")
        return encode(messages)

    llm.encode_chat = refuse  # type: ignore[method-assign]
    said = talk(llm, "hi", "/system bad", "go on", system="good")
    assert "error: System role not supported\n" in said
    assert [role for role, _ in llm.prompts[1]] == ["system", "user", "assistant", "user"]
    assert llm.prompts[1][0] == ("system", "good")


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
    llm = FakeLLM(["x"])
    before = SamplingParams(temperature=0.25, stop=["s"], logit_bias={1: 1.0})
    assert talk(llm, f"/params {line}", "hi", params=before) == "x\n"
    got = getattr(llm.params[0], name)
    assert got == value
    assert type(got) is type(value)
    assert before == SamplingParams(temperature=0.25, stop=["s"], logit_bias={1: 1.0})


def test_params_changes_several_at_once_and_shows_them() -> None:
    llm = FakeLLM(["x"])
    said = talk(llm, "/params top_k=3 stop=a b  seed=1", "hi", "/params")
    assert llm.params[0] == SamplingParams(top_k=3, stop=["a b"], seed=1)
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
    llm = FakeLLM(["x"])
    said = talk(llm, f"/params {line}", "hi", params=SamplingParams(top_k=9))
    error, answer, end = said.split("\n")
    assert error.startswith("error: ")
    assert named in error
    assert (answer, end) == ("x", "")
    assert llm.params == [SamplingParams(top_k=9)]


def test_stats_count_the_last_answer_and_all() -> None:
    llm = FakeLLM(["a", "b"], ["c"])
    said = talk(llm, "/stats", "one", "two", "/stats", "/reset", "/stats")
    stats = [line for line in said.splitlines() if "tokens" in line]
    zero, _, _, context, last, total, after = stats[:7]
    assert zero == after == "conversation  0 of 64 tokens"
    assert context == "conversation  32 of 64 tokens"
    assert last.startswith("last answer   30 prompt + 2 output tokens, prefill ")
    assert total.startswith("total         40 prompt + 5 output tokens, prefill ")
    assert total.endswith(" tok/s")


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


def test_unknown_commands_list_the_known_ones() -> None:
    llm = FakeLLM(["x"])
    said = talk(llm, "/rest", "/Exit", "/", "/reset now", "/exit now", "hi")
    lines = said.splitlines()
    assert len(lines) == 6
    for line, name in zip(lines, ("/rest", "/Exit", "/"), strict=False):
        assert line.startswith(f"error: unknown command {name};")
        assert "/reset /system /params /stats /help /exit" in line
    assert lines[3] == "error: /reset takes no argument, it was given 'now'"
    assert lines[4] == "error: /exit takes no argument, it was given 'now'"
    assert llm.prompts == [[("user", "hi")]]


def test_help_names_every_command() -> None:
    said = talk(FakeLLM(), "/help")
    for name in ("/reset", "/system", "/params", "/stats", "/help", "/exit", "/quit", "Ctrl-C"):
        assert name in said


@pytest.mark.parametrize("way_out", ["/exit", "/quit", "/exit  ", EOFError])
def test_ways_to_leave(way_out: str | type[BaseException]) -> None:
    assert talk(FakeLLM(), way_out) == ""


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


@pytest.mark.parametrize(
    ("typed", "offered"), [("/re", ["/reset"]), ("/s", ["/system", "/stats"]), ("see /s", [])]
)
def test_only_a_leading_slash_completes(typed: str, offered: list[str]) -> None:
    found = _completer().get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == offered
