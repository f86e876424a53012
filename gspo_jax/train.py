"""The RL iteration: sample, score, compute advantages, update, publish.

Exact resume depends on the order of calls in `train`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gspo_jax import teacher
from gspo_jax.learner import advantages, optimizer
from gspo_jax.learner import batch as batches
from gspo_jax.learner.adaptive_clip import adapted
from gspo_jax.learner.critic import make_values, new_critic, optimizers
from gspo_jax.learner.metrics import lag_metrics, reward_metrics
from gspo_jax.learner.passes import (
  Learner,
  fill,
  learner_of,
  make_old_policy,
  make_review,
  make_score,
)
from gspo_jax.learner.state import new_state, params_of, state_of_phase, with_critic
from gspo_jax.learner.step import make_rl_step
from gspo_jax.learner.summary import summarize
from gspo_jax.models import flops
from gspo_jax.models.lora import merged
from gspo_jax.models.params import as_read, with_adapters
from gspo_jax.rollouts.collector import Collected
from gspo_jax.rollouts.pipeline import Pipeline
from gspo_jax.rollouts.samples_log import rollout_records
from gspo_jax.run import Run
from gspo_jax.runs.metrics import Totals, memory
from gspo_jax.runs.phase import Phase
from gspo_jax.settings import passes
from gspo_jax.settings.passes import Pass
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import TrainBatch, TrainState
from gspo_jax.system.text import did_you_mean


def train(run: Run, start_params: Callable[[], Any]) -> Any:
  """Trains to the end of `rl.iterations` and returns the parameters.

  Args:
    start_params: function that returns the parameters before the first iteration. The KL penalty's
      reference policy has the same parameters.

  Raises:
    Preempted: the run was asked to stop; the resume point is saved.
    NonFiniteError: NaN or infinity ends the run (`on_nonfinite`); state and mini-batches are saved.
  """
  c, programs = run.config, programs_of(run)
  phase = run.phase("rl", c.rl.iterations, updates=c.rl.updates, keep=2)
  start = functools.partial(start_state, run, start_params)
  last, state, saved = phase.resume(like=lambda: state_of_phase(c, "rl", run.mesh), start=start)
  frozen = frozen_params(run, start_params)
  sampling = run.pipeline(run.collector(), phase.stages, last)
  total, row = resume_sampling(sampling, saved)
  sampling.publish(state.params, version=last + 1)
  with sampling, phase:
    phase.set_resume_point(last, state, position(sampling, total), row)
    if row is not None:
      finish_iteration(run, phase, sampling, state, row)
    for step in phase.steps():
      start_time = time.perf_counter()
      with run.profiler("all", step):
        with run.profiler("sample", step):
          collected = sampling.next(step)
        with phase.stages("logp"):
          params = frozen | params_of(state)
          minibatches = batches.place(c, run.mesh, collected, programs.segments)
          minibatches = [fill(programs.passes, params, batch) for batch in minibatches]
          minibatches, advantage_row = jax.block_until_ready(programs.advantages(minibatches))
        epochs = batches.epochs(minibatches, c.rl.epochs)
        phase.keep_batches(step, epochs)
        phase.check(dict(step=step, sampler_logp=float(collected.rollout.logp.sum())))
        sampling.release()
        with phase.stages("update"), run.profiler("update", step):
          state, row, seconds = update(run, programs, state, epochs, collected)
        rollout, usage = collected.rollout, collected.usage
        model = run.teacher and run.teacher.model
        work = flops.iteration_flops(c, model, rollout.prompt_lengths, rollout.ends)
        row |= advantage_row | flops.utilisation(work.updates, seconds, run.mesh.devices.flat)
        total = total.plus(usage.tokens, usage.flops + work.passes + work.updates)
        row |= total.metrics()
        with phase.stages("publish"):
          sampling.publish(state.params, version=step + 1)
        row["tokens_per_second"] = usage.tokens / (time.perf_counter() - start_time)
      if step % c.rl.dump_every == 0 or step in (1, c.rl.iterations):
        with phase.stages("report"):
          reviews = [programs.review(state.params, b, state.clip_factor) for b in minibatches]
          arrays = batches.sample_arrays(c, rollout, minibatches, reviews)
          records = rollout_records(collected, arrays, run.tokenizer)
          run.writer.dump_rollouts("rl", step, records)
      state = with_clip_factor(c, state, row)
      phase.set_resume_point(step, state, position(sampling, total), row)
      finish_iteration(run, phase, sampling, state, row)
  return state.params


@dataclasses.dataclass(frozen=True)
class Programs:
  """Programs of the trainer in an iteration."""

  # Function from a rollout to segment numbers. None for a loss without segments.
  segments: batches.Segments | None
  passes: Sequence[tuple[Pass, Callable]]  # Forward passes before the updates.
  advantages: advantages.Part  # Fills advantages on the devices, and returns their metrics.
  update: Callable[[TrainState, TrainBatch], tuple[TrainState, Any]]
  review: Callable[..., dict[str, jax.Array]]  # Computes arrays of the samples log.
  schedule: Mapping[str, float]  # Hyperparameters of the optimizer.


def programs_of(run: Run) -> Programs:
  """Builds the programs of the configured objective."""
  c, learner = run.config, learner_of(run.config, "rl")
  tx, critic = optimizers(c)
  old_policy = make_old_policy(learner, c.objective)
  return Programs(
    batches.make_segments(c.objective, run.tokenizer),
    make_passes(run, learner, old_policy),
    advantages.make(c, critic),
    make_rl_step(learner, c.objective, tx, critic),
    make_review(learner, c.objective, old_policy),
    tx.hyperparameters,
  )


def start_state(run: Run, start_params: Callable[[], Any]) -> TrainState:
  """Builds the training state before the first iteration."""
  c = run.config
  tx, critic = optimizers(c)
  state = new_state(start_policy(run, start_params), tx, c.objective.adaptive_clip)
  if critic is None:
    return state

  def policy() -> Any:
    return merged(start_policy(run, start_params, "float32"))

  fresh = new_critic(c.critic, c.model, run.mesh, c.seed_of("critic"), policy)
  return with_critic(state, fresh, critic.tx)


def start_policy(run: Run, start_params: Callable[[], Any], dtype: str = "") -> Any:
  """Returns the policy's initial parameters, with adapters if configured.

  dtype: dtype of weights with adapters; "" for `compute.dtype`.
  """
  c = run.config
  return with_adapters(
    start_params(), c.model, c.lora, dtype or c.compute.dtype, run.mesh, c.seed_of("lora")
  )


def resume_sampling(
  sampling: Pipeline, saved: Mapping[str, Any] | None
) -> tuple[Totals, dict[str, Any] | None]:
  """Resumes sampling; returns the run's `Totals`, and the metrics row not reported yet.

  At the start of a run, the row has step 0, so that the model is evaluated before any update. The
  row is None if all rows have been reported.

  Args:
    saved: JSON of the resume point. None at the start of a run.
  """
  if saved is None:
    return Totals(), dict(step=0) | Totals().metrics()
  sampling.set_position(saved["position"])
  return Totals(**saved["position"]["total"]), saved["pending"]


def update(
  run: Run,
  programs: Programs,
  state: TrainState,
  minibatches: Sequence[TrainBatch],
  collected: Collected,
) -> tuple[TrainState, dict[str, Any], float]:
  """Runs an iteration's updates; returns state, metrics row and seconds.

  Args:
    minibatches: mini-batches of all epochs, in the order of updates.
    collected: groups and metrics of the iteration.
  """
  c, rollout, start_time, metrics = run.config, collected.rollout, time.perf_counter(), []
  for minibatch in minibatches:
    state, metric = programs.update(state, minibatch)
    metrics.append(metric)
    run.profiler.count("update", 1, state)
  # The updates still run on the devices while the host computes metrics.
  rate = optimizer.last_rate(programs.schedule, state.opt_state)
  row = dict(step=collected.step, learning_rate=rate)
  row |= collected.metrics | memory()
  trained_B = rollout.lengths * np.concatenate([x.trained_G(c) for x in collected.groups])
  rewards_B, longest = collected.reward_PG.reshape(-1), c.sampling.max_new_tokens
  row |= reward_metrics(rewards_B, collected.known_B, trained_B, longest)
  row |= summarize(tuple(metrics))
  # A run saved with a lag and resumed without one still trains on the batches sampled before.
  if c.rl.lag or collected.version != collected.step:
    row |= lag_metrics(rollout, collected.step, trained_B > 0)
  jax.block_until_ready(state)
  return state, row, time.perf_counter() - start_time


def with_clip_factor(c: RunConfig, state: TrainState, row: Mapping[str, Any]) -> TrainState:
  """Adapts the factor of adaptive clip ranges to the iteration's metrics.

  During the critic's warmup the policy is not updated, so the factor is unchanged.
  """
  if row["step"] <= c.critic.warmup:
    return state
  return adapted(state, row, c.objective.adaptive_clip, c.on_nonfinite)


def make_passes(run: Run, learner: Learner, old_policy: Callable) -> list[tuple[Pass, Callable]]:
  """Returns the passes before an iteration's updates, with their jitted programs."""
  c = run.config
  make = dict(
    old_policy=lambda: old_policy,
    reference=lambda: make_score(learner),
    values=lambda: make_values(learner, c.critic, c.objective.replay),
    teacher=lambda: teacher.scoring(run.teacher, learner),
  )
  return [(declared, make[declared.name]()) for declared in passes.iteration_passes(c)]


