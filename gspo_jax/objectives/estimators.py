"""Declarations of the estimators of advantages: function, requirements and combinations.

A trainer and its checks of configurations read these declarations.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives.advantages import group_advantages, selection_weights, soft_advantages
from gspo_jax.objectives.checks import Number


@dataclasses.dataclass(frozen=True)
class Estimator:
  """Declaration of an estimator of advantages."""

  name: str  # Name in a configuration.
  # Function (rewards [P, G], valid_PG, options by name) -> advantages [P, G]. None if advantages
  # need more than rewards of a group.
  of_group: Callable[..., Array] | None = None
  # Names of options of `of_group`: options of the loss, and `right_from`.
  options: tuple[str, ...] = ()
  group: bool = False  # Compares the responses to a prompt, and needs at least two.
  relative: bool = False  # Groups of equal rewards have advantages of 0.
  # Compares turns or lines with the same number. If their returns are equal, advantages are 0.
  parts: bool = False
  # Uses statistics of the whole batch. Masked responses are excluded from these statistics.
  across_groups: bool = False
  # Required parts of a configuration: a "critic", a "teacher", a "reference" policy in the reward,
  # "signals" (several rewards, costs), and separate rewards of "turns" or "lines".
  needs: frozenset[str] = frozenset()
  beside: frozenset[str] = frozenset()  # Parts of a configuration that are allowed, not required.
  # Names of estimators of group rewards with which this one may be combined. () means all names.
  kinds: tuple[str, ...] = ()
  by_token: bool = False  # Advantages may differ between tokens of a response.
  by_response: bool = True  # Computes one advantage per response, for losses by response.
  of_rewards: bool = True  # The advantages are, or include, advantages from a group's rewards.
  on_devices: bool = False  # Computed on the devices, after the passes of an iteration.


def _soft(
  reward_PG: ArrayLike, *, valid_PG: ArrayLike, beta: Number, soft_value: Number | None = None
) -> Array:
  """Calls `soft_advantages` with `soft_value` as its argument `value`."""
  return soft_advantages(reward_PG, beta, soft_value, valid_PG=valid_PG)


# An environment's turns do not affect estimators of whole responses.
_WHOLE = frozenset({"turns"})


_KINDS = ("std", "none", "leave_one_out")  # Estimators within a group, also for turns and lines.

_from_critic = partial(
  Estimator, by_token=True, by_response=False, of_rewards=False, on_devices=True
)

# By default, a configuration has the first of these estimators with nonempty `needs` that are all
# met, if `kinds` allows the estimator of the loss's publication (`policy_loss`). If there is no
# such estimator, the default is the estimator of the publication.
_ALL = (
  _from_critic("gae", needs=frozenset({"critic"}), beside=frozenset({"turns", "lines"})),
  _from_critic("turn_gae", needs=frozenset({"critic", "turns"})),
  Estimator(
    "distillation",
    needs=frozenset({"teacher"}),
    beside=frozenset({"signals", "turns", "lines"}),
    by_token=True,
    by_response=False,
    on_devices=True,
  ),
  Estimator("constraints", group=True, needs=frozenset({"signals"})),
  Estimator("gdpo", group=True, across_groups=True, needs=frozenset({"signals"})),
  Estimator(
    "kl_in_reward",
    group=True,
    across_groups=True,
    needs=frozenset({"reference"}),
    kinds=(*_KINDS, "batch"),
    on_devices=True,
  ),
  *(
    Estimator(name, group=True, parts=True, needs=frozenset({name}), kinds=_KINDS, by_token=True)
    for name in ("turns", "lines")
  ),
  *(
    Estimator(
      name, partial(group_advantages, normalize=name), group=True, relative=True, beside=_WHOLE
    )
    for name in _KINDS
  ),
  Estimator(
    "batch",
    partial(group_advantages, normalize="batch"),
    group=True,
    relative=True,
    across_groups=True,
    beside=_WHOLE,
  ),
  Estimator("soft", _soft, options=("beta", "soft_value"), group=True, beside=_WHOLE),
  Estimator(
    "best", partial(selection_weights, select="best"), options=("right_from",), beside=_WHOLE
  ),
  Estimator("reward", partial(selection_weights, select="reward"), beside=_WHOLE),
)
ESTIMATORS = {estimator.name: estimator for estimator in _ALL}
