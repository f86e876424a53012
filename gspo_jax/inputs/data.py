"""Prompts, recorded responses and held-out problems of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax import rewards
from gspo_jax.data import growing, recorded, sources
from gspo_jax.data.overlap import shared_prompts
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.evaluation.benchmarks import HeldOut, check_problems, choose
from gspo_jax.rewards.signals import check_signals
from gspo_jax.sampling.conversations import Answer, try_turn
from gspo_jax.sampling.driver import new_groups
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import SftConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts
from gspo_jax.tasks import environments


@dataclasses.dataclass(frozen=True)
class Data:
  """Tokenized prompts of a run."""

  train_prompts: Sequence[Prompt]  # Prompts of data.train, else of `recordings`; [] for job=eval.
  demonstrations: Sequence[Prompt]  # For the cold start; [] if there is none.
  recordings: recorded.Recordings | None  # Responses for job=offline; None for other jobs.
  held_out: Sequence[HeldOut]  # Benchmarks with their problems.
  evaluations: Sequence[HeldOut]  # `held_out`, or [] for job=sft, which has no evaluations.

  @property
  def main_prompts(self) -> Sequence[Prompt]:
    """Training prompts. If there are none, problems of benchmarks without a separate verifier."""
    problems = [prompt for b in self.held_out if not b.config.reward for prompt in b.problems]
    return self.train_prompts or problems


def read_data(config: RunConfig, tok: Tokenizer) -> Data:
  """Reads prompts, recorded responses and held-out problems.

  Raises:
    ValueError: a file, row or gold answer is invalid; the message names it.
  """
  # If there is an environment, it gives the rewards instead of `reward.name`.
  verifier = "" if config.environment.name else config.reward.name
  check_answer = rewards.answer_check(verifier if config.has_iterations else "")
  recordings = _read_recordings(config, tok) if config.job == "offline" else None
  trained = [] if recordings is None else [recordings.prompts]
  if config.samples_prompts:
    load = growing.load if config.schedule.refresh_every else sources.load
    trained.insert(0, load(config.data, tok, "train", check_answer))
  prompts: Sequence[Prompt] = trained[0] if trained else []
  demonstrations = (
    _read_demonstrations(config.sft, config.data.on_error, tok, prompts)
    if "sft" in config.job
    else []
  )
  held_out = _read_held_out(config, tok, verifier, trained)
  if isinstance(prompts, growing.Growing):
    prompts.watch([problem for b in held_out for problem in b.problems])
  parts = [prompts, demonstrations, recordings or (), *(b.problems for b in held_out)]
  sources.require_same_on_hosts(parts)
  evaluations = [] if config.job == "sft" else held_out
  return Data(prompts, demonstrations, recordings, held_out, evaluations)


def _read_held_out(
  config: RunConfig, tok: Tokenizer, verifier: str, trained: Sequence[Sequence[Prompt]]
) -> list[HeldOut]:
  """Reads benchmarks, and counts their overlap with training data.

  trained: prompts of each training source. The largest count over the sources is kept.
  """
  held_out = []
  data = dataclasses.replace(config.data, demonstration_field="")  # Only training rows need it.
  for name, benchmark, key in config.benchmarks():
    check_gold = rewards.answer_check(benchmark.reward or verifier)
    source = sources.load_spec(data, tok, benchmark.data, key, check_gold)
    problems = choose(source, benchmark.problems)
    check_problems(name, benchmark, problems)
    shared = max((shared_prompts(prompts, source, problems) for prompts in trained), default=0)
    held_out.append(HeldOut(name, benchmark, key, problems, shared))
  return held_out


def _read_recordings(config: RunConfig, tok: Tokenizer) -> recorded.Recordings:
  """Reads the recorded responses of job=offline."""
  data = config.data
  limits = recorded.Limits(
    config.rl.group_size,
    data.max_prompt_tokens,
    config.sampling.max_new_tokens,
    config.model.vocab_size,
    tuple(config.sampling.stop_strings),
  )
  return recorded.load(config.offline.data, tok, data.prompt_template, limits, data.on_error)


def _read_demonstrations(
  sft: SftConfig, on_error: str, tok: Tokenizer, prompts: Sequence[Prompt]
) -> Sequence[Prompt]:
  """Selects demonstrations within `sft.max_tokens`.

  Empty demonstrations are excluded, too. Raises DataError as `sources.fitting` does, or if fewer
  fit than `sft.demonstrations`, or fewer than two with `sft.target_loss`.
  """
  fitting = sources.fitting(prompts, tok, sft.max_tokens, on_error)
  available = f"data.train has {len(fitting)} that fit into sft.max_tokens={sft.max_tokens}"
  if sft.target_loss and min(len(fitting), sft.demonstrations or len(fitting)) < 2:
    raise sources.DataError(
      f"sft.target_loss={sft.target_loss:g} holds out some demonstrations, so it needs at least 2; "
      f"sft.demonstrations={sft.demonstrations}, and {available}"
    )
  if len(fitting) < sft.demonstrations:
    raise sources.DataError(f"sft.demonstrations={sft.demonstrations}: {available}")
  if not sft.demonstrations:
    return fitting
  indices = np.random.default_rng(0).choice(len(fitting), sft.demonstrations, replace=False)
  return sources.Prompts([fitting[int(i)] for i in indices], fitting.skipped)


class Trial(NamedTuple):
  """A problem's prompt, and the environment's answers to two possible first turns."""

  tokens: tuple[int, ...]  # The prompt as the model reads it.
  answers: tuple[Answer, ...]  # After the gold answer as first turn, and after an empty one.


def try_environment(
  config: RunConfig, environment: environments.Make, tok: Tokenizer, prompt: Prompt
) -> Trial:
  """Tries two first turns, each in a new conversation.

  One turn is the gold answer, and the other is empty.

  Args:
    config: configuration of the run.
    environment: constructor of environments.
    tok: tokenizer of the policy.
    prompt: the problem.

  Raises:
    ValueError: a conversation cannot begin, or the environment fails on both turns.
  """

  def render(messages: Sequence[Mapping[str, str]]) -> list[int]:
    return tok.encode(tok.chat(messages))

  longest, limit = config.data.max_prompt_tokens, config.sampling.max_new_tokens
  (trials,) = new_groups([prompt], 2, 0, longest, environment, render, None, tok.vocab_size)
  if failures := [trial.failure for trial in trials if trial.failure]:
    name = config.environment.name
    raise ValueError(f"environment.name={name!r} fails at the start: {failures[0]}")
  end = list(tok.stop_ids[:1])
  turns = [[*tok.encode_text(prompt.answer), *end], end]
  gold, empty = hosts.run_on_first_host(
    lambda: [
      try_turn(environment, trial.environment, turn, limit, tok.vocab_size)
      for trial, turn in zip(trials, turns)
    ]
  )
  if gold.failure and empty.failure:
    raise ValueError(
      f"environment.name={config.environment.name!r} fails on problem {prompt.id}: step() with "
      f"the gold answer {gold.failure}; with an empty turn it {empty.failure}"
    )
  return Trial(trials[0].prompt, (gold, empty))


def reward_sections(config: RunConfig) -> dict[str, RewardConfig]:
  """Returns section `reward` for each verifier of the run and its benchmarks.

  Raises:
    ValueError: a verifier's module is missing, or the verifier does not support `reward.per_line`.
  """
  sections = {config.reward.name: config.reward}
  for _, b, _ in config.benchmarks():
    if b.reward and b.reward not in sections:
      sections[b.reward] = dataclasses.replace(
        config.reward, name=b.reward, partial=0.0, per_line=False
      )
  for name in sections:
    rewards.check_importable(name)
  check_signals(config.constraints)
  rewards.check_lines(config.reward)
  return sections
