"""The RL iteration: sample, score, advantage, update, publish, evaluate, save."""

import collections
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import data, multi_turn, optimizer, partial, query_set, rollout_viewer, sharding
from gspo_jax import objectives as O
from gspo_jax.checkpoint import Checkpointer
from gspo_jax.config import RLConfig
from gspo_jax.context import Context, abstract_state, new_state
from gspo_jax.metrics import Deferred, Progress, Stopwatch, check_finite
from gspo_jax.models import routing, transformer
from gspo_jax.query_set import Groups, QuerySet
from gspo_jax.sampling import Usage, generate
from gspo_jax.structs import Prompt, Rollout, TrainBatch
from gspo_jax.train_step import (
  Learner,
  make_old_policy,
  make_rl_step,
  make_score,
  summarize,
)


def run(context: Context, start_params: Callable[[], Any]) -> Any:
  """Trains for `rl.iterations`, or what is left of them, and returns the parameters.

  `start_params` gives the policy before the first iteration, which is also the reference policy of
  the KL penalty.
  """
  c = context.config
  updates = c.rl.iterations * c.rl.minibatches
  tx = optimizer.make(c.rl_optimizer, updates)
  rates = optimizer.rates(c.rl_optimizer, updates)
  learner = Learner(
    c.model,
    c.compute,
    c.sampling.temperature,
    c.rl.microbatches,
    c.objective.load_balance_coef,
  )
  train_step, score_step = make_rl_step(learner, c.objective, tx), make_score(learner)
  old_policy = make_old_policy(learner, c.objective)
  publish = sharding.publisher(
    transformer.shardings(c.model, sharding.ROLLOUT, context.mesh), np.dtype(c.compute.dtype)
  )
  batches = data.batches(context.train_prompts, c.rl.prompts, seed=context.seed("rl", "data"))
  queries, in_flight = QuerySet(c.data.query_set), partial.InFlight()
  checkpoints = Checkpointer(context.workdir / "checkpoints" / "rl", c.checkpoint)

  done = checkpoints.latest()
  if done is None:
    state = new_state(start_params(), tx)
  else:
    state, host = checkpoints.restore(done, abstract_state(context, tx))
    batches.set_state(host["data"])
    queries.set_state(host["queries"])
    in_flight.set_state(host["in_flight"])
  context.writer.truncate({"rl": -1 if done is None else done})
  reference = start_params() if c.objective.kl_coef else None
  rollout_params = publish(state.params)

  deferred, stages = Deferred(), Stopwatch()
  progress = Progress("rl", c.rl.iterations, start=done or 0)

  def report(row: dict[str, Any] | None) -> None:
    if row is not None:
      check_finite(row)
      context.writer.write(row)
      progress.update(row["step"], row)

  if done is None:  # where the curve starts
    row, records = context.evaluate(rollout_params)
    row = {k: v for k, v in row.items() if not k.startswith("time/")}
    context.writer.dump_rollouts("eval", 0, records)
    report(dict(phase="rl", step=0) | row)

  with contextlib.closing(checkpoints), progress:  # what is being saved is finished in any case
    for step in range((done or 0) + 1, c.rl.iterations + 1):
      started = time.perf_counter()
      queries.readmit(step)
      usage = Usage()
      round_of_groups = functools.partial(
        sample_groups, context, rollout_params, batches, queries, in_flight, stages, usage, step
      )
      groups, sampled, found = query_set.fill(round_of_groups, c.data.query_set.extra_rounds)
      queries.update(sampled.prompts, sampled.correct_PG, step)
      advantage_PG = np.asarray(
        O.group_advantages(groups.reward_PG, normalize=c.objective.advantage)
      )

      batch = fill_up(train_batch(context, groups.rollout, advantage_PG), c.rl)
      minibatches = split(batch, c.rl.minibatches)
      minibatches = [sharding.put_batch(b, context.mesh) for b in minibatches]
      with stages("logp"):
        if reference is not None:
          minibatches = [b.replace(ref_logp_BT=score_step(reference, b)) for b in minibatches]
        if c.objective.old_logp == "recompute":
          minibatches = [b.replace(**old_policy(state.params, b)) for b in minibatches]
        jax.block_until_ready(minibatches)
      metrics = []
      with stages("update"):
        for minibatch in minibatches:
          state, metric = train_step(state, minibatch)
          metrics.append(metric)
        rollout_params = publish(state.params)

      # The devices are busy; what the host has to do comes now.
      row = dict(phase="rl", step=step, learning_rate=float(rates[step * c.rl.minibatches - 1]))
      row |= (
        rollout_metrics(sampled)
        | multi_turn.metrics(sampled)
        | partial.metrics(sampled.rollout, in_flight, step)
        | usage.metrics()
        | found
        | queries.metrics()
      )
      row |= data.skipped_rows(context.train_prompts)
      if step % c.rl.dump_every == 0 or step in (1, c.rl.iterations):
        records = rollout_records(groups, advantage_PG)
        context.writer.dump_rollouts("rl", step, records)
      with stages("update"):
        jax.block_until_ready(rollout_params)
      seconds = time.perf_counter() - started
      row["tokens_per_second"] = float(sampled.rollout.lengths.sum()) / seconds
      if step % c.eval.every == 0 or step == c.rl.iterations:
        with stages("evaluate"):
          evaluation, records = context.evaluate(rollout_params, step)
        context.writer.dump_rollouts("eval", step, records)
        row |= {k: v for k, v in evaluation.items() if not k.startswith("time/")}
      report(deferred.push(row | stages.lap() | summarize(tuple(metrics))))
      if step % c.checkpoint.every == 0 or step == c.rl.iterations:
        report(deferred.flush())
        with stages("save"):
          kept = dict(data=batches, queries=queries, in_flight=in_flight)
          checkpoints.save(step, state, {name: part.get_state() for name, part in kept.items()})
        if jax.process_index() == 0:
          with stages("report"):
            rollout_viewer.write_report(context.workdir)
  return state.params


