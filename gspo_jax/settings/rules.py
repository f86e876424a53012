"""Rules between the keys of a configuration: invalid settings, unused keys, and warnings.

A rule is a row with a message, a condition, and evidence that users need the rule. In a message,
{rl.prompts} becomes `rl.prompts=64`, and {rl.prompts:} becomes `64`.
"""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gspo_jax import objectives as O
from gspo_jax.settings import estimators, ranges
from gspo_jax.settings.evaluation import EvalConfig
from gspo_jax.settings.rewards import RESPONSE_SIGNALS, VERIFIERS, CostSignal, RewardSignal
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.sampling import MAX_CANDIDATES, SamplingConfig
from gspo_jax.settings.training import OptimizerConfig

TASK_VERIFIERS = {  # Verifiers of this package that can accept responses to an embedded task.
  "arithmetic": ("arithmetic", "math", "string"),
  "calculator": ("arithmetic", "math", "string"),
  "recurrence": ("recurrence",),
  "word_problems": ("arithmetic", "math", "string"),
}


@dataclasses.dataclass(frozen=True)
class DataFacts:
  """Facts about data and machine, for rules of INVALID_DATA and DATA_WARNINGS."""

  # Number of prompts of data.train; if the job does not read it, of prompts of recorded responses.
  prompts: int = 0
  demonstrations: int = 0  # Number of demonstrations of the cold start; 0 without a cold start.
  # Shares of gold answers that fit into a response: a dict by key of the data (data.train, ...).
  answers: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # Most frequent gold answers that are words, with their shares: {"data.train": "none: 40%"}.
  words: Mapping[str, str] = dataclasses.field(default_factory=dict)
  format_tokens: int = 0  # Number of tokens of the tags of reward.format.
  shared: str = ""  # Counts of held-out problems in training data, as text; "" if there are none.
  memory_mb: int = 2**30  # Memory of this machine in MiB.
  processes: int = 1  # Number of JAX processes.
  has_tokenizer: bool = False  # Whether the weights include a tokenizer.


class Rule(NamedTuple):
  """Invalid or doubtful combination of keys."""

  message: str
  wrong: Callable[[RunConfig], bool]
  shown_by: str  # Evidence for the rule: a test, a change or a page.


class EntryRule(NamedTuple):
  """Rule for each entry of a mapping. {x.limit} is a field of the entry, and {path:} its key."""

  message: str
  entries: Callable[[RunConfig], Mapping[str, Any]]
  wrong: Callable[[RunConfig, Any], bool]
  shown_by: str


class DataRule(NamedTuple):
  """Rule about data or machine. In the message, {facts.prompts:} is the value of a fact."""

  message: str
  wrong: Callable[[RunConfig, DataFacts], bool]
  shown_by: str


class Unused(NamedTuple):
  """Keys that must have their defaults if `off` is true."""

  keys: str  # Keys separated by spaces. A section means all of its keys.
  message: str  # The error is `KEY=VALUE message; remedy`.
  off: Callable[[RunConfig], bool]
  shown_by: str


def tasks(spec: str) -> list[str]:
  """Returns the embedded tasks of a data specification, such as "arithmetic:train,FILE"."""
  return re.findall(rf"(?:^|,)\s*({'|'.join(TASK_VERIFIERS)}):", spec)


def _sources(c: RunConfig) -> dict[str, tuple[str, str]]:
  """Maps each key of scored data to (specification, verifier or environment)."""
  default = c.environment.name or c.reward.name
  sources = {key: (b.data, b.reward or default) for name, b, key in c.benchmarks() if name}
  if c.job != "sft":
    sources["data.eval"] = c.data.eval, default
  if c.has_iterations and c.samples_prompts:
    sources["data.train"] = c.data.train, default
  return sources


def _is_never_right(c: RunConfig, source: tuple[str, str]) -> bool:
  """Whether the verifier rejects all responses to some task of the source."""
  spec, verifier = source
  if verifier == "calculator":
    return "recurrence" in tasks(spec)
  return verifier in VERIFIERS and any(verifier not in TASK_VERIFIERS[task] for task in tasks(spec))


def _lengths(c: RunConfig) -> dict[str, int]:
  """Lengths to fit into the model's window, by their sums of keys."""
  prompt, windows = c.data.max_prompt_tokens, {}
  if c.job != "eval":
    windows["data.max_prompt_tokens + sampling.max_new_tokens"] = prompt + c.sampling.max_new_tokens
    windows["sft.max_tokens"] = c.sft.max_tokens
  return windows | {"data.max_prompt_tokens + eval.max_new_tokens": prompt + c.eval.max_new_tokens}


