"""A `minisgl serve` in processes of its own, and a model tiny enough to be served in tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.parts import TokenizerParts
from tests.helpers import TINY, save, tiny_hf_model

ROOT = Path(__file__).resolve().parents[2]
START_S = 90
STOP_S = 60
READY = "minisgl is ready at "
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PROSE = (
    "the quick brown fox and the lazy dog went to the house in the rain; then it was the end. "
    "user assistant system hello, how are you today? Über naïve façades — 中文 😀\n\n  "
)
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{{ raise_exception('Tools have no say here') }}{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


class Server:
    """A running server; a context manager, at whose end it is stopped."""

    def __init__(self, model: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "MINISGL_API_KEY"}
        with contextlib.ExitStack() as files:
            # Files and not pipes: nobody needs to read them for the server to go on.
            self._out: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            self._err: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", "serve", "--model", model, "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                cwd=ROOT,
                env={**inherited, **(env or {})},
                start_new_session=True,  # Ctrl-C at the tests is no business of the server's
            )
            self._files = files.pop_all()
        self.url = ""
        """Its address, once it is ready."""

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return _written(self._out)

    @property
    def stderr(self) -> str:
        """What it has logged so far."""
        return _written(self._err)

    def wait_until_ready(self, timeout_s: float = START_S) -> Server:
        """Returns when the line with the address is there; raises with its log if it never is."""

        def said_or_ended() -> bool:
            return "\n" in self.stdout or self.process.poll() is not None

        in_time = wait_for(said_or_ended, timeout_s)
        line = self.stdout.partition("\n")[0]
        if not line.startswith(READY):
            what = f"exited with {self.process.returncode}" if in_time else "is not ready"
            self.kill()
            raise AssertionError(f"The server {what}; it said {line!r} and logged\n{self.stderr}")
        self.url = line.removeprefix(READY).partition(";")[0]
        return self

    def stop(self, timeout_s: float = STOP_S) -> int:
        """End it by SIGTERM; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"The server did not end; it logged\n{self.stderr}") from None

    def kill(self) -> None:
        """End it and its children the hard way."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop()
        finally:
            self.close()

    def close(self) -> None:
        """End it if it still runs, and forget what it wrote."""
        self.kill()
        self._files.close()


def start_server(model: str, *flags: str, env: Mapping[str, str] | None = None) -> Server:
    """A server that is ready, on a free port; `env` is added to this process's environment."""
    server = Server(model, *flags, env=env)
    try:
        return server.wait_until_ready()
    except BaseException:
        server.close()
        raise


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until it holds; False if it did not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _written(file: IO[bytes]) -> str:
    # `pread` leaves the place alone at which the server, whose file it is too, goes on to write.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8", "replace")


def make_tiny_model(folder: Path, context: int = 256) -> str:
    """A random chat model with a context of so many tokens, whose answers are random bytes.

    They hold half characters, special tokens and ends of text: more of all than a real model's.
    """
    backend = _tiny_backend()
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    Tokenizer(TokenizerParts(backend, special, {"default": TEMPLATE})).save(str(folder))
    size = backend.get_vocab_size()
    assert size == TINY["vocab_size"], size
    end = backend.token_to_id(SPECIAL[2])
    model = tiny_hf_model("llama", vocab_size=size, max_position_embeddings=context)
    path = save(model, folder, eos_token_id=end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), "utf-8")
    return path


def _tiny_backend() -> Backend:
    """All bytes, some merges of `PROSE`, and the special tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["vocab_size"] - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([PROSE] * 3, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend
