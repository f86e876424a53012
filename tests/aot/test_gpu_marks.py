"""Work of benchmarks/gpu.py's programs, compiled for an H100, against the least that they need."""

import math
import sys
from pathlib import Path

import pytest
from support.aot import needs_cuda

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu

TRAINED = 7  # Layers of the mixture in an update; `gpu.py --check --target=h100` says it.
MARKS = dict(train=1.2, sample=1.25)  # At most 1.25 is promised.
DEPTHS = 2, 3  # Work grows by the same amount with each layer.


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("model, task", [("moe", "train"), ("dense", "sample"), ("moe", "sample")])
def test_an_update_and_a_decode_step_do_little_more_than_they_need(model, task, tmp_path):
  """Work of the whole model, from two depths that compile fast."""
  shallow, deep = (_work(model, task, depth, tmp_path) for depth in DEPTHS)
  more = (TRAINED if task == "train" else gpu.MODELS[model]["num_layers"]) - DEPTHS[0]
  executed, needed = (a + (b - a) * more for a, b in zip(shallow, deep))
  assert 0.9 < executed / needed < MARKS[task]


def _work(model: str, task: str, layers: int, directory: Path) -> tuple[float, float]:
  """Returns the executed and the needed work of an update or decode step."""
  spec = gpu.make_spec(model, task, toy=False) | dict(experts="auto")
  spec["model"] |= dict(num_layers=layers)
  runner = gpu.Runner(directory, math.inf)
  rows = runner.process("gpu_ours.py", dict(task="check", target="h100", of=spec), cpu=True)
  ((executed, needed),) = [(row["executed"], row["needed"]) for row in rows if row["needed"]]
  return executed, needed
