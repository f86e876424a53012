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
  """Declaration of an estimator: its function, needs and compatible parts."""

  name: str  # Name in a configuration.
  # (rewards [P, G], valid_PG, `options` by name) -> advantages [P, G]. None if they need more than
  # rewards of a group.
  of_group: Callable[..., Array] | None = None
  options: tuple[str, ...] = ()  # Options of a loss, and `right_from`, for `of_group`.
  group: bool = False  # Compares responses to a prompt: needs at least two.
  relative: bool = False  # Groups of equal rewards get 0.
  parts: bool = False  # Compares turns or lines: groups get 0 if these have equal rewards.
  across_groups: bool = False  # Statistics of the whole batch, without masked responses.
  # Requirements: a "critic", a "teacher", a "reference" (in the reward), "signals" (several
  # rewards, costs), "turns" or "lines" with separate rewards. `beside` lists further allowed ones.
  needs: frozenset[str] = frozenset()
  beside: frozenset[str] = frozenset()
  kinds: tuple[str, ...] = ()  # Group estimators that it may replace; (): all.
  by_token: bool = False  # Advantages differ between tokens of a response.
  by_response: bool = True  # Also gives one per response, for losses without token advantages.
  of_rewards: bool = True  # Includes advantages from a group's rewards.
  on_devices: bool = False  # Computed after the passes of an iteration; logs have it from there.


def _soft(
  reward_PG: ArrayLike, *, valid_PG: ArrayLike, beta: Number, soft_value: Number | None = None
) -> Array:
  return soft_advantages(reward_PG, beta, soft_value, valid_PG=valid_PG)


# An environment's turns do not affect estimators of whole responses.
_WHOLE = frozenset({"turns"})


_KINDS = ("std", "none", "leave_one_out")  # Turns and lines may use these too.

# By default a configuration gets the first with its needs met; without one, that of the loss's
# publication (`policy_loss`).
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