def _figures(c: RunConfig) -> list[str]:
  """Returns names of metrics of evaluations."""
  rooms = [f"eval/{name}/" if name else "eval/" for name, _, _ in c.benchmarks()]
  return c.eval.figures() + [f"{x}constraint/{y}" for x in rooms for y in c.constraints.signals]


def _closest_metric(c: RunConfig) -> dict[str, str]:
  """Returns {metric: `checkpoint.best`}, for the metric with the most similar name."""
  best, metrics = c.checkpoint.best, _figures(c)
  return {(difflib.get_close_matches(best, metrics, n=1) or metrics)[0]: best}


def _is_unknown_metric(c: RunConfig, best: str) -> bool:
  """Whether `best` is an unknown metric of evaluations. (Environments may add metrics.)"""
  unknown = best not in _figures(c) and "/verifier/" not in best
  return best.startswith("eval/") and unknown and not c.environment.name


def _is_greedy(c: RunConfig, sampled: SamplingConfig | EvalConfig) -> bool:
  """Whether all responses to a prompt are equal."""
  no_choice = sampled.top_k == 1 or sampled.top_p <= 1 / c.model.vocab_size
  return not sampled.temperature or no_choice


def _active(c: RunConfig) -> dict[str, RewardSignal | CostSignal]:
  """Active entries of `constraints`, by path."""
  kinds = {"rewards": c.constraints.active_rewards, "costs": c.constraints.active_costs}
  return {f"constraints.{k}.{n}": x for k, signals in kinds.items() for n, x in signals.items()}


def _is_vacuous(c: RunConfig, cost: RewardSignal | CostSignal) -> bool:
  """Whether a cost's adaptive limit lies outside the known range of its signal."""
  if not isinstance(cost, CostSignal) or cost.signal not in (*RESPONSE_SIGNALS, *VERIFIERS):
    return False
  low, high = (1, c.sampling.max_new_tokens) if cost.signal == "length" else (0, 1)
  at_least, moves = cost.bound == "at_least", cost.rate or cost.gain
  return moves and not (low < cost.limit <= high if at_least else low <= cost.limit < high)


def _optimizers(c: RunConfig) -> dict[str, OptimizerConfig]:
  """Optimizers in use, by section."""
  used = {"sft_optimizer": "sft" in c.job, "rl_optimizer": c.has_iterations}
  return {name: getattr(c, name) for name, uses in used.items() if uses}


def _updates(c: RunConfig, optimizer: OptimizerConfig) -> int:
  """Number of updates of the cold start or of RL, by its optimizer."""
  iterations = c.rl.iterations - c.critic.warmup
  return c.sft.steps if optimizer is c.sft_optimizer else iterations * c.rl.updates


def _weight_paths(c: RunConfig) -> dict[str, str]:
  """Paths of the initial weights and of the teacher's weights, by key."""
  paths = {"weights": c.weights, "distillation.teacher": c.distillation.teacher}
  return {key: path for key, path in paths.items() if path}


def _mixes_up_clip_ranges(c: RunConfig) -> bool:
  """Whether ratios of responses have a clip range for ratios of tokens, or the reverse."""
  widest, name = max(side or 0 for side in c.objective.clip_ranges), c.objective.name
  if name in ("gspo", "gspo_token", "luspo") and c.objective.length_exponent in (None, 1):
    return widest >= 0.15
  return name in ("grpo", "dapo", "dr_grpo", "ppo_clip") and 0 < widest < 0.005


def _never_finishes(c: RunConfig) -> bool:
  """Whether a response of full length becomes too old to finish."""
  tokens = c.rl.rows * c.sampling.max_new_tokens
  return 0 < c.rl.max_age < math.ceil(tokens / (c.rl.token_budget or math.inf)) - 1


def _is_one_segment(c: RunConfig) -> bool:
  """Whether every response is a single segment."""
  o = c.objective
  turns = o.segment_unit in (None, "turn") and not c.environment.name
  tokens = o.segment_unit == "tokens" and (o.segment_tokens or 0) >= c.sampling.max_new_tokens
  return o.name == "segment" and (turns or tokens)


