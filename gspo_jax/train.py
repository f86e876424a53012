"""The RL iteration: sample, score, advantage, update, publish."""

import concurrent.futures
import dataclasses
import difflib
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gspo_jax import teacher
from gspo_jax.hardware import forward_flops, utilisation
from gspo_jax.learner import batch as batches
from gspo_jax.learner import by_age, by_length, optimizer
from gspo_jax.learner.adaptive_clip import adapted
from gspo_jax.learner.ahead import compile_ahead
from gspo_jax.learner.critic import optimizers
from gspo_jax.learner.distillation import make_distill
from gspo_jax.learner.layout import sampled
from gspo_jax.learner.state import (
  abstract,
  abstract_state,
  as_read,
  new_state,
  with_adapters,
  with_critic,
)
from gspo_jax.learner.step import (
  learner_of,
  make_old_policy,
  make_review,
  make_rl_step,
  make_score,
)
from gspo_jax.learner.summary import summarize
from gspo_jax.learner.values import at_the_end, make_advantages, make_values, new_critic
from gspo_jax.report import page
from gspo_jax.rollouts.collector import Collected, Collector
from gspo_jax.rollouts.dumps import rollout_records
from gspo_jax.rollouts.pipeline import Pipeline
from gspo_jax.run import Run
from gspo_jax.runs.metrics import Totals, memory
from gspo_jax.runs.phase import Phase
from gspo_jax.sampling.delimiters import step_ends
from gspo_jax.sampling.parts import segment_ids
from gspo_jax.structs import Rollout, TrainBatch, TrainState


def train(run: Run, start_params: Callable[[], Any]) -> Any:
  """Trains for `rl.iterations`, or what is left of them, and returns the parameters.

  `start_params` gives the policy before the first iteration, which is also the reference policy of
  the KL penalty.

  Raises:
    Preempted: the machine is about to go; where the run stands has been saved.
    NonFiniteError: NaN or infinity; what the update met has been saved.
  """
  c = run.config
  waits = c.critic.warmup  # iterations in which only the critic learns
  rates = optimizer.rates(c.rl_optimizer, (c.rl.iterations - waits) * c.rl.updates)
  (tx, critic), learner, collector = optimizers(c), learner_of(c, "rl"), Collector(run)
  update, score = make_rl_step(learner, c.objective, tx, critic), make_score(learner)
  old_policy = make_old_policy(learner, c.objective)
  adaptive = c.objective.adaptive_clip
  phase = run.phase("rl", c.rl.iterations, updates=c.rl.updates, keep=2)

  def start() -> Any:
    adapters = c.rl.lora_rank, c.compute.dtype, run.mesh, run.seed("lora")
    return with_adapters(start_params(), c.model, *adapters)

  def start_state() -> TrainState:
    state = new_state(start(), tx, adaptive)
    if critic is None:
      return state
    options = c.critic, c.model, run.mesh, run.seed("critic")
    return with_critic(state, new_critic(*options, policy=start_params), critic.tx)

  last, state, host = phase.resume(like=lambda: empty_state(run), start=start_state)
  total = Totals()
  pending = dict(step=0) | total.metrics()  # where the curve starts: an evaluation
  sampling = Pipeline(run, collector, phase.stages, last)
  if host is not None:
    sampling.set_position(host["position"])
    total, pending = Totals(**host["position"]["total"]), host["pending"]
  reference = as_read(start_params(), c.model, c.compute.dtype) if c.needs_reference else None
  sampling.publish(state.params, version=last + 1)

  values = None
  if critic:
    values = make_values(learner, c.critic, c.objective.replay)
    advantages = make_advantages(c.critic, critic.numbers)
  if run.teacher:
    teacher_logp = teacher.scoring(run.teacher, learner)
    of_teacher = functools.partial(teacher_logp, teacher.load(run.teacher, c, run.mesh))
    advantages = make_distill(c.distillation, of_teacher)

  def prepared(
    state: TrainState, minibatches: list[TrainBatch]
  ) -> tuple[list[TrainBatch], dict[str, jax.Array]]:
    """The mini-batches with what stays fixed during the updates, log-probabilities and what a
    critic or a teacher says, and metrics of it."""

    def one(batch: TrainBatch) -> TrainBatch:
      fixed = dict(old_logp_BT=batch.sampler_logp_BT)
      if c.objective.old_logp == "recompute":
        fixed = old_policy(state.params, sampled(batch))
      if c.objective.old_logp == "behaviour":
        found = old_policy(state.params, sampled(batch))
        fixed |= dict(own_logp_BT=found.pop("old_logp_BT")) | found
      if reference is not None:
        fixed["ref_logp_BT"] = score(reference, batch)
      if critic:
        fixed["old_value_BT"] = values((state.params, state.critic.params), batch)
      return batch.replace(**fixed)

    minibatches = [one(batch) for batch in minibatches]
    return advantages(minibatches) if critic or c.distillation.on else (minibatches, {})

  if last < c.rl.iterations:
    update, old_policy, values = ahead(run, collector, prepared, update, old_policy, values)
  review = make_review(learner, c.objective, old_policy)
  with sampling, phase:
    phase.stand(last, state, position(sampling, total), pending)
    if pending is not None:
      conclude(run, phase, sampling, state, pending)
    for step in phase.steps():
      if step == c.profile:
        jax.profiler.start_trace(str(run.workdir / "profile"))
      started = time.perf_counter()
      collected = sampling.next(step)
      with phase.stages("logp"):
        minibatches = place(run, collected, c.rl.minibatches)
        minibatches, of_advantages = prepared(state, minibatches)
        jax.block_until_ready(minibatches)
      taken = batches.epochs(minibatches, c.rl.epochs)
      phase.hold(step, taken)
      phase.check(dict(step=step, sampler_logp=float(collected.rollout.logp.sum())))
      sampling.release()
      metrics, update_started = [], time.perf_counter()
      with phase.stages("update"):
        for minibatch in taken:
          state, metric = update(state, minibatch)
          metrics.append(metric)
        # The devices are busy; what the host has to do comes now.
        rate = optimizer.last_rate(rates, state.step, waits * c.rl.updates)
        row = dict(step=step, learning_rate=rate)
        row |= of_advantages | collected.metrics | rewards_by_length(run, collected) | memory()
        row |= summarize(tuple(metrics))
        if c.rl.lag:
          row |= by_age.lag_metrics(collected.rollout, step)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - update_started
      without_gradient, training = operations(run, collected)
      row |= utilisation(training, seconds, run.mesh.devices.flat)
      usage = collected.usage
      total = total.plus(usage.tokens, usage.flops + without_gradient + training)
      row |= total.metrics()
      with phase.stages("publish"):
        sampling.publish(state.params, version=step + 1)
      row["tokens_per_second"] = usage.tokens / (time.perf_counter() - started)
      if step == c.profile:
        jax.profiler.stop_trace()
      if step % c.rl.dump_every == 0 or step in (1, c.rl.iterations):
        with phase.stages("report"):
          reviews = [review(state.params, b, state.clip_factor) for b in minibatches]
          run.writer.dump_rollouts("rl", step, records(run, collected, minibatches, reviews))
      if step > waits:
        state = adapted(state, row, c.objective.adaptive_clip, c.on_nonfinite)
      phase.stand(step, state, position(sampling, total), row)
      conclude(run, phase, sampling, state, row)
  return state.params


