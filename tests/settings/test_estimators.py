"""Which estimator of advantages a configuration has, and what is refused with it."""

import pytest
from support.configs import config_of

from configs import common
from gspo_jax import objectives as O
from gspo_jax.learner import advantages as devices
from gspo_jax.rollouts import advantages as host
from gspo_jax.settings.estimators import REMEDIES

CRITIC = dict(critic__name="model", objective__name="ppo_clip")
TEACHER = dict(distillation__teacher="/t", objective__name="ppo_clip")
COST = dict(constraints__costs__length__bound="at_most", constraints__costs__length__limit=6.0)
TALK = dict(environment__name="calculator", environment__max_turns=4)
PRICE = dict(objective__reward_kl_coef=0.1)
LINES = dict(
  reward__name="recurrence",
  reward__per_line=True,
  objective__name="gspo_token",
  data__train="recurrence:train",
  data__eval="recurrence:heldout",
)

# The estimator, and the one of rewards on the host.
CHOSEN = {
  "a price in the reward": (PRICE, "kl_in_reward", "std"),
  "the same by the batch": (PRICE | dict(objective__advantage="batch"), "kl_in_reward", "batch"),
  "nothing": ({}, "std", "std"),
  "the loss's own": (dict(objective__name="dr_grpo"), "none", "none"),
  "named": (dict(objective__advantage="leave_one_out"), "leave_one_out", "leave_one_out"),
  "a critic": (CRITIC, "gae", "std"),
  "a critic, named": (CRITIC | dict(objective__advantage="gae"), "gae", "std"),
  "a critic of turns": (CRITIC | TALK, "gae", "turns"),
  "a critic by the turn": (
    CRITIC | TALK | dict(objective__advantage="turn_gae"),
    "turn_gae",
    "turns",
  ),
  "a teacher": (TEACHER, "distillation", "std"),
  "a teacher of turns": (TEACHER | TALK, "distillation", "turns"),
  "a teacher and a cost": (TEACHER | COST, "distillation", "constraints"),
  "a cost": (COST, "constraints", "constraints"),
  "a cost, by the batch": (COST | dict(objective__advantage="gdpo"), "gdpo", "gdpo"),
  "the same of another loss": (
    COST | dict(objective__advantage="gdpo", objective__name="dr_grpo"),
    "gdpo",
    "gdpo",
  ),
  "a teacher, named, and a cost": (
    TEACHER | COST | dict(objective__advantage="distillation"),
    "distillation",
    "constraints",
  ),
  "turns": (TALK, "turns", "turns"),
  "turns by their mean": (TALK | dict(objective__advantage="none"), "turns", "turns"),
  "conversations": (TALK | dict(objective__name="rft"), "best", "best"),
  "lines": (LINES, "lines", "lines"),
}


@pytest.mark.parametrize("changes, name, name_of_rewards", CHOSEN.values(), ids=CHOSEN)
def test_first_estimator_with_its_needs_met_is_chosen(changes, name, name_of_rewards):
  c = config_of(common.base, **changes)
  assert (c.estimator.name, c.estimator_of_rewards.name) == (name, name_of_rewards)


@pytest.mark.parametrize("name", O.ESTIMATORS)
def test_each_estimator_has_an_implementation(name):
  estimator = O.ESTIMATORS[name]
  group_kinds = [other for other, declared in O.ESTIMATORS.items() if declared.of_group]
  assert estimator.name == name and estimator.needs | estimator.beside <= REMEDIES.keys()
  assert name in group_kinds or name in host.PARTS or name in devices.PARTS
  assert estimator.by_token or estimator.by_response
  assert (name in devices.PARTS) == estimator.on_devices >= (not estimator.by_response)
  assert {*estimator.kinds} <= {*group_kinds}
