"""The flagship's train and decode programs, reduced, must not get worse than figures.json says.

Figures of the compiler: bytes through HBM, how many times what is needed they are, and utilisation
at the bound. Written anew, where a change is meant or has made them better, by

    python tests/aot/test_figures.py
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_name("figures.json")
TOLERANCE = 0.05
LESS_IS_BETTER = dict(hbm_bytes=True, moved_over_needed=True, mfu=False)
MODEL = dict(
  num_layers=4,
  hidden_size=256,
  num_heads=4,
  num_kv_heads=2,
  num_experts=8,
  experts_per_token=2,
  moe_intermediate_size=128,
  vocab_size=4096,
)
COMMAND = (
  "--config=configs/moe_aime.py",
  "--topology=v5p:2x2x1",
  "--programs=train,decode",
  "--sequences=8",
  "--length=512",
  "--config.mesh.fsdp=2",
  "--config.mesh.expert=2",
  "--config.engine.slots=64",
  "--config.engine.cache_tokens=917504",
  *(f"--config.model.{key}={value}" for key, value in MODEL.items()),
)


def measure() -> dict:
  """The figures of this version of the code, and of the compiler."""
  with tempfile.TemporaryDirectory() as directory:
    out = Path(directory, "aot.json")
    environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    command = [sys.executable, "-m", "gspo_jax.aot", *COMMAND, f"--json={out}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
      raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    rows = json.loads(out.read_text())
  return dict(
    compiler=compiler(),
    programs={row["program"]: {name: row[name] for name in LESS_IS_BETTER} for row in rows},
  )


def compiler() -> str:
  return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def worse(found: dict, known: dict) -> list[str]:
  """What got worse by more than the tolerance, in words."""
  said = []
  for program, figures in known["programs"].items():
    for name, before in figures.items():
      now = found["programs"][program][name]
      by = now / before - 1 if LESS_IS_BETTER[name] else before / now - 1
      if by > TOLERANCE:
        said.append(f"{program} {name} {before:.4g} -> {now:.4g}")
  return said


@pytest.mark.long
def test_programs_are_no_worse_than_they_were():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("needs libtpu: pip install -e '.[tpu]'")
  known = json.loads(FIGURES.read_text())
  if known["compiler"] != compiler():
    pytest.skip(f"figures are of {known['compiler']}, this is {compiler()}")
  said = worse(measure(), known)
  assert not said, f"{'; '.join(said)}; if that is meant: python tests/aot/test_figures.py"


def test_worse_is_more_bytes_or_less_utilisation():
  known = dict(programs=dict(train=dict(hbm_bytes=100.0, moved_over_needed=2.0, mfu=0.5)))

  def of(**figures):
    return dict(programs=dict(train=known["programs"]["train"] | figures))

  assert worse(of(hbm_bytes=104.0, moved_over_needed=1.0, mfu=0.48), known) == []
  assert worse(of(hbm_bytes=106.0), known) == ["train hbm_bytes 100 -> 106"]
  assert worse(of(mfu=0.47), known) == ["train mfu 0.5 -> 0.47"]
  assert worse(of(hbm_bytes=50.0, mfu=0.9), known) == []


if __name__ == "__main__":
  FIGURES.write_text(json.dumps(measure(), indent=2) + "\n")
