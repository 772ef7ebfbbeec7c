"""Chapter 8, the radix cache: what requests have in common is computed once.

    python tools/make_checkpoint.py tests/configs/qwen3-0.6b.json /tmp/small \\
        --set hidden_size=256 intermediate_size=512 vocab_size=4096
    python examples/ch08_radix_cache.py /tmp/small

CHECKPOINT is a model's folder or a GGUF file (random weights will do). Adds nothing: the
scheduler of chapter 7 gets another cache.

Prints for each round of requests their batches as request[first token:end], what each read from
the tree instead of computing it, and then the tree: a node a line, as [its tokens | its pages],
under its parent. Rounds show a shared prefix, a conversation that goes on, two requests at once
(one waits a step for pages that the other computes), a salt, and an eviction. At the end the same
requests run without a prefix cache: they compute more tokens and generate the same ones.
"""

from __future__ import annotations

import argparse
from array import array

from minisgl.config import EngineConfig
from minisgl.core import Batch, PendingStep, Req, SamplingParams
from minisgl.engine import Engine
from minisgl.kvcache import KVCache, NaiveCache, RadixCache
from minisgl.kvcache.radix_tree import Node, RadixTree
from minisgl.models import load_model_info
from minisgl.resolve import resolve
from minisgl.scheduler import Limits, Scheduler
from minisgl.utils.hardware import Hardware

PAGE_SIZE, NUM_PAGES = 4, 15
LIMITS = Limits(max_running_requests=2, token_budget=32, max_model_len=32)
NUM_OUTPUT = 4
SALT = "another user"
SHARED = [*range(11, 19)]  # two pages that several prompts begin with


def draw(tree: RadixTree) -> None:
    """Print what is cached, without a salt and with one."""
    for salt in (None, SALT):
        root = tree.root(salt)
        tree.lock(root)  # a root that nobody holds and that has no child goes again
        if root.children:
            print("  tree" + (f" of the salt {salt!r}" if salt else ""))
            draw_below(root, "    ")
        tree.unlock(root)


def draw_below(node: Node, indent: str) -> None:
    """The children of a node, each above its own."""
    for child in node.children.values():
        tokens = " ".join(str(token) for token in array("i", bytes(child.key)))
        pages = " ".join(f"p{page}" for page in child.pages)
        locks = f" read by {child.locks}" if child.locks else ""
        print(f"{indent}[{tokens} | {pages}]{locks}")
        draw_below(child, indent + "    ")


class Session:
    """Rounds of requests through one scheduler, printed unless `quiet`."""

    def __init__(self, engine: Engine, cache: KVCache, *, quiet: bool) -> None:
        self.attach, self.set_pages, self._engine = engine.attach, engine.set_pages, engine
        self._cache, self._quiet = cache, quiet
        self.scheduler = Scheduler(self, cache, LIMITS)
        self.reqs: list[Req] = []
        self._batches: list[str] = []

    def launch(self, batch: Batch) -> PendingStep:
        """Note the batch on its way to the engine."""
        parts = [f"{req.uid}[{req.cached_len}:{req.device_len}]" for req in batch.reqs]
        self._batches.append(" ".join(parts))
        return self._engine.launch(batch)

    def run(self, title: str, *prompts: list[int], salt: str | None = None) -> list[int]:
        """Run the prompts at once, to their end; returns all tokens of the last."""
        params = SamplingParams(temperature=1.0, top_k=50).resolve_defaults({})
        self._say(f"\n{title}")
        self._batches = []
        for prompt in prompts:
            req = Req(
                uid=len(self.reqs),
                token_ids=list(prompt),
                prompt_len=len(prompt),
                params=params,
                max_len=len(prompt) + NUM_OUTPUT,
                cache_salt=salt,
            )
            self.reqs.append(req)
            self.scheduler.add(req)
        drawn = 1
        while self.scheduler.has_work:
            self.scheduler.step()
            self.scheduler.check_integrity()
            if self.scheduler.num_running > drawn:
                drawn = self.scheduler.num_running
                self._draw(f"  when {drawn} run:")
        self._say(f"  batches: {',  '.join(self._batches)}")
        for req in self.reqs[-len(prompts) :]:
            read, output = req.num_cached_tokens, req.token_ids[req.prompt_len :]
            self._say(f"  request {req.uid}: of {req.prompt_len} prompt tokens {read} read, "
                      f"{req.prompt_len - read} computed; generated {output}")  # fmt: skip
        self._draw(f"  pages: {self._cache.num_cached_pages} cached, of {NUM_PAGES}")
        return self.reqs[-1].token_ids

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text)

    def _draw(self, title: str) -> None:
        if isinstance(self._cache, RadixCache) and not self._quiet:
            print(title)
            draw(self._cache.tree)


def serve(engine: Engine, cache: KVCache, *, quiet: bool = False) -> Session:
    """All rounds, with this cache."""
    session = Session(engine, cache, quiet=quiet)
    first = [*SHARED, 21, 22, 23]
    second = [*SHARED, 31, 32, 33, 34, 35]
    said = session.run("Nothing is cached yet.", first)
    session.run("The same first tokens, then others: the node is split where they part.", second)
    session.run("The first one's conversation goes on.", [*said, 24, 25])
    session.run("Two at once: the second waits a step, to read what the first computes.",
                [*range(41, 49), 51], [*range(41, 49), 61])  # fmt: skip
    session.run("The first prompt again, with a salt: nothing is shared.", first, salt=SALT)
    session.run("A long prompt finds too few free pages: what was used least recently is evicted.",
                [*range(71, 88)])  # fmt: skip
    session.run("The second prompt again: of its pages, those shared with others are left.", second)
    return session


def main() -> None:
    """Run all rounds with the radix cache, then without one."""
    parser = argparse.ArgumentParser(description="Requests that share prefixes.")
    parser.add_argument("checkpoint", help="a model's folder, or a GGUF file")
    path = parser.parse_args().checkpoint
    info = load_model_info(path)
    config = resolve(
        EngineConfig(dtype="float32", page_size=PAGE_SIZE, num_pages=NUM_PAGES,
                     max_model_len=LIMITS.max_model_len,
                     max_running_requests=LIMITS.max_running_requests),
        Hardware.detect(),
        info.facts(),
    )  # fmt: skip
    engine = Engine(path, info.config, config)
    radix = serve(engine, RadixCache(NUM_PAGES, PAGE_SIZE))
    naive = serve(engine, NaiveCache(NUM_PAGES, PAGE_SIZE), quiet=True)
    print()
    for name, session in ("radix", radix), ("naive", naive):
        stats = session.scheduler.stats
        computed = stats.num_prefill_tokens + stats.num_decode_tokens
        print(f"{name}: {computed} tokens computed, {stats.num_hit_tokens} read")
    same = [req.token_ids for req in radix.reqs] == [req.token_ids for req in naive.reqs]
    print("same tokens both times:", same)


if __name__ == "__main__":
    main()
