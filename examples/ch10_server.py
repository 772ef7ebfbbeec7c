"""Chapter 10, serving: a model in a process of its own, used by many at once.

    python examples/ch10_server.py [MODEL]

Adds `message` and `server`: typed messages between processes, and `AsyncEngine`, on which
`minisgl serve`, the terminal chat and this program stand alike.

Prints the answers of three clients that share the model, one of which goes away in the middle;
then that nothing of theirs is left running.
"""

from __future__ import annotations

import argparse
import asyncio

from minisgl import AsyncEngine, SamplingParams

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]


async def client(engine: AsyncEngine, prompt: str, patience: int) -> str:
    """Read a stream until it ends, or leave after `patience` chunks."""
    text = prompt
    chunks = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    async for chunk in chunks:
        text += chunk.text
        patience -= 1
        if patience == 0:
            await chunks.aclose()  # the engine hears of it and ends the request
            return f"{text!r}, and the client went away"
    return f"{text!r}"


async def main() -> None:
    """Serve three clients at once."""
    parser = argparse.ArgumentParser(description="An engine that asyncio programs share.")
    parser.add_argument("model", nargs="?", default="smollm2")
    model = parser.parse_args().model
    async with AsyncEngine(model, max_model_len=512, max_running_requests=8) as engine:
        ready = engine.ready
        print(f"{model} on {ready.device} in {ready.dtype}: {ready.num_pages} pages")
        clients = [client(engine, prompt, 3 if i == 2 else 99) for i, prompt in enumerate(PROMPTS)]
        for answer in await asyncio.gather(*clients):
            print(answer)
        await engine.drain(timeout_s=10)
        print(f"live sequences: {engine.num_live}")


if __name__ == "__main__":
    asyncio.run(main())