def sample_groups(
  context: Context,
  params: Any,
  batches: data.Batches,
  queries: QuerySet,
  in_flight: partial.InFlight,
  stages: Stopwatch,
  usage: Usage,
  step: int,
  attempt: int,
) -> Groups:
  """P prompts that are in use, with G scored responses each; `attempt` counts within a step.

  Where responses may be carried over there can be fewer.
  """
  rl = context.config.rl
  take = lambda count: batches.take(count, queries.wants)  # noqa: E731
  if context.environment is not None:
    with stages("sample"):
      seed = sampling_seed(context, step, attempt)
      return multi_turn.sample_groups(context, params, take(rl.prompts), usage, seed)
  with stages("sample"):
    if rl.partial:
      prompts, rollout = in_flight.sample(context, params, take, usage, step)
    else:
      prompts = take(rl.prompts)
      rollout = sample(context, params, prompts, usage, step, attempt)
  with stages("score"):
    rows = range(len(rollout.tokens))
    responses = [context.tokenizer.decode(rollout.response(row)) for row in rows]
    reward_PG, correct_PG, outcomes = score(context, prompts, responses, rollout.lengths)
  return Groups(prompts, rollout, responses, reward_PG, correct_PG, outcomes)


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
  answers = [p.answer for p in prompts for _ in range(group)]
  scores = context.score(responses, answers, lengths.tolist())
  reward_B, correct_B = scores.reward, scores.correct
  if jax.process_count() > 1:
    # A time limit may strike on one host and not on another: the first one's word counts.
    reward_B, correct_B = multihost_utils.broadcast_one_to_all((reward_B, correct_B))
  reward_PG, correct_PG = reward_B.reshape(-1, group), correct_B.reshape(-1, group)
  if not np.isfinite(reward_PG).all():
    row = int(np.argmin(np.isfinite(reward_PG).all(1)))
    raise ValueError(f"reward of prompt {prompts[row].id} is {reward_PG[row]}: must be finite")
  return reward_PG, correct_PG, collections.Counter(scores.outcomes)


def train_batch(context: Context, rollout: Rollout, advantage_PG: np.ndarray) -> TrainBatch:
  """The rollout as the learner sees it, padded to one length for the whole run.

  The sampler's log-probabilities stand in for the old policy's; whoever recomputes replaces them.
  """
  c = context.config
  length = c.data.max_prompt_tokens + c.sampling.max_new_tokens
  pad = lambda x, value=0: np.pad(  # noqa: E731
    x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=value
  )
  segments_BT = (np.arange(length)[None] < rollout.ends[:, None]).astype(np.int32)
  routes_BTlk = rollout.routing
  if routes_BTlk is not None:  # whatever padding holds was not chosen by anybody
    kept = segments_BT[:, :, None, None] > 0
    routes_BTlk = np.where(kept, pad(routes_BTlk), routes_BTlk.dtype.type(routing.NO_ROUTE))
  turn_BT = advantage_BT = None
  if rollout.turns is not None:
    turn_BT = pad(np.where(rollout.mask > 0, rollout.turns, -1), -1)
    advantage_BT = pad(multi_turn.advantages(context, rollout))
  logp_BT = pad(rollout.logp)
  return TrainBatch(
    tokens_BT=pad(rollout.tokens, context.tokenizer.pad_id),
    segments_BT=segments_BT,
    mask_BT=pad(rollout.mask),
    advantage_B=advantage_PG.reshape(-1).astype(np.float32),
    old_logp_BT=logp_BT,
    sampler_logp_BT=logp_BT,
    turn_BT=turn_BT,
    advantage_BT=advantage_BT,
    sampler_routing_BTlk=routes_BTlk,
  )


def fill_up(batch: TrainBatch, rl: RLConfig) -> TrainBatch:
  """P groups: rows that are padding for those that are missing, evenly in all mini-batches."""
  rows = rl.prompts * rl.group_size
  missing = rows - len(batch.tokens_BT)
  if not missing:
    return batch
  group_P = np.argsort(np.arange(rl.prompts) % rl.minibatches, kind="stable")
  row_B = (group_P[:, None] * rl.group_size + np.arange(rl.group_size)).reshape(-1)
  widen = lambda x: np.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))  # noqa: E731
  return jax.tree.map(lambda x: widen(x)[row_B], batch)


def split(batch: TrainBatch, parts: int) -> list[TrainBatch]:
  """Mini-batches of whole groups, in order; prompts come shuffled."""
  cut = [np.split(x, parts) for x in jax.tree.leaves(batch)]
  structure = jax.tree.structure(batch)
  return [jax.tree.unflatten(structure, leaves) for leaves in zip(*cut)]


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


def rollout_records(groups: Groups, advantage_PG: np.ndarray) -> list[dict[str, Any]]:
  """What a person wants to read of each response that was trained on."""
  prompts, rollout, group = groups.prompts, groups.rollout, advantage_PG.shape[1]
  return [
    dict(
      prompt_id=prompts[row // group].id,
      sample=row % group,
      prompt=prompts[row // group].question,
      response=response,
      answer=prompts[row // group].answer[:1000],  # the tests of a program take megabytes
      reward=float(groups.reward_PG.flat[row]),
      advantage=round(float(advantage_PG.flat[row]), 4),
      length=int(rollout.lengths[row]),
      truncated=not bool(rollout.stopped[row]),
      eval=False,
    )
    for row, response in enumerate(groups.responses)
  ]
