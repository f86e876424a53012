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
  config: DistillationConfig, teacher_logp: Callable[[TrainBatch], jax.Array]
) -> Callable[[Sequence[TrainBatch]], tuple[list[TrainBatch], dict[str, jax.Array]]]:
  """A function of all mini-batches of an iteration, which need `old_logp_BT`. It returns them with
  the `advantage_BT` of each token, and metrics.

  Â_t = w Â_reward + c Σ_{u≥t} γ^(u−t) (log π_teacher(y_u) − log π_old(y_u)), with c `coef`, γ
  `discount` and w `reward_weight` (`objectives.distillation_advantages`).

  Args:
    teacher_logp: log-probabilities [B, T] of the tokens of a batch.
  """

  def distill(batches: Sequence[TrainBatch]) -> tuple[list[TrainBatch], dict[str, jax.Array]]:
    logps = [teacher_logp(batch) for batch in batches]
    return _with_advantages(list(batches), logps, config.numbers())

  return distill


@jax.jit
def _with_advantages(
  batches: list[TrainBatch], logps: list[jax.Array], number: Mapping[str, Any]
) -> tuple[list[TrainBatch], dict[str, jax.Array]]:
  def one(batch: TrainBatch, logp_BT: jax.Array) -> TrainBatch:
    reward_BT = batch.advantage_BT
    if reward_BT is None:
      reward_BT = batch.advantage_B[:, None]
    arguments = batch.old_logp_BT, logp_BT, batch.mask_BT, number["discount"]
    gain_BT = number["coef"] * O.distillation_advantages(*arguments)
    reward_BT = jnp.where(batch.mask_BT > 0, number["reward_weight"] * reward_BT, 0)
    return batch.replace(advantage_BT=reward_BT + gain_BT)

  pairs = list(zip(batches, logps, strict=True))
  divergences = [O.reverse_kl.sums(b.old_logp_BT, logp, b.mask_BT) for b, logp in pairs]
  metrics = {"distillation/reverse_kl": functools.reduce(merge, divergences)}
  return [one(*pair) for pair in pairs], O.compute(metrics)
