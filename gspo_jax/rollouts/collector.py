"""Samples, scores and selects the groups of an iteration (dynamic sampling as in DAPO).

A group is a prompt and its responses. A group is finished when all its responses are finished. One
long response would delay an iteration. So if `rl.extra_prompts` is set, more groups may start than
the iteration trains on, and sampling ends once enough groups are finished. If `rl.token_budget` is
set, sampling may end once that number of tokens is sampled (`Collector._sample`).

The next iteration continues the unfinished responses, called partial rollouts, with newer weights.
Each token keeps its log-probability and the version of the weights that sampled it. So the
likelihood of a partial rollout under the behaviour policy is the product of the recorded token
probabilities. GSPO's importance ratio can use this likelihood (arXiv:2507.18071, §5.4). When a
partial rollout resumes, the newer weights prefill its tokens again.
"""

import collections
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax import rewards
from gspo_jax.data import recorded, sources
from gspo_jax.data.tokenizer import Tokenizer, line_breaks
from gspo_jax.rewards.signals import Signals
from gspo_jax.rollouts import advantages, metrics, schedules, scoring
from gspo_jax.rollouts.groups import (
  Group,
  filled,
  require_lengths,
  restored,
  trajectories_of,
)
from gspo_jax.rollouts.multipliers import Constraints
from gspo_jax.rollouts.prompt_filter import PromptFilter
from gspo_jax.runs.metrics import Writer
from gspo_jax.sampling import Driver, Engine, Trajectory, Usage, assemble, requests
from gspo_jax.sampling.driver import new_groups
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt, Rollout
from gspo_jax.system import hosts, workers
from gspo_jax.tasks import environments

UNKNOWN = "unknown"  # Directory of the log of responses without a verdict.
MAX_LOGGED = 100  # Maximum number of responses in a file of this directory.
Stages = Callable[[str], contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True)
class Collected:
  """Training groups of an iteration, and metrics of all its samples."""

  groups: list[Group]
  rollout: Rollout  # `groups` as arrays.
  step: int  # Iteration of the updates on `groups`.
  version: int  # Version of the weights at the start of sampling. Tokens may have other versions.
  advantage_PG: np.ndarray
  advantage_BL: np.ndarray | None  # None if all tokens of a response have the same advantage.
  usage: Usage  # Tokens and time of this iteration's sampling, discarded groups included.
  metrics: dict[str, float]

  @property
  def reward_PG(self) -> np.ndarray:
    return np.stack([group.reward_G for group in self.groups])

  @property
  def known_B(self) -> np.ndarray:
    """Mask of responses with a verdict, bool."""
    return np.concatenate([group.known_G for group in self.groups])