# fmt: off
# `shown_by` begins with a test, CHANGELOG, a page or a benchmark, or names another project's issue.
UNUSED = (
  Unused("lora", "has no effect, since {lora.rank}", lambda c: not c.lora.rank, "test_rules"),
  Unused("critic critic_optimizer", "has no effect, since {critic.name}",
    lambda c: c.critic.name == "none", "CHANGELOG: options of a critic did nothing"),
  Unused("critic.trunk_coef", "has no effect, since {critic.name}",
    lambda c: c.critic.name == "model", "CHANGELOG: options of a critic did nothing"),
  Unused("distillation", "has no effect without a teacher (distillation.teacher)",
    lambda c: not c.distillation.enabled, "test_distillation"),
  Unused("profile.iteration", "has no effect: {job} has no iterations",
    lambda c: not c.has_iterations, "docs/running.md: a run that ends without its profile"),
  Unused("profile.stage profile.steps", "has no effect, since {profile.iteration}",
    lambda c: not c.profile.iteration, "docs/running.md: a run that ends without its profile"),
  Unused("profile.steps", "has no effect, since {profile.stage} traces the whole iteration",
    lambda c: c.profile.stage == "all", "CHANGELOG: a profile of a whole iteration"),
  Unused("rl.record rl.replay rollout_mesh.fsdp", "has no effect, since {job}, {offline.fresh}",
    lambda c: not c.samples, "test_pipeline: no batch is sampled"),
  Unused("rl.lag data.query_set", "has no effect, since {job}, {offline.fresh}",
    lambda c: c.job == "offline" and not c.offline.fresh, "test_pipeline: nothing is sampled"),
  Unused("rollout_mesh.data rollout_mesh.expert rollout_mesh.tensor", "has no effect, since "
    "{rollout_mesh.fsdp}; set fsdp to at least 1", lambda c: not c.rollout_mesh.fsdp, "test_rules"),
  Unused("offline", "has no effect, since {job}", lambda c: c.job != "offline", "test_offline"),
  Unused("objective.correction.name objective.off_policy_threshold objective.volatility "
    "objective.reward_kl_coef environment.name reward.per_line rl.extra_prompts rl.token_budget "
    "data.query_set.extra_rounds distillation.teacher",
    "cannot be used with {job}: recorded responses are single turns with one reward, without "
    "log-probs, experts or versions of a sampler", lambda c: c.job == "offline", "test_offline"),
  Unused("rl.max_age", "has no effect: responses are carried over only if rl.extra_prompts or "
    "rl.token_budget is set", lambda c: not c.rl.partial, "test_partial_rollouts"),
  Unused("schedule", "has no effect with {job}, only with RL", lambda c: c.job == "offline",
    "test_schedules"),
  Unused("checkpoint.best_is", "has no effect, since {checkpoint.best}",
    lambda c: not c.checkpoint.best, "test_checkpoint: no best checkpoint"),
  Unused("engine.server", "has no effect, since {engine.name}",
    lambda c: c.engine.name == "local", "docs/engines.md: servers without engine.name"),
  Unused("reward.format", "has no effect, since {reward.format_weight}",
    lambda c: not c.reward.format_weight
    and not any(x.signal == "format" for x in _active(c).values()), "test_rules: no reward for it"),
  Unused("reward.format_weight reward.overlong_weight reward.false_positive reward.false_negative "
    "reward.partial reward.per_line", "has no effect, since {environment.name} gives the rewards",
    lambda c: bool(c.environment.name), "test_rules: an overlong punishment of conversations"),
  Unused("environment.max_turns environment.workers environment.token_cost environment.call_cost "
    "environment.charge", "has no effect without an environment ({environment.name})",
    lambda c: not c.environment.name, "CHANGELOG: max_turns did nothing"),
  Unused("environment.charge", "has no effect without environment.token_cost or call_cost",
    lambda c: not c.environment.costs, "test_costs"),
  Unused("objective.clip_length", "has no effect without objective.clip_exponent",
    lambda c: not c.objective.clip_exponent, "CHANGELOG: options of a loss did nothing"),
  Unused("objective.off_policy_threshold", "has no effect: Â < 0 is not trained on", lambda c:
    c.objective.name == "rft" or c.objective.advantage_kind in ("best", "reward"), "test_epochs"),
  Unused("objective.kl_groups", "has no effect without objective.kl_coef",
    lambda c: not c.objective.kl_coef, "CHANGELOG: options of a loss did nothing"),
  Unused("objective.adaptive_clip", "has no effect, since {objective.adaptive_clip.target}",
    lambda c: not c.objective.adaptive_clip.target, "CHANGELOG: options of a loss did nothing"),
  Unused("objective.load_balance_coef objective.replay sft_optimizer.router_rate",
    "has no effect, since the model has no experts ({model.num_experts})",
    lambda c: not c.model.num_experts, "test_epochs"),
  Unused("rl_optimizer.router_rate", "has no effect: no router is trained ({model.num_experts}, "
    "{lora.rank})", lambda c: not c.model.num_experts or c.lora.rank > 0, "test_optimizer"),
  Unused("critic_optimizer.router_rate", "has no effect, since {critic.name}, {model.num_experts}",
    lambda c: c.critic.name != "model" or not c.model.num_experts, "test_optimizer"),
  Unused("data.checks", "is for demonstrations of calculator, and {data.train} has none",
    lambda c: bool(c.data.train) and "calculator:" not in c.data.train, "test_costs"),
  Unused("data.skipped_work", "is for demonstrations of arithmetic, and {data.train} has none",
    lambda c: bool(c.data.train) and "arithmetic:" not in c.data.train, "test_costs"),
)

