"""Every loss and its gradient against the papers' equations in float64 NumPy."""

import functools

import jax
import numpy as np
import pytest
from support import objectives_reference as paper

from gspo_jax import objectives as O

# name: (ours, paper's, advantage per token)
LOSSES = {
  "gspo": (O.gspo_loss, paper.gspo, False),
  "gspo_dual": (
    functools.partial(O.gspo_loss, dual_clip=1.001),
    functools.partial(paper.gspo, dual=1.001),
    False,
  ),
  "gspo_half": (
    functools.partial(O.gspo_loss, length_exponent=0.5),
    functools.partial(paper.gspo, alpha=0.5),
    False,
  ),
  "gspo_raw": (
    functools.partial(O.gspo_loss, length_exponent=0.0, clip_low=0.2, clip_high=0.3),
    functools.partial(paper.gspo, alpha=0, low=0.2, high=0.3),
    False,
  ),
  "gspo_token": (O.gspo_token_loss, paper.gspo_token, True),
  "gspo_token_row": (O.gspo_token_loss, paper.gspo_token, False),
  "grpo": (O.grpo_loss, paper.grpo, False),
  "grpo_token": (
    functools.partial(O.grpo_loss, aggregate="token", dual_clip=3.0),
    functools.partial(paper.grpo, how="token", dual=3.0),
    True,
  ),
  "grpo_constant": (
    functools.partial(O.grpo_loss, aggregate="constant", max_length=50),
    functools.partial(paper.grpo, how="constant", max_length=50),
    True,
  ),
  "ppo": (O.ppo_loss, functools.partial(paper.grpo, low=0.2, high=0.2), True),
  "dapo": (O.dapo_loss, functools.partial(paper.grpo, low=0.2, high=0.28, how="token"), False),
  "dr_grpo": (
    functools.partial(O.dr_grpo_loss, max_length=12),
    functools.partial(paper.grpo, low=0.2, high=0.2, how="constant", max_length=12),
    False,
  ),
  "cispo": (O.cispo_loss, paper.cispo, True),
  "cispo_low": (
    functools.partial(O.cispo_loss, clip_low=0.5),
    functools.partial(paper.cispo, low=0.5),
    False,
  ),
  "gmpo": (
    functools.partial(O.gmpo_loss, clip_low=0.05),
    functools.partial(paper.gmpo, low=0.05),
    False,
  ),
  "sapo": (O.sapo_loss, paper.sapo, True),
  "sapo_row": (O.sapo_loss, paper.sapo, False),
}


@functools.cache
def ours(name):
  return jax.jit(jax.value_and_grad(lambda *args: LOSSES[name][0](*args)[0]))


def compare(name, spread, dtype, tolerance, seed=0):
  _, reference, per_token = LOSSES[name]
  case = paper.case(seed, spread=spread, dtype=dtype)
  args = case["old"], case["advantage_bt" if per_token else "advantage"], case["mask"]
  loss, grad = ours(name)(case["logp"], *args)
  args64 = [np.asarray(x, np.float64) for x in args]
  f = functools.partial(lambda logp: reference(logp, *args64))
  expected = paper.gradient(f, case["logp"].astype(np.float64))
  scale = np.abs(expected).max()
  assert loss.dtype == grad.dtype == dtype
  assert scale > 0
  np.testing.assert_allclose(grad, expected, rtol=0, atol=tolerance * scale)
  value = f(case["logp"].astype(np.float64)).real
  np.testing.assert_allclose(loss, value, rtol=tolerance, atol=tolerance * scale)
  assert np.all(np.asarray(grad)[~case["mask"]] == 0)


@pytest.mark.parametrize("spread", ["near", "mixed", "wide"])
@pytest.mark.parametrize("name", LOSSES)
def test_float32(name, spread):
  for seed in range(3):
    compare(name, spread, np.float32, 1e-6, seed)


@pytest.mark.parametrize("name", LOSSES)
def test_float64(name, x64):
  for spread in ("near", "mixed", "wide"):
    compare(name, spread, np.float64, 1e-12)


def test_sapo_keeps_its_digits_where_the_gate_is_closed():
  """The gradient of σ(x) as σ(1 − σ) is off by 1e-2 at w = 13 in float32."""
  log_ratio = np.array([[-20.0, 0.0, 1.0, 2.0, 2.5, 2.6]])
  f = jax.grad(
    lambda x: O.sapo_loss(x, np.zeros((1, 6), np.float32), np.ones(1), np.ones((1, 6)))[0]
  )
  w = np.exp(log_ratio.astype(np.float32).astype(np.float64))
  expected = -w / np.cosh((w - 1) / 2) ** 2 / 6
  np.testing.assert_allclose(f(log_ratio.astype(np.float32)), expected, rtol=2e-5)
