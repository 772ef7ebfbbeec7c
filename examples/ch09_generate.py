"""Chapter 9, generating: text in, text out, in one process.

    python examples/ch09_generate.py [MODEL]

MODEL is a folder, a GGUF file, a hub id, or `smollm2` (the default, which `make setup` brings).
Adds `tokenizer` and `llm`: text to ids and back, chat templates, stop strings, and `LLM`, which
puts everything below it together.

Prints completions of several prompts that run in one batch, the answer to a chat, and a stream
that arrives piece by piece.
"""

from __future__ import annotations

import argparse

from minisgl import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "The opposite of hot is"]
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]


def main() -> None:
    """Generate, chat, stream."""
    parser = argparse.ArgumentParser(description="Text from a model.")
    parser.add_argument("model", nargs="?", default="smollm2")
    model = parser.parse_args().model
    with LLM(model, max_model_len=512, max_running_requests=8) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12)
        for result in llm.generate(PROMPTS, greedy, use_tqdm=False):
            counts = f"{result.num_prompt_tokens} + {len(result.token_ids)} tokens"
            print(f"{result.prompt!r} -> {result.text!r} ({counts}, {result.finish_reason})")

        if llm.tokenizer is not None and llm.tokenizer.chat_template is not None:
            params = SamplingParams(temperature=0.0, max_tokens=40)
            [answer] = llm.chat(QUESTION, params, use_tqdm=False)
            print(f"\nchat: {answer.text}")

        print("\nstream: ", end="")
        # The same seed gives the same tokens, whatever else runs beside it.
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, stop="\n")
        for chunk in llm.stream("Once upon a time", params):
            print(chunk.text, end="|", flush=True)
        print()


if __name__ == "__main__":
    main()