RECORDED = " and ".join(name for name, loss in O.POLICY_LOSSES.items() if loss.recorded)

INVALID: tuple[Rule | EntryRule, ...] = (
  # Sizes and lengths.
  Rule("{rl.prompts} must be a multiple of {rl.minibatches}, since groups are not split",
    lambda c: c.rl.prompts % c.rl.minibatches != 0, "test_main: a reshape fails"),
  Rule("rl.prompts × rl.group_size = {rl.rows:} rows must be a multiple of {rl.minibatches} × "
    "{rl.microbatches}", lambda c: c.rl.rows % (c.rl.minibatches * c.rl.microbatches) != 0,
    "test_main: a reshape fails"),
  Rule("{sft.batch} must be a multiple of {sft.microbatches}",
    lambda c: c.sft.batch % c.sft.microbatches != 0, "test_main: a reshape fails"),
  EntryRule("{x} exceed {model.max_position_embeddings}; lower a length", _lengths,
    lambda c, length: length > c.model.max_position_embeddings, "test_main"),
  Rule("{sampling.top_k}, {eval.top_k}: one of these is more than {model.vocab_size}; 0 means all",
    lambda c: max(c.sampling.top_k, c.eval.top_k) > c.model.vocab_size, "test_truncated_sampling"),
  Rule("{rl.packed} skips empty micro-batches, but a single one is never empty; set it to False, "
    "or rl.microbatches above 1", lambda c: c.rl.packed and c.rl.microbatches == 1, "test_packing"),
  # Jobs.
  Rule("{sft.steps}: {job} begins with a cold start; set sft.steps above 0, or set job=rl",
    lambda c: "sft" in c.job and not c.sft.steps, "test_sft: RL of random weights"),
  Rule("{lora.adapter}, {job}: the cold start changes the weights of these adapters; set job to rl",
    lambda c: bool(c.lora.adapter) and "sft" in c.job, "docs/one_chip.md: for weights"),
  Rule("{environment.workers}, {distributed}: hosts would see turns end in different orders and "
    "diverge; set environment.workers to 0", lambda c: c.distributed and c.environment.workers > 0,
    "test_rules"),
  Rule("{rollout_mesh.fsdp}, {distributed}, {engine.name}: the sampler's own mesh needs a single "
    "process and the local engine; set rollout_mesh.fsdp to 0", lambda c: c.rollout_mesh.fsdp != 0
    and (c.distributed or c.engine.name == "server"), "test_pipeline"),
  # Verifiers and data.
  EntryRule("{path:}: with (data, verifier) = {x:} every response to a task is wrong; set the "
    "task's verifier", _sources, _is_never_right, "CHANGELOG: rewards of 0"),
  Rule("{sampling.stop_strings}: an empty text ends every turn at once; leave it out",
    lambda c: "" in c.sampling.stop_strings, "CHANGELOG: responses of no token"),
  # Evaluations and checkpoints.
  EntryRule("{checkpoint.best} is no metric of the evaluation; did you mean {path:}?",
    _closest_metric, _is_unknown_metric, "CHANGELOG: an error after the first evaluation"),
  Rule("{eval.temperature}, {eval.top_k}, {eval.top_p}: all greedy responses to a problem are "
    "equal; set eval.samples (and those of benchmarks) to 1, or change these keys",
    lambda c: c.job != "sft" and _is_greedy(c, c.eval)
    and any(b.samples > 1 for _, b, _ in c.benchmarks()), "CHANGELOG: sampled several times"),
  Rule("{engine.server.directory}, {checkpoint.directory}: these must differ, since old weights "
    "for servers are deleted; set another directory", lambda c: bool(c.checkpoint.directory)
    and c.engine.server.directory == c.checkpoint.directory, "CHANGELOG: one directory for both"),
  EntryRule("{checkpoint.directory} lies in {x}, the directory of other weights; set a directory "
    "outside it", _weight_paths, lambda c, path: bool(c.checkpoint.directory)
    and Path(c.checkpoint.directory).is_relative_to(path), "CHANGELOG: checkpoints of two runs"),
  # Objectives.
  Rule("{objective.adaptive_clip.target}, {objective.old_logp}: with one update per iteration, all "
    "ratios are 1 and nothing is clipped; set rl.minibatches or rl.epochs above 1",
    lambda c: c.objective.adaptive_clip.target > 0 and c.objective.old_logp == "recompute"
    and c.rl.updates == 1, "CHANGELOG: options of a loss did nothing"),
  Rule("{objective.kl} has no effect without objective.kl_coef; set kl_coef, or leave kl unset",
    lambda c: not c.objective.kl_coef
    and c.objective.kl not in (None, c.objective.loss.options.get("kl")),
    "CHANGELOG: options of a loss did nothing"),
  Rule("{objective.kl}: with {job} and {objective.name} there is no ratio to the sampling policy; "
    "set it to k2", lambda c: bool(c.objective.kl_coef) and c.objective.kl == "k3_weighted"
    and (c.job == "offline" or c.objective.loss.to_reference), "test_epochs"),
  Rule("{objective.advantage}, {objective.name}: soft advantages are for spo alone, and spo takes "
    "no others; leave objective.advantage unset",
    lambda c: (c.objective.name == "spo") != (c.objective.advantage_kind == "soft"),
    "test_offline"),
  Rule("{objective.correction.cap}, {objective.correction.low}, {objective.correction.high}: these "
    "bounds exclude 1, the weight if sampler and trainer agree; set cap and high to at least 1, "
    "and low to at most 1",
    lambda c: (c.objective.correction.cap or 1) < 1 or (c.objective.correction.low or 0) > 1
    or (c.objective.correction.high or 1) < 1, "CHANGELOG: no response left"),
  Rule("{job}: {objective.name} cannot learn from recorded responses; losses for them: " + RECORDED,
    lambda c: c.job == "offline" and not c.objective.loss.recorded, "test_offline"),
  Rule("{job}: {objective.old_logp}, {objective.replay}: log-probs and experts of the "
    "recorded responses' sampler are unknown; set old_logp to recompute, replay to none or R2",
    lambda c: c.job == "offline"
    and (c.objective.old_logp != "recompute" or c.objective.replay == "R3"), "test_offline"),
  Rule("{offline.fresh} of {rl.prompts} is rounded to none or all of them; set another share, or 0",
    lambda c: c.offline.fresh > 0 and round(c.offline.fresh * c.rl.prompts) in (0, c.rl.prompts),
    "test_offline"),
  # Schedules.
  Rule("{schedule.new_tokens} rises to {schedule.longest:}, above {sampling.max_new_tokens}: "
    "raise max_new_tokens, or lower the last stage",
    lambda c: c.schedule.longest > c.sampling.max_new_tokens, "test_schedules"),
  Rule("{schedule.new_tokens}: the overlong punishment is largest at each stage's limit, and "
    "{reward.overlong_buffer} exceeds the lowest limit, {schedule.shortest:}; lower the buffer",
    lambda c: c.reward.overlong_weight > 0 and c.overlong_at_limit
    and 0 < c.schedule.shortest < c.reward.overlong_buffer, "test_composition"),
  Rule("{schedule.group_size_min}: advantages compare responses of a group; set it to at least 2, "
    "and at most {rl.group_size}", lambda c: c.schedule.group_size_min > c.rl.group_size
    or (c.schedule.group_size_min == 1 and c.needs_group), "test_left_out: groups of one"),
  Rule("{schedule.group_size_min}, {rl.extra_prompts}: extra prompts would fill the slots that "
    "small groups leave free, and be trained on iterations later; set one of these keys to 0",
    lambda c: c.schedule.group_size_min > 0 and c.rl.extra_prompts > 0, "test_schedules"),
  # Signals of `constraints`.
  EntryRule("{x.signal} needs a buffer: {reward.overlong_buffer} must lie between 1 and "
    "{reward.overlong_max}", _active,
    lambda c, x: x.signal == "overlong" and bool(c.reward.buffer_error), "test_composition"),
  EntryRule("{x.signal} has a fixed buffer, and {schedule.new_tokens} changes the limit; leave "
    "new_tokens empty, or set the signal to truncated", _active,
    lambda c, x: x.signal == "overlong" and bool(c.schedule.new_tokens), "test_multipliers"),
  EntryRule("{x.signal} needs reward.format=think or think_answer", _active,
    lambda c, x: x.signal == "format" and c.reward.format == "none", "test_multipliers"),
  EntryRule("{x.limit}, {x.bound}: {x.signal} always satisfies this limit, or never; set the "
    "limit inside the signal's range", _active, _is_vacuous, "test_multipliers"),
  EntryRule("{x.token} must be below {model.vocab_size}", _active,
    lambda c, x: x.signal == "token" and x.token >= c.model.vocab_size, "test_multipliers"),
)

