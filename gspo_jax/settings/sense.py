"""Settings that cannot be meant: a key, or two against each other. `doubts` has those that hardly
can.

Tables as in `checks`: what is said, with {rl.prompts} for a key with its value and {it} for what
the condition came to, and when.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_jax.settings import ranges
from gspo_jax.settings.objective import options_of
from gspo_jax.settings.rewards import VERIFIERS

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig
  from gspo_jax.settings.training import OptimizerConfig

MOST_WORKERS = 1024  # no machine has so many processors
JUDGES = {  # verifiers of ours that can find a response to an embedded task right
  "arithmetic": ("arithmetic", "math", "string"),
  "calculator": ("arithmetic", "math", "string"),
  "recurrence": ("recurrence",),
  "word_problems": ("arithmetic", "math", "string"),
}


def tasks(spec: str) -> list[str]:
  """Names of the embedded tasks among the sources of data."""
  return re.findall(rf"(?:^|,)\s*({'|'.join(JUDGES)}):", spec)


def _unjudged(c: "RunConfig") -> str:
  """A source whose responses its verifier finds right never."""
  judged = [(f"eval.benchmarks.{name}.data", b) for name, b, _ in c.benchmarks() if name]
  judged = [(key, b.data, b.reward) for key, b in judged]
  judged += [("data.eval", c.data.eval, "")] if c.job != "sft" else []
  judged += [("data.train", c.data.train, "")] if c.has_iterations and c.samples_prompts else []
  for key, spec, named in judged:
    verifier = named or c.reward.name
    for task in tasks(spec):
      if named or not c.environment.name:
        if verifier in VERIFIERS and verifier not in JUDGES[task]:
          return f"{key}={spec!r}: {verifier} finds no response to {task} right"
      elif c.environment.name == "calculator" and task == "recurrence":
        return f"{key}={spec!r}: environment.name='calculator' finds none to {task} right"
  return ""


def equal_samples(c: "RunConfig", most: int) -> int:
  """The most responses to a problem that an evaluation samples, if more than `most` of them have no
  choice."""
  least = 1 / c.model.vocab_size  # which the likeliest token always has
  greedy = not c.eval.temperature or c.eval.top_k == 1 or c.eval.top_p <= least
  samples = max((b.samples for _, b, _ in c.benchmarks()), default=0)
  return samples if greedy and c.job != "sft" and samples > most else 0


def clip_ranges(c: "RunConfig") -> tuple[float | None, float | None]:
  """Both clip ranges, None where there is none."""
  options = options_of(c.objective.name) | c.objective.options()
  return options.get("clip_low"), options.get("clip_high")


def _learns(c: "RunConfig") -> Iterator[tuple[str, "OptimizerConfig", int]]:
  """Names, sections and updates of the optimizers that are used."""
  if "sft" in c.job and c.sft.steps:
    yield "sft_optimizer", c.sft_optimizer, c.sft.steps
  if c.has_iterations:
    yield "rl_optimizer", c.rl_optimizer, (c.rl.iterations - c.critic.warmup) * c.rl.updates
    if c.critic.name != "none":
      yield "critic_optimizer", c.critic_optimizer, c.rl.iterations * c.rl.updates


def of_optimizers(
  c: "RunConfig", *keys: str, wrong: Callable[["OptimizerConfig", int], bool]
) -> str:
  """The keys, with their values, of the first optimizer that is wrong."""
  for name, section, updates in _learns(c):
    if wrong(section, updates):
      return ", ".join(f"{name}.{key}={getattr(section, key)!r}" for key in keys)
  return ""


Table = dict[str, Callable[["RunConfig"], Any]]


REFUSED: Table = {
  # No signal.
  "{it}; set reward.name to the verifier of the task": _unjudged,
  "{objective.correction.cap} cuts off the weight 1 too, of a trainer that agrees with the "
  "sampler; make it at least 1": lambda c: (
    c.objective.correction.name == "truncated" and (c.objective.correction.cap or 1) < 1
  ),
  "{objective.correction.low}, {objective.correction.high} leave out the weight 1, of a "
  "trainer that agrees with the sampler; put them below and above 1": lambda c: (
    c.objective.correction.name == "masked"
    and ((c.objective.correction.low or 0) > 1 or (c.objective.correction.high or 2) < 1)
  ),
  "{objective.adaptive_clip.span} leaves the ranges where they are; make it more than 1, or "
  "target 0": lambda c: c.objective.adaptive_clip.target and c.objective.adaptive_clip.span == 1,
  "{distillation.teacher} is {weights}: the policy is its own teacher, and "
  "{distillation.reward_weight} leaves nothing else to learn from": lambda c: (
    c.distillation.alone and c.has_iterations and c.distillation.teacher == c.weights
  ),
  "{it}: the decay of an update takes the whole weight; make their product less than 1": lambda c: (
    of_optimizers(
      c,
      "learning_rate",
      "weight_decay",
      wrong=lambda x, _: x.learning_rate * x.weight_decay >= 1,
    )
  ),
  # The same several times.
  "{eval.temperature}, {eval.top_k}, {eval.top_p}: all {it} greedy responses to a problem are "
  "equal; set eval.samples (and those of benchmarks) to 1, or temperature "
  "above 0": lambda c: equal_samples(c, 1),
  "{sampling.stop_strings}: an empty text ends every turn at once, and one named twice is a "
  "typing error": lambda c: (
    "" in c.sampling.stop_strings or len({*c.sampling.stop_strings}) < len(c.sampling.stop_strings)
  ),
  "{sampling.top_p} leaves no more than the likeliest of {model.vocab_size}: the greedy "
  "responses of a group are equal and teach nothing": lambda c: (
    c.samples and c.sampling.top_p <= 1 / c.model.vocab_size
  ),
  # Sizes that there are not.
  "{sampling.top_k} is more than {model.vocab_size}; set it to 0 for all": lambda c: (
    c.samples and c.sampling.top_k > c.model.vocab_size
  ),
  "{eval.top_k} is more than {model.vocab_size}; set it to 0 for all": lambda c: (
    c.eval.top_k > c.model.vocab_size
  ),
  "{reward.workers} are more processes than a machine has processors; set it "
  "to {it} at most": lambda c: c.reward.workers > MOST_WORKERS and MOST_WORKERS,
  "{environment.workers} are more threads than the {it} conversations that an iteration or an "
  "evaluation has at once": lambda c: (
    c.environment.workers > MOST_WORKERS and c.environment.workers > c.rl.rows and c.rl.rows
  ),
  # Intervals that never come, and times that are none.
  "{engine.server.timeout_s}, {engine.server.publish_s}: no server answers in no time; set "
  "both above 0": lambda c: (
    c.engine.name == "server" and not (c.engine.server.timeout_s and c.engine.server.publish_s)
  ),
  # Thresholds outside of what they are compared with.
  "{sft.target_loss} is above log({model.vocab_size}), of a policy that has learned nothing: "
  "the cold start would end with its first look; make it smaller": lambda c: (
    "sft" in c.job and c.sft.target_loss >= math.log(c.model.vocab_size) > 0
  ),
  "{rl.token_budget} is less than a token for each of the {it} responses of an iteration; make "
  "it larger, or 0": lambda c: c.samples and 0 < c.rl.token_budget < c.rl.rows and c.rl.rows,
  # Places that coincide.
  "{engine.server.directory}, {checkpoint.directory}: weights for servers are removed again, "
  "and checkpoints stay; name two directories": lambda c: (
    c.engine.server.directory and c.engine.server.directory == c.checkpoint.directory
  ),
  "{checkpoint.directory} lies in {it}, which has checkpoints of its own; name a directory "
  "elsewhere": lambda c: next(
    (
      f"{key}={path!r}"
      for key, path in (("weights", c.weights), ("distillation.teacher", c.distillation.teacher))
      if path and c.checkpoint.directory and Path(c.checkpoint.directory).is_relative_to(path)
    ),
    "",
  ),
}

# Where there are iterations.
REFUSED_RL: Table = {
  # No signal.
  "{reward.false_positive}, {reward.false_negative}: wrong responses are rewarded as often as "
  "right ones; let both add up to less than 1": lambda c: (
    c.reward.false_positive + c.reward.false_negative >= 1
  ),
  "{reward.overlong_max}, {reward.overlong_buffer}: no response of {sampling.max_new_tokens} "
  "is long enough to be punished; lower overlong_max": lambda c: (
    c.reward.overlong_weight
    and c.reward.overlong_max - c.reward.overlong_buffer >= c.sampling.max_new_tokens
  ),
  "{objective.clip_low}, {objective.clip_high}: every ratio but 1 is clipped, and nothing is "
  "learned after the first update of an iteration; leave them unset": lambda c: (
    clip_ranges(c) == (0, 0)
  ),
  "{objective.dual_clip}: it bounds all that a response with Â < 0 teaches; set it above 1, or "
  "leave it unset": lambda c: c.objective.dual_clip == 1,
  "{objective.off_policy_threshold} leaves out every response with Â < 0; set it above 0, or "
  "leave it unset": lambda c: c.objective.off_policy_threshold == 0,
  "{objective.kl}, {objective.kl_coef}: as a loss k1 has no gradient on policy, in expectation, "
  "and of responses of an older one a gradient that leads away from that policy; set kl to k2 or "
  "k3_weighted, or take objective.reward_kl_coef instead, where k1 is right": lambda c: (
    c.objective.kl == "k1" and c.objective.kl_coef
  ),
  "{critic.discount}: no token but the last hears of the reward; set it above 0": lambda c: (
    c.critic.name != "none" and not c.critic.discount
  ),
  # Sizes that there are not.
  "{lora.rank} is above {model.hidden_size}: adapters of a rank above the width have more "
  "numbers than what they adapt; make it smaller": lambda c: c.lora.rank > c.model.hidden_size,
  # Intervals that never come, and times that are none.
  "{rl.lag}: sampling is ahead of all {rl.iterations}; make it smaller": lambda c: (
    c.rl.lag >= c.rl.iterations
  ),
  "{schedule.refresh_every} is more than {rl.iterations}: no line that is appended is read; "
  "make it smaller, or 0": lambda c: c.schedule.refresh_every > c.rl.iterations,
  # Thresholds outside of what they are compared with.
  "{alarms.entropy} is above log({model.vocab_size}), the most that there is: every iteration "
  "would warn; make it smaller": lambda c: c.alarms.entropy >= math.log(c.model.vocab_size) > 0,
}


def check(c: "RunConfig") -> None:
  """ValueError for what cannot be meant."""
  for message, wrong in (REFUSED | (REFUSED_RL if c.has_iterations else {})).items():
    if it := wrong(c):
      raise ValueError(ranges.told(c, "", message, it=it))
