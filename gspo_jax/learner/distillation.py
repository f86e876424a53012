"""On-policy distillation: section `distillation` of a configuration, and advantages by a teacher.

The student samples, the teacher scores the same tokens, and each token's advantage is how much
likelier the teacher finds it than the student did, beside that of its rewards or instead of it.
"""

import dataclasses
import functools
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import objectives as O
from gspo_jax.objectives.reductions import merge
from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import Fraction, NonNegativeFloat, PositiveFloat
from gspo_jax.structs import TrainBatch


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  # "": none | Hugging Face directory | run or its checkpoint (runs/start.py) | http://host:port
  teacher: str
  coef: PositiveFloat  # of log π_teacher/π_old in the advantage of a token
  discount: Fraction  # of that of later tokens; 0: each token answers for itself alone
  reward_weight: NonNegativeFloat  # of the advantage that rewards give; 0: the teacher's alone

  def __post_init__(self):
    ranges.check(self, "distillation")
    if self.served:
      parts = urllib.parse.urlsplit(self.teacher)
      if not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"distillation.teacher={self.teacher!r} is not like http://host:port")

  @property
  def on(self) -> bool:
    return bool(self.teacher)

  @property
  def served(self) -> bool:
    """Whether the teacher is a server, and no weights are here."""
    return self.teacher.startswith(("http://", "https://"))

  @property
  def url(self) -> str:
    return self.teacher.rstrip("/")

  @property
  def alone(self) -> bool:
    """Whether nothing is learned from rewards."""
    return self.on and self.reward_weight == 0

  def check_with(self, c: Any) -> None:
    """ValueError if the other sections of a `config.RunConfig` do not go with this one."""
    if not self.on:
      for key, value in dict(coef=1.0, discount=0.0, reward_weight=1.0).items():
        if (given := getattr(self, key)) != value:
          raise ValueError(
            f"distillation.{key}={given} has no effect without a teacher; set distillation.teacher,"
            f" or this to {value:g}"
          )
      return
    if not c.has_iterations:
      return
    what, rounds = f"distillation.teacher={self.teacher!r}", c.data.query_set.extra_rounds
    s, of_server = c.sampling, f"{what}: a server's log-probs of prompts are those of"
    takes = [name for name, loss in O.POLICY_LOSSES.items() if loss.by_token]
    wrong = {
      f"{what} gives each token an advantage, which objective.name={c.objective.name!r} does not "
      f"take; set it to one of {', '.join(takes)}": not c.objective.loss.by_token,
      f"{what}, critic.name={c.critic.name!r}: both give each token its advantage; set critic.name "
      "to none": c.critic.name != "none",
      f"{what}: the student learns from its own responses, and job='offline' has others; set job "
      "to rl": c.job == "offline",
      "distillation.reward_weight=0 leaves constraints and costs without effect; set it above 0, "
      "or leave out constraints, environment.token_cost and environment.call_cost": self.alone
      and (c.constraints.on or c.environment.costs),
      f"data.query_set.extra_rounds={rounds} leaves out groups of equal rewards, of which "
      f"{what} teaches too; set it to 0": rounds > 0,
      f"{of_server} temperature 1; set sampling.temperature={s.temperature:g} to 1, or take the "
      "teacher's weights": self.served and s.temperature != 1,
      f"{of_server} all tokens; set sampling.top_k={s.top_k}, sampling.top_p={s.top_p:g}, "
      f"sampling.min_p={s.min_p:g} to 0, 1 and 0, or take the teacher's weights": self.served
      and not s.whole,
    }
    for message, found in wrong.items():
      if found:
        raise ValueError(message)

  def numbers(self) -> dict[str, float]:
    """What is an argument of the compiled program."""
    names = ("coef", "discount", "reward_weight")
    return {name: getattr(self, name) for name in names}


OFF = DistillationConfig("", coef=1.0, discount=0.0, reward_weight=1.0)


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
