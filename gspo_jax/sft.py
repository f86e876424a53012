"""The cold start: supervised fine-tuning on demonstrations."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import sharding
from gspo_jax.data import sources
from gspo_jax.learner import optimizer
from gspo_jax.learner.step import make_sft_step, summarize
from gspo_jax.run import Context, abstract_state, new_state
from gspo_jax.runs import nonfinite, preemption
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.runs.metrics import Deferred
from gspo_jax.runs.progress import Progress
from gspo_jax.structs import Prompt, TrainBatch


def run(context: Context) -> Any:
  """Trains for `sft.steps` updates, or what is left of them, and returns the parameters."""
  c = context.config
  tx = optimizer.make(c.sft_optimizer, c.sft.steps)
  rates = optimizer.rates(c.sft_optimizer, c.sft.steps)
  step_fn = make_sft_step(c.learner("sft"), tx)
  prompts = sources.fitting(
    context.train_prompts, context.tokenizer, c.sft.max_tokens, c.data.on_error
  )
  batches = sources.Batches(prompts, c.sft.batch, seed=context.seed("sft", "data"))
  checkpoints = Checkpointer(context.workdir, "sft", c.checkpoint)

  done = checkpoints.latest()
  if done is None:
    done, state = 0, new_state(context.initial_params(), tx)
  else:
    state, host = checkpoints.restore(done, abstract_state(c.model, context.mesh, tx))
    batches.set_state(host["data"])
  context.writer.truncate({"sft": done} if done else {})
  # A row is fetched when the next one is due, so batches are kept for as long.
  guard = nonfinite.Guard(context, state, updates=1, keep=2 * c.sft.log_every)

  deferred = Deferred()
  progress = Progress("sft", c.sft.steps, start=done, active=jax.process_index() == 0)

  def report(row: dict[str, Any] | None) -> None:
    if row is not None:
      guard.check(row, state)
      context.writer.write(row)
      progress.update(row["step"], row)

  with contextlib.closing(checkpoints), progress:  # what is being saved is finished in any case
    for step in range(done + 1, c.sft.steps + 1):
      try:
        preemption.check()
      except preemption.Preempted:
        report(deferred.flush())
        if step - 1 != checkpoints.latest():
          checkpoints.save(step - 1, state, dict(data=batches.get_state()))
        raise
      batch = sharding.put_batch(train_batch(next(batches), context), context.mesh)
      guard.hold(step, [batch])
      state, metrics = step_fn(state, batch)
      if step % c.sft.log_every == 0 or step == c.sft.steps:
        row = dict(phase="sft", step=step, learning_rate=float(rates[step - 1]))
        report(deferred.push(row | sources.skipped_rows(prompts) | summarize((metrics,))))
      if step % c.checkpoint.every == 0 or step == c.sft.steps:
        report(deferred.flush())
        checkpoints.save(step, state, dict(data=batches.get_state()))
  return state.params


def train_batch(prompts: list[Prompt], context: Context) -> TrainBatch:
  """Demonstrations as one padded batch; the fields of a rollout are not used and hold 0."""
  tokens, mask = sources.pack_demonstrations(
    prompts, context.tokenizer, context.config.sft.max_tokens
  )
  lengths = [len(p.tokens) for p in prompts]
  ends = np.maximum(lengths, tokens.shape[1] - np.argmax(mask[:, ::-1] > 0, axis=1))
  zeros = np.zeros(tokens.shape, np.float32)
  return TrainBatch(
    tokens_BT=tokens,
    segments_BT=(np.arange(tokens.shape[1])[None] < ends[:, None]).astype(np.int32),
    mask_BT=mask,
    advantage_B=zeros[:, 0],
    old_logp_BT=zeros,
    sampler_logp_BT=zeros,
  )


def finished(context: Context) -> bool:
  """Whether the cold start of this workdir has come to its end."""
  c = context.config
  directory = c.checkpoint.of(context.workdir, "sft")
  # The first process may have begun to write while another one still looks: its answer counts.
  if not multihost_utils.broadcast_one_to_all(np.int32(directory.exists())):
    return False
  with contextlib.closing(Checkpointer(context.workdir, "sft", c.checkpoint)) as checkpoints:
    return checkpoints.latest() == c.sft.steps


def params_after(context: Context) -> Any:
  """The parameters that a finished cold start left in this workdir."""
  c = context.config
  tx = optimizer.make(c.sft_optimizer, c.sft.steps)
  like = abstract_state(c.model, context.mesh, tx)
  with contextlib.closing(Checkpointer(context.workdir, "sft", c.checkpoint)) as checkpoints:
    state, _ = checkpoints.restore(c.sft.steps, like)
  return jax.block_until_ready(state.params)
