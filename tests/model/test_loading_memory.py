"""Loading streams: its peak of anonymous memory is the model and little more.

On a checkpoint with the shapes of Qwen3-0.6B, written with random weights; a fresh process
loads it while a thread watches `RssAnon`, which leaves mapped file pages out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "configs" / "qwen3-0.6b.json"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is in Linux's /proc only"),
]

PROBE = """
import json, sys, threading
import torch
from minisgl.layers import set_rope_device
from minisgl.models import create_model, load_weight
from minisgl.models.checkpoint import load_model_config
from minisgl.utils import parse_dtype, torch_dtype

folder, dtype = sys.argv[1], parse_dtype(sys.argv[2])

def anonymous_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024

baseline = peak = anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
set_rope_device("cpu")
with torch.device("meta"), torch_dtype(dtype):
    model = create_model(load_model_config(folder))
names = []
def named(tensors):
    for name, tensor in tensors:
        names.append((name, list(tensor.shape)))
        yield name, tensor
model.load_state_dict(dict(named(load_weight(folder, "cpu", dtype=dtype))))
done.set()
watcher.join()
peak = max(peak, anonymous_bytes())
weights = model.state_dict()
qkv = model.model.layers.op_list[0].self_attn.qkv_proj.weight
print(json.dumps({
    "used": peak - baseline,
    "model": sum(t.nbytes for t in weights.values()),
    "largest": max(t.nbytes for t in weights.values()),
    "num_weights": len(weights),
    "num_params": model.num_params(),
    "read": names,
    "qkv": [list(qkv.shape), str(qkv.dtype), str(qkv.device)],
    "sums": [weights[k].double().sum().item() for k in ("model.norm.weight",)],
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1.5 GB, head and embedding both written as the published checkpoint does."""
    path = tmp_path_factory.mktemp("qwen3")
    yield make_checkpoint(json.loads(CONFIG.read_text("utf-8")), path)
    shutil.rmtree(path)


def load(folder: Path, dtype: str) -> dict[str, Any]:
    """What the fresh process measured."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder), dtype],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# In bfloat16 the tensors that need no merging stay views of the mapped file; converting to
# float32 copies every one of them, so that all of the model is anonymous.
@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_peak_memory_is_the_model_and_one_tensor(folder: Path, dtype: str, num_bytes: int) -> None:
    found = load(folder, dtype)
    assert found["model"] == found["num_params"] * num_bytes == 596_049_920 * num_bytes
    assert found["largest"] == 151936 * 1024 * num_bytes
    # Room for the merge buffer, the RoPE table (21 MB) and what the allocator keeps.
    assert found["used"] < 1.15 * found["model"] + found["largest"]
    # The measurement sees something: the merged projections are anonymous either way.
    merged = 28 * (4096 + 6144) * 1024 * num_bytes
    assert found["used"] > (found["model"] if dtype == "float32" else merged)
    assert found["num_weights"] == 226
    assert len(found["read"]) == 227
    assert found["read"][:6] == [
        ["lm_head.weight", [151936, 1024]],
        ["model.embed_tokens.weight", [151936, 1024]],
        ["model.layers.0.input_layernorm.weight", [1024]],
        ["model.layers.0.mlp.down_proj.weight", [1024, 3072]],
        ["model.layers.0.mlp.gate_up_proj.weight", [6144, 1024]],
        ["model.layers.0.post_attention_layernorm.weight", [1024]],
    ]
    assert found["qkv"] == [[4096, 1024], f"torch.{dtype}", "cpu"]
    # Norms are drawn about one: the sum of 1024 of them is near 1024.
    assert found["sums"][0] == pytest.approx(1024, abs=16)
