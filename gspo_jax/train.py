"""The RL iteration: sample, score, advantage, update, publish."""

import concurrent.futures
import difflib
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from gspo_jax.collect import Collected, Collector
from gspo_jax.hardware import forward_flops, utilisation
from gspo_jax.learner import batch as batches
from gspo_jax.learner import by_length, optimizer
from gspo_jax.learner.adaptive_clip import adapted
from gspo_jax.learner.ahead import compile_ahead
from gspo_jax.learner.state import abstract, abstract_state, new_state, with_adapters
from gspo_jax.learner.step import (
  make_old_policy,
  make_review,
  make_rl_step,
  make_score,
)
from gspo_jax.learner.summary import summarize
from gspo_jax.records import rollout_records
from gspo_jax.report import page
from gspo_jax.run import Run
from gspo_jax.runs.metrics import memory
from gspo_jax.runs.phase import Phase
from gspo_jax.runs.totals import Totals
from gspo_jax.segments import segment_ids
from gspo_jax.structs import Rollout, TrainBatch, TrainState


def train(run: Run, start_params: Callable[[], Any]) -> Any:
  """Trains for `rl.iterations`, or what is left of them, and returns the parameters.

  `start_params` gives the policy before the first iteration, which is also the reference policy of
  the KL penalty.

  Raises:
    Preempted: the machine is about to go; where the run stands has been saved.
    NonFiniteError: NaN or infinity; what the update met has been saved.
  """
  c, engine = run.config, run.engine
  updates = c.rl.iterations * c.rl.updates
  tx, rates = optimizer.make(c.rl_optimizer, updates), optimizer.rates(c.rl_optimizer, updates)
  learner, collector = c.learner("rl"), Collector(run)
  update, score = make_rl_step(learner, c.objective, tx), make_score(learner)
  old_policy = make_old_policy(learner, c.objective)
  adaptive = c.objective.adaptive_clip
  phase = run.phase("rl", c.rl.iterations, updates=c.rl.updates, keep=2)

  def start() -> Any:
    adapters = c.rl.lora_rank, c.compute.dtype, run.mesh, run.seed("lora")
    return with_adapters(start_params(), c.model, *adapters)

  last, state, host = phase.resume(
    like=lambda: empty_state(run, tx), start=lambda: new_state(start(), tx, adaptive)
  )
  total = Totals()
  pending = dict(step=0) | total.metrics()  # where the curve starts: an evaluation
  if host is not None:
    collector.set_position(host["position"])
    total, pending = Totals(**host["position"].get("total", {})), host["pending"]
  reference = start() if c.objective.needs_reference else None
  engine.load(state.params, version=last + 1)

  def prepared(params: Any, batch: TrainBatch) -> TrainBatch:
    """The batch with the log-probabilities that stay fixed during the updates."""
    fixed = dict(old_logp_BT=batch.sampler_logp_BT)
    if c.objective.old_logp == "recompute":
      fixed = old_policy(params, batch)
    if reference is not None:
      fixed["ref_logp_BT"] = score(reference, batch)
    return batch.replace(**fixed)

  if last < c.rl.iterations:
    update, old_policy = ahead(run, collector, prepared, update, old_policy, tx)
  review = make_review(learner, c.objective, old_policy)
  with phase:
    phase.stand(last, state, position(collector, total), pending)
    if pending is not None:
      conclude(run, phase, state, pending)
    for step in phase.steps():
      if step == c.profile:
        jax.profiler.start_trace(str(run.workdir / "profile"))
      started = time.perf_counter()
      collected = collector.collect(step, phase.stages)
      with phase.stages("logp"):
        minibatches = place(run, collected, c.rl.minibatches)
        minibatches = [prepared(state.params, one) for one in minibatches]
        jax.block_until_ready(minibatches)
      taken = batches.epochs(minibatches, c.rl.epochs)
      phase.hold(step, taken)
      phase.check(dict(step=step, sampler_logp=float(collected.rollout.logp.sum())))
      engine.release()
      metrics, update_started = [], time.perf_counter()
      with phase.stages("update"):
        for minibatch in taken:
          state, metric = update(state, minibatch)
          metrics.append(metric)
        # The devices are busy; what the host has to do comes now.
        row = dict(step=step, learning_rate=float(rates[step * c.rl.updates - 1]))
        row |= collected.metrics | rewards_by_length(run, collected) | memory()
        jax.block_until_ready(state)
        seconds = time.perf_counter() - update_started
      without_gradient, training = operations(run, collected)
      row |= utilisation(training, seconds, run.mesh.devices.flat)
      sampling = collected.usage
      total = total.plus(sampling.tokens, sampling.flops + without_gradient + training)
      row |= total.metrics()
      with phase.stages("publish"):
        engine.load(state.params, version=step + 1)
      row["tokens_per_second"] = sampling.tokens / (time.perf_counter() - started)
      row |= summarize(tuple(metrics))
      if step == c.profile:
        jax.profiler.stop_trace()
      if step % c.rl.dump_every == 0 or step in (1, c.rl.iterations):
        with phase.stages("report"):
          reviews = [review(state.params, b, state.clip_factor) for b in minibatches]
          run.writer.dump_rollouts("rl", step, records(run, collected, minibatches, reviews))
      state = adapted(state, row, c.objective.adaptive_clip, c.on_nonfinite)
      phase.stand(step, state, position(collector, total), row)
      conclude(run, phase, state, row)
  return state.params