def ahead(
  run: Run,
  collector: Collector,
  prepared: Callable[[TrainState, list[TrainBatch]], tuple[list[TrainBatch], Any]],
  update: Callable,
  old_policy: Callable,
  values: Callable | None,
) -> tuple[Callable, Callable, Callable | None]:
  """`update`, `old_policy` and `values`, which a thread compiles for the shapes of this run while
  the first responses are sampled."""
  c, pool = run.config, concurrent.futures.ThreadPoolExecutor(1)
  state = empty_state(run)

  @functools.cache
  def batch() -> TrainBatch:
    blank = collector.blank(c.rl.prompts // c.rl.minibatches)
    return abstract(place(run, blank, parts=1)[0], run.mesh)

  def whole() -> TrainBatch:
    minibatches, _ = jax.eval_shape(prepared, state, [batch()])
    return abstract(minibatches[0], run.mesh)

  compiled = compile_ahead(pool, run.mesh, old_policy, lambda: (state.params, sampled(batch())))
  if values is not None:
    both = lambda: (state.params, state.critic.params)  # noqa: E731
    values = compile_ahead(pool, run.mesh, values, lambda: (both(), batch()))
  update = compile_ahead(pool, run.mesh, update, lambda: (state, whole()))
  pool.shutdown(wait=False)  # the thread ends with its last job
  return update, compiled, values


def empty_state(run: Run) -> TrainState:
  """Shapes and shardings of the training state of RL."""
  c = run.config
  tx, critic = optimizers(c)
  adaptive = c.objective.adaptive_clip
  return abstract_state(c.model, run.mesh, tx, c.rl.lora_rank, c.compute.dtype, adaptive, critic)


def place(run: Run, collected: Collected, parts: int) -> list[TrainBatch]:
  """So many mini-batches, on the devices; an iteration has `rl.minibatches` of them."""
  c, rollout = run.config, collected.rollout
  # Conversations may begin differently. What was put aside went through the prompt again, with
  # other weights, so that each trajectory of a group may have other experts there. With a lag
  # those of servers may too, which take new weights under way; their record (`rl.replay`)
  # makes the same updates with any engine.
  moved = c.rl.partial or (c.rl.lag and c.objective.replay == "R3")
  alike = run.environment is None and not (moved and rollout.routing is not None)
  advantages = collected.advantage_PG, collected.advantage_BL
  reward_BL = None
  if c.critic.name != "none" or c.objective.loss.to_reference:
    rollout = judged(collected)
  if c.critic.name != "none":
    reward_BL = of_tokens(collected, rollout)
  batch = batches.train_batch(
    rollout,
    *advantages,
    segments_of(run, rollout),
    shared_prompts=alike,
    version=collected.step if c.rl.partial or c.rl.lag or c.job == "offline" else None,
    ages=c.rl.ages > 0,
    replays_sampler=c.objective.replay == "R3",
    mask_truncated=c.rl.mask_truncated,
    reward_BL=reward_BL,
  )
  sizes = parts, c.rl.prompts * parts // c.rl.minibatches, c.rl.group_size
  return batches.minibatches(batch, *sizes, run.mesh, c.rl.packed)


def judged(collected: Collected) -> Rollout:
  """The rollout without the responses on which there is no verdict, for losses that learn from an
  advantage of 0 too."""
  rollout = collected.rollout
  if not collected.groups:
    return rollout
  known_B = np.concatenate([group.known_G for group in collected.groups])
  return dataclasses.replace(rollout, mask=rollout.mask * known_B[:, None])


def of_tokens(collected: Collected, rollout: Rollout) -> np.ndarray:
  """The reward of each token that counts in `rollout`: of turns or lines where these have rewards
  of their own, else of the response at its end."""
  if collected.advantage_BL is not None:
    return rollout.rewards * (rollout.mask > 0).any(axis=1, keepdims=True)
  known_B = (rollout.mask > 0).any(axis=1)
  return at_the_end(np.where(known_B, collected.reward_PG.reshape(-1), 0), rollout.mask)


def segments_of(run: Run, rollout: Rollout) -> np.ndarray | None:
  """Parts of each trajectory that have an importance ratio of their own; None: there are none."""
  objective, ends_BT = run.config.objective, None
  if objective.segment_unit is None:
    return None
  if objective.segment_unit == "step":
    ends_BT = step_ends(run.delimiters, rollout.tokens, rollout.mask, rollout.turns)
  return segment_ids(
    objective.segment_unit,
    rollout.tokens,
    rollout.mask,
    turn_BT=rollout.turns,
    size=objective.segment_tokens,
    breaks_V=run.line_breaks if objective.segment_unit == "line" else None,
    ends_BT=ends_BT,
  )


def conclude(
  run: Run, phase: Phase, sampling: Pipeline, state: TrainState, row: dict[str, Any]
) -> None:
  """Evaluates, reports and saves what is due after an iteration, whose row of metrics this is."""
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
  length_B = rollout.lengths * (rollout.stopped | (not run.config.rl.mask_truncated))
  return by_length.reward_metrics(collected.reward_PG.reshape(-1), known_B, length_B, longest)


def position(sampling: Pipeline, total: Totals) -> Callable[[], dict[str, Any]]:
  """Remembers where the run stands; called, the result makes JSON of it for a checkpoint."""
  where = sampling.position()
  return lambda: where() | dict(total=total.get_state())


def operations(run: Run, collected: Collected) -> tuple[float, float]:
  """Model FLOPs of an iteration's passes without gradient and of its updates, with each prompt
  counted once, without padding and without what is calculated twice."""
  c, prompt_B = run.config, collected.rollout.prompt_lengths
  arguments = prompt_B[:: c.rl.group_size], prompt_B, collected.rollout.ends
  one = forward_flops(c.model, *arguments)
  taught = forward_flops(run.teacher.model, *arguments) if run.teacher else 0.0
  return c.passes * one + taught, 3 * c.rl.epochs * c.models * one


def records(
  run: Run,
  collected: Collected,
  minibatches: list[TrainBatch],
  reviews: list[dict[str, jax.Array]],
) -> list[dict[str, Any]]:
  """Records of the dump for each response; `reviews` are of the policy after the updates."""
  ratios, clipped = ([one[name] for one in reviews] for name in ("log_ratio_BT", "clipped_BT"))
  order = minibatches, len(collected.rollout.tokens), run.config.rl.group_size
  ratio_BT, clipped_BT = (batches.in_rollout_order(x, *order) for x in (ratios, clipped))
  more = {}
  values = ["old_value_BT"] if run.config.critic.name != "none" else []
  if values or run.config.distillation.on:
    for name in [*values, "advantage_BT"]:
      more[name] = batches.in_rollout_order([getattr(b, name) for b in minibatches], *order)
  if minibatches[0].unit_BT is not None:
    parts = ([b.unit_BT for b in minibatches], [one["gradient_BT"] for one in reviews])
    more |= dict(segments=tuple(batches.in_rollout_order(x, *order) for x in parts))
  return rollout_records(collected, ratio_BT, clipped_BT, run.tokenizer.decode, **more)
