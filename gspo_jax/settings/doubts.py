"""Settings that can hardly be meant, and what the machine and the data have to say.

Tables as in `sense`. `inputs` has them told once, when a run or a dry run begins; `..._HERE` go by
what it has found.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gspo_jax.settings import ranges
from gspo_jax.settings.sense import Table, clip_ranges, equal_samples, of_optimizers, tasks

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig

# Ends of the names of metrics that are to be large, and of those that are to be small.
LARGE = ("accuracy", "greedy", "rating", "reward/mean")
SMALL = ("loss", "truncated_fraction")


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a run finds where it is started."""

  prompts: int = 0  # to sample responses to; 0: it samples none
  recorded: int = 0  # groups of responses that job=offline learns from
  demonstrations: int = 0  # 0: it has no cold start
  problems: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by the key of their data
  # Shares of the answers that responses have the tokens for, by the same keys.
  answers: Mapping[str, float] = dataclasses.field(default_factory=dict)
  format_tokens: int = 0  # of the tags of reward.format
  processors: int = 1
  memory_mb: int = 2**30
  processes: int = 1
  has_tokenizer: bool = False  # weights come with one


def _steps(c: "RunConfig") -> int:
  """Iterations, or updates of a cold start alone: what checkpoints are counted by."""
  return c.rl.iterations if c.has_iterations else c.sft.steps


def _iterations(c: "RunConfig") -> int:
  """Those over which the longest response is sampled, at its share of the budget; 0: no budget."""
  budget = c.rl.token_budget
  return math.ceil(c.rl.rows * c.sampling.max_new_tokens / budget) if budget else 0


def _twice(c: "RunConfig") -> str:
  """Benchmarks that are the same but for their names."""
  seen: dict[Any, str] = {}
  for _, b, key in c.benchmarks():
    judged = b.data, b.reward or c.reward.name
    if judged in seen:
      return f"{seen[judged]} and {key} = {b.data!r}"
    seen[judged] = key
  return ""


def _rare(share: float) -> str:
  """A share of answers that is neither none nor all, in per cent."""
  return f"{100 * share:.0f} %" if 0 < share < 1 else ""


TableHere = dict[str, Callable[["RunConfig", Facts], Any]]

