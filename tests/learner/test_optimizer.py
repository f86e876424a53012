"""The learning rate: where it begins, and that it ends where the configuration says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.learner.optimizer import last_rate, rates
from gspo_jax.settings.training import OptimizerConfig

CONFIG = OptimizerConfig(
  learning_rate=1e-3, schedule="linear", warmup_steps=0, final_fraction=0.1, b1=0.9, b2=0.95,
  eps=1e-8, weight_decay=0.0, clip_norm=1.0,
)  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_last_update_has_the_final_fraction(schedule, warmup, final):
  config = dataclasses.replace(CONFIG, schedule=schedule, warmup_steps=warmup, final_fraction=final)
  rate = rates(config, 40)
  np.testing.assert_allclose(rate[-1], 1e-3 * final, rtol=1e-5, atol=1e-10)
  np.testing.assert_allclose(rate[warmup], 1e-3, rtol=1e-5)  # the first one after the warm-up
  assert rate.max() <= 1e-3 * (1 + 1e-5)
  assert (np.diff(rate[warmup:]) < 0).all() or final == 1


def test_a_constant_rate_and_short_runs_have_no_end_to_reach():
  np.testing.assert_allclose(rates(dataclasses.replace(CONFIG, schedule="constant"), 5), 1e-3)
  np.testing.assert_allclose(rates(CONFIG, 1), [1e-3])
  np.testing.assert_allclose(rates(CONFIG, 2), [1e-3, 1e-4], rtol=1e-5)
  rising = rates(dataclasses.replace(CONFIG, warmup_steps=10), 5)
  assert (np.diff(rising) > 0).all() and rising[-1] < 1e-3


def test_the_rate_on_show_is_that_of_the_last_update_that_was_applied():
  all_rates = rates(CONFIG, 5)
  shown = [float(last_rate(all_rates, jnp.int32(step), waits=2)) for step in range(8)]
  np.testing.assert_allclose(shown, [0, 0, 0, *all_rates], rtol=1e-6)
