"""The groups of an iteration: sampled, scored, and chosen (the dynamic sampling of DAPO).

Long responses would keep an iteration waiting. With `rl.extra_prompts` more groups may be begun
than an iteration trains on: it ends when enough of them are finished. With `rl.token_budget` it
also ends when so many tokens have been sampled. What is not finished is put aside, each token with
its log-probability and the version of the weights that sampled it; its prefix is prefilled again
under the new weights. So the old policy of such a trajectory is a mixture, and its likelihood the
product of what the sampler said: GSPO's importance ratio takes it as it is (arXiv:2507.18071,
§5.4).
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax import rewards
from gspo_jax.data import recorded, sources
from gspo_jax.data.tokenizer import Tokenizer, line_breaks
from gspo_jax.rewards.signals import Signals
from gspo_jax.rollouts import advantages, judging, schedules
from gspo_jax.rollouts.groups import Group, filled
from gspo_jax.rollouts.metrics import (
  environment_metrics,
  partial_metrics,
  recorded_metrics,
  rollout_metrics,
)
from gspo_jax.rollouts.multipliers import Constraints
from gspo_jax.rollouts.prompt_filter import PromptFilter
from gspo_jax.runs.metrics import Writer
from gspo_jax.sampling import Driver, Engine, Environment, SingleTurn, Usage, assemble, requests
from gspo_jax.sampling.driver import new_groups
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt, Rollout
from gspo_jax.system import hosts
from gspo_jax.tasks import environments

UNKNOWN = "unknown"  # directory of the responses that the verifier failed on
Stages = Callable[[str], contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True)
class Collected:
  """Groups that an iteration trains on, and the metrics of all that was sampled for it."""

  groups: list[Group]
  rollout: Rollout  # of these groups
  step: int  # the iteration that trains on them
  version: int  # of the weights that sampled last; tokens of groups put aside may have older ones
  reward_PG: np.ndarray
  advantage_PG: np.ndarray
  advantage_BL: np.ndarray | None  # of each token, where turns or lines have rewards of their own
  usage: Usage  # what this iteration has sampled, for whichever groups
  metrics: dict[str, float]


class Collector:
  """Source of scored groups: draws prompts, and keeps the groups that are under way.

  Args:
    environment: None: a response is one turn, and `score` judges it.
    writer: of the responses that there is no verdict on.
    records: responses that job=offline learns from.
    shared_prompts: held-out problems that are among the prompts that are trained on.
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
    self._config, self._seed, self._engine = config, config.seed_of, engine
    self._tokenizer, self._score, self._environment = tokenizer, score, environment
    self._prompts, self._writer, self._shared_prompts = prompts, writer, shared_prompts
    workload = requests.workload(config, tuple(tokenizer.stop_ids), environment is not None)
    self._workload = workload
    self._breaks_V = line_breaks(tokenizer) if config.reward.per_line else None
    P, seed = config.rl.prompts, config.seed_of("rl", "data")
    self._schedule = config.schedule
    self._batches = sources.Batches(prompts, P, seed=seed)
    self._records, self._fresh = None, round(config.sampled_share * P)
    if records is not None:
      self._left_out = records.left_out()
      self._records = sources.Batches(records, P, seed=config.seed_of("rl", "recorded"))
    self._filter = PromptFilter(config.data.query_set, self._schedule.group_size_min > 0)
    self._under_way: list[Group] = []
    self._signals = signals
    self._constraints = Constraints(config.constraints) if config.constraints.on else None
    self._limit = config.sampling.max_new_tokens  # of a response in this iteration
    # What `assemble` is told besides the trajectories.
    self._arrays = workload.window, tokenizer.pad_id, workload.support
    self._version = 0  # of the engine's weights
    # Ids of the groups that were finished before this iteration, and not needed.
    self._surplus = set[int]()

  def collect(self, step: int, stages: Stages, version: int | None = None) -> Collected:
    """Samples and scores the groups of an iteration, but for those that come from files;
    `stages(name)` times its two stages. The engine has the weights of `version`, by default those
    that the iteration begins with.

    Rounds of P groups each are sampled until P of them are mixed, at most `extra_rounds` after the
    first. The mixed ones are trained on, in the order in which they were sampled; where there are
    not enough, the first others fill the batch: their advantages are 0. Where trajectories may be
    put aside there can be fewer than P groups.

    Raises:
      ValueError: a reward is not finite.
      NoVerdictError: the verifier failed on all responses.
    """
    c, usage, outcomes = self._config, Usage(), collections.Counter()
    self._version = step if version is None else version
    self._surplus = {id(group) for group in self._under_way if group.finished}
    self._filter.readmit(step)
    self._limit, scheduled = schedules.begin(c, self._prompts, step)
    sampled: list[Group] = []
    recorded = self._recorded(c.rl.prompts - self._fresh)
    rounds, most = 0, 1 + c.data.query_set.extra_rounds if self._fresh else 0
    while rounds < most and (rounds == 0 or sum(g.mixed for g in sampled) < c.rl.prompts):
      with stages("sample"):
        groups = self._sample(step, rounds, usage)
      with stages("score"):
        outcomes.update(self._judge(groups))
      sampled += groups
      rounds += 1
      self._require_verdicts(sampled, step)
    verdicts = [g.correct_G for g in sampled], step, [g.known_G for g in sampled]
    self._filter.update([g.prompt for g in sampled], *verdicts)
    chosen = sampled
    if most > 1:
      mixed_first = sorted(range(len(sampled)), key=lambda i: not sampled[i].mixed)
      chosen = [sampled[i] for i in sorted(mixed_first[: c.rl.prompts])]
    metrics = self._filter.metrics() | scheduled
    if sampled:
      metrics |= rollout_metrics(sampled, outcomes) | usage.metrics()
    if recorded:
      metrics |= recorded_metrics(recorded) | self._left_out
    metrics |= sources.skipped_rows(self._prompts)
    if shared := getattr(self._prompts, "shared", self._shared_prompts):
      metrics["data/shared_prompts"] = float(shared)
    if self._schedule.group_size_min:
      metrics |= schedules.size_metrics([len(group.trajectories) for group in sampled])
      chosen = [filled(group, c.rl.group_size) for group in chosen]
    if most > 1:
      metrics["dynamic_sampling/rounds"] = float(rounds)
      metrics["dynamic_sampling/discarded_groups"] = float(len(sampled) - len(chosen))
      metrics["dynamic_sampling/filled_groups"] = float(sum(not g.mixed for g in chosen))
    if self._environment:
      metrics |= environment_metrics(sampled)
    if c.rl.partial:
      metrics |= partial_metrics(sampled, chosen, self._under_way, self._surplus, self._version)
    groups = [*recorded, *chosen]
    if recorded and chosen:  # each mini-batch, which is a stretch of them, has its share of both
      order = np.argsort(np.arange(len(groups)) % c.rl.minibatches, kind="stable")
      groups = [groups[i] for i in order]
    return self._collected(groups, step, usage, metrics)

  def _recorded(self, count: int) -> list[Group]:
    """The next groups on record."""
    if not count:
      return []
    size, decode = self._config.rl.group_size, self._tokenizer.decode
    return [Group.on_record(one, size, decode) for one in self._records.take(count)]

  def _sample(self, step: int, attempt: int, usage: Usage) -> list[Group]:
    """Goes on until P groups are finished or the budget is spent, and hands out those that are: at
    most P, and one per mini-batch at least.

    At most so many responses are under way as the groups that are missing have. When a group's
    worth of them has ended, an extra prompt takes their place. (Were all extra prompts begun at
    once, short responses would all be finished at once, and the surplus would be trained on by
    policies that have not sampled it.) Groups that were finished in an earlier iteration and not
    needed there come first, but are half of a batch at most.
    """
    rl, engine = dataclasses.replace(self._config.rl, prompts=self._fresh), self._engine
    turns, workers = self._config.environment.max_turns, self._config.environment.workers
    vocabulary = self._config.model.vocab_size
    options = dict(vocab_size=vocabulary, max_turns=turns, workers=workers, limit=self._limit)
    driver = Driver(engine, self._workload, **options)
    stale = [group for group in self._under_way if id(group) in self._surplus]
    later = stale[max(1, rl.prompts // 2) :]
    groups = [group for group in self._under_way if not any(group is one for one in later)]
    places = rl.group_size * (rl.prompts - sum(group.finished for group in groups))
    begins = itertools.count()

    def begin() -> None:
      """Begins as many prompts as there is room for."""
      room = (places - sum(group.left for group in groups)) // rl.group_size
      count = min(room, rl.prompts + rl.extra_prompts - len(later) - len(groups))
      if count > 0:
        new = self._new_groups(count, step, attempt, next(begins))
        for group in new:
          driver.begin(group.trajectories)
        groups.extend(new)

    def enough() -> bool:
      finished = sum(group.finished for group in groups)
      spent = rl.token_budget and engine.usage.tokens >= rl.token_budget
      if finished >= rl.prompts or (spent and finished >= rl.minibatches):
        return True
      begin()
      return False

    for group in groups:
      driver.begin(group.trajectories)
    begin()
    for _ in driver.run(enough):
      pass
    usage.add(engine.usage)
    done = [group for group in groups if group.finished][: rl.prompts]
    handed_out = {id(group) for group in done}
    self._under_way = later + [group for group in groups if id(group) not in handed_out]
    return done

  def _new_groups(self, count: int, step: int, *again: int) -> list[Group]:
    """The next prompts that are wanted, with responses to be sampled."""
    make, longest = self._environment, self._workload.prompt_length
    # A prompt that comes up again in one step gets other responses.
    seed = self._seed("rl", "sample", step, *(again if any(again) else ()))
    prompts = self._batches.take(count, self._filter.wants)
    sizes = schedules.group_sizes(self._config, map(self._filter.tried, prompts))
    groups = new_groups(prompts, sizes, seed, longest, make, self._render)
    return list(map(Group, prompts, groups))

  def _render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    return self._tokenizer.encode(self._tokenizer.chat(messages))

  def _judge(self, groups: Sequence[Group]) -> Mapping[str, int]:
    """Gives finished groups what they are worth; returns how often the verifier came to each of its
    outcomes."""
    judging.respond(groups, self._tokenizer.decode)
    verdicts = hosts.of_first(lambda: self._verdicts(groups))
    judging.hand_out(groups, verdicts)
    return verdicts.outcomes

  def _verdicts(self, groups: Sequence[Group]) -> judging.Verdicts:
    if self._environment:
      return judging.of_conversations(groups, self._config.environment)
    shift = schedules.overlong_shift(self._config, self._limit)
    return judging.of_responses(
      groups, self._score, shift=shift, breaks_V=self._breaks_V, signals=self._signals
    )

  def _require_verdicts(self, sampled: Sequence[Group], step: int) -> None:
    """Writes down the responses without a verdict; ends the run if there is none at all."""
    flat = [(group, g) for group in sampled for g in range(len(group.responses))]
    unknown = {i: group.unknown[g] for i, (group, g) in enumerate(flat) if g in group.unknown}
    if unknown:
      responses, prompts = [group.responses[g] for group, g in flat], [g.prompt for g, _ in flat]
      rows = rewards.describe_unknown(responses, prompts, unknown)
      self._writer.dump_rollouts("rl", step, rows, folder=UNKNOWN)
    where = f"{UNKNOWN}/rl_{step:06d}.jsonl of the workdir"
    rewards.require_verdicts([*unknown.values()], len(flat), where)

  def _collected(
    self, groups: list[Group], step: int, usage: Usage, metrics: dict[str, float]
  ) -> Collected:
    trajectories = [one for group in groups for one in group.trajectories]
    rollout = assemble(trajectories, *self._arrays)
    judged = advantages.Judged(self._config, groups, rollout, self._constraints, self._breaks_V)
    made = advantages.make(judged)
    return Collected(
      groups,
      rollout,
      step,
      self._version,
      judged.reward_PG,
      made.of_responses_PG,
      made.of_tokens_BL,
      usage,
      metrics | made.metrics,
    )

  def again(self, groups: list[Group], **rest: Any) -> Collected:
    """What was collected, of its groups and all of its other fields but the rollout.

    Raises:
      ValueError: the batch has more groups than the run's, or groups of another size.
    """
    prompts, size = self._config.rl.prompts, self._config.rl.group_size
    sizes = {len(group.trajectories) for group in groups}
    if len(groups) > prompts or sizes - {size}:
      raise ValueError(
        f"its {len(groups)} groups of {max(sizes)} responses do not go with rl.prompts={prompts} "
        f"and rl.group_size={size}: set these to what they were"
      )
    trajectories = [one for group in groups for one in group.trajectories]
    rollout = assemble(trajectories, *self._arrays)
    return Collected(groups, rollout, **rest)

  def position(self) -> Callable[[], dict[str, Any]]:
    """Remembers where sampling stands; called, the result makes JSON of it for a checkpoint."""
    batches, known = self._batches.get_state(), self._filter.get_state()
    groups = [Group(g.prompt, [one.copy() for one in g.trajectories]) for g in self._under_way]
    own = {} if self._records is None else dict(recorded=self._records.get_state())
    own |= dict(multipliers=self._constraints.get_state()) if self._constraints else {}
    return lambda: (
      own
      | dict(
        batches=batches, prompt_filter=known, under_way=[group.get_state() for group in groups]
      )
    )

  def set_position(self, state: Mapping[str, Any]) -> None:
    """Goes on from what `position` made."""
    self._batches.set_state(state["batches"])
    self._filter.set_state(state["prompt_filter"])
    if self._records is not None and "recorded" in state:  # not after a run of another job
      self._records.set_state(state["recorded"])
    if self._constraints:
      self._constraints.set_state(state.get("multipliers", {}))
    self._under_way = [Group.from_state(group, self._again) for group in state["under_way"]]

  def _again(self, prompt: Prompt) -> Environment | None:
    """A new environment for a trajectory that goes on, on the first host."""
    if self._environment is None:
      return SingleTurn(prompt.tokens)
    return self._environment(prompt) if hosts.is_first() else None
