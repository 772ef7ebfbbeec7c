"""Ranks that hold whole experts compute what one process computes (CPU, gloo, float32).

Each case has prompts longer than a chunk, and some have a rank that gets no token or has no expert.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.core import TokenLogprobs
from minisgl.errors import CheckpointError, ConfigError
from tests.helpers import LOGIT_ATOL, random_prompts, save, tiny_hf_model

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kernels": "reference",
    "threads": 1,
    "page_size": 4,
    "num_pages": 64,
    "max_prefill_length": 16,
}
# Heads that both two and three ranks can share.
SIZES: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}
MOE = {"moe_intermediate_size": 28, "norm_topk_prob": True}
PROMPTS = random_prompts([5, 40, 17, 3], 320, seed=5)
GREEDY = SamplingParams(
    temperature=0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2
)


class Case(NamedTuple):
    kind: str
    experts: int
    top_k: int
    changes: dict[str, Any]
    ranks: int
    favourite: int | None = None
    """The expert that all tokens have first; the next best is the one after it."""


CASES = {
    "qwen3_moe: 3 and 2 experts": Case("qwen3_moe", 5, 2, {**MOE, "head_dim": 16}, 2),
    "qwen3_moe: 2, 2, none": Case("qwen3_moe", 4, 2, {**MOE, "head_dim": 16}, 3),
    "qwen2_moe: all to the last of 2": Case(
        "qwen2_moe", 4, 2, {**MOE, "shared_expert_intermediate_size": 23}, 2, favourite=2
    ),
    "qwen2_moe: 2, 2, 1": Case(
        "qwen2_moe", 5, 2, {**MOE, "shared_expert_intermediate_size": 23}, 3
    ),
    "mixtral: 2 and 2": Case("mixtral", 4, 2, {}, 2),
    "mixtral: all to one expert": Case("mixtral", 5, 1, {}, 3, favourite=2),
}


def route_to(model: Any, favourite: int) -> None:
    """Make all tokens rank the experts alike: all embeddings get a large first dimension, which
    alone the routers look at and the head does not."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] += 8.0
        model.lm_head.weight[:, 0] = 0.0
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[0] = 1.0
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[favourite, 0] = 0.2
            layer.mlp.gate.weight[favourite + 1, 0] = 0.1


def used_experts(model: Any) -> set[tuple[int, ...]]:
    """Which experts the layers send any of the prompts' tokens to."""
    used: set[tuple[int, ...]] = set()

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        used.add(tuple(output[2].unique().tolist()))

    hooks = [layer.mlp.gate.register_forward_hook(look) for layer in model.model.layers]
    with torch.inference_mode():
        model(torch.tensor([sum(PROMPTS, [])]))
    for hook in hooks:
        hook.remove()
    return used


def make(case: Case, folder: Path) -> str:
    count = "num_local_experts" if case.kind == "mixtral" else "num_experts"
    changes = {**SIZES, **case.changes, count: case.experts, "num_experts_per_tok": case.top_k}
    model = tiny_hf_model(case.kind, num_hidden_layers=2, **changes)
    if case.favourite is None:
        assert used_experts(model) == {tuple(range(case.experts))}
    else:
        route_to(model, case.favourite)
        first = case.favourite
        assert used_experts(model) == {tuple(range(first, first + case.top_k))}
    return save(model, folder)


def scores(found: list[TokenLogprobs | None] | None) -> list[float]:
    """All logprobs, of tokens and of alternatives."""
    kept = [item for item in found or () if item is not None]
    return [value for item in kept for value in (item.logprob, *(v for _, v in item.top))]


def run(path: str, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Ids and scores of all prompts, after a request that is aborted beside another."""
    with LLM(path, **OPTIONS, **options) as llm:
        kept, closed = llm.stream(PROMPTS[1], GREEDY), llm.stream(PROMPTS[2], GREEDY)
        begun = [next(stream).token_ids for stream in (kept, closed)]
        closed.close()
        begun += [chunk.token_ids for chunk in kept]
        assert llm.scheduler.num_running == 0
        steps = llm.scheduler.stats.num_steps
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.scheduler.stats.num_steps - steps > GREEDY.max_tokens + 1  # in chunks
        llm.scheduler.check_integrity()
        assert llm.scheduler.num_used_pages == 0
    found = [([i for ids in begun for i in ids], [])]
    for output in outputs:
        [one] = output.outputs
        found.append((one.token_ids, scores(output.prompt_logprobs) + scores(one.logprobs)))
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_whole_experts_give_what_one_process_gives(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = make(case, tmp_path)
    expected = run(path)
    assert len(expected[2][1]) == (39 * 3) + 10 * 4
    overlap = "on" if case.ranks == 2 else "off"
    found = run(path, tp=case.ranks, ep=True, overlap=overlap)
    for (ids, values), (their_ids, their_values) in zip(found, expected, strict=True):
        assert ids == their_ids
        assert values == pytest.approx(their_values, abs=LOGIT_ATOL, rel=0)


def test_a_rank_refuses_a_checkpoint_that_lacks_an_expert(tmp_path: Path) -> None:
    path = make(CASES["qwen3_moe: 3 and 2 experts"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.1.down_proj.weight"]  # rank 0's; all say so
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"Incomplete expert tensors: .*lacks \[1\]"):
        LLM(path, tp=2, ep=True, **OPTIONS)


def test_dense_models_have_no_experts_to_share_out(tmp_path: Path) -> None:
    path = save(tiny_hf_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match="the model has none: leave it out"):
        LLM(path, tp=2, ep=True, **OPTIONS)
