"""What a single chip has to hold at once, and that configs/gsm8k.py fits it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from configs import gsm8k
from gspo_jax import sharding
from gspo_jax.aot import estimate
from gspo_jax.aot.programs import PROGRAMS, make_case, programs, state_of
from gspo_jax.models import transformer
from gspo_jax.settings.reading import from_dict

ROOT = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"
)


def bytes_held(rank):
  """What stays on the device besides each program's own arrays, and the number of parameters."""
  given = gsm8k.get_config("tiny")
  given.update(rl=dict(lora_rank=rank), compute=dict(dtype="bfloat16"))
  case = make_case(from_dict(given.to_dict()))
  mesh = sharding.make_mesh(case.config.mesh, jax.devices()[:1])
  with jax.set_mesh(mesh):
    found = {name: estimate.held(one.held) for name, one in programs(case, mesh, PROGRAMS)}
    state = state_of(case, mesh)
  return found, transformer.count(case.model)[0], estimate.held(state.params)


def test_the_training_state_is_held_while_sampling_and_the_sampler_while_scoring():
  held, count, params = bytes_held(rank=0)
  assert params == 4 * count
  assert held["train"] == 0, "the sampler's weights are gone by then"
  assert held["decode"] == held["prefill"] == pytest.approx(12 * count, abs=100)
  assert held["publish"] == pytest.approx(8 * count, abs=100)
  assert held["score"] == pytest.approx((8 + 2) * count, abs=100)


def test_with_adapters_frozen_weights_are_held_once_in_half():
  held, count, params = bytes_held(rank=4)
  assert 2 * count < params < 2.7 * count
  assert held["publish"] == pytest.approx(2 * (params - 2 * count), abs=100), "moments of adapters"
  assert held["decode"] == pytest.approx(params + held["publish"], abs=100)


def compiled(tmp_path, *options):
  """The report of the command line, without the test harness's simulated devices."""
  out = tmp_path / "aot.json"
  command = [sys.executable, "-m", "gspo_jax.aot", f"--json={out}", *options]
  environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return {row["program"]: row for row in json.loads(out.read_text())}


@needs_libtpu
def test_a_topology_of_one_chip_compiles(tmp_path):
  options = "--config=configs/gsm8k.py:tiny", "--topology=v5e:1x1", "--programs=publish"
  (row,) = compiled(tmp_path, *options).values()
  assert row["fits"] and row["held_gib"] > 0 and row["hbm_gib"] == 16


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in gsm8k.VARIANTS if "-v" in name])
def test_every_program_fits_with_what_is_held_meanwhile(name, tmp_path):
  chip = name.partition("-")[2]
  rows = compiled(tmp_path, f"--config=configs/gsm8k.py:{name}", f"--topology={chip}:1x1")
  assert list(rows) == list(PROGRAMS) and all(row["fits"] for row in rows.values())
