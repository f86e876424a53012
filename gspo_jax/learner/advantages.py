"""The devices' part of advantages: after the passes of an iteration, before its updates.

The host's part, of rewards, is rollouts/advantages.py.
"""

from collections.abc import Callable, Sequence

import jax

from gspo_jax.learner.critic import Critic, make_advantages
from gspo_jax.learner.distillation import make_distill
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import TrainBatch

# From all mini-batches of an iteration to the same with advantages of tokens, and metrics.
Made = tuple[list[TrainBatch], dict[str, jax.Array]]
Part = Callable[[Sequence[TrainBatch]], Made]


def make(c: RunConfig, critic: Critic | None) -> Part:
  """The part of the configured estimator."""
  make_part = PARTS.get(c.estimator.name)
  return make_part(c, critic) if make_part else _of_the_host


def _of_the_host(batches: Sequence[TrainBatch]) -> Made:
  return list(batches), {}


PARTS: dict[str, Callable[[RunConfig, Critic | None], Part]] = dict(
  gae=lambda c, critic: make_advantages(c.critic, critic.numbers),
  distillation=lambda c, _: make_distill(c.distillation),
)
