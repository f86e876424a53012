"""Kernels of one position of the gated delta rule: those of TPU and GPU equal the plain form."""

import chex
import jax
import jax.numpy as jnp
import pytest

from gspo_jax.models.attention import delta_kernel, delta_rule

STEPS = dict(
  tpu=lambda *arguments: delta_kernel.step_tpu(*arguments, interpret=True),
  gpu=delta_kernel.step_gpu,
)


def arrays(rows, key_heads, repeats, key_dim, value_dim):
  keys = iter(jax.random.split(jax.random.key(0), 6))

  def normal(*shape):
    return jax.random.normal(next(keys), shape)

  heads = rows, 1, key_heads
  inputs = delta_rule.Inputs(
    q_BTKH=delta_rule.normalise(normal(*heads, key_dim)),
    k_BTKH=delta_rule.normalise(normal(*heads, key_dim)),
    v_BTKRJ=normal(*heads, repeats, value_dim).astype(jnp.bfloat16),
    g_BTKR=-jnp.exp(normal(*heads, repeats)),
    beta_BTKR=jax.nn.sigmoid(normal(*heads, repeats)),
  )
  states = normal(3, rows, key_heads, repeats, key_dim, value_dim)
  return inputs.masked(jnp.arange(rows)[:, None] != 1), states


@pytest.mark.parametrize("platform", STEPS)
@pytest.mark.parametrize(
  "shape", [(3, 2, 2, 128, 128), pytest.param((2, 16, 1, 32, 16), marks=pytest.mark.long)]
)
def test_a_kernel_computes_a_step_and_leaves_other_layers_alone(platform, shape, monkeypatch):
  monkeypatch.setattr(delta_kernel, "BLOCK", 8 * 4 * 32 * 16)  # Two blocks of eight key heads.
  inputs, states = arrays(*shape)
  y_BKRJ, updated = jax.jit(STEPS[platform])(inputs, states, jnp.int32(1))
  expected, state = delta_rule.step(inputs, states[1])
  chex.assert_trees_all_close((y_BKRJ[:, None], updated[1]), (expected, state), atol=2e-6)
  chex.assert_trees_all_equal(updated[::2], states[::2])
  chex.assert_trees_all_equal(updated[1, 1], states[1, 1])  # A row of padding.


def test_where_no_kernel_runs_the_plain_form_does():
  inputs, states = arrays(2, 2, 2, 8, 8)
  y_BTKRJ, updated = delta_kernel.step(inputs, states, 2)
  chex.assert_trees_all_equal((y_BTKRJ, updated[2]), delta_rule.step(inputs, states[2]))
  chex.assert_trees_all_equal(updated[:2], states[:2])
