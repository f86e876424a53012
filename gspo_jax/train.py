"""The RL iteration: sample, score, advantage, update, publish, evaluate, save."""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import multi_turn, partial
from gspo_jax import objectives as O
from gspo_jax.data import prompt_filter, sources
from gspo_jax.data.prompt_filter import Groups, QuerySet
from gspo_jax.hardware import utilisation
from gspo_jax.learner import optimizer
from gspo_jax.learner.step import summarize
from gspo_jax.minibatches import fill_up, place, rollout_records, split, train_batch
from gspo_jax.programs import Programs, ahead
from gspo_jax.report import page
from gspo_jax.run import Context, abstract_state, new_state
from gspo_jax.runs import nonfinite, preemption
from gspo_jax.runs.alarms import Alarms
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.metrics import Deferred, Stopwatch, compute, memory
from gspo_jax.runs.progress import Progress
from gspo_jax.sampling import Usage, generate
from gspo_jax.structs import Prompt, Rollout, TrainBatch

# Jitted: one small program instead of twenty.
advantages = jax.jit(O.group_advantages, static_argnames="normalize")


def run(context: Context, start_params: Callable[[], Any]) -> Any:
  """Trains for `rl.iterations`, or what is left of them, and returns the parameters.

  `start_params` gives the policy before the first iteration, which is also the reference policy of
  the KL penalty.

  Raises:
    Preempted: the machine is about to go; where the run stands has been saved.
    NonFiniteError: NaN or infinity; what the update met has been saved.
  """
  c = context.config
  updates = c.rl.iterations * c.rl.minibatches
  tx, rates = optimizer.make(c.rl_optimizer, updates), optimizer.rates(c.rl_optimizer, updates)
  programs = Programs.of(context, tx)
  sampling = Sampling(
    sources.Batches(context.train_prompts, c.rl.prompts, seed=context.seed("rl", "data")),
    QuerySet(c.data.query_set),
    partial.InFlight(),
  )
  checkpoints = Checkpointer(context.workdir, "rl", c.checkpoint)

  done = checkpoints.latest()
  if done is None:
    done, state = 0, new_state(start_params(), tx)
    pending = dict(phase="rl", step=0)  # where the curve starts: an evaluation
  else:
    state, host = checkpoints.restore(done, abstract_state(c.model, context.mesh, tx))
    sampling.set_state(host["sampling"])
    pending = host["pending"]
  context.writer.truncate({"rl": done if pending is None else done - 1})
  reference = start_params() if c.objective.kl_coef else None
  rollout_params = programs.publish(state.params)
  if done < c.rl.iterations:
    programs = ahead(programs, context, state)

  deferred, stages = Deferred(), Stopwatch()
  alarms = Alarms(c.alarms, context.writer.rows("rl"))
  guard = nonfinite.Guard(context, state, updates=c.rl.minibatches, keep=2)
  progress = Progress("rl", c.rl.iterations, start=done, active=jax.process_index() == 0)

  def report(row: dict[str, Any] | None) -> None:
    if row is not None:
      guard.check(row, state)
      warnings, begun = alarms(row)
      context.writer.write(row | warnings)
      progress.update(row["step"], row, begun)

  def conclude(row: dict[str, Any]) -> None:
    """Evaluates, reports and saves what is due after an iteration, whose row of metrics this is."""
    step = row["step"]
    last = step == c.rl.iterations
    if step % c.eval.every == 0 or last:
      with stages("evaluate"):
        evaluation, records = context.evaluate(rollout_params, step)
      context.writer.dump_rollouts("eval", step, records)
      row = row | {k: v for k, v in evaluation.items() if not k.startswith("time/")}
    report(deferred.push(row | stages.lap() | checkpoints.metrics()))
    if step and (step % c.checkpoint.every == 0 or last):
      report(deferred.flush())
      with stages("save"):
        _, sampler, _ = standing
        checkpoints.save(step, state, dict(sampling=sampler, pending=None), row)
      if jax.process_index() == 0:
        with stages("report"):
          page.write_report(context.workdir)

  # What to save should the machine go; `pending` is the row of an iteration still to be concluded.
  standing = done, sampling.get_state(), pending
  with contextlib.closing(checkpoints), progress:  # what is being saved is finished in any case
    try:
      if pending is not None:
        conclude(pending)
      for step in range(done + 1, c.rl.iterations + 1):
        standing = (*standing[:2], None)  # what an interruption of the sampling goes back to
        preemption.check()
        if step == c.profile:
          jax.profiler.start_trace(str(context.workdir / "profile"))
        started, usage = time.perf_counter(), Usage()
        groups, sampled, found = sampling.groups(context, rollout_params, stages, usage, step)
        advantage_PG = np.asarray(advantages(groups.reward_PG, normalize=c.objective.advantage))

        with stages("logp"):
          minibatches = prepare(
            context, programs, state.params, reference, groups.rollout, advantage_PG
          )
        guard.hold(step, minibatches)
        sampler_logp = float(groups.rollout.logp.sum())
        guard.check(dict(phase="rl", step=step, sampler_logp=sampler_logp), state)
        rollout_params = None  # makes room: the updated ones replace them
        metrics, update_started = [], time.perf_counter()
        with stages("update"):
          for minibatch in minibatches:
            state, metric = programs.update(state, minibatch)
            metrics.append(metric)
          rollout_params = programs.publish(state.params)

        # The devices are busy; what the host has to do comes now.
        row = dict(phase="rl", step=step, learning_rate=float(rates[step * c.rl.minibatches - 1]))
        row |= rollout_metrics(sampled) | multi_turn.metrics(sampled) | found
        row |= sampling.metrics(context, sampled.rollout, step) | usage.metrics() | memory()
        with stages("update"):
          jax.block_until_ready(state)
        updated = time.perf_counter()
        prompt_B, end_B = groups.rollout.prompt_lengths, groups.rollout.ends
        lengths = prompt_B[:: c.rl.group_size], prompt_B, end_B
        devices = context.mesh.devices.flat
        row |= utilisation(c.model, *lengths, updated - update_started, devices)
        with stages("publish"):
          jax.block_until_ready(rollout_params)
        seconds = time.perf_counter() - started
        row["tokens_per_second"] = float(sampled.rollout.lengths.sum()) / seconds
        row |= summarize(tuple(metrics))
        if step == c.profile:
          jax.profiler.stop_trace()
        if step % c.rl.dump_every == 0 or step in (1, c.rl.iterations):
          with stages("report"):
            new_logp = [programs.old_policy(state.params, b)["old_logp_BT"] for b in minibatches]
            records = rollout_records(context, groups, advantage_PG, minibatches, new_logp)
            context.writer.dump_rollouts("rl", step, records)
        standing = step, sampling.get_state(), row
        conclude(row)
    except preemption.Preempted:
      report(deferred.flush())
      step, sampler, pending = standing
      if step != checkpoints.latest():
        pending = None if pending is None else compute(pending)
        checkpoints.save(step, state, dict(sampling=sampler, pending=pending))
      raise
  return state.params


