"""The pool that renders chat templates: same texts and errors as in-process, and nothing hangs."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from minisgl.errors import BusyError, ChatTemplateError, InvalidRequestError, RequestFailedError
from minisgl.tokenizer import ChatTemplate, TemplateRenderer, Tokenizer
from tests.unit.test_chat_template import CHATS, PLAIN, RICH, TOOLS, TRIMMING, USER

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = ChatTemplate("Hello {{ messages[0].content }}")
LOOP = ChatTemplate(
    "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
)
# One C call that goes on for hours, with no Python code in between that could be interrupted.
LOOP_IN_C = ChatTemplate("{{ messages[0].n ** (messages[0].n ** 24) > 0 }}")


@contextlib.contextmanager
def pool(**options: Any) -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(**options)
    try:
        yield renderer
    finally:
        renderer.close()


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with pool(cpu_limit_s=0.3, memory_limit_bytes=128 << 20) as renderer:
        yield renderer


def workers() -> set[int]:
    """Process ids of all render workers of this process."""
    children = psutil.Process().children()
    return {child.pid for child in children if "minisgl.tokenizer.render_worker" in child.cmdline()}


@contextlib.contextmanager
def looping(renderer: TemplateRenderer, pids: set[int]) -> Iterator[tuple[Future[str], int]]:
    """A render that loops, and the pid of the one of `pids` that does it."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(renderer.render, LOOP, [USER])
        while True:  # starting takes far less CPU time than this
            busy = [pid for pid in pids if psutil.Process(pid).cpu_times().user > 1]
            if busy:
                break
            time.sleep(0.01)
        yield future, busy[0]


def outcome(render: Any, *args: Any, **options: Any) -> Any:
    """The text, or everything a client sees of the error."""
    try:
        return render(*args, **options)
    except ChatTemplateError as error:
        return type(error), str(error), error.param


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("source", [PLAIN, TRIMMING, RICH], ids=["plain", "trimming", "rich"])
@pytest.mark.parametrize("mode", ["default", "no prompt", "continue"])
def test_equals_rendering_in_process(
    renderer: TemplateRenderer, source: str, messages: list[dict[str, Any]], mode: str
) -> None:
    options: dict[str, Any] = {
        "add_generation_prompt": False if mode == "no prompt" else None,
        "continue_final_message": mode == "continue",
        "tools": TOOLS,
        "template_kwargs": {"flag": True},
    }
    template = ChatTemplate(source, TOKENS)
    want = template.render(messages, **options)
    assert renderer.render(template, messages, **options) == want


@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        ("{{ raise_exception('only users, ' + messages[0].content) }}", [USER], {}),
        ("{{ raise_exception('\\ud83d') }}", [USER], {}),
        ("{{ messages[0].role + 1 }}", [USER], {}),
        ("{{ messages[9].role.x }}", [USER], {}),
        ("{{ ''.__class__.__mro__() }}", [USER], {}),
        ("{% for %}", [USER], {}),
        ("{% for i in a %}" * 30 + "{% endfor %}" * 30, [USER], {}),
        (PLAIN, [], {}),
        (PLAIN, [USER, {"role": "user", "content": 5}], {}),
        (PLAIN, [USER], {"tools": ["f"]}),
        (PLAIN, [USER], {"template_kwargs": {"messages": 1}}),
        (PLAIN, [USER], {"template_kwargs": {"x": object()}}),
        (PLAIN, [USER], {"add_generation_prompt": True, "continue_final_message": True}),
        ("{{ messages[0].role }}", [USER], {"continue_final_message": True}),
    ],
)
def test_errors_equal_those_in_process(
    renderer: TemplateRenderer, source: str, messages: Any, options: dict[str, Any]
) -> None:
    template = ChatTemplate(source)
    want = outcome(template.render, messages, **options)
    assert isinstance(want, tuple)
    assert outcome(renderer.render, template, messages, **options) == want


