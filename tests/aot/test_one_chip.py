"""What a single chip has to hold at once, and that configs/gsm8k.py fits it."""

import jax
import pytest
from support.aot import compiled, needs_libtpu

from configs import gsm8k
from gspo_jax import sharding
from gspo_jax.aot import estimate
from gspo_jax.aot.programs import PROGRAMS, make_case, programs, state_of
from gspo_jax.models import transformer
from gspo_jax.settings.reading import from_dict


def bytes_held(rank):
  """Bytes on the device beside each program's arrays, and counts of parameters."""
  values = gsm8k.get_config("tiny")
  values.update(lora=dict(rank=rank), compute=dict(dtype="bfloat16"))
  case = make_case(from_dict(values.to_dict()))
  mesh = sharding.make_mesh(case.config.mesh, jax.devices()[:1])
  with jax.set_mesh(mesh):
    sizes = {
      name: estimate.device_bytes(program.resident)
      for name, program in programs(case, mesh, PROGRAMS)
    }
    state = state_of(case, mesh)
  return sizes, transformer.count(case.model)[0], estimate.device_bytes(state.params)


def test_the_training_state_is_held_while_sampling_and_the_sampler_while_scoring():
  resident, count, params = bytes_held(rank=0)
  assert params == 4 * count
  assert resident["train"] == 0, "the sampler's weights are gone by then"
  assert resident["decode"] == resident["prefill"] == pytest.approx(12 * count, abs=100)
  assert resident["publish"] == pytest.approx(8 * count, abs=100)
  assert resident["score"] == pytest.approx((8 + 2) * count, abs=100)


def test_with_adapters_frozen_weights_are_held_once_in_half():
  resident, count, params = bytes_held(rank=4)
  assert 2 * count < params < 2.7 * count
  assert resident["publish"] == pytest.approx(2 * (params - 2 * count), abs=100), (
    "moments of adapters"
  )
  assert resident["decode"] == pytest.approx(params + resident["publish"], abs=100)


@needs_libtpu
def test_a_topology_of_one_chip_compiles(tmp_path):
  options = "--topology=v5e:1x1", "--programs=publish"
  rows, _ = compiled(tmp_path, *options, config="configs/gsm8k.py:tiny")
  (row,) = rows.values()
  assert row["fits"] and row["held_gib"] > 0 and row["hbm_gib"] == 16


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in gsm8k.VARIANTS if "-v" in name])
def test_every_program_fits_with_what_is_held_meanwhile(name, tmp_path):
  chip = name.rpartition("-")[2]
  rows, _ = compiled(tmp_path, f"--topology={chip}:1x1", config=f"configs/gsm8k.py:{name}")
  assert list(rows) == list(PROGRAMS) and all(row["fits"] for row in rows.values())