INVALID_RL: tuple[Rule | EntryRule, ...] = (  # For jobs with RL or recorded responses.
  Rule("{profile.iteration} is no iteration: {job} has {rl.iterations:}; lower it, or set it to 0",
    lambda c: c.profile.iteration > c.rl.iterations, "docs/running.md: a run without profile"),
  Rule("{critic.warmup_iterations}, {rl.lag}, {rl.iterations}: all responses would be samples of "
    "the initial policy; lower the warm-up and the lag below the iterations",
    lambda c: max(c.critic.warmup, c.rl.lag) >= c.rl.iterations, "test_critic: all warm-up"),
  # No signal.
  Rule("{sampling.temperature}, {sampling.top_k}, {sampling.top_p}: greedy responses of a group "
    "are equal and teach nothing; set temperature above 0, top_k not to 1, and top_p higher",
    lambda c: _is_greedy(c, c.sampling), "test_main"),
  Rule("{sampling.top_p}, {sampling.min_p}, {sampling.top_k}: updates renormalise over the "
    f"candidates of each token, and at most {MAX_CANDIDATES} are recorded; set sampling.top_k "
    f"between 2 and {MAX_CANDIDATES} too, or set top_p=1 and min_p=0",
    lambda c: not c.sampling.untruncated and not 0 < c.sampling.top_k <= MAX_CANDIDATES,
    "test_truncated_sampling: ratios off by the excluded probability"),
  Rule("{sampling.top_k}, {sampling.top_p}, {sampling.min_p}: {engine.name} keeps no record of a "
    "token's candidates; set top_k=0, top_p=1 and min_p=0",
    lambda c: not c.sampling.untruncated and c.engine.name != "local", "test_truncated_sampling"),
  Rule("{reward.false_positive}, {reward.false_negative}: wrong responses are rewarded at least as "
    "often as right ones; lower these shares to a sum below 1",
    lambda c: c.reward.false_positive + c.reward.false_negative >= 1, "CHANGELOG: no signal"),
  Rule("{reward.overlong_max}, {reward.overlong_buffer}: no response of {sampling.max_new_tokens} "
    "is long enough to be punished; lower overlong_max", lambda c: c.reward.overlong_weight > 0
    and c.reward.overlong_max - c.reward.overlong_buffer >= c.sampling.max_new_tokens,
    "CHANGELOG: DAPO's lengths with a shorter limit"),
  Rule("{objective.clip_low}, {objective.clip_high}: every ratio but 1 is clipped, and nothing is "
    "learned after the first update of an iteration; leave them unset",
    lambda c: c.objective.clip_ranges == (0, 0), "CHANGELOG: one update of four"),
  Rule("{objective.kl}, {objective.kl_coef}: the gradient of k1 in the loss has an expected value "
    "of 0 on policy, and a wrong direction off policy; set kl to k2 or k3_weighted, or "
    "instead of kl_coef set objective.reward_kl_coef, for k1 in the reward",
    lambda c: c.objective.kl == "k1" and bool(c.objective.kl_coef), "CHANGELOG: k1 as a loss"),
  # Constraints.
  Rule("distillation.reward_weight=0 leaves constraints and costs without effect; set it above 0, "
    "or leave out constraints, environment.token_cost and environment.call_cost",
    lambda c: c.distillation.alone and (c.constraints.enabled or c.environment.costs),
    "test_distillation"),
  Rule("constraints ({constraints.names:}): {job} has recorded costs, not the policy's; set "
    "job=rl", lambda c: c.constraints.enabled and c.job == "offline", "test_multipliers"),
  Rule("constraints ({constraints.names:}): {rl.mask_truncated} excludes the costs of the "
    "longest responses; set it to False",
    lambda c: c.rl.mask_truncated and bool(c.constraints.active_costs), "test_multipliers"),
  Rule("constraints ({constraints.names:}), {objective.advantage}: rewards and costs are combined "
    "after standardisation; set objective.advantage to std",
    lambda c: c.constraints.enabled and not c.objective.standardises, "test_multipliers"),
)

