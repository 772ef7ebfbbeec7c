"""Overlap as `--trace-file` shows it: a device that decodes never waits for its host."""

from __future__ import annotations

import json
from statistics import median

import pytest

from minisgl import LLM, SamplingParams
from minisgl.scheduler.recorder import StepRecorder
from tests.gpu.small_models import published_config
from tests.helpers import random_prompts

pytestmark = pytest.mark.gpu  # needs a CUDA device

NUM_TOKENS = 200
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-14B with 12 of its 40 layers: a step reads 9.5 GB of weights.

    That takes 2 ms or more, several times what the host needs for a step: it must be able to keep
    ahead, or there would be no overlap to see.
    """
    target = tmp_path_factory.mktemp("qwen3")
    config = published_config("qwen3-14b") | {"num_hidden_layers": 12}
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    return str(target)


def test_steps_of_a_decode_run_are_back_to_back_on_the_device(folder: str) -> None:
    prompts = random_prompts([20, 30, 40, 50], 1000, seed=3)
    sizes = {"num_pages": 256, "max_model_len": 512, "max_running_requests": 4}
    with LLM(folder, device="cuda", load_format="dummy", **sizes) as llm:
        assert llm.engine.config.overlap
        llm.generate(prompts, PARAMS, use_tqdm=False)  # kernels are compiled and loaded
        llm.scheduler.recorder = recorder = StepRecorder.of(llm.engine)
        llm.generate(prompts, PARAMS, use_tqdm=False)
    steps = [step for step in recorder.take() if not step.num_prefill_tokens]
    assert len(steps) >= NUM_TOKENS - 1
    assert all(step.is_replayed and step.num_reqs == 4 for step in steps[: NUM_TOKENS - 1])
    pairs = list(zip(steps, steps[1:], strict=False))
    computed_s = median(step.device_end_s - step.device_s for step in steps)
    gap_s = median(after.device_s - before.device_end_s for before, after in pairs)
    # Between two events of one stream with nothing in between lie a few microseconds. A host that
    # plans only when it has read the tokens takes more than a tenth of a millisecond.
    assert 0 <= gap_s < 0.02 * computed_s, (gap_s, computed_s)
    # The end of a launch is what counts: all of the step is queued by then. Not for every step,
    # as a shared host may pause for longer than one takes.
    in_time = sum(after.launched_s < before.device_end_s for before, after in pairs)
    assert in_time > 0.9 * len(pairs), f"{in_time} of {len(pairs)}"
    # The two clocks are one: the host sees a step's end soon after it, and never long before.
    seen_s = median(step.read_end_s - step.device_end_s for step in steps)
    assert abs(seen_s) < 0.2 * computed_s, (seen_s, computed_s)
