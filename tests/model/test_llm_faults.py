"""What one request, file or interrupt does wrong stays its own: others go on, nothing is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.errors import ConfigError, InvalidRequestError
from minisgl.layers.rotary import get_rope
from minisgl.tokenizer import Tokenizer
from tests.helpers import TINY, random_prompts, save, tiny_hf_model

V = TINY["vocab_size"]
PROMPTS = random_prompts([4, 9, 17], V - 1, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_pages": 16, "page_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tiny_hf_model("llama", seed=2), tmp_path_factory.mktemp("llama")))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm
        assert not llm._sequences
        llm.scheduler.check_integrity()


def ids(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def change_json(path: Path, **fields: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | fields))


def copy(folder: Path, target: Path) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_text_with_tokens_the_model_lacks_is_refused(
    folder: Path, tmp_path: Path, demo_model_path: Path
) -> None:
    copy(folder, tmp_path)
    Tokenizer.load(str(demo_model_path)).save(str(tmp_path))  # 49,152 tokens, the model has fewer
    with LLM(tmp_path, **OPTIONS) as llm:
        with pytest.raises(InvalidRequestError, match=f"prompt 1: .*vocabulary of {V}"):
            llm.generate([[5, 6], "Hello world"], GREEDY, use_tqdm=False)
        assert not llm.scheduler.has_work


def test_eos_ids_outside_the_vocabulary_are_left_out(
    folder: Path, tmp_path: Path, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ids(llm, PROMPTS)
    change_json(copy(folder, tmp_path) / "generation_config.json", eos_token_id=[V, -1, 10**6])
    with LLM(tmp_path, **OPTIONS) as other:
        assert f"EOS ids [{V}, 1000000] are outside" in caplog.text
        strict = SamplingParams(temperature=0, max_tokens=12, min_tokens=12)
        assert ids(other, PROMPTS, strict) == expected, "-1 must not ban the last token"


def test_huge_counts_are_cut_to_the_vocabulary(llm: LLM) -> None:
    common: dict[str, Any] = {"seed": 3, "max_tokens": 6, "ignore_eos": True, "temperature": 1.0}
    huge = ids(llm, PROMPTS, SamplingParams(top_k=2**63 - 1, top_p=0.9, **common))
    assert huge == ids(llm, PROMPTS, SamplingParams(top_p=0.9, **common))


def test_logprobs_of_more_tokens_than_there_are(tmp_path: Path) -> None:
    small = save(tiny_hf_model("llama", seed=2, vocab_size=16), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, prompt_logprobs=20)
    with LLM(small, **OPTIONS) as llm:
        output = llm.generate([1, 2, 3], params, use_tqdm=False)[0]
    assert output.logprobs is not None and len(output.logprobs[0].top) == 16


def test_a_penalty_beyond_float32_stays_finite(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1e-40, seed=1, max_tokens=5)
    for tokens, prompt in zip(ids(llm, PROMPTS, params), PROMPTS, strict=True):
        assert set(tokens) <= set(prompt), "what was seen is all but certain to come again"


def test_a_poisoned_request_spoils_no_other(folder: Path, tmp_path: Path, llm: LLM) -> None:
    """Infinite activations fill its pages with NaN; later owners of the pages mask the rest."""
    expected = ids(llm, PROMPTS)
    copy(folder, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][V - 1] = torch.inf
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(tmp_path, **OPTIONS) as poisoned:
        bad = [V - 1] * 12
        together = ids(poisoned, [*PROMPTS, bad])
        after = ids(poisoned, PROMPTS)
    assert together[:3] == expected
    assert after == expected


def test_a_step_that_raises_loses_no_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(one), next(two)
    [uid, _] = llm._sequences
    assert llm.scheduler.abort(uid, "stop")

    def broken(batch: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "launch", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            list(two)
    assert [chunk.finish_reason for chunk in one][-1] == "stop"


def test_an_interrupt_waits_for_the_end_of_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, cache = ids(llm, PROMPTS), llm.scheduler._cache
    end = cache.end

    def pressed(req: Any, **options: Any) -> None:
        end(req, **options)  # the pages are free; the row is not yet
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "end", pressed)
        with pytest.raises(KeyboardInterrupt):
            ids(llm, PROMPTS)
    assert llm.scheduler.num_running == llm.scheduler.num_waiting == 0
    assert ids(llm, PROMPTS) == expected


def test_a_stream_of_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(folder, **OPTIONS)
    stream, unstarted = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.close()
    for late in (stream, unstarted):
        with pytest.raises(ConfigError, match="closed"):
            next(late)


def test_stop_ids_of_the_user_are_the_reason_even_if_eos(folder: Path, tmp_path: Path) -> None:
    change_json(copy(folder, tmp_path) / "generation_config.json", eos_token_id=[7])
    with LLM(tmp_path, **OPTIONS) as llm:
        free = ids(llm, [PROMPTS[0]])[0]
        params = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[free[2]])
        output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", free[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 10**12}, "the KV cache: .* GiB needed.*--num-pages"),
        (
            {"max_running_requests": 10**9, "max_prefill_length": 10**9},
            "the request tables: .* GiB needed.*--max-running-requests",
        ),
        ({"threads": 100_000}, "--threads = 100000 must be at most"),
    ],
)
def test_sizes_beyond_the_machine_name_the_flag(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **(OPTIONS | options))


def test_a_claimed_context_costs_nothing_until_it_is_used(folder: Path, tmp_path: Path) -> None:
    change_json(copy(folder, tmp_path) / "config.json", max_position_embeddings=2**31 - 1)
    with pytest.raises(ConfigError, match="a RoPE table for this length: .*--max-model-len"):
        LLM(tmp_path, **OPTIONS)
    with LLM(tmp_path, max_model_len=64, **OPTIONS) as llm:
        model: Any = llm.engine.model
        table = model.model.layers[0].self_attn.attn.rotary._cos_sin_cache
        assert table.shape[0] == 64
    assert get_rope(8, 8, 1000, 1e4, table_length=10)._cos_sin_cache.shape == (10, 8)
