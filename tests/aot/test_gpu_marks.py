"""Work of benchmarks/gpu.py's programs, compiled for an H100, against the least that they need."""

import math
import sys
from pathlib import Path

import pytest
from support.aot import needs_cuda

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu

MARK = 1.25


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("model, task", [("moe", "train"), ("dense", "sample"), ("moe", "sample")])
def test_an_update_and_a_decode_step_do_little_more_than_they_need(model, task, tmp_path):
  """Two layers, and for the update a smaller head: logits are computed again."""
  spec = gpu.make_spec(model, task, toy=False) | dict(experts="auto")
  spec["model"] |= dict(num_layers=2)
  if task == "train":
    spec["model"] |= dict(vocab_size=8192)
  runner = gpu.Runner(tmp_path, math.inf)
  rows = runner.process("gpu_ours.py", dict(task="check", target="h100", of=spec), cpu=True)
  ratios = [row["executed"] / row["needed"] for row in rows if row["needed"]]
  assert len(ratios) == 1 and 0.9 < ratios[0] < MARK