DOUBTED: Table = {
  # Little or no signal.
  "{weights}, {job}: a policy that has learned nothing is hardly ever right; begin with a cold "
  "start or with weights": lambda c: c.weights == "random" and c.job in ("rl", "offline", "eval"),
  "{reward.name}: demonstrations of arithmetic write their work before the answer, which this "
  "verifier does not look behind": lambda c: (
    "sft" in c.job
    and not c.environment.name
    and c.reward.name in ("math", "string")
    and "arithmetic" in tasks(c.data.train)
  ),
  "{reward.overlong_buffer} is {reward.overlong_max}: length is punished from "
  "the first token": lambda c: (
    c.has_iterations
    and c.reward.overlong_weight
    and c.reward.overlong_buffer == c.reward.overlong_max
  ),
  "{environment.token_cost}, {environment.call_cost}: a token, or a call, costs what a right "
  "answer earns": lambda c: max(c.environment.token_cost, c.environment.call_cost) >= 1,
  "{data.carry_errors}: every demonstration with a carry is wrong": lambda c: (
    "sft" in c.job and c.data.carry_errors == 1
  ),
  # Objectives.
  "{objective.load_balance_coef}, {sft.load_balance_coef}: the balance of experts outweighs "
  "the loss": lambda c: max(c.objective.load_balance_coef, c.sft.load_balance_coef) >= 1,
  # Distributions.
  "{sampling.temperature}: responses to train on are all but random": lambda c: (
    c.samples and c.sampling.temperature >= 4
  ),
  "{sampling.temperature}, {sampling.min_p}: responses of a group are all but equal": lambda c: (
    c.samples and (c.sampling.temperature < 0.1 or c.sampling.min_p >= 0.5)
  ),
  "{eval.temperature}: what is evaluated is all but random": lambda c: (
    c.job != "sft" and c.eval.temperature >= 4
  ),
  "{eval.greedy}, {eval.temperature}, {eval.top_k}: the greedy responses are "
  "sampled twice": lambda c: c.eval.greedy and equal_samples(c, 0),
  # Optimizers.
  "{it}: the rate is still rising at the last update": lambda c: of_optimizers(
    c,
    "warmup_steps",
    wrong=lambda x, updates: x.warmup_steps not in (0, 10) and x.warmup_steps >= updates,
  ),
  "{it}: the schedule is over before the rate has risen": lambda c: of_optimizers(
    c,
    "warmup_steps",
    "schedule_steps",
    wrong=lambda x, _: x.warmup_steps >= x.schedule_steps > 0,
  ),
  "{it}: an update of Adam moves each weight by as much": lambda c: of_optimizers(
    c, "learning_rate", wrong=lambda x, _: not 1e-9 <= x.learning_rate <= 0.1
  ),
  "{it}: Adam takes the mean of gradients over longer than that of their squares, and may "
  "diverge": lambda c: of_optimizers(c, "b1", "b2", wrong=lambda x, _: x.b1**2 > x.b2),
  "{it}: larger than gradients are, which updates then go with": lambda c: of_optimizers(
    c, "eps", wrong=lambda x, _: x.eps >= 1e-3
  ),
  "{it}: the rate stays as it is": lambda c: of_optimizers(
    c,
    "schedule",
    "final_fraction",
    wrong=lambda x, _: x.schedule != "constant" and x.final_fraction == 1,
  ),
  # Intervals.
  "{sft.target_loss} is looked at every {sft.check_every} of {sft.steps}: at "
  "the end alone": lambda c: (
    "sft" in c.job and c.sft.target_loss and c.sft.check_every not in (10, *range(c.sft.steps))
  ),
  "{data.query_set.extra_rounds}: an iteration may sample so many times as much": lambda c: (
    c.samples and c.data.query_set.extra_rounds > 50
  ),
  "{checkpoint.keep_every}, {checkpoint.every}: no step is both, so none is "
  "kept for good": lambda c: (
    c.checkpoint.keep_every
    and math.lcm(c.checkpoint.keep_every, c.checkpoint.every) > _steps(c) > 0
  ),
  "{checkpoint.best}, {job}: a cold start has no figure of which the best is kept": lambda c: (
    c.checkpoint.best and c.job == "sft"
  ),
  "{checkpoint.grace_s}: SIGTERM ends the run before it has saved anything": lambda c: (
    c.checkpoint.grace_s == 0
  ),
  # Thresholds of alarms.
  "{alarms.unknown}: no share is above 1; 0 turns it off": lambda c: c.alarms.unknown == 1,
  "{engine.server.tolerance}: a server that samples another model passes": lambda c: (
    c.engine.server.tolerance > 1
  ),
  # Sizes and lengths.
  "{rl.token_budget} is never reached by {it} responses of {sampling.max_new_tokens}": lambda c: (
    c.samples
    and c.rl.token_budget
    >= (c.rl.rows + c.rl.extra_prompts * c.rl.group_size) * c.sampling.max_new_tokens
    and c.rl.rows
  ),
  "{rl.max_age}, {rl.token_budget}: a response of {sampling.max_new_tokens} takes {it} iterations, "
  "and is begun again before it is finished": lambda c: (
    c.rl.max_age and _iterations(c) > c.rl.max_age + 1 and _iterations(c)
  ),
  "{rl.extra_prompts} is more than {rl.prompts}: more is carried over than is "
  "trained on": lambda c: c.samples and c.rl.extra_prompts > c.rl.prompts,
  "{model.experts_per_token} is {model.num_experts}: every token goes to all experts": lambda c: (
    1 < c.model.num_experts == c.model.experts_per_token
  ),
  "{model.sliding_window} is not less than {model.max_position_embeddings}: local layers see "
  "all": lambda c: c.model.sliding_window >= c.model.max_position_embeddings,
  "{model.rope_theta}: positions turn all pairs alike": lambda c: c.model.rope_theta == 1,
  "{model.rms_norm_eps}: as large as what it is added to": lambda c: c.model.rms_norm_eps >= 0.1,
  "{model.final_logit_softcapping}: no token can be likely": lambda c: (
    0 < c.model.final_logit_softcapping < math.log(c.model.vocab_size) / 2
  ),
  "{engine.page_tokens}: a page holds a whole response and its prompt": lambda c: (
    c.samples
    and (c.engine.cache == "paged" or c.engine.cache_tokens)
    and c.engine.page_tokens > c.data.max_prompt_tokens + c.sampling.max_new_tokens
  ),
  "{eval.max_new_tokens} is less than {sampling.max_new_tokens}: evaluations cut off sooner "
  "what is trained on": lambda c: (
    c.has_iterations and 0 < c.eval.max_new_tokens < c.sampling.max_new_tokens
  ),
  "{environment.max_turns} is more than {sampling.max_new_tokens} has room for": lambda c: (
    c.environment.name and 2 * c.environment.max_turns - 1 > c.sampling.max_new_tokens
  ),
  "{rollout_mesh.fsdp}, {rl.lag}: sampler and trainer wait for each other, each on devices of "
  "its own": lambda c: c.samples and c.rollout_mesh.on and not c.rl.lag,
  "{it}: its multiplier stays 0, and the cost is measured only": lambda c: next(
    (
      f"constraints.costs.{name}"
      for name, cost in c.constraints.active_costs.items()
      if not (cost.initial or cost.rate or cost.gain)
    ),
    "",
  ),
  "{reward.time_limit_s}: the verifier has no time to judge": lambda c: (
    c.reward.name not in ("arithmetic", "recurrence", "string") and c.reward.time_limit_s < 0.1
  ),
  "{engine.steps}: the host looks once or not at all while a response is sampled": lambda c: (
    c.engine.name == "local"
    and c.engine.steps > max(16, 2 * c.sampling.max_new_tokens, 2 * c.eval.max_new_tokens)
  ),
  "{environment.max_turns}: whoever asks is cut off before the answer is of use": lambda c: (
    c.environment.name == "calculator" and c.environment.max_turns == 1
  ),
  "{model.attn_logit_softcapping}: all keys are seen about alike": lambda c: (
    0 < c.model.attn_logit_softcapping < 1
  ),
  "{compute.logits_chunk} is more than any row has": lambda c: (
    c.compute.logits_chunk
    > max(c.data.max_prompt_tokens + c.sampling.max_new_tokens, c.sft.max_tokens, 2048)
  ),
  "{reward.time_limit_s}: a verifier may hang for an hour": lambda c: c.reward.time_limit_s > 3600,
  "{it}: the same benchmark twice": _twice,
}

