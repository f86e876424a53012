"""Passes without gradient over an iteration's mini-batches, before its updates.

Training, memory estimates, counts of operations, the dry run and `aot` all read the list that
`iteration_passes` returns. `make_passes` in train.py has the program of each pass.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig

TRAINED = ("policy", "critic")  # Parameters changed by updates.


@dataclasses.dataclass(frozen=True)
class Pass:
  """A pass: the parameters that it reads and the fields that it fills."""

  name: str
  reads: tuple[str, ...]  # Names of parameters.
  fills: tuple[str, ...]  # Fields of TrainBatch.
  model: str = "policy"  # Model that the pass runs: "policy" or "teacher".


def iteration_passes(c: RunConfig) -> tuple[Pass, ...]:
  """Returns the passes of an iteration, in their order."""
  passes = []
  # Old log-probs are the sampler's, unless "recompute" replaces them.
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
  if c.distillation.enabled:
    passes.append(Pass("teacher", ("teacher",), ("teacher_logp_BT",), model="teacher"))
  return tuple(passes)


def describe_old_policy(c: RunConfig) -> str:
  """Describes the old policy of importance ratios; "" if it is unambiguous.

  If the run has a lag or carries responses over, there are two candidates: the policy that sampled
  the responses, and the newer policy before the updates.
  """
  if not (c.rl.lag or c.rl.partial) or not c.samples or c.objective.loss.recorded:
    return ""
  ages = [f"up to {c.rl.lag} iterations old"] if c.rl.lag else []
  ages += ["older for carried-over tokens"] if c.rl.partial else []
  policy, note = f"the sampling weights, which are {' and '.join(ages)}", ""
  if c.objective.old_logp == "recompute":
    policy = f"the policy before an iteration's updates, not {policy}"
    note = f"; their difference is left to objective.correction.name={c.objective.correction.name}"
  return f"objective.old_logp={c.objective.old_logp}: the old policy of ratios is {policy}{note}"


def sampler_types(engine: Mapping[str, Any], trainer: str) -> str:
  """Describes the sampler's dtypes; "" if a local engine has only the trainer's.

  Args:
    engine: values of section `engine`, as in config.json.
    trainer: compute.dtype.
  """
  if engine.get("name") == "server":
    return f"servers with {engine.get('dtype') or trainer} weights, and caches of their own types"
  types = {key: engine.get(key) for key in ("dtype", "weights_dtype", "cache_dtype")}
  return " ".join(f"engine.{k}={v}" for k, v in types.items() if v not in (None, "", trainer))


def frozen_models(c: RunConfig, teacher: ModelConfig | None) -> dict[str, ModelConfig]:
  """Returns configurations of models with frozen parameters.

  The keys are the names of the parameters in `Pass.reads`.

  Args:
    c: configuration of the run.
    teacher: configuration of the teacher; None to exclude the teacher.
  """
  models = dict(policy=c.model, teacher=teacher)
  read = {
    name: models[p.model] for p in iteration_passes(c) for name in p.reads if name not in TRAINED
  }
  return {name: model for name, model in read.items() if model is not None}
