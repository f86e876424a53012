"""Estimators of advantages: what each is made of, and what it goes with.

A trainer and its checks read here what they would otherwise have to know of each.
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
  """What a declared estimator is made of, and what it goes with."""

  name: str  # in a configuration
  # Rewards [P, G], valid_PG and the `options`, by name -> advantages [P, G]; None: they are made of
  # more than a group's rewards.
  of_group: Callable[..., Array] | None = None
  options: tuple[str, ...] = ()  # of a loss, that `of_group` takes
  group: bool = False  # a response is judged by others to the same prompt: it needs two of them
  relative: bool = False  # all members of a group of equal rewards get 0
  across_groups: bool = False  # of the whole batch, in which what is masked out does not count
  # What makes it possible: a "critic", a "teacher", a "reference" (in the reward), "signals"
  # (several rewards, costs), "turns" or "lines" with rewards of their own; and which of these there
  # may be besides.
  needs: frozenset[str] = frozenset()
  beside: frozenset[str] = frozenset()
  kinds: tuple[str, ...] = ()  # estimators of a group's rewards whose place it takes; (): of all
  by_token: bool = False  # advantages differ between the tokens of a response
  by_response: bool = True  # a response has one too, for losses that take no others
  of_rewards: bool = True  # advantages that a group's rewards give are in it
  on_devices: bool = False  # made after the passes of an iteration; dumps have it from there


def _soft(
  reward_PG: ArrayLike, *, valid_PG: ArrayLike, beta: Number, soft_value: Number | None = None
) -> Array:
  return soft_advantages(reward_PG, beta, soft_value, valid_PG=valid_PG)


# An environment's turns do not disturb what is of whole responses.
_WHOLE = frozenset({"turns"})


_KINDS = ("std", "none", "leave_one_out")  # of which turns and lines may have some too

# Where a configuration leaves it open, the first whose needs are met is taken, and where there is
# none, the one that the loss was published with (`policy_loss`).
_ALL = (
  Estimator(
    "gae",
    needs=frozenset({"critic"}),
    beside=frozenset({"turns", "lines"}),
    by_token=True,
    by_response=False,
    of_rewards=False,
    on_devices=True,
  ),
  Estimator(
    "turn_gae",
    needs=frozenset({"critic", "turns"}),
    by_token=True,
    by_response=False,
    of_rewards=False,
    on_devices=True,
  ),
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
  Estimator(
    "turns", group=True, relative=True, needs=frozenset({"turns"}), kinds=_KINDS, by_token=True
  ),
  Estimator(
    "lines", group=True, relative=True, needs=frozenset({"lines"}), kinds=_KINDS, by_token=True
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
  Estimator("best", partial(selection_weights, select="best"), beside=_WHOLE),
  Estimator("reward", partial(selection_weights, select="reward"), beside=_WHOLE),
)
ESTIMATORS = {estimator.name: estimator for estimator in _ALL}