WARNINGS: tuple[Rule | EntryRule, ...] = (
  Rule("{weights}, {job}: an untrained policy is hardly ever right; begin with a cold start or "
    "pretrained weights", lambda c: c.weights == "random"
    and c.job in ("rl", "offline", "eval"), "test_rehearse: rewards of 0"),
  Rule("{reward.name}: demonstrations of arithmetic show their work before the answer, and this "
    "verifier does not skip the work; set reward.name=arithmetic", lambda c: "sft" in c.job
    and not c.environment.name and c.reward.name in ("math", "string")
    and "arithmetic" in tasks(c.data.train), "CHANGELOG: rewards of 0"),
  EntryRule("{x.warmup_steps}: the learning rate still rises at the last update",
    _optimizers, lambda c, x: x.warmup_steps not in (0, 10) and x.warmup_steps >= _updates(c, x),
    "CHANGELOG: a long run's file, shortened"),
  EntryRule("{x.learning_rate}: each update of Adam changes each weight by about this much",
    _optimizers, lambda c, x: not 1e-9 <= x.learning_rate <= 0.1, "CHANGELOG: a forgotten sign"),
)

WARNINGS_RL: tuple[Rule | EntryRule, ...] = (  # For jobs with RL or recorded responses.
  Rule("{rl.max_age}, {rl.token_budget}: a response of {sampling.max_new_tokens} takes more "
    "iterations than max_age allows, and is restarted before it finishes", _never_finishes,
    "test_partial_rollouts: long responses begun again"),
  Rule("{eval.max_new_tokens} is less than {sampling.max_new_tokens}: evaluations truncate "
    "responses sooner than training", lambda c: c.eval.max_new_tokens < c.sampling.max_new_tokens,
    "CHANGELOG: accuracy falls as responses grow"),
  Rule("{rollout_mesh.fsdp}, {rl.lag}: sampler and trainer have separate devices, and wait for "
    "each other", lambda c: c.samples and c.rollout_mesh.enabled and not c.rl.lag,
    "benchmarks/lag.py: devices idle"),
  Rule("{checkpoint.best}, {checkpoint.every}, {eval.every}: no step before the last is both "
    "evaluated and saved, so only the last can be kept as the best",
    lambda c: c.checkpoint.best.startswith("eval/") and math.lcm(c.checkpoint.every, c.eval.every)
    > c.rl.iterations > c.checkpoint.every, "CHANGELOG: the best is removed"),
  Rule("{objective.clip_low}, {objective.clip_high}: this range is unusual for the ratios of "
    "{objective.name}; ratios of responses stay close to 1 (3e-4 and 4e-4 in the GSPO paper), "
    "ratios of tokens do not (0.2 is common)", _mixes_up_clip_ranges, "TRL issue 3834"),
  Rule("{objective.reward_kl_coef} with advantages standardised by group: in a group of equal "
    "rewards, small differences of the KL are scaled up to weigh as much as right and wrong "
    "elsewhere; set objective.advantage to batch or none", lambda c: c.objective.reward_kl_coef > 0
    and c.objective.advantage_kind == "std", "test_advantages: equal rewards"),
  Rule("{objective.name}, {objective.segment_unit}, {objective.segment_tokens}: each response is a "
    "segment, as in plain GSPO ({environment.name}, {sampling.max_new_tokens})", _is_one_segment,
    "CHANGELOG: plain GSPO"),
)