class Collector:
  """Draws prompts, and samples and scores a batch of groups for each iteration.

  Args:
    score: verifier of single-turn responses.
    environment: constructor of environments. None means single turns, scored by `score`.
    writer: writes the log of responses without a verdict. None if the verifier cannot fail.
    records: recorded responses for job=offline. None means that all responses are sampled.
    signals: computes further rewards and costs (rewards/signals.py); None if there are none.
    shared_prompts: number of prompts in both training and held-out data, to log as a metric.
  """

  def __init__(
    self,
    config: RunConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    score: rewards.Scorer,
    environment: environments.Make | None = None,
    *,
    writer: Writer | None = None,
    records: recorded.Recordings | None = None,
    signals: Signals | None = None,
    shared_prompts: int = 0,
  ):
    self.config, self._engine, self._tokenizer, self._prompts = config, engine, tokenizer, prompts
    self._score, self._environment, self._signals = score, environment, signals
    self._writer, self._records, self._shared_prompts = writer, records, shared_prompts
    self._workload = requests.workload(
      config, tuple(tokenizer.stop_ids), environment is not None, tokenizer.vocab_size
    )
    self._buckets = schedules.length_buckets(
      config, [prompts, *([] if records is None else [records.prompts])]
    )
    if self._buckets != (config.data.max_prompt_tokens,) and hosts.is_first():
      sizes = " or ".join(map(str, self._buckets))
      sys.stderr.write(f"updates pad prompts to {sizes} tokens, with a program for each length\n")
    self._breaks_V = line_breaks(tokenizer) if config.reward.per_line else None
    P = config.rl.prompts
    self._num_sampled = round(config.sampled_share * P)  # All other groups are recorded.
    self._batches = sources.Batches(prompts, P, seed=config.seed_of("rl", "data"))
    self._filter = PromptFilter(config.data.query_set, config.schedule.group_size_min > 0)
    self._constraints = Constraints(config.constraints) if config.constraints.enabled else None
    # Objects whose state is in the checkpoint. The checkpoint also has the groups in flight.
    self._stateful = dict(batches=self._batches, prompt_filter=self._filter)
    if records is not None:
      seed = config.seed_of("rl", "recorded")
      self._stateful["recorded"] = sources.Batches(records, P, seed=seed)
    if self._constraints:
      self._stateful["multipliers"] = self._constraints
    # Groups carried over to the next iteration: unfinished groups, and finished surplus groups.
    self._in_flight: list[Group] = []
    self._limit = config.sampling.max_new_tokens  # Maximum response length in this iteration.
    self._version = 0  # Version of the engine's weights.
    # Python ids of surplus groups, which were finished in earlier iterations.
    self._surplus = set[int]()

  def collect(self, step: int, stages: Stages, version: int | None = None) -> Collected:
    """Samples and scores the groups of an iteration; some may be recorded.

    The batch has P = `rl.prompts` groups, of which N are sampled. A group is mixed if the scores of
    its responses differ. While fewer than N sampled groups are mixed, dynamic sampling adds rounds,
    up to R = `data.query_set.extra_rounds`. The batch takes mixed groups first, and then the
    earliest groups that are not mixed. If R > 0, advantages of groups that are not mixed are 0,
    since their rewards differ by reward shaping alone. `costs.teaches` names an exception. If
    `rl.token_budget` is set, the batch may have fewer than P groups.

    Args:
      step: number of the iteration.
      stages: timer; `stages(name)` times the stages "sample" and "score".
      version: version of the engine's weights at the start of sampling. None means `step`.

    Raises:
      ValueError: a reward is not finite.
      NoVerdictError: no sampled response has a verdict.
    """
    c, usage, outcomes = self.config, Usage(), collections.Counter()
    self._version = step if version is None else version
    restarts = self._restart_stale()
    self._surplus = {id(group) for group in self._in_flight if group.finished}
    self._filter.readmit(step)
    self._limit, row = schedules.begin(c.schedule, self._prompts, step, c.sampling.max_new_tokens)
    on_record, sampled, rounds, N = self._recorded_groups(), [], 0, self._num_sampled
    max_rounds = 1 + c.data.query_set.extra_rounds if N else 0
    while rounds < max_rounds and (not rounds or sum(g.mixed for g in sampled) < N):
      with stages("sample"):
        groups = self._sample(step, rounds, usage)
      with stages("score"):
        outcomes.update(self._score_groups(groups))
      sampled += groups
      rounds += 1
      self._require_verdicts(sampled, step)
    self._filter.update(sampled, step)
    chosen = self._select(sampled)
    groups = self._in_minibatches(on_record, chosen)
    rollout = self.rollout(groups)
    scored = advantages.ScoredGroups(c, groups, rollout, self._constraints, self._breaks_V)
    advantage_PG, advantage_BL, advantage_metrics = advantages.compute(scored)
    if sampled:
      row |= metrics.rollout_metrics(sampled, outcomes) | usage.metrics()
    row |= self._metrics(on_record, sampled, chosen, rounds) | restarts | advantage_metrics
    version = self._version
    return Collected(groups, rollout, step, version, advantage_PG, advantage_BL, usage, row)

  def _restart_stale(self) -> dict[str, float]:
    """Restarts responses with tokens more than `rl.max_age` versions old; returns a metric."""
    if not self.config.rl.max_age:
      return {}
    oldest_allowed, number = self._version - self.config.rl.max_age, 0
    for group in self._in_flight:
      for g, old in enumerate(group.trajectories):
        if old.oldest_version is not None and old.oldest_version < oldest_allowed:
          ((new,),) = self._trajectories([group.prompt], 1, old.seed)
          new.sample, group.trajectories[g] = old.sample, new
          number += 1
    return {"partial/begun_again": float(number)}

  def _recorded_groups(self) -> list[Group]:
    """Returns the P - N recorded groups of a batch."""
    count, c = self.config.rl.prompts - self._num_sampled, self.config
    records = self._stateful["recorded"].take(count) if count else ()
    return [
      Group.on_record(x, c.rl.group_size, self._tokenizer.decode, c.reward.threshold)
      for x in records
    ]

  def _select(self, sampled: list[Group]) -> list[Group]:
    """Selects at most N groups, preferably mixed ones, in sampling order.

    Groups with fewer than `rl.group_size` responses are padded with blank responses.
    """
    c = self.config
    mixed_first = sorted(range(len(sampled)), key=lambda i: not sampled[i].mixed)
    chosen = [sampled[i] for i in sorted(mixed_first[: self._num_sampled])]
    return [filled(group, c.rl.group_size) for group in chosen]

  def _in_minibatches(self, on_record: list[Group], chosen: list[Group]) -> list[Group]:
    """Orders groups so that recorded groups are distributed evenly over mini-batches.

    A mini-batch has groups that are contiguous in this order.
    """
    groups = [*on_record, *chosen]
    if not (on_record and chosen):
      return groups
    order = np.argsort(np.arange(len(groups)) % self.config.rl.minibatches, kind="stable")
    return [groups[i] for i in order]

  def _metrics(
    self, on_record: list[Group], sampled: list[Group], chosen: list[Group], rounds: int
  ) -> dict[str, float]:
    c = self.config
    row = self._filter.metrics() | sources.skipped_rows(self._prompts)
    if shared := getattr(self._prompts, "shared", self._shared_prompts):
      row["data/shared_prompts"] = float(shared)
    if on_record:
      row |= metrics.recorded_metrics(on_record) | self._records.left_out()
    if c.schedule.group_size_min:
      row |= metrics.size_metrics(sampled)
    if c.data.query_set.extra_rounds:
      row |= metrics.round_metrics(sampled, chosen, rounds)
    if self._environment:
      row |= metrics.environment_metrics(sampled)
    if c.rl.partial:
      row |= metrics.partial_metrics(
        sampled, chosen, self._in_flight, self._surplus, self._version, c
      )
    return row

  def _sample(self, step: int, round_index: int, usage: Usage) -> list[Group]:
    """Samples until N groups are finished or the token budget is spent.

    Returns the finished groups, at most N. The budget ends sampling only once there is a finished
    group for each mini-batch.

    Surplus groups were finished in earlier iterations. The oldest max(1, N // 2) of them are used
    first. The remaining surplus groups wait for later rounds. Let F be the number of groups that
    are finished at the start and do not wait, and G = `rl.group_size`. A new prompt starts only if
    at most G (N - F) responses are in flight afterwards. If all extra prompts started at once, more
    groups would finish than the iteration needs, and surplus groups would age while they wait.
    """
    c, engine, N, G = self.config, self._engine, self._num_sampled, self.config.rl.group_size
    driver = Driver(
      engine,
      self._workload,
      vocab_size=c.model.vocab_size,
      max_turns=c.environment.max_turns,
      workers=c.environment.workers,
      time_limit_s=environments.time_limit(self._environment),
      limit=self._limit,
    )
    surplus = [group for group in self._in_flight if id(group) in self._surplus]
    waiting = surplus[max(1, N // 2) :]
    groups = [group for group in self._in_flight if not any(group is x for x in waiting)]
    max_in_flight = G * (N - sum(group.finished for group in groups))
    draws = itertools.count()

    def start_prompts() -> None:
      """Starts prompts for N to N + `rl.extra_prompts` groups, up to `max_in_flight` responses."""
      free = (max_in_flight - sum(group.unfinished for group in groups)) // G
      count = min(free, max(N + c.rl.extra_prompts - len(waiting), N) - len(groups))
      if count > 0:
        new = self._new_groups(count, step, round_index, next(draws))
        for group in new:
          driver.begin(group.trajectories)
        groups.extend(new)

    def should_stop() -> bool:
      """Whether the round is over. If it is not, starts further prompts."""
      finished = sum(group.finished for group in groups)
      spent = c.rl.token_budget and engine.usage.tokens >= c.rl.token_budget
      if finished >= N or (spent and finished >= c.rl.minibatches):
        return True
      start_prompts()
      return False

    for group in groups:
      driver.begin(group.trajectories)
    start_prompts()
    for _ in driver.run(should_stop):
      pass
    usage.add(engine.usage)
    done = [group for group in groups if group.finished][:N]
    done_ids = {id(group) for group in done}
    self._in_flight = waiting + [group for group in groups if id(group) not in done_ids]
    return done

  def _new_groups(self, count: int, step: int, round_index: int, draw: int) -> list[Group]:
    """Draws prompts, if possible accepted by the filter, as groups of empty responses."""
    c, max_size = self.config, self.config.rl.group_size
    # A later draw of the iteration may repeat a prompt, so each draw has a different seed.
    seed = c.seed_of("rl", "sample", step, *((round_index, draw) if round_index or draw else ()))
    prompts = self._batches.take(count, self._filter.wants)
    min_size = c.schedule.group_size_min or max_size
    sizes = [schedules.group_size(*self._filter.tried(x), min_size, max_size) for x in prompts]
    return list(map(Group, prompts, self._trajectories(prompts, sizes, seed)))

  def _trajectories(
    self, prompts: Sequence[Prompt], size: int | Sequence[int], seed: int
  ) -> list[list[Trajectory]]:
    longest, vocab_size = self._workload.prompt_length, self._workload.vocabulary
    make, render, threads = self._environment, self._render, self.config.environment.workers
    return new_groups(prompts, size, seed, longest, make, render, None, vocab_size, threads)

  def _render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    return self._tokenizer.encode(self._tokenizer.chat(messages))

  def _score_groups(self, groups: Sequence[Group]) -> Mapping[str, int]:
    """Scores finished groups; returns the number of responses by outcome of the verifier."""
    for group in groups:
      group.responses = [self._tokenizer.decode(x.tokens.tolist()) for x in group.trajectories]
    verdicts = hosts.run_on_first_host(lambda: workers.interruptible(self._verdicts, groups))
    scoring.assign_verdicts(groups, verdicts)
    return verdicts.outcomes

  def _verdicts(self, groups: Sequence[Group]) -> scoring.Verdicts:
    c = self.config
    if self._environment:
      right_from, compares_parts = c.reward.right_from, c.compares_parts
      return scoring.score_conversations(groups, c.environment, right_from, compares_parts)
    return scoring.score_responses(
      groups,
      self._score,
      longest=c.sampling.max_new_tokens if c.overlong_at_limit else 0,
      breaks_V=self._breaks_V,
      signals=self._signals,
      discount=c.environment.discount if c.compares_parts else None,
    )

  def _require_verdicts(self, sampled: Sequence[Group], step: int) -> None:
    """Logs responses without a verdict; raises NoVerdictError if there is no verdict at all."""
    unknown = [(group, g) for group in sampled for g in sorted(group.unknown)]
    if unknown:
      rows = [
        dict(
          prompt_id=group.prompt.id,
          prompt=group.prompt.question,
          response=group.responses[g],
          answer=group.prompt.answer[:1000],  # The tests of a program may be megabytes long.
          unknown=group.unknown[g],
        )
        for group, g in unknown[:MAX_LOGGED]
      ]
      self._writer.dump_rollouts("rl", step, rows, folder=UNKNOWN)
    reasons, total = [group.unknown[g] for group, g in unknown], len(trajectories_of(sampled))
    rewards.require_verdicts(reasons, total, f"{UNKNOWN}/rl_{step:06d}.jsonl of the workdir")

  def rollout(self, groups: Sequence[Group]) -> Rollout:
    """Assembles the trajectories of training groups as arrays.

    Raises:
      ValueError: there are more than `rl.prompts` groups, a group has not exactly `rl.group_size`
        responses, or a prompt or response exceeds the configured length.
    """
    c, trajectories = self.config, trajectories_of(groups)
    sizes = sorted({len(group.trajectories) for group in groups})
    if len(groups) > c.rl.prompts or sizes != [c.rl.group_size]:
      raise ValueError(
        f"{len(groups)} groups of {' or '.join(map(str, sizes))} responses do not fit "
        f"rl.prompts={c.rl.prompts} and rl.group_size={c.rl.group_size}: set these as in the run "
        "that sampled the groups"
      )
    require_lengths(trajectories, c.data.max_prompt_tokens, c.sampling.max_new_tokens)
    longest = max(len(trajectory.prompt) for trajectory in trajectories)
    prompt_length = schedules.bucket_length(longest, self._buckets, c.data.max_prompt_tokens)
    window = prompt_length + c.sampling.max_new_tokens
    return assemble(trajectories, window, self._tokenizer.pad_id, self._workload.support)

  def position(self) -> Callable[[], dict[str, Any]]:
    """Copies the sampling state; returns a function that converts the copy to JSON types."""
    states = {name: part.get_state() for name, part in self._stateful.items()}
    groups = [Group(g.prompt, [x.copy() for x in g.trajectories]) for g in self._in_flight]
    return lambda: states | dict(under_way=[group.get_state() for group in groups])

  def set_position(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `position`; ignores the states of objects that this job lacks.

    Raises ValueError if a prompt is longer than `data.max_prompt_tokens`.
    """
    for name in self._stateful.keys() & state.keys():
      self._stateful[name].set_state(state[name])
    limits = self.config.data.max_prompt_tokens, self.config.sampling.max_new_tokens
    threads = self.config.environment.workers
    self._in_flight = restored(state["under_way"], self._environment, *limits, threads)
    if self._in_flight:  # These are resumed even if `rl.partial` is off by now.
      self._workload = dataclasses.replace(self._workload, partial=True)
