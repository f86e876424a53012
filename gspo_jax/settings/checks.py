"""Checks of a configuration's keys against each other, before any device is touched.

Tables, for the dry run and the run alike. In their texts {rl.prompts} is a key with its value, and
{it} what the condition came to.
"""

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_jax import objectives as O
from gspo_jax.settings import estimators, ranges, sense
from gspo_jax.settings.rewards import SHOWN, CostSignal, RewardSignal, verifier_config
from gspo_jax.settings.sampling import MOST_KEPT

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig


class Default(NamedTuple):
  """Sections or keys that have to be as they are by default: a section that is off is one."""

  keys: str
  when: str  # key=this,that, or key: it is neither 0 nor ""
  why: str = "has no effect, since {when}"


def _too_long(c: "RunConfig") -> str:
  """The first length that the model's window does not hold."""
  prompt = c.data.max_prompt_tokens
  lengths = {
    "data.max_prompt_tokens + sampling.max_new_tokens": prompt + c.sampling.max_new_tokens,
    "data.max_prompt_tokens + eval.max_new_tokens": prompt + c.eval.max_new_tokens,
    "sft.max_tokens": c.sft.max_tokens,
  }
  most = c.model.max_position_embeddings
  return next((f"{name} = {length}" for name, length in lengths.items() if length > most), "")


def _no_figure(c: "RunConfig") -> str:
  """The figure that is nearest to `checkpoint.best` if an evaluation has no such figure."""
  best, figures = c.checkpoint.best, c.eval.figures()
  if not best.startswith("eval/") or best in figures or "/verifier/" in best or c.environment.name:
    return ""  # an environment has figures of its own
  return (difflib.get_close_matches(best, figures, n=1) or figures)[0]


def _fresh(c: "RunConfig") -> str:
  """The number of prompts that are sampled if the share of them comes to none or to all."""
  prompts = round(c.offline.fresh * c.rl.prompts)
  wrong = (prompts > 0) != (c.offline.fresh > 0) or prompts == c.rl.prompts
  return str(prompts) if wrong else ""


def _constrained(c: "RunConfig") -> str:
  """Names of the signals that advantages follow, "" without any."""
  return ", ".join(c.constraints.signals) if c.has_iterations else ""


def _no_limit(cost: RewardSignal | CostSignal, longest: int) -> str:
  """Says why a cost's limit holds for no mean, or for every one; "" if it is a limit."""
  if not isinstance(cost, CostSignal) or not (cost.rate or cost.gain):
    return ""
  low, high = (1, longest) if cost.signal == "length" else (0, 1)
  never, always = cost.limit < low, cost.limit >= high
  if cost.bound == "at_least":
    never, always = cost.limit > high, cost.limit <= low
  which, side = "no" if never else "every", cost.bound.replace("_", " ")
  text = f"signal={cost.signal!r} {which} mean is {side} that; set it between {low} and {high}"
  return text if never or always else ""


def _no_verifier(c: "RunConfig", signal: str) -> str:
  """Says what a verifier lacks that a signal comes from."""
  if signal in SHOWN:
    return ""
  try:
    verifier_config(c.reward, signal)
  except ValueError as error:
    return str(error)
  return ""


def _no_ratio(c: "RunConfig") -> str:
  """Says why there is no ratio to what has sampled, "" if there is one."""
  if c.job == "offline":
    return f"job={c.job!r} does not know what has sampled"
  name = c.objective.name
  to_reference = c.objective.loss.to_reference
  return f"the ratio of objective.name={name!r} is to the reference" if to_reference else ""


