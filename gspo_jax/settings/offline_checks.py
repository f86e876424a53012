"""offline checks"""

from typing import TYPE_CHECKING

from gspo_jax.settings.objective import LOSSES

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig


def check(config: "RunConfig") -> None:
  """ValueError for what cannot be known of recorded responses, or has no meaning there; `config` is
  a `config.RunConfig`."""
  o, rl, taken = config.objective, config.rl, [n for n, loss in LOSSES.items() if loss.recorded]
  sampled = round(config.offline.fresh * rl.prompts)
  wrong = {
    f"offline.fresh={config.offline.fresh} is {sampled} of rl.prompts={rl.prompts}: leave some to "
    "the record, or set it to 0": (sampled > 0) != (config.offline.fresh > 0)
    or sampled == rl.prompts,
    f"objective.name={o.name!r} learns from responses of its own policy; of others learn "
    f"{' and '.join(taken)}": not o.loss.recorded,
    f"objective.old_logp={o.old_logp!r}: what a sampler said of recorded responses is not known; "
    "set it to recompute": o.old_logp != "recompute",
    f"objective.correction.name={o.correction.name!r} needs a sampler's log-probs; set it to "
    "none": o.correction.name != "none",
    "objective.off_policy_threshold needs a sampler's log-probs; leave it "
    "unset": o.off_policy_threshold is not None,
    f"objective.replay={o.replay!r}, objective.volatility={o.volatility}: experts are not "
    "recorded; set them to none and False": o.needs_sampler_routing,
    f"environment.name={config.environment.name!r}: recorded responses are single turns; leave it "
    "empty": bool(config.environment.name),
    "reward.per_line=True: a recorded response has one reward; set it to "
    "False": config.reward.per_line,
    f"rl.extra_prompts={rl.extra_prompts}, rl.token_budget={rl.token_budget} have no effect; set "
    "them to 0": rl.partial,
    f"data.query_set.drop_after={config.data.query_set.drop_after} has no effect, since nothing is "
    "sampled; set it to 0": config.data.query_set.drop_after > 0 and not sampled,
    f"data.query_set.extra_rounds={config.data.query_set.extra_rounds} has no effect; set it to "
    "0": config.data.query_set.extra_rounds > 0,
  }
  for what, found in wrong.items():
    if found:
      raise ValueError(f"job='offline': {what}")