# Where there are iterations.
DOUBTED_RL: Table = {
  "{checkpoint.best}: a run whose first iteration has no such metric ends there": lambda c: (
    c.checkpoint.best and not c.checkpoint.best.startswith(("eval/", "reward/mean"))
  ),
  "{checkpoint.best}, {checkpoint.best_is}: that is the worst": lambda c: (
    c.checkpoint.best.endswith(LARGE if c.checkpoint.best_is == "smallest" else SMALL)
  ),
  # Little or no signal.
  "{data.train} is for the calculator, and {environment.name} leaves it out": lambda c: (
    not c.environment.name and "calculator" in tasks(c.data.train)
  ),
  "{reward.false_positive}, {reward.false_negative}: half of the verdicts are "
  "noise, or more": lambda c: c.reward.false_positive + c.reward.false_negative >= 0.5,
  "{reward.format_weight}: the format is worth more than a right answer": lambda c: (
    c.reward.format_weight > 1
  ),
  "{reward.overlong_weight}: length is worth more than a right answer": lambda c: (
    c.reward.overlong_weight > 1
  ),
  "{reward.overlong_max} is above {sampling.max_new_tokens}: no response is "
  "punished in full": lambda c: (
    c.reward.overlong_weight and c.reward.overlong_max > c.sampling.max_new_tokens
  ),
  # Objectives.
  "{objective.clip_low}, {objective.clip_high}: on one side every ratio but 1 "
  "is clipped": lambda c: 0 in clip_ranges(c) and any(clip_ranges(c)),
  "{objective.clip_low}, {objective.clip_high}: the ratio of {objective.name} is a mean over a "
  "whole response, which hardly moves so far (3e-4 and 4e-4 in the paper)": lambda c: (
    c.objective.name in ("gspo", "gspo_token", "luspo")
    and c.objective.length_exponent in (None, 1)
    and max(clip_ranges(c)) >= 0.15
  ),
  "{objective.clip_low}, {objective.clip_high}: the ratio of {objective.name} is of a token, "
  "which moves further with the first update (0.2 is common)": lambda c: (
    c.objective.name in ("grpo", "dapo", "dr_grpo", "ppo_clip") and 0 < max(clip_ranges(c)) < 0.005
  ),
  "{objective.dual_clip} is within {objective.clip_high}": lambda c: (
    c.objective.dual_clip and c.objective.dual_clip < 1 + (clip_ranges(c)[1] or 0)
  ),
  "{objective.kl_coef}: the penalty is worth more than a right answer": lambda c: (
    (c.objective.kl_coef or 0) > 1
  ),
  "{objective.reward_kl_coef} with advantages that are standardised by group: where rewards are "
  "equal the divergence alone counts as much as a right answer; set objective.advantage to batch "
  "or none": lambda c: c.objective.reward_kl_coef and c.objective.advantage_kind == "std",
  "{objective.entropy_coef}: randomness is worth more than a right answer": lambda c: (
    (c.objective.entropy_coef or 0) >= 1
  ),
  "{objective.adaptive_clip.target}: most of what was sampled would be clipped": lambda c: (
    c.objective.adaptive_clip.target > 0.5
  ),
  "{objective.segment_tokens} is not less than {sampling.max_new_tokens}: a response is one "
  "segment": lambda c: (c.objective.segment_tokens or 0) >= c.sampling.max_new_tokens,
  "{objective.segment_unit}, {environment.name}: a response is one turn, and "
  "one segment": lambda c: (
    c.objective.name == "segment"
    and c.objective.segment_unit in (None, "turn")
    and not c.environment.name
  ),
  "{distillation.teacher} is {weights}: the policy begins as its own teacher": lambda c: (
    c.distillation.on and c.distillation.teacher == c.weights
  ),
  "{rl.epochs}: responses are used so often that most are clipped": lambda c: c.rl.epochs > 10,
  # Intervals.
  "{schedule.new_tokens}: the last stage would begin after {rl.iterations}": lambda c: (
    c.schedule.stages and c.schedule.stages[-1][0] > c.rl.iterations
  ),
  "{schedule.group_size_min} is {rl.group_size}: all groups are of one size": lambda c: (
    c.schedule.group_size_min == c.rl.group_size
  ),
  "{data.query_set.drop_after} is more than {rl.iterations}: no prompt is "
  "sampled so often": lambda c: c.data.query_set.drop_after > c.rl.iterations,
  "{data.query_set.readmit_after} is not less than {rl.iterations}: no prompt returns": lambda c: (
    c.data.query_set.readmit_after >= c.rl.iterations
  ),
  "{checkpoint.best}, {checkpoint.every}, {eval.every}: no step before the last is evaluated "
  "and saved, so the best is the last": lambda c: (
    c.checkpoint.best.startswith("eval/")
    and math.lcm(c.checkpoint.every, c.eval.every) > c.rl.iterations > c.checkpoint.every
  ),
  # Thresholds of alarms.
  "{alarms.window} is more than {rl.iterations}": lambda c: (
    c.alarms.window > max(10, c.rl.iterations)
  ),
  "{alarms.no_gradient} is more than {rl.iterations}": lambda c: (
    c.alarms.no_gradient > max(5, c.rl.iterations)
  ),
  "{alarms.ratio}: a policy that leaves so far has run away long before": lambda c: (
    c.alarms.ratio >= 1
  ),
  "{objective.off_policy_threshold}: no token is so unlikely, so no response "
  "is left out": lambda c: (c.objective.off_policy_threshold or 0) >= 10,
  "{objective.correction.cap}: no weight is so large, so none is cut off": lambda c: (
    c.objective.correction.name == "truncated" and (c.objective.correction.cap or 0) >= 1000
  ),
  "{distillation.coef}: the teacher is worth more than all rewards": lambda c: (
    c.distillation.on and not c.distillation.alone and c.distillation.coef > 100
  ),
  "{alarms.reward}: rewards do not fall so far": lambda c: (
    not c.environment.name
    and c.alarms.reward > 1 + c.reward.format_weight + c.reward.overlong_weight
  ),
  "{alarms.grad_norm}: a gradient like any other is above that": lambda c: (
    0 < c.alarms.grad_norm <= 1
  ),
}