DEFAULTS = (
  Default("sft_optimizer.schedule_steps", "sft_optimizer.schedule=constant"),
  Default("rl_optimizer.schedule_steps", "rl_optimizer.schedule=constant"),
  Default("critic_optimizer.schedule_steps", "critic_optimizer.schedule=constant"),
  Default("lora", "lora.rank=0"),
  Default("critic critic_optimizer", "critic.name=none"),
  Default("critic.init", "critic.name=head"),
  Default("critic.trunk_coef", "critic.name=model"),
  Default(
    "distillation",
    "distillation.teacher=",
    "has no effect without a teacher (distillation.teacher)",
  ),
  Default("profile.iteration", "job=sft,eval", "is no iteration: {when} has none"),
  Default("profile.stage profile.steps", "profile.iteration=0"),
  Default("profile.steps", "profile.stage=all", "counts the steps of sample or update, not of all"),
  Default("offline", "job=sft+rl,sft,rl,eval"),
  Default("rl.lag rl.record rl.replay rollout_mesh.fsdp data.query_set", "job=sft,eval"),
  Default(
    "rl.lag rl.record rl.replay rollout_mesh.fsdp data.query_set",
    "samples=False",
    "has no effect with job='offline' and offline.fresh=0, which samples nothing",
  ),
  Default("rl.extra_prompts rl.token_budget data.query_set.extra_rounds", "job=offline"),
  Default("rl.max_age", "rl.partial=False", "has no effect, since nothing is carried over"),
  Default("schedule", "job=sft,offline,eval", "has no effect with {when}, only with job=rl"),
  Default("checkpoint.best_is", "checkpoint.best="),
  Default("schedule.group_solved", "schedule.group_size_min=0"),
  Default("engine.server", "engine.name=local"),
  Default(
    "reward.format_weight reward.overlong_weight reward.false_positive reward.false_negative "
    "reward.partial reward.per_line",
    "environment.name",
    "has no effect, since {when} gives the rewards",
  ),
  Default(
    "environment.max_turns environment.workers",
    "environment.name=",
    "has no effect, since {when} leaves responses of one turn",
  ),
  Default(
    "environment.token_cost environment.call_cost",
    "environment.name=",
    "is a cost of conversations, and {when} has none; reward.overlong_weight is for single turns",
  ),
  Default(
    "environment.charge",
    "environment.costs=False",
    "has no effect without environment.token_cost or call_cost",
  ),
  Default(
    "objective.clip_length",
    "objective.clip_exponent=None,0.0",
    "has no effect without objective.clip_exponent",
  ),
  Default(
    "objective.off_policy_threshold",
    "objective.advantage=best",
    "has no effect: it masks responses with Â < 0, of which {when} learns nothing",
  ),
  Default(
    "objective.off_policy_threshold",
    "objective.name=rft",
    "has no effect: it masks responses with Â < 0, of which {when} learns nothing",
  ),
  Default(
    "objective.kl_groups",
    "objective.kl_coef=None,0.0",
    "has no effect without objective.kl_coef",
  ),
  Default("objective.adaptive_clip", "objective.adaptive_clip.target=0.0"),
  Default(
    "objective.load_balance_coef objective.replay",
    "model.num_experts=0",
    "has no effect, since {when} leaves nothing to route",
  ),
  Default(
    "objective.correction.name objective.off_policy_threshold",
    "job=offline",
    "needs a sampler's log-probs: {when}",
  ),
  Default("objective.volatility", "job=offline", "needs a sampler's experts: {when}"),
  Default(
    "environment.name reward.per_line",
    "job=offline",
    "with {when}: recorded responses are single turns with one reward",
  ),
  Default(
    "environment.workers", "distributed", "with {when}: hosts would come to different orders"
  ),
  Default("rollout_mesh.fsdp", "distributed", "with {when}: two meshes are of one process"),
  Default("rollout_mesh.fsdp", "engine.name=server", "with {when}: servers have their own devices"),
  Default("rl.record", "rl.replay", "records again what {when} has"),
  Default(
    "rl.packed",
    "rl.microbatches=1",
    "saves the micro-batches that packing leaves empty; set rl.microbatches above 1, or",
  ),
)

