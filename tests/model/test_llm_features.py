"""What users ask of `LLM` beyond plain greedy text: penalties, ends, stop strings, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.helpers import (
    LOGIT_ATOL,
    TINY,
    assert_close,
    hf_logits,
    random_prompts,
    save,
    tiny_hf_model,
)

V = TINY["vocab_size"]
PROMPTS = random_prompts([5, 23, 11], V, 3)


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_hf_model("llama", seed=1)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(reference, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tiny(folder: str) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", threads=1, num_pages=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo(demo_model_path: Path) -> Iterator[LLM]:
    with LLM(str(demo_model_path), dtype="float32", max_model_len=256, num_pages=64) as llm:
        yield llm


def ids(llm: LLM, prompt: Any, **params: Any) -> list[int]:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].token_ids


def test_repetition_penalty_equals_transformers(reference: Any, tiny: LLM) -> None:
    for prompt in PROMPTS:
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=1.7,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        ours = ids(
            tiny, prompt, max_tokens=40, temperature=0, repetition_penalty=1.7, ignore_eos=True
        )
        assert ours == theirs
        assert ours != ids(tiny, prompt, max_tokens=40, temperature=0, ignore_eos=True)


def test_prompt_logprobs_equal_transformers(reference: Any, folder: str) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    with LLM(folder, dtype="float32", threads=1, num_pages=64, max_prefill_length=8) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = output.prompt_logprobs[1:]
        logits = hf_logits(reference, prompt, range(len(prompt) - 1))
        expected = torch.log_softmax(logits, dim=-1)
        assert [e.token_id for e in entries if e] == prompt[1:]
        own = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert_close(torch.tensor([e.logprob for e in entries if e]), own, 2 * LOGIT_ATOL)
        for entry, row in zip(entries, expected, strict=True):
            assert entry is not None
            assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
            assert entry.rank == int((row > row[entry.token_id]).sum()) + 1


def test_every_eos_id_counts_and_min_tokens_bans_them_all(reference: Any, tmp_path: Path) -> None:
    path = save(reference, tmp_path)
    with LLM(path, dtype="float32", threads=1, num_pages=64) as llm:
        free = ids(llm, PROMPTS[0], max_tokens=20, temperature=0, ignore_eos=True)
    firsts = [i for i, token in enumerate(free) if token not in free[:i]]
    early, late = firsts[1], firsts[-1]  # the ids chosen as EOS come there, and not before
    assert early < late
    in_generation, in_config = free[early], free[late]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": in_config}))
    defaults = {"eos_token_id": [in_generation], "temperature": 0.0, "top_k": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    with LLM(path, dtype="float32", threads=1, num_pages=64) as llm:
        first = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20), use_tqdm=False)[0]
        assert first.token_ids == free[: early + 1], (
            "greedy by the model's default, ended by the second id"
        )
        assert (first.finish_reason, first.outputs[0].stop_reason) == ("stop", None)
        later = ids(llm, PROMPTS[0], max_tokens=20, min_tokens=8)
        assert len(later) >= 8
        assert not {in_config, in_generation} & set(later[:7])
        through = ids(llm, PROMPTS[0], max_tokens=20, ignore_eos=True)
        assert through == free
        named = llm.generate(
            PROMPTS[0],
            SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[in_config]),
            use_tqdm=False,
        )[0]
        assert named.token_ids == free[: late + 1]
        assert named.finish_reason == "stop"


def test_n_sequences_are_reproducible_and_differ(tiny: LLM) -> None:
    params = SamplingParams(n=4, seed=9, temperature=1.0, max_tokens=12, ignore_eos=True)
    one, two = (tiny.generate(PROMPTS[:2], params, use_tqdm=False) for _ in range(2))
    assert one == two
    texts = {tuple(o.token_ids) for o in one[0].outputs}
    assert len(texts) == 4
    assert [o.index for o in one[0].outputs] == [0, 1, 2, 3]
    unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    assert ids_of(tiny, unseeded) != ids_of(tiny, unseeded)


def ids_of(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_stop_strings_cut_the_text_and_end_the_request(demo: LLM) -> None:
    messages = [{"role": "user", "content": "Count from one to ten in words."}]
    whole = demo.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    middle = whole.text[len(whole.text) // 2 :][:3]
    cut = whole.text.index(middle)
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=40, stop=["never there", middle],
            include_stop_str_in_output=include, logprobs=1,
        )  # fmt: skip
        output = demo.chat(messages, params, use_tqdm=False)[0]
        assert output.text == whole.text[: cut + (len(middle) if include else 0)]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", middle)
        count = len(output.token_ids)
        assert output.token_ids == whole.token_ids[:count]
        assert count < len(whole.token_ids)
        assert output.logprobs is not None and len(output.logprobs) == count
    assert not demo.scheduler.has_work


def test_streams_join_to_the_whole_and_may_interleave(demo: LLM) -> None:
    prompt = "Once upon a time"
    params = SamplingParams(temperature=0, max_tokens=24)
    whole = demo.generate(prompt, params, use_tqdm=False)[0]
    one, two = demo.stream(prompt, params), demo.stream(prompt, params)
    first, second = [next(one)], [next(two)]
    again = demo.generate(prompt, params, use_tqdm=False)[0]  # beside two open streams
    first, second = first + list(one), second + list(two)
    assert again.token_ids == whole.token_ids
    for chunks in (first, second):
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids
        assert [c.finish_reason for c in chunks if c.finish_reason] == [whole.finish_reason]


def test_closing_a_stream_gives_its_pages_back(demo: LLM) -> None:
    stream = demo.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=200))
    next(stream)
    assert demo.scheduler.num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert demo.scheduler.num_running == 0
    demo.scheduler.check_integrity()


def test_instances_live_side_by_side_and_one_after_another(folder: str, tiny: LLM) -> None:
    expected = ids(tiny, PROMPTS[1], max_tokens=8, temperature=0, ignore_eos=True)
    for _ in range(2):
        with LLM(folder, dtype="float32", threads=1, num_pages=64, page_size=4) as other:
            for llm in (other, tiny):
                got = ids(llm, PROMPTS[1], max_tokens=8, temperature=0, ignore_eos=True)
                assert got == expected