INVALID_DATA = (
  DataRule("{reward.format}: its tags alone take {facts.format_tokens:} tokens of "
    "{sampling.max_new_tokens}; raise max_new_tokens, or set format to none",
    lambda c, facts: c.has_iterations and not c.environment.name
    and facts.format_tokens >= c.sampling.max_new_tokens, "CHANGELOG: rewards of 0"),
  DataRule("{sampling.max_new_tokens}, {eval.max_new_tokens}: no answer of a source fits into a "
    "response (shares that fit: {facts.answers:}); raise them",
    lambda c, facts: 0 in facts.answers.values(), "CHANGELOG: rewards of 0"),
)

DATA_WARNINGS = (
  DataRule("{sampling.max_new_tokens}: some answers do not fit (shares that fit: {facts.answers:})",
    lambda c, facts: 0 < facts.answers.get("data.train", 0) < 1, "CHANGELOG: rewards of 0"),
  DataRule("the most frequent gold answer is a word ({facts.words:}): if it means that the answer "
    "is missing (\"unknown\"), remove its rows", lambda c, facts: bool(facts.words), "CHANGELOG"),
  DataRule("held-out problems are in data.train too ({facts.shared:}): accuracy on these may be "
    "memorised; remove one of the copies", lambda c, facts: bool(facts.shared), "test_rehearse"),
  DataRule("{rl.prompts} is more than the {facts.prompts:} prompts of the data: an iteration "
    "repeats some of them", lambda c, facts: c.has_iterations and 0 < facts.prompts < c.rl.prompts,
    "CHANGELOG: small files"),
  DataRule("{sft.batch} is more than the {facts.demonstrations:} demonstrations: an update repeats "
    "some of them", lambda c, facts: 0 < facts.demonstrations < c.sft.batch, "CHANGELOG"),
  DataRule("{reward.workers} × {reward.memory_mb} are more than this machine's memory of "
    "{facts.memory_mb:} MiB; lower one of them", lambda c, facts: c.reward.name == "code"
    and max(1, c.reward.workers) * c.reward.memory_mb > facts.memory_mb, "CHANGELOG"),
  DataRule("{distributed}: this is the only process; start the command on every host",
    lambda c, facts: c.distributed and facts.processes == 1, "docs/running.md: two alone"),
  DataRule("{tokenizer}, {weights}: these weights have their own tokenizer; leave tokenizer empty",
    lambda c, facts: c.tokenizer == "bytes" and facts.has_tokenizer, "CHANGELOG: rewards of 0"),
)
# fmt: on


