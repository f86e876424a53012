"""Several TPU slices, which only the data-centre network joins: `mesh.data` runs over them, and
what is sent between them is the gradient, once an update."""

import jax
import numpy as np
import pytest
from support.aot import needs_libtpu
from support.small_models import MODELS, MOE
from support.small_updates import (
  PER_MICRO_BATCH,
  SGD,
  after,
  assert_same_update,
  make_batch,
  placed,
  update,
)

from gspo_jax import sharding
from gspo_jax.aot import hlo, hlo_costs, links
from gspo_jax.aot.compiler import devices_of
from gspo_jax.learner.state import new_state
from gspo_jax.settings.mesh import MeshConfig, RolloutMeshConfig

MESH = (2, 2, 2, 1)
MICROBATCHES = 2


@pytest.fixture
def two_slices(monkeypatch):
  """The simulated devices as two slices of four."""
  monkeypatch.setattr(sharding, "slice_of", lambda device: device.id // 4)


@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (4, 1, 2, 1)], ids=str)
def test_a_replica_is_within_one_slice(two_slices, shape):
  interleaved = sorted(jax.devices(), key=lambda device: device.id % 4)
  mesh = sharding.make_mesh(MeshConfig(*shape), interleaved)
  slices = [{device.id // 4 for device in replica.flat} for replica in mesh.devices]
  assert slices == [{0}] * (shape[0] // 2) + [{1}] * (shape[0] // 2)


@pytest.mark.parametrize("shape, devices", [((1, 8, 1, 1), 8), ((2, 3, 1, 1), 6)], ids=str)
def test_what_does_not_fit_slices_is_refused_with_their_sizes(two_slices, shape, devices):
  sizes = f"2 slices of 4, {devices - 4} devices"
  with pytest.raises(ValueError, match=rf"mesh\.fsdp=.*{sizes}.*make mesh\.data a multiple of 2"):
    sharding.make_mesh(MeshConfig(*shape), jax.devices()[:devices])


def test_trainer_and_sampler_may_have_a_slice_each(two_slices):
  trainer, sampler = sharding.make_meshes(MeshConfig(1, 4, 1, 1), RolloutMeshConfig(1, 2, 1, 2))
  for mesh, number in ((trainer, 0), (sampler, 1)):
    assert {device.id // 4 for device in mesh.devices.flat} == {number}


@needs_libtpu
@pytest.mark.parametrize(
  "topology, shape", [("v5p:2x2x2", (2, 8, 1, 1)), ("v5e:4x4", (4, 2, 4, 1))]
)
def test_slices_of_tpus_become_replicas(topology, shape):
  devices = devices_of(topology, slices=2)
  mesh = sharding.make_mesh(MeshConfig(*shape), devices)
  slices = [{device.slice_index for device in replica.flat} for replica in mesh.devices]
  assert slices == [{0}] * (shape[0] // 2) + [{1}] * (shape[0] // 2)
  with pytest.raises(ValueError, match=r"make mesh\.data a multiple of 2"):
    sharding.make_mesh(MeshConfig(1, -1, 1, 1), devices)


def sums_over_data(step, model, shape):
  """(times, bytes, members) of each sum of an update that runs over replicas, and the bytes of all
  weights for each device of a replica."""
  with placed(model, make_batch(model), shape) as (params, batch):
    program = hlo.parse(step.compile(new_state(params, SGD), batch).function.as_text())
    weights = sum(x.nbytes for x in jax.tree.leaves(params)) / np.prod(shape[1:])
  replica_of = np.repeat(np.arange(shape[0]), np.prod(shape[1:]))
  sums = []
  for instruction, times, _ in hlo_costs.executed(program):
    members = links.members(instruction.attributes)
    if instruction.op in ("all-reduce", "reduce-scatter") and len({*replica_of[members]}) > 1:
      sums.append((times, instruction.bytes, len(members)))
  return sums, weights


def test_an_update_sums_each_gradient_over_replicas_once():
  """The sums of a replica, of which no two devices send the same; micro-batches sum scalars."""
  sums, weights = sums_over_data(update(MOE, MICROBATCHES), MOE, MESH)
  assert sum(size for times, size, _ in sums if times > 1) < 0.02 * weights
  large = [(size, members) for _, size, members in sums if size > 0.02 * weights]
  assert sum(size for size, _ in large) == weights
  assert {members for _, members in large} == {MESH[0]}


@pytest.mark.parametrize("name, shape", [("gemma", (2, 2, 1, 2)), ("moe", (4, 1, 2, 1))])
@pytest.mark.long
def test_an_update_of_replicas_is_that_of_one_device(name, shape):
  model = MODELS[name]
  step, batch = update(model, MICROBATCHES), make_batch(model)
  expected = after(step, model, batch)
  assert_same_update(after(step, model, batch, shape), expected, apart=(*PER_MICRO_BATCH, "router"))