def test_values_of_every_kind_reach_the_template_unchanged(renderer: TemplateRenderer) -> None:
    values = [2**200, -(2**63) - 1, 1, True, None, 0.1, 1e300, -0.0, math.inf, math.nan]
    texts = ["", "é中😀", "\ud83d", "\x00\n\u2028", {"z": 1, "a": {"é": []}}]
    template = ChatTemplate(
        "{% for v in values %}{{ v }} {{ v is integer }}{{ v is float }}{{ v is boolean }}|"
        "{{ v | tojson }}{% endfor %}{{ bos_token }}{{ messages }}"
    )
    options: dict[str, Any] = {"template_kwargs": {"values": [*values, *texts]}}
    want = template.render([USER, {**USER, "x": values}], **options)
    assert "\ud83d" in want
    assert renderer.render(template, [USER, {**USER, "x": values}], **options) == want


def test_the_demo_models_chats_are_the_same(
    renderer: TemplateRenderer, demo_model_path: Path
) -> None:
    tokenizer = Tokenizer.load(str(demo_model_path))
    messages = [USER, {"role": "assistant", "content": "Yes."}, USER]
    want = tokenizer.encode_chat(messages), tokenizer.apply_chat_template([USER])
    tokenizer.render_with(renderer)
    assert (tokenizer.encode_chat(messages), tokenizer.apply_chat_template([USER])) == want


def test_a_tokenizer_renders_by_its_renderer_until_told_otherwise(demo_model_path: Path) -> None:
    tokenizer = Tokenizer.load(str(demo_model_path))
    with pool(processes=1) as closed:
        pass
    tokenizer.render_with(closed)
    with pytest.raises(BusyError, match="shutting down"):
        tokenizer.encode_chat([USER])
    tokenizer.render_with(None)
    assert tokenizer.encode_chat([USER])


def test_a_lone_surrogate_is_the_requests_error(
    renderer: TemplateRenderer, demo_model_path: Path
) -> None:
    tokenizer = Tokenizer.load(str(demo_model_path))
    tokenizer.render_with(renderer)
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "a\ud83d"}])
    assert tokenizer.encode_chat([USER])


def test_an_integer_too_long_to_be_written_is_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(ChatTemplateError, match="can't be handed") as caught:
        renderer.render(HELLO, [USER], template_kwargs={"x": 10**5000})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOP, r"ran for more than 0\.3 s"),
        (LOOP_IN_C, r"ran for more than 0\.3 s"),
        (ChatTemplate("{{ 'a' * 10**12 }}"), "more than 128 MiB of memory"),
        (
            ChatTemplate(
                "{% set n = namespace(l=['a']) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}"
                "{% endfor %}"
            ),
            "more than 128 MiB of memory",
        ),
        (ChatTemplate("{{ 'a' * messages[0].n * 2**23 }}"), "41943040 characters"),
    ],
    ids=["loop", "loop in C", "long string", "growing list", "long text"],
)
def test_a_template_that_wants_too_much_is_stopped_and_the_pool_lives(
    renderer: TemplateRenderer, template: ChatTemplate, words: str
) -> None:
    for _ in range(3):  # more than there are processes
        with pytest.raises(ChatTemplateError, match=words) as caught:
            renderer.render(template, [{**USER, "n": 5}])
        assert caught.value.param == "messages"
        assert renderer.render(HELLO, [USER]) == "Hello Hi <b>&"
    assert len(workers()) == 2


def test_a_looping_render_does_not_hold_up_the_others() -> None:
    before = workers()
    with pool(cpu_limit_s=600) as renderer, looping(renderer, workers() - before) as (loop, _):
        assert [renderer.render(HELLO, [USER]) for _ in range(5)] == ["Hello Hi <b>&"] * 5
        assert not loop.done()
        renderer.close()
        with pytest.raises(BusyError, match="shutting down"):
            loop.result()
    assert workers() == before


