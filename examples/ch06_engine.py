"""Chapter 6, the engine: one worker that turns batches into tokens.

    python tools/make_checkpoint.py tests/configs/qwen3-0.6b.json /tmp/small \\
        --set hidden_size=256 intermediate_size=512 vocab_size=4096
    python examples/ch06_engine.py /tmp/small

CHECKPOINT is a model's folder or a GGUF file (random weights will do). Adds `config` and
`engine`: memory sizing, the forward of a batch, the sampler.

Nothing schedules here: the program makes one request, gives it a row and pages, launches its
prompt as a batch of one, then one batch for each token. Prints why the configuration is what it
is, then for each step how many tokens it computed, in which pages, and the id it chose.
"""

from __future__ import annotations

import argparse

from minisgl.config import EngineConfig
from minisgl.core import Batch, PageWrites, Req, SamplingParams
from minisgl.engine import Engine
from minisgl.models import load_model_info
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware

PROMPT = [17, 4, 256, 99, 3, 1024]
NUM_OUTPUT = 5


def main() -> None:
    """Generate from one hand-made request."""
    parser = argparse.ArgumentParser(description="One request through the engine.")
    parser.add_argument("checkpoint", help="a model's folder, or a GGUF file")
    path = parser.parse_args().checkpoint
    info = load_model_info(path)
    config = resolve(
        EngineConfig(dtype="float32", page_size=4, num_pages=8, max_model_len=32,
                     max_running_requests=2),
        Hardware.detect(),
        info.facts(),
    )  # fmt: skip
    engine = Engine(path, info.config, config)
    print("\n".join((*config.reasons, engine.plan.reason)), end="\n\n")

    params = SamplingParams(temperature=1.0, top_k=50).resolve_defaults(info.generation_defaults)
    req = Req(
        uid=0,
        token_ids=list(PROMPT),
        prompt_len=len(PROMPT),
        params=params,
        max_len=len(PROMPT) + NUM_OUTPUT,
        seed=1,  # with the position, all that its random numbers depend on
        row=0,  # its place in the token pool and the page table
    )
    free_pages = list(range(engine.plan.num_pages))
    engine.attach(req)
    while len(req.token_ids) < req.max_len:
        req.device_len = len(req.token_ids)  # the whole prompt first, then the newest token
        while len(req.pages) * config.page_size < req.device_len:
            column, page = len(req.pages), free_pages.pop(0)
            engine.set_pages(PageWrites([req.row], [column], [page], fresh=[page]))
            req.pages.append(page)
        batch = Batch([req])
        kind = "prefill" if batch.is_prefill else "decode"
        [token] = engine.launch(batch).result().token_ids
        print(f"{kind:<8}{req.extend_len} tokens, pages {req.pages}: sampled {token}")
        assert token is not None  # None would mean: the prompt is not computed to its end
        req.cached_len = req.device_len
        req.token_ids.append(token)
    print("\nids:", req.token_ids[req.prompt_len :])
    engine.close()


if __name__ == "__main__":
    main()