RECORDED = " and ".join(name for name, loss in O.POLICY_LOSSES.items() if loss.recorded)
# What is wrong, and when.
RELATIONS: dict[str, Callable[["RunConfig"], Any]] = {
  "{critic.warmup_iterations} leaves none of {rl.iterations} to the policy": lambda c: (
    c.critic.warmup >= c.rl.iterations
  ),
  "{distillation.teacher}: the student learns from its own responses, and {job} has others; set "
  "job to rl": lambda c: c.distillation.on and c.job == "offline",
  "distillation.reward_weight=0 leaves constraints and costs without effect; set it above 0, or "
  "leave out constraints, environment.token_cost and environment.call_cost": lambda c: (
    c.has_iterations and c.distillation.alone and (c.constraints.on or c.environment.costs)
  ),
  "{rl.prompts} does not divide into {rl.minibatches}: groups stay whole": lambda c: (
    c.rl.prompts % c.rl.minibatches
  ),
  "rl.prompts × rl.group_size = {it} rows do not divide into {rl.minibatches} × "
  "{rl.microbatches}": lambda c: c.rl.rows % (c.rl.minibatches * c.rl.microbatches) and c.rl.rows,
  "{sft.batch} does not divide into {sft.microbatches}": lambda c: c.sft.batch % c.sft.microbatches,
  "{data.checks} is of the teacher of calculator, and {data.train} has another; set it to "
  "0": lambda c: c.data.checks and c.data.train and "calculator:" not in c.data.train,
  "{data.skipped_work} is of the teacher of arithmetic, and {data.train} has another; set it to "
  "0": lambda c: c.data.skipped_work and c.data.train and "arithmetic:" not in c.data.train,
  "{it} exceed {model.max_position_embeddings}": _too_long,
  "{profile.iteration} is no iteration: {job} has {it}; set it to 0": lambda c: (
    c.has_iterations and c.profile.iteration > c.rl.iterations and c.rl.iterations
  ),
  "{profile.stage} is not here with {engine.name}: profile the servers": lambda c: (
    c.profile.stage == "sample" and c.engine.name == "server"
  ),
  "{sft.steps}: {job} begins with a cold start; set job=rl to go without": lambda c: (
    "sft" in c.job and not c.sft.steps
  ),
  "{checkpoint.best} is no figure of the evaluation; did you mean {it}?": _no_figure,
  "{sampling.temperature}, {sampling.top_k}: the greedy responses of a group are equal and teach "
  "nothing": lambda c: c.has_iterations and (not c.sampling.temperature or c.sampling.top_k == 1),
  "{sampling.top_p}, {sampling.min_p}, {sampling.top_k}: updates renormalise over the tokens that "
  "each one was drawn from, and without top_k these may be the whole vocabulary; set "
  "sampling.top_k to 2 to {it} too, of which top_p and min_p leave out more, or set top_p=1 and "
  "min_p=0 (evaluation has its own)": lambda c: (
    c.has_iterations and not c.sampling.whole and not c.sampling.top_k and MOST_KEPT
  ),
  "{sampling.top_k}: the tokens that each one was drawn from are kept for the updates, which is "
  f"{{it}} bytes per token; set it to {MOST_KEPT} at most, or to 0 for all": lambda c: (
    c.has_iterations and c.sampling.top_k > MOST_KEPT and 4 * c.sampling.top_k
  ),
  "{objective.adaptive_clip.target}: with one update per iteration the ratio is 1 and nothing is "
  "clipped; set rl.minibatches or rl.epochs above 1": lambda c: (
    c.objective.adaptive_clip.target and c.objective.old_logp == "recompute" and c.rl.updates == 1
  ),
  "{objective.kl} has no effect without objective.kl_coef; set it, or leave objective.kl "
  "unset": lambda c: (
    not c.objective.kl_coef and c.objective.kl not in (None, c.objective.loss.options.get("kl"))
  ),
  "{objective.kl}: {it}; set it to k2": lambda c: (
    c.objective.kl_coef and c.objective.kl == "k3_weighted" and _no_ratio(c)
  ),
  "{job}: {objective.reward_kl_coef}: recorded responses say nothing of how far the policy has "
  "come; set it to 0, and objective.kl_coef for a penalty": lambda c: (
    c.job == "offline" and c.objective.reward_kl_coef
  ),
  "{sampling.top_k}: {engine.name} keeps no record of the tokens that each one was drawn from; set "
  "top_k=0, top_p=1 and min_p=0": lambda c: (
    c.has_iterations and not c.sampling.whole and c.engine.name != "local"
  ),
  "{objective.advantage}, {objective.name}: a soft advantage is what the log-ratio of spo has to "
  "come to, and of no other loss; leave objective.advantage unset": lambda c: (
    (c.objective.name == "spo") != (c.objective.advantage_kind == "soft")
  ),
  "constraints ({it}): {job}: multipliers follow what the policy samples; set job=rl": lambda c: (
    c.job == "offline" and _constrained(c)
  ),
  "constraints ({it}): {rl.mask_truncated} leaves out what the longest responses cost; set it to "
  "False": lambda c: c.rl.mask_truncated and c.constraints.active_costs and _constrained(c),
  "constraints ({it}): {objective.advantage}: standardised advantages are combined; set it to "
  "std": lambda c: c.objective.advantage_kind != "std" and _constrained(c),
  "{schedule.new_tokens} goes on to {it} tokens, and {sampling.max_new_tokens} is the most: raise "
  "the one or lower the other": lambda c: (
    c.schedule.longest > c.sampling.max_new_tokens and c.schedule.longest
  ),
  "{schedule.new_tokens}: the overlong punishment moves with the limit, and "
  "{reward.overlong_buffer} is more than {it} tokens; make it smaller": lambda c: (
    c.reward.overlong_weight
    and c.overlong_follows
    and c.schedule.shortest < c.reward.overlong_buffer
    and c.schedule.shortest
  ),
  "{schedule.group_size_min} is more than {rl.group_size}, the most": lambda c: (
    c.schedule.group_size_min > c.rl.group_size
  ),
  "{schedule.group_size_min}: advantages are relative to a group; make it at least 2": lambda c: (
    c.schedule.group_size_min == 1 and estimators.needs_group(c)
  ),
  "{schedule.group_size_min}, {rl.extra_prompts}: small groups leave room for extra prompts from "
  "the start, and these would be trained on late; set one of them to 0": lambda c: (
    c.schedule.group_size_min and c.rl.extra_prompts
  ),
  "{offline.fresh} is {it} of {rl.prompts}: leave some to the record, or set it to 0": lambda c: (
    c.job == "offline" and _fresh(c)
  ),
  "{job}: {objective.name} learns from responses of its own policy; of others learn "
  + RECORDED: lambda c: c.job == "offline" and not c.objective.loss.recorded,
  "{job}: {objective.old_logp}: what a sampler said of recorded responses is not known; set it to "
  "recompute": lambda c: c.job == "offline" and c.objective.old_logp != "recompute",
  "{job}: {objective.replay}: the sampler's experts are not recorded; set it to none": lambda c: (
    c.job == "offline" and c.objective.replay == "R3"
  ),
}

