"""The estimator of advantages that a configuration asks for, and what it goes with.

What it goes with is looked up in two declarations, the estimator's (objectives/estimators.py) and
the loss's (objectives/terms.py).
"""

from typing import TYPE_CHECKING

from gspo_jax import objectives as O

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig

NEEDED = {  # what an estimator needs, and how to have it
  "teacher": "distillation.teacher",
  "signals": "an entry of constraints",
  "critic": "critic.name=head or model",
  "reference": "objective.reward_kl_coef",
  "turns": "environment.name",
  "lines": "reward.per_line=True",
}
# Whose advantages they give.
UNITS = dict(signals="response", reference="response", critic="token", turns="turn", lines="line")


def chosen(c: "RunConfig") -> O.Estimator:
  """The estimator that `objective.advantage` names, where that is not one of a group's rewards;
  else the first whose needs are met."""
  named = O.ESTIMATORS.get(c.objective.advantage)
  return named if named and named.of_group is None else _first(c)


def of_rewards(c: "RunConfig") -> O.Estimator:
  """The one that makes advantages of rewards on the host, whatever a critic or a teacher does on
  the devices."""
  estimator = chosen(c)
  return _first(c, on_host=True) if estimator.on_devices else estimator


def _first(c: "RunConfig", on_host: bool = False) -> O.Estimator:
  there, kind = sources(c).keys(), c.objective.advantage_kind
  for estimator in O.ESTIMATORS.values():
    possible = not (estimator.on_devices and on_host)
    met = estimator.needs and estimator.needs <= there
    if possible and met and kind in (estimator.kinds or (kind,)):
      return estimator
  return O.ESTIMATORS[kind]


def sources(c: "RunConfig") -> dict[str, str]:
  """What there is to make advantages of besides a group's rewards, and the key that says so."""
  there = {}
  if c.has_iterations and c.distillation.on:
    there["teacher"] = f"distillation.teacher={c.distillation.teacher!r}"
  if c.has_iterations and c.constraints.on:
    there["signals"] = f"constraints ({', '.join(c.constraints.signals)})"
  if c.critic.name != "none":
    there["critic"] = f"critic.name={c.critic.name!r}"
  if c.has_iterations and c.objective.reward_kl_coef:
    there["reference"] = f"objective.reward_kl_coef={c.objective.reward_kl_coef}"
  if c.environment.name:
    there["turns"] = f"environment.name={c.environment.name!r}"
  elif c.reward.per_line:
    there["lines"] = "reward.per_line=True"
  return there


def needs_group(c: "RunConfig") -> bool:
  """Whether a response is judged by others to the same prompt."""
  estimator = chosen(c)
  if c.distillation.alone or not estimator.of_rewards or c.objective.soft_value is not None:
    return False
  return of_rewards(c).group


def check(c: "RunConfig") -> None:
  """ValueError where the estimator does not go with the loss, or with another section."""
  for message, wrong in _refused(c).items():
    if wrong:
      raise ValueError(message)
  _check_sources(c)


def _refused(c: "RunConfig") -> dict[str, bool]:
  estimator, loss, kind = chosen(c), c.objective.loss, c.objective.advantage_kind
  there, rounds = sources(c), c.data.query_set.extra_rounds
  source = ", ".join(there[need] for need in there if need in estimator.needs)
  missing = [NEEDED[need] for need in NEEDED if need in estimator.needs - there.keys()]
  learns = f"objective.name={c.objective.name!r} with objective.advantage={kind!r}"
  takes = ", ".join(name for name, x in O.POLICY_LOSSES.items() if x.by_token)
  parts = of_rewards(c).by_token and estimator.of_rewards and loss.by_token
  return {
    f"objective.advantage={estimator.name!r} needs {', '.join(missing)}": bool(missing),
    "rl.group_size=1: advantages are relative to a group; make it at least 2": c.rl.group_size == 1
    and needs_group(c),
    f"{source} gives each token an advantage, which objective.name={c.objective.name!r} does not "
    f"take; set it to one of {takes}": not (estimator.by_response or loss.by_token),
    f"objective.advantage={kind!r} has no effect, since {source} gives the advantages; leave it "
    "unset": not estimator.of_rewards and kind != loss.advantage,
    (f"{source}: " if source else "") + f"data.query_set.extra_rounds={rounds} leaves out groups "
    f"of equal rewards, of which {'it' if source else learns} learns too; set it to 0": rounds > 0
    and not estimator.relative,
    f"environment.discount={c.environment.discount} has no effect: it is of turns and lines with "
    f"advantages of their own, and {learns}, critic.name={c.critic.name!r}, environment.name="
    f"{c.environment.name!r}, reward.per_line={c.reward.per_line} have none; set it to 1, or "
    "critic.discount where there is a critic": c.environment.discount != 1 and not parts,
  }


def _check_sources(c: "RunConfig") -> None:
  """ValueError for what would make advantages beside the estimator."""
  estimator, there = chosen(c), sources(c)
  for source in [name for name in there if name not in estimator.needs | estimator.beside]:
    if estimator.of_group is not None:
      raise ValueError(
        f"{there[source]} has no effect, since objective.advantage={estimator.name!r} is of whole "
        "responses; leave it out"
      )
    first, second = (name for name in there if name in estimator.needs or name == source)
    raise ValueError(
      f"{there[first]}: {there[second]}: both give each {UNITS[second]} its advantage; leave out "
      "one of them"
    )
