"""The demo model, a real one in GGUF: chats equal those of `transformers` token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl import LLM, SamplingParams
from tests.helpers import Greedy, assert_close, engine_logits, hf_greedy, hf_logits

pytestmark = pytest.mark.slow

ATOL = 3e-4
"""Logits of up to 40 in float32 after 30 layers, sums in another order. Measured: 7e-5."""
MAX_TOKENS = 48
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "An apple."},
        {"role": "user", "content": "And another one, with its colour - naïve café ☕ 你好!"},
    ],
    [{"role": "user", "content": "Write a poem\nabout the sea."}],
]


class Reference(NamedTuple):
    """The same file, read by transformers."""

    model: Any
    prompts: list[list[int]]
    answers: list[Greedy]


@pytest.fixture(scope="module")
def reference(demo_model_path: Path) -> Reference:
    source = {
        "pretrained_model_name_or_path": str(demo_model_path.parent),
        "gguf_file": demo_model_path.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for chat in CHATS
    ]
    return Reference(model, prompts, [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts])


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> Iterator[LLM]:
    with LLM(str(demo_model_path), dtype="float32", num_pages=64, max_prefill_length=128) as llm:
        yield llm


def test_chat_prompts_equal_transformers(llm: LLM, reference: Reference) -> None:
    assert [llm.encode_chat(chat) for chat in CHATS] == reference.prompts
    assert len({tuple(prompt) for prompt in reference.prompts}) == len(CHATS)


def test_answers_equal_transformers(llm: LLM, reference: Reference) -> None:
    # Greedy ids compare only where the best two logits differ by more than both errors.
    assert min(answer.smallest_gap for answer in reference.answers) > 2 * ATOL
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.chat(CHATS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == reference.prompts
    for output, answer in zip(outputs, reference.answers, strict=True):
        assert output.token_ids == answer.token_ids
        ended = answer.token_ids[-1] == reference.model.generation_config.eos_token_id
        assert output.finish_reason == ("stop" if ended else "length")
    # Both ends occur, and an answer alone is the answer in a batch.
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    alone = llm.chat(CHATS[0], params, use_tqdm=False)[0]
    assert (alone.token_ids, alone.text) == (outputs[0].token_ids, outputs[0].text)


def test_logits_equal_transformers(llm: LLM, reference: Reference) -> None:
    ids = [*reference.prompts[4], *reference.answers[4].token_ids]
    positions = list(range(0, len(ids), 7))
    ours = engine_logits(llm.engine, ids, positions, chunk=33)
    assert_close(ours, hf_logits(reference.model, ids, positions), ATOL)


def test_stop_strings_survive_chunks_cache_and_retraction(demo_model_path: Path) -> None:
    """Texts cut at a string that each had in its middle, on a pool of a few pages, read late."""
    prompts = [f"{name} was born in a small town and" for name in ("Ann", "Ben", "Cy", "Di")]
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64}
    with LLM(demo_model_path, cache="naive", num_pages=64, **options) as llm:
        whole = [output.text for output in llm.generate(prompts, plain, use_tqdm=False)]
    stops = [text[len(text) // 2 :][:7] for text in whole]
    cut = [text[: text.index(stop)] for text, stop in zip(whole, stops, strict=True)]
    each = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop) for stop in stops
    ]
    with LLM(
        demo_model_path, overlap="on", page_size=4, num_pages=16, max_prefill_length=8,
        max_running_requests=4, **options,
    ) as llm:  # fmt: skip
        for _ in range(2):
            outputs = llm.generate(prompts, each, use_tqdm=False)
            assert [output.text for output in outputs] == cut
            assert [output.outputs[0].stop_reason for output in outputs] == stops
        assert llm.scheduler.stats.num_retractions > 0
        assert llm.scheduler.stats.num_hit_tokens > 0
