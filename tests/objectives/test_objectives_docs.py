"""The ten lines of docs/objectives.md, run as they stand there."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import objectives as O

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "objectives.md"


def log_probs(params, tokens):
  """A policy without context: one row of logits per position."""
  return jnp.take_along_axis(jax.nn.log_softmax(params), tokens.T, axis=1).T


@jax.jit
def rollout(params):
  """Every response is rewarded for its share of token 0."""
  tokens = jax.random.categorical(jax.random.key(0), params, shape=(64, len(params)))
  reward = jnp.mean(tokens == 0, axis=1)
  return dict(
    tokens=tokens,
    old_logp=log_probs(params, tokens),
    advantage=O.group_advantages(reward[None])[0],
    mask=jnp.ones(tokens.shape),
  )


def test_ten_lines_of_optax():
  pytest.importorskip("optax")
  code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1)
  statements = [line for line in code.splitlines() if line.strip()]
  assert len(statements) <= 12
  params = jnp.zeros((5, 4))
  batch, losses = rollout(params), []

  def batches():
    for start in range(0, 64, 16):
      yield {name: x[start : start + 16] for name, x in batch.items()}
      losses.append({name: float(x) for name, x in scope["metrics"].items()})

  scope = dict(log_probs=log_probs, params=params, batches=batches())
  exec(code, scope)
  assert len(losses) == 4
  assert losses[0]["ratio/deviation"] == 0  # On policy.
  assert all(metrics["ratio/deviation"] > 1e-4 for metrics in losses[1:])
  assert max(metrics["clip_fraction/token"] for metrics in losses) > 0
  before, after = (np.mean(jax.nn.softmax(p)[:, 0]) for p in (params, scope["params"]))
  assert after > before


def test_the_gradient_of_micro_batches_without_responses_is_0():
  (line,) = re.findall(r"^grads = jax.tree.map.*", PAGE.read_text(), re.M)
  sums = O.rft_loss.sums(
    *jnp.zeros((2, 2, 3)), O.selection_weights([[0.0, 0.0]])[0], jnp.ones((2, 3))
  )
  scope = dict(jax=jax, O=O, sums=sums, grads=[jnp.zeros(4)])
  exec(line, scope)
  np.testing.assert_array_equal(scope["grads"], np.zeros((1, 4)))
  scope |= dict(sums=(O.Mean(jnp.float32(6), jnp.float32(3)), {}), grads=[jnp.full(4, 6.0)])
  exec(line, scope)
  np.testing.assert_array_equal(scope["grads"], np.full((1, 4), 2.0))


def test_every_public_loss_is_on_the_page():
  page = PAGE.read_text()
  for name, value in vars(O).items():
    if inspect.isfunction(value) and not name.endswith("_ratio") and name != "reduced":
      assert re.search(rf"\b{name}\b", page), name
