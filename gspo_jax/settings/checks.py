"""Checks of a configuration's sections against each other, before any device is touched."""

import difflib
from typing import TYPE_CHECKING, Any

from gspo_jax.settings import constraint_checks, estimators, offline_checks, schedule_checks
from gspo_jax.settings.sampling import MOST_KEPT

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig


def check(c: "RunConfig") -> None:
  """ValueError for what can be seen to be wrong; `c` is a `config.RunConfig`."""
  estimators.check(c)
  c.critic.check_with(c.rl.iterations)
  c.distillation.check_with(c)
  _batches(c)
  _data(c)
  _lengths(c)
  _job(c)
  _ahead(c)
  _sampling(c)
  _environment(c)
  _objective(c)
  constraint_checks.check(c)
  schedule_checks.check(c)
  if c.job == "offline":
    offline_checks.check(c)


def check_devices(c: "RunConfig", batch_shards: int) -> None:
  """ValueError where rows of a step do not divide over the devices that share them."""
  rows = c.rl.prompts * c.rl.group_size // (c.rl.minibatches * c.rl.microbatches)
  of_rl = "rl.prompts × rl.group_size / (rl.minibatches × rl.microbatches)"
  steps = [(of_rl, rows)] if c.has_iterations else []
  if "sft" in c.job:
    steps.append(("sft.batch / sft.microbatches", c.sft.batch // c.sft.microbatches))
  for name, count in steps:
    _require(
      count % batch_shards == 0,
      f"{name} = {count} rows do not divide over the {batch_shards} devices of mesh.data × "
      "mesh.fsdp × mesh.expert",
    )


def _batches(c: "RunConfig") -> None:
  rl, rows = c.rl, c.rl.prompts * c.rl.group_size
  _require(
    rl.prompts % rl.minibatches == 0,
    f"rl.prompts={rl.prompts} does not divide into rl.minibatches={rl.minibatches}: groups stay "
    "whole",
  )
  _require(
    rows % (rl.minibatches * rl.microbatches) == 0,
    f"rl.prompts × rl.group_size = {rows} rows do not divide into rl.minibatches="
    f"{rl.minibatches} × rl.microbatches={rl.microbatches}",
  )
  _require(
    not rl.packed or rl.microbatches > 1,
    "rl.packed=True saves the micro-batches that packing leaves empty: set rl.microbatches above "
    "1, so that each device has few rows in each",
  )
  _require(
    c.sft.batch % c.sft.microbatches == 0,
    f"sft.batch={c.sft.batch} does not divide into sft.microbatches={c.sft.microbatches}",
  )


def _data(c: "RunConfig") -> None:
  for key, task in (("checks", "calculator"), ("skipped_work", "arithmetic")):
    _require(
      not (getattr(c.data, key) and c.data.train) or f"{task}:" in c.data.train,
      f"data.{key}={getattr(c.data, key)} is of the teacher of {task}, and data.train="
      f"{c.data.train!r} has another; set it to 0",
    )


def _lengths(c: "RunConfig") -> None:
  for key, window in (
    ("data.max_prompt_tokens + sampling.max_new_tokens", c.sampling.max_new_tokens),
    ("data.max_prompt_tokens + eval.max_new_tokens", c.eval.max_new_tokens),
    ("sft.max_tokens", c.sft.max_tokens - c.data.max_prompt_tokens),
  ):
    window += c.data.max_prompt_tokens
    _require(
      window <= c.model.max_position_embeddings,
      f"{key} = {window} exceed model.max_position_embeddings={c.model.max_position_embeddings}",
    )


def _job(c: "RunConfig") -> None:
  _require(
    c.profile <= (c.has_iterations and c.rl.iterations),
    f"profile={c.profile} is no iteration: job={c.job!r} has "
    f"{c.rl.iterations if c.has_iterations else 'none'}; set it to 0",
  )
  _require(
    "sft" not in c.job or c.sft.steps > 0,
    f"sft.steps=0: job={c.job!r} begins with a cold start; set job=rl to go without",
  )
  best, figures = c.checkpoint.best, c.eval.figures()
  _require(
    not best.startswith("eval/")
    or best in figures
    or "/verifier/" in best
    or bool(c.environment.name),  # which has figures of its own
    f"checkpoint.best={best!r} is no figure of the evaluation; did you mean "
    f"{(difflib.get_close_matches(best, figures, n=1) or figures)[0]}?",
  )
  _require(
    c.job == "offline" or not (c.offline.data or c.offline.fresh),
    f"offline.data={c.offline.data!r}, offline.fresh={c.offline.fresh} have no effect with "
    f"job={c.job!r}; set job=offline, or leave them empty and 0",
  )


def _ahead(c: "RunConfig") -> None:
  samples, axes = c.has_iterations and c.sampled_share > 0, "data fsdp expert tensor".split()
  nothing = f"job={c.job!r}" + (f" and offline.fresh={c.offline.fresh}" * (c.job == "offline"))
  _require(
    samples or not c.rl.lag,
    f"rl.lag={c.rl.lag} has no effect, since {nothing} samples nothing to train on; set it to 0",
  )
  _require(
    samples or not (c.rl.record or c.rl.replay),
    f"rl.record={c.rl.record}, rl.replay={c.rl.replay!r} have no effect, since {nothing} samples "
    'nothing to train on; set them to False and ""',
  )
  _require(
    not (c.rl.record and c.rl.replay),
    f"rl.record=True records again what rl.replay={c.rl.replay!r} has; set it to False",
  )
  sizes = ", ".join(f"rollout_mesh.{axis}={getattr(c.rollout_mesh, axis)}" for axis in axes)
  _require(
    samples or not c.rollout_mesh.on,
    f"{sizes} has no effect, since {nothing} samples nothing to train on; set one of them to 0",
  )
  _require(
    not (c.distributed and c.rollout_mesh.on),
    f"{sizes} with distributed=True: two meshes are of one process; set one of them to 0 (rl.lag "
    "goes without), or let another process sample",
  )
  _require(
    c.engine.name == "local" or not c.rollout_mesh.on,
    f"{sizes} with engine.name={c.engine.name!r}, whose servers have devices of their own; set one "
    "of them to 0",
  )


def _sampling(c: "RunConfig") -> None:
  _require(
    not c.has_iterations or c.sampling.temperature > 0,
    "sampling.temperature=0: the greedy responses of a group are equal and teach nothing",
  )
  s = c.sampling
  _require(
    not c.has_iterations or s.whole or s.top_k > 0,
    f"sampling.top_p={s.top_p}, sampling.min_p={s.min_p}, sampling.top_k=0: updates renormalise "
    "over the tokens that each one was drawn from, and without top_k these may be the whole "
    f"vocabulary; set sampling.top_k to 2 to {MOST_KEPT} too, of which top_p and min_p leave out "
    "more, or set top_p=1 and min_p=0 (evaluation has its own)",
  )
  _require(
    not c.has_iterations or s.top_k <= MOST_KEPT,
    f"sampling.top_k={s.top_k}: the tokens that each one was drawn from are kept for the updates, "
    f"which is {4 * s.top_k} bytes per token; set it to {MOST_KEPT} at most, or to 0 for all",
  )
  _require(
    not c.has_iterations or s.top_k != 1,
    "sampling.top_k=1: the greedy responses of a group are equal and teach nothing",
  )
  _require(
    not c.has_iterations or s.whole or c.engine.name == "local",
    f"sampling.top_k={s.top_k}: engine.name={c.engine.name!r} keeps no record of the tokens that "
    "each one was drawn from; set top_k=0, top_p=1 and min_p=0",
  )


def _environment(c: "RunConfig") -> None:
  for key in ("format_weight", "overlong_weight", "false_positive", "false_negative", "partial"):
    _require(
      not (c.environment.name and getattr(c.reward, key)),
      f"reward.{key}={getattr(c.reward, key)} has no effect, since environment.name="
      f"{c.environment.name!r} gives the rewards; set it to 0",
    )
  _require(
    not (c.environment.name and c.reward.per_line),
    f"reward.per_line=True has no effect, since environment.name={c.environment.name!r} gives "
    "each turn its reward; set it to False",
  )
  for key, none in dict(max_turns=1, stop_strings=(), workers=0).items():
    _require(
      bool(c.environment.name) or getattr(c.environment, key) == none,
      f"environment.{key}={getattr(c.environment, key)} has no effect, since environment.name='' "
      f"leaves responses of one turn; set it to {none}",
    )
  for key in ("token_cost", "call_cost"):
    _require(
      bool(c.environment.name) or not getattr(c.environment, key),
      f"environment.{key}={getattr(c.environment, key)} is a cost of conversations, and "
      "environment.name='' has none; set it to 0 (reward.overlong_weight is for single responses)",
    )
  _require(
    c.environment.charge == "all" or c.environment.costs,
    f"environment.charge={c.environment.charge!r} has no effect without a cost; set it to "
    "'all', or set environment.token_cost or environment.call_cost",
  )
  _require(
    not (c.distributed and c.environment.workers),
    f"environment.workers={c.environment.workers}: with distributed=True hosts would come to "
    "different orders; set it to 0",
  )


def _objective(c: "RunConfig") -> None:
  kind, name = c.objective.advantage_kind, c.objective.name
  _require(
    (name == "spo") == (kind == "soft"),
    f"objective.advantage={kind!r}, objective.name={name!r}: a soft advantage is what the log-"
    "ratio of spo has to come to, and of no other loss; leave objective.advantage unset",
  )
  _require(
    c.objective.off_policy_threshold is None or not (name == "rft" or kind == "best"),
    f"objective.off_policy_threshold={c.objective.off_policy_threshold} has no effect: it masks "
    f"responses with Â < 0, of which objective.name={name!r} with objective.advantage={kind!r} "
    "learns nothing; leave it unset",
  )
  _require(
    not c.objective.adaptive_clip.target or c.objective.old_logp != "recompute" or c.rl.updates > 1,
    f"objective.adaptive_clip.target={c.objective.adaptive_clip.target}: with one update per "
    "iteration the ratio is 1 and nothing is clipped; set rl.minibatches or rl.epochs above 1",
  )
  _require(
    c.objective.replay == "none" or c.model.num_experts > 0,
    f"objective.replay={c.objective.replay!r}: model.num_experts=0 leaves nothing to route",
  )
  _without_effect(c.objective, c.model)


def _without_effect(objective: Any, model: Any) -> None:
  _require(
    objective.kl_coef or objective.kl in (None, objective.loss.options.get("kl")),
    f"objective.kl={objective.kl!r} has no effect without objective.kl_coef; set it, or leave "
    "objective.kl unset",
  )
  _require(
    objective.clip_exponent or objective.clip_length is None,
    f"objective.clip_length={objective.clip_length} has no effect without objective.clip_exponent; "
    "set it, or leave objective.clip_length unset",
  )
  _require(
    model.num_experts > 0 or not objective.load_balance_coef,
    f"objective.load_balance_coef={objective.load_balance_coef} has no effect, since model."
    "num_experts=0 leaves nothing to balance; set it to 0",
  )


def _require(ok: bool, message: str) -> None:
  if not ok:
    raise ValueError(message)