def prepare(
  context: Context,
  programs: Programs,
  params: Any,
  reference: Any | None,
  rollout: Rollout,
  advantage_PG: np.ndarray,
) -> list[TrainBatch]:
  """The mini-batches of an iteration on the devices, with all that stays fixed during its updates:
  the old policy's log-probabilities, and the reference policy's if there is one."""
  c = context.config
  batch = fill_up(train_batch(context, rollout, advantage_PG), c.rl)
  minibatches = [place(context, part) for part in split(batch, c.rl.minibatches)]
  if reference is not None:
    minibatches = [b.replace(ref_logp_BT=programs.score(reference, b)) for b in minibatches]
  if c.objective.old_logp == "recompute":
    minibatches = [b.replace(**programs.old_policy(params, b)) for b in minibatches]
  return jax.block_until_ready(minibatches)


@dataclasses.dataclass
class Sampling:
  """Where prompts come from, and what is known of them; its state is JSON."""

  batches: sources.Batches
  queries: QuerySet
  in_flight: partial.InFlight

  def groups(
    self, context: Context, params: Any, stages: Stopwatch, usage: Usage, step: int
  ) -> tuple[Groups, Groups, dict[str, float]]:
    """The groups to train on, all that were sampled, and metrics: see `query_set.fill`."""
    self.queries.readmit(step)
    one_round = functools.partial(self._round, context, params, stages, usage, step)
    groups, sampled, found = prompt_filter.fill(
      one_round, context.config.data.query_set.extra_rounds
    )
    self.queries.update(sampled.prompts, sampled.correct_PG, step)
    return groups, sampled, found

  def _round(
    self, context: Context, params: Any, stages: Stopwatch, usage: Usage, step: int, attempt: int
  ) -> Groups:
    """P prompts that are in use, with G scored responses each; `attempt` counts within a step.

    Where responses may be carried over there can be fewer.
    """
    rl = context.config.rl
    take = lambda count: self.batches.take(count, self.queries.wants)  # noqa: E731
    if context.environment is not None:
      with stages("sample"):
        seed = sampling_seed(context, step, attempt)
        return multi_turn.sample_groups(context, params, take(rl.prompts), usage, seed)
    with stages("sample"):
      if rl.partial:
        prompts, rollout = self.in_flight.sample(context, params, take, usage, step)
      else:
        prompts = take(rl.prompts)
        rollout = sample(context, params, prompts, usage, step, attempt)
    with stages("score"):
      rows = range(len(rollout.tokens))
      responses = [context.tokenizer.decode(rollout.response(row)) for row in rows]
      reward_PG, correct_PG, outcomes = score(context, prompts, responses, rollout.lengths)
    return Groups(prompts, rollout, responses, reward_PG, correct_PG, outcomes)

  def metrics(self, context: Context, rollout: Rollout, step: int) -> dict[str, float]:
    of_partial = partial.metrics(rollout, self.in_flight, step)
    return of_partial | self.queries.metrics() | sources.skipped_rows(context.train_prompts)

  def get_state(self) -> dict[str, Any]:
    return {name: part.get_state() for name, part in vars(self).items()}

  def set_state(self, state: dict[str, Any]) -> None:
    for name, part in vars(self).items():
      part.set_state(state[name])