# What is wrong with an active signal of `constraints`, {signal...}.
SIGNALS: dict[str, Callable[["RunConfig", RewardSignal | CostSignal], Any]] = {
  "{signal.signal} needs a buffer: {it}": lambda c, s: (
    s.signal == "overlong" and c.reward.wrong_buffer
  ),
  "{signal.signal} has a fixed buffer, and {schedule.new_tokens} moves the limit; leave it empty, "
  "or take signal=truncated": lambda c, s: s.signal == "overlong" and c.schedule.new_tokens,
  "{signal.signal} needs reward.format=think or think_answer": lambda c, s: (
    s.signal == "format" and c.reward.format == "none"
  ),
  "{signal.limit}: with {it}": lambda c, s: _no_limit(s, c.sampling.max_new_tokens),
  "{signal.most}: its multiplier stays 0; set bound to '' to leave it out": lambda c, s: (
    isinstance(s, CostSignal) and not s.most
  ),
  "{signal.token} is not below {model.vocab_size}": lambda c, s: (
    s.signal == "token" and s.token >= c.model.vocab_size
  ),
  "{signal.signal}: {it}": lambda c, s: _no_verifier(c, s.signal),
}


def check(c: "RunConfig") -> None:
  """ValueError for what can be seen to be wrong."""
  estimators.check(c)
  for message, wrong in RELATIONS.items():
    if it := wrong(c):
      raise ValueError(ranges.told(c, "", message, it=it))
  for keys, when, why in DEFAULTS:
    condition = _holds(c, when)
    for name, value, default in _changed(c, keys) if condition else ():
      raise ValueError(f"{name}={value!r} {why.format(when=condition)}; {_instead(default)}")
  active = dict(rewards=c.constraints.active_rewards, costs=c.constraints.active_costs)
  for kind, signals in active.items():
    for name, signal in signals.items():
      for message, wrong in SIGNALS.items():
        if it := wrong(c, signal):
          message = message.replace("{signal", f"{{constraints.{kind}.{name}")
          raise ValueError(ranges.told(c, "", message, it=it))
  sense.check(c)


def check_devices(c: "RunConfig", batch_shards: int) -> None:
  """ValueError where rows of a step do not divide over the devices that share them."""
  steps = []
  if c.has_iterations:
    rows = c.rl.rows // (c.rl.minibatches * c.rl.microbatches)
    steps.append(("rl.prompts × rl.group_size / (rl.minibatches × rl.microbatches)", rows))
  if "sft" in c.job:
    steps.append(("sft.batch / sft.microbatches", c.sft.batch // c.sft.microbatches))
  for name, rows in steps:
    if rows % batch_shards:
      raise ValueError(
        f"{name} = {rows} rows do not divide over the {batch_shards} devices of mesh.data × "
        "mesh.fsdp × mesh.expert"
      )


def _holds(c: "RunConfig", condition: str) -> str:
  """A condition of DEFAULTS as it is met, "" if it is not."""
  key, sign, words = condition.partition("=")
  value = ranges.at(c, key)
  met = str(value) in words.split(",") if sign else value
  return f"{key}={value!r}" if met else ""


def _changed(c: "RunConfig", keys: str) -> Iterator[tuple[str, Any, Any]]:
  """Name, value and default of each of the keys that differs from its default."""
  defaults = types.SimpleNamespace(**{x.name: x.default for x in dataclasses.fields(c)})
  for name in keys.split():
    value, default = ranges.at(c, name), ranges.at(defaults, name)
    if dataclasses.is_dataclass(default):
      yield from _changed(c, " ".join(f"{name}.{x.name}" for x in dataclasses.fields(default)))
    elif value != default:
      yield name, value, default


def _instead(default: Any) -> str:
  """What to do about a key that should have its default."""
  if default is None:
    return "leave it unset"
  if default in ("", ()):
    return "leave it empty"
  return f"set it to {default:g}" if isinstance(default, float) else f"set it to {default}"
