"""The flagship's train and decode programs, reduced, must not get worse than figures.json says. Nor
must the decode program of Qwen3.5-35B-A3B.

Figures of the compiler: bytes through HBM, how many times what is needed they are, and utilisation
at the bound. Written anew, where a change is meant or has made them better, by

    PYTHONPATH=tests python tests/aot/test_figures.py
"""

import importlib.metadata
import json
import re
import tempfile
from pathlib import Path

import pytest
from support import aot

FIGURES = Path(__file__).with_name("figures.json")
TOLERANCE = 0.03
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
OPTIONS = (
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


INT8 = (
  *OPTIONS,
  "--programs=decode",
  "--config.engine.cache_dtype=int8",
  "--config.engine.weights_dtype=int8",
)


def measure(directory: Path) -> dict:
  """The figures of this version of the code, and of the compiler."""
  rows, _ = aot.compiled(directory, *OPTIONS, config="configs/moe_aime.py")
  narrow, _ = aot.compiled(directory, *INT8, config="configs/moe_aime.py")
  whole = "--topology=v5p:4x4x4", "--programs=decode"
  hybrid, _ = aot.compiled(directory, *whole, config="configs/moe_aime.py:qwen3_5")
  rows |= {"decode int8": narrow["decode"], "decode qwen3_5": hybrid["decode"]}
  figures = {name: {key: row[key] for key in LESS_IS_BETTER} for name, row in rows.items()}
  return dict(compiler=compiler(), programs=figures)


def compiler() -> str:
  return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def worse(measured: dict, reference: dict) -> list[str]:
  """Describes figures worse by more than the tolerance."""
  lines = []
  for program, figures in reference["programs"].items():
    for name, before in figures.items():
      current = measured["programs"][program][name]
      change = current / before - 1 if LESS_IS_BETTER[name] else before / current - 1
      if change > TOLERANCE:
        lines.append(f"{program} {name} {before:.4g} -> {current:.4g}")
  return lines


def test_the_extra_tpu_installs_the_compiler_that_the_figures_are_of():
  pins = re.findall(r'"(jax|libtpu)(?:\[tpu\])?==([\d.]+)"', (aot.ROOT / "setup.py").read_text())
  compiler = json.loads(FIGURES.read_text())["compiler"]
  assert compiler == " ".join(f"{name} {version}" for name, version in pins)


@pytest.mark.long
@aot.needs_libtpu
def test_programs_are_no_worse_than_they_were(tmp_path):
  reference = json.loads(FIGURES.read_text())
  if reference["compiler"] != compiler():
    pytest.skip(f"figures are of {reference['compiler']}, this is {compiler()}")
  lines = worse(measure(tmp_path), reference)
  assert not lines, f"{'; '.join(lines)}; where that is meant, see above how to write them anew"


def test_worse_is_more_bytes_or_less_utilisation():
  reference = dict(programs=dict(train=dict(hbm_bytes=100.0, moved_over_needed=2.0, mfu=0.5)))

  def changed(**figures):
    return dict(programs=dict(train=reference["programs"]["train"] | figures))

  assert worse(changed(hbm_bytes=102.0, moved_over_needed=1.0, mfu=0.49), reference) == []
  assert worse(changed(hbm_bytes=106.0), reference) == ["train hbm_bytes 100 -> 106"]
  assert worse(changed(mfu=0.47), reference) == ["train mfu 0.5 -> 0.47"]
  assert worse(changed(hbm_bytes=50.0, mfu=0.9), reference) == []


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as scratch:
    FIGURES.write_text(json.dumps(measure(Path(scratch)), indent=2) + "\n")