def check(c: RunConfig) -> None:
  """Raises ValueError for invalid settings."""
  estimators.check(c)
  for _, message in invalid(c):
    raise ValueError(message)


def warnings(c: RunConfig, facts: DataFacts) -> list[str]:
  """Returns warnings; raises ValueError for settings invalid for these data."""
  for _, message in invalid(c, facts):
    raise ValueError(message)
  return [message for _, message in doubtful(c, facts)]


def invalid(c: RunConfig, facts: DataFacts | None = None) -> Iterator[tuple[NamedTuple, str]]:
  """Yields each broken rule for invalid settings, with its message."""
  yield from _broken(INVALID + (INVALID_RL if c.has_iterations else ()), c)
  for row in UNUSED:
    for name, value, default in _changed(c, row.keys.split()) if row.off(c) else ():
      yield row, f"{name}={value!r} {ranges.fill(c, '', row.message)}; {_remedy(default)}"
  yield from _broken(INVALID_DATA, c, facts)


def doubtful(c: RunConfig, facts: DataFacts) -> Iterator[tuple[NamedTuple, str]]:
  """Yields each broken rule for warnings, with its message."""
  yield from _broken(WARNINGS + (WARNINGS_RL if c.has_iterations else ()), c)
  yield from _broken(DATA_WARNINGS, c, facts)


def _broken(
  rules: Iterable[Rule | EntryRule | DataRule], c: RunConfig, facts: DataFacts | None = None
) -> Iterator[tuple[NamedTuple, str]]:
  """Yields the broken rules with their messages."""
  for rule in rules:
    if isinstance(rule, EntryRule):
      for path, x in rule.entries(c).items():
        if rule.wrong(c, x):
          yield rule, ranges.fill(c, "", rule.message, x=(path, x), path=("", path))
    elif isinstance(rule, Rule):
      if rule.wrong(c):
        yield rule, ranges.fill(c, "", rule.message)
    elif facts is not None and rule.wrong(c, facts):
      yield rule, ranges.fill(c, "", rule.message, facts=("", facts))


def _changed(c: RunConfig, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
  """Yields (name, value, default) of each key with another value than its default."""
  defaults = types.SimpleNamespace(**{x.name: x.default for x in dataclasses.fields(c)})
  for name in keys:
    value, default = ranges.look_up(c, name), ranges.look_up(defaults, name)
    if dataclasses.is_dataclass(default):
      yield from _changed(c, [f"{name}.{x.name}" for x in dataclasses.fields(default)])
    elif value != default:
      yield name, value, default


def _remedy(default: Any) -> str:
  """Returns the instruction for resetting a key to its default."""
  if default in (None, "", ()):
    return "leave it unset" if default is None else "leave it empty"
  return f"set it to {default:g}" if isinstance(default, float) else f"set it to {default}"
