"""What was saved comes back bit for bit, onto any mesh, or not at all."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from gspo_jax import checkpoint, sharding
from gspo_jax.context import new_state
from gspo_jax.models import transformer
from gspo_jax.models.sizes import tiny_moe

MODEL = dataclasses.replace(
  tiny_moe(64), hidden_size=32, num_layers=2, num_heads=2, head_dim=16, moe_intermediate_size=16
)
TX = optax.adamw(1e-3)
CONFIG = checkpoint.CheckpointConfig(
  directory="", every=1, keep=2, keep_every=0, best="", grace_s=30.0
)


def state_on(mesh, model=MODEL, seed=0):
  shardings = transformer.shardings(model, sharding.TRAIN, mesh)
  init = jax.jit(lambda key: transformer.init(model, key), out_shardings=shardings)
  return new_state(init(jax.random.key(seed)), TX)


def mesh_of(*sizes):
  return sharding.make_mesh(sharding.MeshConfig(*sizes))


def save(directory, state, steps=(1,), host=None):
  checkpoints = checkpoint.Checkpointer(directory, CONFIG)
  for step in steps:
    checkpoints.save(step, state, host or {"data": {"next": step}})
  checkpoints.close()


def restore(directory, like, mesh):
  checkpoints = checkpoint.Checkpointer(directory, CONFIG)
  step = checkpoints.latest()
  state, host = checkpoints.restore(step, checkpoint.abstract(like, mesh))
  checkpoints.close()
  return step, state, host


def test_values_and_shardings_come_back_on_another_mesh(tmp_path):
  with jax.set_mesh(mesh_of(1, 2, 2, 2)):
    saved = state_on(jax.sharding.get_mesh())
    save(tmp_path, saved, steps=(1, 2, 3))
  mesh = mesh_of(2, 4, 1, 1)
  with jax.set_mesh(mesh):
    other = state_on(mesh, seed=1)
    step, restored, host = restore(tmp_path, other, mesh)
    assert step == 3 and host == {"data": {"next": 3}}
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(saved))
    chex.assert_trees_all_equal(jax.tree.map(jax.typeof, restored), jax.tree.map(jax.typeof, other))
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]  # keep=2


def test_a_donated_state_is_saved_as_it_was(tmp_path):
  mesh = mesh_of(8, 1, 1, 1)
  with jax.set_mesh(mesh):
    state = state_on(mesh)
    expected = jax.tree.map(jnp.copy, state)
    checkpoints = checkpoint.Checkpointer(tmp_path, CONFIG)
    checkpoints.save(1, state, {})
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    checkpoints.close()
    _, restored, _ = restore(tmp_path, expected, mesh)
    chex.assert_trees_all_equal(restored, expected)


def test_a_half_written_checkpoint_is_not_read(tmp_path):
  mesh = mesh_of(8, 1, 1, 1)
  with jax.set_mesh(mesh):
    state = state_on(mesh)
    save(tmp_path, state, steps=(1,))
    # What a kill in the middle of a write leaves: the directory before its final rename.
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    step, restored, _ = restore(tmp_path, state, mesh)
    assert step == 1
    chex.assert_trees_all_equal(restored, state)


def test_another_model_is_refused_with_both_shapes(tmp_path):
  mesh = mesh_of(8, 1, 1, 1)
  with jax.set_mesh(mesh):
    save(tmp_path, state_on(mesh))
    wider = state_on(mesh, dataclasses.replace(MODEL, vocab_size=128))
    with pytest.raises(ValueError, match=r"embed has shape \(64, 32\).*wants \(128, 32\)"):
      restore(tmp_path, wider, mesh)