def frozen_params(run: Run, start_params: Callable[[], Any]) -> dict[str, Any]:
  """Loads the parameters of reference policy and teacher, by name, if passes read them."""
  c = run.config
  load = {
    "reference policy": lambda: as_read(start_policy(run, start_params), c.model, c.compute.dtype),
    "teacher": lambda: run.teacher.source.load(run.teacher.model, run.mesh, c.compute.dtype),
  }
  return {name: load[name]() for name in passes.frozen_models(c, run.teacher and run.teacher.model)}


def finish_iteration(
  run: Run, phase: Phase, sampling: Pipeline, state: TrainState, row: dict[str, Any]
) -> None:
  """Reports an iteration; evaluates and saves a checkpoint if due.

  Args:
    row: metrics row of the iteration.
  """
  c, step = run.config, row["step"]
  last = step == c.rl.iterations
  evaluated = step % c.eval.every == 0 or last
  if evaluated:
    with phase.stages("evaluate"):
      key = run.evaluate.key(state.params)
      with sampling.engine() as engine:
        evaluation, records = run.evaluate(engine, key, step)
    run.writer.dump_rollouts("eval", step, records)
    row = row | {k: v for k, v in evaluation.items() if not k.startswith("time/")}
  if not (c.checkpoint.best == "held_out_loss" and "sft" in c.job):  # The cold start's.
    check_best(c.checkpoint.best, row, evaluated)
  phase.report(row)
  saved = step and (last or step % c.checkpoint.every == 0 or phase.is_time())
  if saved:
    with phase.stages("save"):
      phase.save(row)
  run.report.update(phase.stages, force=saved)


def check_best(best: str, row: dict[str, Any], evaluated: bool) -> None:
  """Raises ValueError if the row should have the metric `checkpoint.best` and lacks it.

  Args:
    best: value of the key; "" for none.
    row: metrics row of the iteration.
    evaluated: whether the row has metrics of an evaluation.
  """
  due = evaluated if best.startswith("eval/") else row["step"] > 0
  if best and due and best not in row:
    hint = did_you_mean(best, row) or ": metrics.jsonl lists the metrics"
    raise ValueError(f"checkpoint.best={best!r} is no metric of this run{hint}")


def position(sampling: Pipeline, total: Totals) -> Callable[[], dict[str, Any]]:
  """Snapshots sampling and totals; returns a function to convert the snapshot to JSON."""
  sampler_position = sampling.position()
  return lambda: sampler_position() | dict(total=dataclasses.asdict(total))
