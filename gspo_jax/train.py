"""The RL iteration: sample, score, advantage, update, publish, evaluate, save."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gspo_jax import data, optimizer, sharding
from gspo_jax import objectives as O
from gspo_jax.checkpoint import Checkpointer
from gspo_jax.context import Context, abstract_state, new_state
from gspo_jax.metrics import Deferred, Progress, Stopwatch, check_finite
from gspo_jax.models import transformer
from gspo_jax.sampling import generate
from gspo_jax.structs import Prompt, Rollout, TrainBatch
from gspo_jax.train_step import Learner, make_rl_step, make_score, summarize


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
  publish = sharding.publisher(
    transformer.shardings(c.model, sharding.ROLLOUT, context.mesh), np.dtype(c.compute.dtype)
  )
  batches = data.batches(context.train_prompts, c.rl.prompts, seed=context.seed("rl", "data"))
  checkpoints = Checkpointer(context.workdir / "checkpoints" / "rl", c.checkpoint)

  done = checkpoints.latest()
  if done is None:
    state = new_state(start_params(), tx)
  else:
    state, host = checkpoints.restore(done, abstract_state(context, tx))
    batches.set_state(host["data"])
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
    context.writer.dump_rollouts("eval", 0, records)
    report(dict(phase="rl", step=0) | row)

  with progress:
    for step in range((done or 0) + 1, c.rl.iterations + 1):
      started = time.perf_counter()
      prompts = next(batches)
      with stages("sample"):
        rollout = sample(context, rollout_params, prompts, step)
      with stages("score"):
        rows = range(len(rollout.tokens))
        responses = [context.tokenizer.decode(rollout.response(row)) for row in rows]
        reward_PG, outcomes = score(context, prompts, responses)
      advantage_PG = np.asarray(O.group_advantages(reward_PG, normalize=c.objective.advantage))

      minibatches = split(train_batch(context, rollout, advantage_PG), c.rl.minibatches)
      minibatches = [sharding.put_batch(b, context.mesh) for b in minibatches]
      with stages("logp"):
        if reference is not None:
          minibatches = [b.replace(ref_logp_BT=score_step(reference, b)) for b in minibatches]
        if c.objective.old_logp == "recompute":
          minibatches = [b.replace(old_logp_BT=score_step(state.params, b)) for b in minibatches]
        jax.block_until_ready(minibatches)
      metrics = []
      with stages("update"):
        for minibatch in minibatches:
          state, metric = train_step(state, minibatch)
          metrics.append(metric)
        rollout_params = publish(state.params)

      # The devices are busy; what the host has to do comes now.
      row = dict(phase="rl", step=step, learning_rate=float(rates[step * c.rl.minibatches - 1]))
      row |= rollout_metrics(rollout, reward_PG) | outcomes
      if step % c.rl.dump_every == 0 or step in (1, c.rl.iterations):
        records = rollout_records(prompts, rollout, responses, reward_PG, advantage_PG)
        context.writer.dump_rollouts("rl", step, records)
      with stages("update"):
        jax.block_until_ready(rollout_params)
      seconds = time.perf_counter() - started
      row["tokens_per_second"] = float(rollout.lengths.sum()) / seconds
      if step % c.eval.every == 0 or step == c.rl.iterations:
        with stages("evaluate"):
          evaluation, records = context.evaluate(rollout_params)
        context.writer.dump_rollouts("eval", step, records)
        row |= evaluation
      report(deferred.push(row | stages.lap() | summarize(tuple(metrics))))
      if step % c.checkpoint.every == 0 or step == c.rl.iterations:
        report(deferred.flush())
        with stages("save"):
          checkpoints.save(step, state, dict(data=batches.get_state()))
  checkpoints.close()
  return state.params


def sample(context: Context, params: Any, prompts: list[Prompt], step: int) -> Rollout:
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
    stop_ids=context.tokenizer.stop_ids,
    seed=context.seed("rl", "sample", step),
    pad_id=context.tokenizer.pad_id,
    prompt_length=c.data.max_prompt_tokens,
    compute=c.compute,
  )


def score(
  context: Context, prompts: list[Prompt], responses: list[str]
) -> tuple[np.ndarray, dict[str, float]]:
  """Rewards [P, G], and the share of each outcome of the verifier."""
  group = context.config.rl.group_size
  scores = context.score(responses, [p.answer for p in prompts for _ in range(group)])
  reward_PG = scores.reward.reshape(-1, group)
  if not np.isfinite(reward_PG).all():
    row = int(np.argmin(np.isfinite(reward_PG).all(1)))
    raise ValueError(f"reward of prompt {prompts[row].id} is {reward_PG[row]}: must be finite")
  shares = {f"verifier/{k}": n / len(responses) for k, n in sorted(scores.outcomes.items())}
  return reward_PG, shares


def train_batch(context: Context, rollout: Rollout, advantage_PG: np.ndarray) -> TrainBatch:
  """The rollout as the learner sees it, padded to one length for the whole run.

  The sampler's log-probabilities stand in for the old policy's; whoever recomputes replaces them.
  """
  c = context.config
  length = c.data.max_prompt_tokens + c.sampling.max_new_tokens
  pad = lambda x, value=0: np.pad(  # noqa: E731
    x, ((0, 0), (0, length - x.shape[1])), constant_values=value
  )
  ends_B = rollout.prompt_lengths + rollout.lengths
  logp_BT = pad(rollout.logp)
  return TrainBatch(
    tokens_BT=pad(rollout.tokens, context.tokenizer.pad_id),
    segments_BT=(np.arange(length)[None] < ends_B[:, None]).astype(np.int32),
    mask_BT=pad(rollout.mask),
    advantage_B=advantage_PG.reshape(-1).astype(np.float32),
    old_logp_BT=logp_BT,
    sampler_logp_BT=logp_BT,
  )


def split(batch: TrainBatch, parts: int) -> list[TrainBatch]:
  """Mini-batches of whole groups, in order; prompts come shuffled."""
  cut = [np.split(x, parts) for x in jax.tree.leaves(batch)]
  structure = jax.tree.structure(batch)
  return [jax.tree.unflatten(structure, leaves) for leaves in zip(*cut)]


def rollout_metrics(rollout: Rollout, reward_PG: np.ndarray) -> dict[str, float]:
  return {
    "reward/mean": float(reward_PG.mean()),
    "reward/std": float(reward_PG.std()),
    "groups_without_spread": float((np.ptp(reward_PG, axis=1) == 0).mean()),
    "response_length/mean": float(rollout.lengths.mean()),
    "response_length/max": float(rollout.lengths.max()),
    "truncated_fraction": float(1 - rollout.stopped.mean()),
  }


def rollout_records(
  prompts: list[Prompt],
  rollout: Rollout,
  responses: list[str],
  reward_PG: np.ndarray,
  advantage_PG: np.ndarray,
) -> list[dict[str, Any]]:
  """What a person wants to read of each response."""
  group = reward_PG.shape[1]
  return [
    dict(
      prompt_id=prompts[row // group].id,
      sample=row % group,
      prompt=prompts[row // group].question,
      response=response,
      answer=prompts[row // group].answer,
      reward=float(reward_PG.flat[row]),
      advantage=round(float(advantage_PG.flat[row]), 4),
      length=int(rollout.lengths[row]),
      truncated=not bool(rollout.stopped[row]),
      eval=False,
    )
    for row, response in enumerate(responses)
  ]
