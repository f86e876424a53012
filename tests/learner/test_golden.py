"""Updates of configs/tiny.py:hybrid, shrunk, have the recorded figures."""

import dataclasses

import pytest
from support.configs import config_of
from support.small_models import SMALL, initial
from support.small_updates import ALL_TERMS, learner, make_batch, scalars

from configs import tiny
from gspo_jax.learner import optimizer
from gspo_jax.learner.state import new_state
from gspo_jax.learner.step import make_rl_step

# Figures of three updates on one batch. A change of the model's arithmetic moves them.
GOLDEN = dict(
  loss=[0.115197, 0.0430415, 0.0143853],
  grad_norm=[10.87804, 2.442711, 2.577663],
  entropy=[3.695423, 3.692561, 3.692580],
)


def hybrid():
  return tiny.get_config("hybrid")


def test_updates_of_the_hybrid_have_the_recorded_figures():
  config = config_of(hybrid)
  linear = dataclasses.replace(config.model.linear, pattern=2)
  model = dataclasses.replace(
    config.model, vocab_size=64, moe_intermediate_size=16, linear=linear, **SMALL
  )
  tx = optimizer.make(dataclasses.replace(config.rl_optimizer, warmup_steps=0), 3)
  step = make_rl_step(learner(model, load_balance_coef=0.01), ALL_TERMS, tx)
  state, batch, rows = new_state(initial(model), tx), make_batch(model), []
  for _ in range(3):
    state, metrics = step(state, batch)
    rows.append(scalars(metrics))
  actual = {name: [row[name] for row in rows] for name in GOLDEN}
  assert actual == {name: pytest.approx(values, rel=1e-3) for name, values in GOLDEN.items()}