def ahead(
  run: Run,
  collector: Collector,
  prepared: Callable[[Any, TrainBatch], TrainBatch],
  update: Callable,
  old_policy: Callable,
  tx: optax.GradientTransformation,
) -> tuple[Callable, Callable]:
  """The two functions, which a thread compiles for the mini-batches of this run."""
  c, pool = run.config, concurrent.futures.ThreadPoolExecutor(1)
  state = empty_state(run, tx)

  @functools.cache
  def batch() -> TrainBatch:
    blank = collector.blank(c.rl.prompts // c.rl.minibatches)
    return abstract(place(run, blank, parts=1)[0], run.mesh)

  def whole() -> TrainBatch:
    return abstract(jax.eval_shape(prepared, state.params, batch()), run.mesh)

  compiled = compile_ahead(pool, run.mesh, old_policy, lambda: (state.params, batch()))
  update = compile_ahead(pool, run.mesh, update, lambda: (state, whole()))
  pool.shutdown(wait=False)  # the thread ends with its last job
  return update, compiled


def empty_state(run: Run, tx: optax.GradientTransformation) -> TrainState:
  """Shapes and shardings of the training state of RL."""
  c = run.config
  adaptive = c.objective.adaptive_clip
  return abstract_state(c.model, run.mesh, tx, c.rl.lora_rank, c.compute.dtype, adaptive)


def place(run: Run, collected: Collected, parts: int) -> list[TrainBatch]:
  """So many mini-batches, on the devices; an iteration has `rl.minibatches` of them."""
  c, rollout = run.config, collected.rollout
  # Conversations may begin differently. What was put aside went through the prompt again, with
  # other weights, so that each trajectory of a group may have other experts there.
  alike = run.environment is None and not (c.rl.partial and rollout.routing is not None)
  advantages = collected.advantage_PG, collected.advantage_BL
  batch = batches.train_batch(
    rollout,
    *advantages,
    segments_of(run, rollout),
    shared_prompts=alike,
    version=collected.version if c.rl.partial or c.job == "offline" else None,
    replays_sampler=c.objective.replay == "R3",
    mask_truncated=c.rl.mask_truncated,
  )
  sizes = parts, c.rl.prompts * parts // c.rl.minibatches, c.rl.group_size
  return batches.minibatches(batch, *sizes, run.mesh, c.rl.packed)


def segments_of(run: Run, rollout: Rollout) -> np.ndarray | None:
  """Parts of each trajectory that have an importance ratio of their own; None: there are none."""
  objective = run.config.objective
  if objective.segment_unit is None:
    return None
  return segment_ids(
    objective.segment_unit,
    rollout.tokens,
    rollout.mask,
    turn_BT=rollout.turns,
    size=objective.segment_tokens,
    breaks_V=run.line_breaks if objective.segment_unit == "line" else None,
  )


def conclude(run: Run, phase: Phase, state: TrainState, row: dict[str, Any]) -> None:
  """Evaluates, reports and saves what is due after an iteration, whose row of metrics this is."""
  c, step = run.config, row["step"]
  last = step == c.rl.iterations
  evaluated = step % c.eval.every == 0 or last
  if evaluated:
    with phase.stages("evaluate"):
      evaluation, records = run.evaluate(run.engine, run.evaluate.key(state.params), step)
    run.writer.dump_rollouts("eval", step, records)
    row = row | {k: v for k, v in evaluation.items() if not k.startswith("time/")}
  check_best(c.checkpoint.best, row, evaluated)
  phase.report(row | phase.stages.lap())
  if step and (step % c.checkpoint.every == 0 or last):
    with phase.stages("save"):
      phase.save(row)
    if jax.process_index() == 0:
      with phase.stages("report"):
        page.write_report(run.workdir)


def check_best(best: str, row: dict[str, Any], evaluated: bool) -> None:
  """ValueError if the metric `checkpoint.best` is not in the first row that it could be in."""
  due = evaluated if best.startswith("eval/") else row["step"] > 0
  if best and due and best not in row:
    near = difflib.get_close_matches(best, row, n=1)
    hint = f"; did you mean {near[0]}?" if near else ": metrics.jsonl has those that there are"
    raise ValueError(f"checkpoint.best={best!r} is no metric{hint}")


def rewards_by_length(run: Run, collected: Collected) -> dict[str, float]:
  """Rewards of the responses that are trained on, by their length."""
  known_B = np.concatenate([group.known_G for group in collected.groups])
  longest, rollout = run.config.sampling.max_new_tokens, collected.rollout
  return by_length.reward_metrics(
    collected.reward_PG.reshape(-1), known_B, rollout.lengths, longest
  )


def position(collector: Collector, total: Totals) -> Callable[[], dict[str, Any]]:
  """Remembers where the run stands; called, the result makes JSON of it for a checkpoint."""
  sampling = collector.position()
  return lambda: sampling() | dict(total=total.get_state())


def operations(run: Run, collected: Collected) -> tuple[float, float]:
  """Model FLOPs of an iteration's passes without gradient and of its updates, with each prompt
  counted once, without padding and without what is calculated twice."""
  c, prompt_B = run.config, collected.rollout.prompt_lengths
  one = forward_flops(c.model, prompt_B[:: c.rl.group_size], prompt_B, collected.rollout.ends)
  passes = (c.objective.old_logp == "recompute") + c.objective.needs_reference
  return passes * one, 3 * c.rl.epochs * one


def records(
  run: Run,
  collected: Collected,
  minibatches: list[TrainBatch],
  reviews: list[dict[str, jax.Array]],
) -> list[dict[str, Any]]:
  """Records of the dump for each response; `reviews` are of the policy after the updates."""
  ratios = [one["logp_BT"] - b.old_logp_BT for one, b in zip(reviews, minibatches)]
  clipped = [one["clipped_BT"] for one in reviews]
  order = minibatches, len(collected.rollout.tokens), run.config.rl.group_size
  fetched = (batches.in_rollout_order(values, *order) for values in (ratios, clipped))
  return rollout_records(collected, *fetched, run.tokenizer.decode)