REFUSED_HERE: TableHere = {
  "{reward.format}: its tags take {it} tokens, and {sampling.max_new_tokens}; raise it, or set "
  "format to none": lambda c, here: (
    c.has_iterations
    and not c.environment.name
    and here.format_tokens >= c.sampling.max_new_tokens
    and here.format_tokens
  ),
  "{sampling.max_new_tokens}, {eval.max_new_tokens}: no answer of {it} fits into a response; "
  "raise them": lambda c, here: next((key for key, share in here.answers.items() if not share), ""),
}

DOUBTED_HERE: TableHere = {
  "{it} of the answers of data.train fit into {sampling.max_new_tokens}": lambda c, here: _rare(
    here.answers.get("data.train", 0)
  ),
  "{rl.prompts} is more than the {it} of data.train: an iteration has some twice": lambda c, here: (
    c.samples and 0 < here.prompts < c.rl.prompts and here.prompts
  ),
  "{rl.prompts} is more than the {it} groups of offline.data: an iteration has "
  "some twice": lambda c, here: 0 < here.recorded < c.rl.prompts and here.recorded,
  "{sft.batch} is more than the {it} demonstrations: an update has some twice": lambda c, here: (
    0 < here.demonstrations < c.sft.batch and here.demonstrations
  ),
  "{it}": lambda c, here: next(
    (
      f"{key.removesuffix('.data') if name else 'eval'}.problems={b.problems} is more than the "
      f"{here.problems[key]} of {key}"
      for name, b, key in c.benchmarks()
      if b.problems > here.problems.get(key, b.problems)
    ),
    "",
  ),
  "{reward.workers} are more than the {it} processors here": lambda c, here: (
    c.reward.workers > 4 * here.processors and here.processors
  ),
  "{reward.workers} × {reward.memory_mb} are more than the {it} MB of memory "
  "here": lambda c, here: (
    c.reward.name == "code"
    and max(1, c.reward.workers) * c.reward.memory_mb > here.memory_mb
    and here.memory_mb
  ),
  "{distributed}: this is the only process": lambda c, here: c.distributed and here.processes == 1,
  "{tokenizer}, {weights}: the model was trained with the tokens of its own "
  "tokenizer": lambda c, here: c.tokenizer == "bytes" and here.has_tokenizer,
}


def check(c: "RunConfig", here: Facts) -> list[str]:
  """What can hardly be meant, a sentence each. ValueError for what cannot be meant here."""
  for message, wrong in REFUSED_HERE.items():
    if it := wrong(c, here):
      raise ValueError(ranges.told(c, "", message, it=it))
  table = DOUBTED | (DOUBTED_RL if c.has_iterations else {})
  doubts = [(message, doubted(c)) for message, doubted in table.items()]
  doubts += [(message, doubted(c, here)) for message, doubted in DOUBTED_HERE.items()]
  return [ranges.told(c, "", message, it=it) for message, it in doubts if it]
