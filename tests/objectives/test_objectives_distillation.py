"""Advantages by a teacher: a loop in NumPy, and what they estimate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import compiled

from gspo_jax import objectives as O


def arrays(seed=0):
  rng = np.random.default_rng(seed)
  mask_BT = (rng.random((4, 9)) < 0.6).astype(np.float32)
  mask_BT[2] = 0
  old_BT, teacher_BT = np.where(mask_BT > 0, rng.normal(-2, 1, (2, 4, 9)), np.nan)
  return old_BT.astype(np.float32), teacher_BT.astype(np.float32), mask_BT


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_it_is_the_sum_over_later_tokens(discount):
  """Observations between two tokens do not count as time."""
  old_BT, teacher_BT, mask_BT = arrays()
  found_BT = np.asarray(compiled(O.distillation_advantages, old_BT, teacher_BT, mask_BT, discount))
  expected_BT = np.zeros(mask_BT.shape)
  for b, mask_T in enumerate(mask_BT):
    later = 0.0
    for t in np.flatnonzero(mask_T)[::-1]:
      later = discount * later - (np.float64(old_BT[b, t]) - teacher_BT[b, t])
      expected_BT[b, t] = later
  np.testing.assert_allclose(found_BT, expected_BT, atol=2e-6)
  assert not found_BT[mask_BT == 0].any() and np.abs(found_BT).max() > 0.5


def test_reverse_kl_is_a_mean_over_tokens_however_they_are_split():
  old_BT, teacher_BT, mask_BT = arrays()
  inside = mask_BT > 0
  expected = (np.float64(old_BT) - teacher_BT)[inside].mean()
  assert float(compiled(O.reverse_kl, old_BT, teacher_BT, mask_BT)) == pytest.approx(
    expected, rel=1e-5
  )
  halves = [
    compiled(O.reverse_kl.sums, *(x[i : i + 2] for x in (old_BT, teacher_BT, mask_BT)))
    for i in (0, 2)
  ]
  assert float(O.compute(O.merge(*halves))) == pytest.approx(expected, rel=1e-5)
  empty = compiled(O.reverse_kl, *(np.tile(x[2:3], (4, 1)) for x in (old_BT, teacher_BT, mask_BT)))
  assert float(empty) == 0


def test_its_policy_gradient_is_that_of_the_reverse_kl_divergence():
  """Over all responses of two tokens of three words, weighted by their probability; γ = 1."""
  rng = np.random.default_rng(0)
  student, teacher = (
    (jnp.array(rng.normal(size=3)), jnp.array(rng.normal(size=(3, 3)))) for _ in range(2)
  )
  y_B2 = np.stack(np.meshgrid(range(3), range(3), indexing="ij"), -1).reshape(-1, 2)

  def logp(tables):
    first, second = map(jax.nn.log_softmax, tables)
    return jnp.stack([first[y_B2[:, 0]], second[y_B2[:, 0], y_B2[:, 1]]], 1)

  def divergence(tables):
    p_B = jnp.exp(logp(tables).sum(1))
    return (p_B * (logp(tables) - logp(teacher)).sum(1)).sum()

  def surrogate(tables):
    old_BT = jax.lax.stop_gradient(logp(tables))
    advantage_BT = O.distillation_advantages(old_BT, logp(teacher), np.ones((9, 2)), 1.0)
    p_B = jnp.exp(old_BT.sum(1))
    return -(p_B[:, None] * jnp.exp(logp(tables) - old_BT) * advantage_BT).sum()

  gradients = (jax.jit(jax.grad(f))(student) for f in (surrogate, divergence))
  for ours, exact in zip(*gradients, strict=True):
    np.testing.assert_allclose(ours, exact, atol=1e-6)
    assert np.abs(exact).max() > 0.01


def test_it_is_a_constant_and_says_what_is_wrong():
  old_BT, teacher_BT, mask_BT = arrays()
  clean = [np.nan_to_num(x) for x in (old_BT, teacher_BT)]

  def total(x, y):
    return O.distillation_advantages(x, y, mask_BT, 1.0).sum()

  for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(*clean):
    assert not np.any(gradient)
  assert np.isfinite(O.distillation_advantages(old_BT, teacher_BT, mask_BT)).all()
  excluded_BT = np.array([[-2.0, -np.inf, -1.0]], np.float32)  # Outside the teacher's top k.
  advantage_BT = jax.jit(O.distillation_advantages)(-np.ones((1, 3)), excluded_BT, np.ones((1, 3)))
  assert advantage_BT[0, 0] == -1 and np.isfinite(advantage_BT).all()
  with pytest.raises(ValueError, match=r"teacher_logp_BT has shape \(4, 8\)"):
    O.distillation_advantages(old_BT, teacher_BT[:, 1:], mask_BT)
  with pytest.raises(ValueError, match="teacher_logp_BT is not finite where mask_BT is 1"):
    O.distillation_advantages(old_BT, np.full_like(teacher_BT, -np.inf), mask_BT)
