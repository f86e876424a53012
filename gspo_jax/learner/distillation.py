"""On-policy distillation: section `distillation` of a configuration, and advantages by a teacher.

The student samples, the teacher scores the same tokens, and each token's advantage is how much
likelier the teacher finds it than the student did, beside that of its rewards or instead of it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import objectives as O
from gspo_jax.objectives.reductions import merge
from gspo_jax.settings.critic import DistillationConfig
from gspo_jax.structs import TrainBatch


def make_distill(
  config: DistillationConfig,
) -> Callable[[Sequence[TrainBatch]], tuple[list[TrainBatch], dict[str, jax.Array]]]:
  """A function of all mini-batches of an iteration, which need `old_logp_BT` and `teacher_logp_BT`.
  It returns them with the `advantage_BT` of each token in the place of the latter, and metrics.

  Â_t = w Â_reward + c Σ_{u≥t} γ^(u−t) (log π_teacher(y_u) − log π_old(y_u)), with c `coef`, γ
  `discount` and w `reward_weight` (`objectives.distillation_advantages`).
  """

  def distill(batches: Sequence[TrainBatch]) -> tuple[list[TrainBatch], dict[str, jax.Array]]:
    return _with_advantages(list(batches), config.numbers())

  return distill


@jax.jit
def _with_advantages(
  batches: list[TrainBatch], number: Mapping[str, Any]
) -> tuple[list[TrainBatch], dict[str, jax.Array]]:
  def advantages(batch: TrainBatch) -> TrainBatch:
    reward_BT = batch.advantage_BT
    if reward_BT is None:
      reward_BT = batch.advantage_B[:, None]
    gain_BT = number["coef"] * O.distillation_advantages(
      batch.old_logp_BT, batch.teacher_logp_BT, batch.mask_BT, number["discount"]
    )
    reward_BT = jnp.where(batch.mask_BT > 0, number["reward_weight"] * reward_BT, 0)
    return batch.replace(advantage_BT=reward_BT + gain_BT, teacher_logp_BT=None)

  divergences = [
    O.reverse_kl.sums(batch.old_logp_BT, batch.teacher_logp_BT, batch.mask_BT) for batch in batches
  ]
  metrics = {"distillation/reverse_kl": functools.reduce(merge, divergences)}
  return [advantages(batch) for batch in batches], O.compute(metrics)
