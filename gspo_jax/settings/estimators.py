"""Checks that the estimator of advantages fits the loss and the other sections.

The checks compare the declarations of the estimator (objectives/estimators.py) and of the loss
(objectives/terms.py).
"""

from gspo_jax import objectives as O
from gspo_jax.settings.run import RunConfig

REMEDIES = {  # The setting that provides each need of an estimator.
  "teacher": "distillation.teacher",
  "signals": "an entry of constraints",
  "critic": "critic.name=head or model",
  "reference": "objective.reward_kl_coef",
  "turns": "environment.name",
  "lines": "reward.per_line=True",
}
# Part of a response with a separate advantage, by source of advantages.
UNITS = dict(signals="response", reference="response", critic="token", turns="turn", lines="line")


def check(c: RunConfig) -> None:
  """Raises ValueError unless the estimator fits loss and sections."""
  estimator, loss, kind = c.estimator, c.objective.loss, c.objective.advantage_kind
  sources, rounds, name = c.advantage_sources, c.data.query_set.extra_rounds, c.objective.name
  source = ", ".join(sources[need] for need in sources if need in estimator.needs)
  missing = [REMEDIES[need] for need in REMEDIES if need in estimator.needs - sources.keys()]
  combination = f"objective.name={name!r} with objective.advantage={kind!r}"
  token_losses = ", ".join(loss for loss, x in O.POLICY_LOSSES.items() if x.by_token)
  by_part = c.estimator_of_rewards.by_token and estimator.of_rewards and loss.by_token
  if missing:
    raise ValueError(f"objective.advantage={estimator.name!r} needs {', '.join(missing)}")
  if c.rl.group_size == 1 and c.needs_group:
    raise ValueError("rl.group_size=1: advantages are relative to a group; set it to at least 2")
  if not (estimator.by_response or loss.by_token):
    raise ValueError(
      f"{source} gives each token an advantage, and objective.name={name!r} takes one per "
      f"response; set objective.name to one of {token_losses}"
    )
  if c.objective.advantage in ("turns", "lines") and not loss.by_token:
    raise ValueError(
      f"objective.advantage={estimator.name!r} has no effect, since objective.name={name!r} takes "
      f"one advantage per response; leave it unset, or set objective.name to one of {token_losses}"
    )
  if not estimator.of_rewards and kind != loss.advantage:
    raise ValueError(
      f"objective.advantage={kind!r} has no effect, since {source} gives the advantages; leave it "
      "unset"
    )
  if rounds > 0 and not (estimator.relative or estimator.parts):
    raise ValueError(
      f"{source and f'{source}: '}data.query_set.extra_rounds={rounds} replaces groups of equal "
      f"rewards, and {'they have advantages' if source else f'{combination} learns from them'}; "
      "set extra_rounds to 0"
    )
  if c.environment.discount != 1 and not by_part:
    raise ValueError(
      f"environment.discount={c.environment.discount} has no effect: it discounts turns and lines "
      f"with separate advantages, and {combination}, critic.name={c.critic.name!r}, "
      f"environment.name={c.environment.name!r}, reward.per_line={c.reward.per_line} have none; "
      "set it to 1 (a critic has its own key critic.discount)"
    )
  _check_sources(c)


def _check_sources(c: RunConfig) -> None:
  """Raises ValueError unless the estimator uses or allows each source of advantages."""
  estimator, sources = c.estimator, c.advantage_sources
  for source in [name for name in sources if name not in estimator.needs | estimator.beside]:
    if estimator.of_group is not None:
      raise ValueError(
        f"{sources[source]} has no effect, since objective.advantage={estimator.name!r} compares "
        "whole responses by their rewards; leave it out"
      )
    first, second, *_ = (name for name in sources if name in estimator.needs or name == source)
    raise ValueError(
      f"{sources[first]}, {sources[second]}: both compute advantages, the second one for each "
      f"{UNITS[second]}; remove one of them"
    )
