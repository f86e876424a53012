"""Passes without gradient over an iteration's mini-batches, before its updates: which a run has.

The training loop, the bound on memory, the count of operations, the dry run and `aot` go through
this list. A pass is an entry here and its program, in train.py's `make_passes`.
"""

import dataclasses

from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig

TRAINED = ("policy", "critic")  # parameters that updates change


@dataclasses.dataclass(frozen=True)
class Pass:
  """What a pass reads of the run's parameters, by name, and the fields of a TrainBatch that its
  program gives, in this order."""

  name: str
  reads: tuple[str, ...]
  fills: tuple[str, ...]
  model: str = "policy"  # whose operations it does: "policy", "teacher"


def of_run(c: RunConfig) -> tuple[Pass, ...]:
  """The passes of an iteration, in their order."""
  passes = []
  # Without one, the old policy is what the sampler said it was.
  if c.objective.old_logp == "recompute":
    passes.append(Pass("old_policy", ("policy",), ("old_logp_BT", "old_experts_BTlk")))
  if c.objective.old_logp == "behaviour":
    passes.append(Pass("old_policy", ("policy",), ("own_logp_BT", "old_experts_BTlk")))
  has_critic = c.critic.name != "none"
  if c.objective.needs_reference or (has_critic and c.critic.kl_coef > 0):
    passes.append(Pass("reference", ("reference policy",), ("ref_logp_BT",)))
  if has_critic:
    last = ("last_value_B",) if c.critic.bootstrap else ()
    passes.append(Pass("values", ("policy", "critic"), ("old_value_BT", *last)))
  if c.distillation.on:
    passes.append(Pass("teacher", ("teacher",), ("teacher_logp_BT",), model="teacher"))
  return tuple(passes)


def anchor(c: RunConfig) -> str:
  """Says which policy ratios are to, where it need not be both the one that sampled and the one
  before the updates; "" where it is, or where there are no such ratios."""
  if not (c.rl.lag or c.rl.partial) or not c.samples or c.objective.loss.recorded:
    return ""
  older = f"up to {c.rl.lag} iterations older" if c.rl.lag else "older where they were carried over"
  to, weighed, correction = f"the weights that sampled, {older}", "", c.objective.correction.name
  if c.objective.old_logp == "recompute":
    to = f"the policy before an iteration's updates, and not to {to}"
    weighed = f"; what lies between is left to objective.correction.name={correction}"
  return f"objective.old_logp={c.objective.old_logp}: ratios and clipping are to {to}{weighed}"


def frozen(c: RunConfig, teacher: ModelConfig | None) -> dict[str, ModelConfig]:
  """Names and models of the parameters that passes read and no update changes; without a teacher,
  those of the others."""
  models = dict(policy=c.model, teacher=teacher)
  read = {name: models[p.model] for p in of_run(c) for name in p.reads if name not in TRAINED}
  return {name: model for name, model in read.items() if model is not None}