def sample(
  context: Context, params: Any, prompts: list[Prompt], usage: Usage, step: int, attempt: int = 0
) -> Rollout:
  """G responses to each prompt from the policy that `params` is."""
  c = context.config
  return generate(
    params,
    c.model,
    [p.tokens for p in prompts],
    group_size=c.rl.group_size,
    max_new_tokens=c.sampling.max_new_tokens,
    temperature=c.sampling.temperature,
    top_k=c.sampling.top_k,
    top_p=c.sampling.top_p,
    min_p=c.sampling.min_p,
    stop_ids=context.tokenizer.stop_ids,
    seed=sampling_seed(context, step, attempt),
    pad_id=context.tokenizer.pad_id,
    prompt_length=c.data.max_prompt_tokens,
    record_routing=c.objective.needs_sampler_routing,
    compute=c.compute,
    engine=c.engine,
    usage=usage,
  )


def sampling_seed(context: Context, step: int, attempt: int) -> int:
  """A prompt that comes up again in one step gets other responses."""
  again = (attempt,) if attempt else ()
  return context.seed("rl", "sample", step, *again)


def score(
  context: Context, prompts: list[Prompt], responses: list[str], lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, collections.Counter]:
  """Rewards [P, G], raw correctness [P, G], and the counts of the verifier's outcomes."""
  group = context.config.rl.group_size
  repeated = [p for p in prompts for _ in range(group)]
  scores = context.score(responses, repeated, lengths.tolist())
  reward_B, correct_B = scores.reward, scores.correct
  if jax.process_count() > 1:
    # A time limit may strike on one host and not on another: the first one's word counts.
    reward_B, correct_B = multihost_utils.broadcast_one_to_all((reward_B, correct_B))
  reward_PG, correct_PG = reward_B.reshape(-1, group), correct_B.reshape(-1, group)
  if not np.isfinite(reward_PG).all():
    row = int(np.argmin(np.isfinite(reward_PG).all(1)))
    raise ValueError(f"reward of prompt {prompts[row].id} is {reward_PG[row]}: must be finite")
  return reward_PG, correct_PG, collections.Counter(scores.outcomes)


def rollout_metrics(groups: Groups) -> dict[str, float]:
  """Of everything that was sampled, which with dynamic sampling is more than is trained on."""
  rollout, reward_PG = groups.rollout, groups.reward_PG
  row = {
    "reward/mean": float(reward_PG.mean()),
    "reward/std": float(reward_PG.std()),
    "groups_without_spread": float((np.ptp(reward_PG, axis=1) == 0).mean()),
    "response_length/mean": float(rollout.lengths.mean()),
    "response_length/max": float(rollout.lengths.max()),
    "truncated_fraction": float(1 - rollout.stopped.mean()),
  }
  total = len(groups.responses)
  return row | {f"verifier/{name}": n / total for name, n in sorted(groups.outcomes.items())}