def test_a_killed_process_fails_its_render_only() -> None:
    before = workers()
    with pool(processes=1, cpu_limit_s=600) as renderer:
        with looping(renderer, workers() - before) as (loop, pid):
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RequestFailedError, match="died .killed by SIGKILL"):
                loop.result()
        assert renderer.render(HELLO, [USER]) == "Hello Hi <b>&"


def test_a_process_that_died_while_free_is_replaced_unnoticed() -> None:
    before = workers()
    with pool(processes=1) as renderer:
        renderer.render(HELLO, [USER])
        (pid,) = workers() - before
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert renderer.render(HELLO, [USER]) == "Hello Hi <b>&"


def test_a_process_that_makes_no_progress_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers()
    with pool(processes=1) as renderer:
        renderer.render(HELLO, [USER])
        (pid,) = workers() - before
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(renderer, "_wall_limit_s", 0.1)
            with pytest.raises(ChatTemplateError, match=r"did not end within 0\.1 s"):
                renderer.render(HELLO, [{"role": "user", "content": "long" * 10**6}])
        assert renderer.render(HELLO, [USER]) == "Hello Hi <b>&"


def test_a_process_that_can_not_be_started_is_an_error_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    with pool(processes=1, cpu_limit_s=0.3) as renderer:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises(ChatTemplateError, match="ran for more"):
                renderer.render(LOOP, [USER])
            with pytest.raises(RequestFailedError, match="no more processes"):
                renderer.render(HELLO, [USER])
        assert renderer.render(HELLO, [USER]) == "Hello Hi <b>&"


def test_an_interrupted_renders_reply_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Any) -> bytearray:
        raise KeyboardInterrupt

    with pool(processes=1) as renderer:
        with monkeypatch.context() as patch:
            patch.setattr("minisgl.tokenizer.renderer.receive_frame", interrupt)
            with pytest.raises(KeyboardInterrupt):
                renderer.render(HELLO, [{"role": "user", "content": "the first"}])
        assert renderer.render(HELLO, [{"role": "user", "content": "next"}]) == "Hello next"


def test_many_threads_get_their_own_texts(renderer: TemplateRenderer) -> None:
    def render(index: int) -> str:
        template = ChatTemplate(f"{index % 20} " + "{{ messages[0].content }}")
        return renderer.render(template, [{"role": "user", "content": f"{index}" * index}])

    with ThreadPoolExecutor(8) as executor:
        texts = list(executor.map(render, range(200)))
    assert texts == [f"{index % 20} " + f"{index}" * index for index in range(200)]


def test_ctrl_c_and_sigterm_are_for_the_parent() -> None:
    before = workers()
    with pool(processes=1) as renderer:
        renderer.render(HELLO, [USER])
        started = workers() - before
        (pid,) = started
        assert os.getpgid(pid) != os.getpgrp()  # so the terminal's Ctrl-C does not reach it
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert renderer.render(HELLO, [USER]) == "Hello Hi <b>&"
        assert workers() - before == started


def test_close_leaves_no_process_and_may_be_repeated() -> None:
    before = workers()
    renderer = TemplateRenderer(processes=3)
    pids = workers() - before
    assert len(pids) == 3
    threads = [threading.Thread(target=renderer.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    renderer.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(BusyError):
        renderer.render(HELLO, [USER])


def test_a_killed_parent_leaves_no_process() -> None:
    program = (
        "import os, signal\n"
        "from minisgl.tokenizer import ChatTemplate, TemplateRenderer\n"
        "renderer = TemplateRenderer()\n"
        "renderer.render(ChatTemplate(''), [{'role': 'user', 'content': ''}])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, cwd=root) as run:
        # The workers have the same stderr: it ends when the last of them has.
        assert run.communicate()[1] == b""
    assert run.returncode == -signal.SIGKILL


def test_a_worker_starts_without_the_large_libraries() -> None:
    program = (
        "import sys, minisgl.tokenizer.render_worker\n"
        "print([n for n in ('torch', 'transformers', 'numpy', 'asyncio') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.strip() == "[]"
