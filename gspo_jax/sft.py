"""The cold start: supervised fine-tuning on demonstrations."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import sharding
from gspo_jax.data import sources
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.learner import optimizer
from gspo_jax.learner.state import abstract_state, new_state
from gspo_jax.learner.step import make_sft_step, summarize
from gspo_jax.run import Run
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.structs import Prompt, TrainBatch


def sft(run: Run) -> Any:
  """Trains for `sft.steps` updates, or what is left of them, and returns the parameters.

  Raises:
    Preempted: the machine is about to go; where the run stands has been saved.
    NonFiniteError: NaN or infinity; what the update met has been saved.
  """
  c, tok = run.config, run.tokenizer
  tx, rates = _optimizer(run), optimizer.rates(c.sft_optimizer, c.sft.steps)
  update = make_sft_step(c.learner("sft"), tx)
  prompts = sources.fitting(run.train_prompts, tok, c.sft.max_tokens, c.data.on_error)
  batches = sources.Batches(prompts, c.sft.batch, seed=run.seed("sft", "data"))
  # A row is fetched when the next one is due, so batches are kept for as long.
  phase = run.phase("sft", c.sft.steps, updates=1, keep=2 * c.sft.log_every)
  done, state, host = phase.resume(
    like=lambda: abstract_state(c.model, run.mesh, tx),
    start=lambda: new_state(run.initial_params(), tx),
  )
  if host is not None:
    batches.set_state(host["position"]["data"])
  position = lambda: dict(data=batches.get_state())  # noqa: E731

  with phase:
    phase.stand(done, state, position)
    for step in phase.steps():
      batch = train_batch(next(batches), tok, c.sft.max_tokens)
      batch = sharding.put_batch(batch, run.mesh)
      phase.hold(step, [batch])
      state, metrics = update(state, batch)
      phase.stand(step, state, position)
      if step % c.sft.log_every == 0 or step == c.sft.steps:
        row = dict(step=step, learning_rate=float(rates[step - 1]))
        phase.report(row | sources.skipped_rows(prompts) | summarize((metrics,)))
      if step % c.checkpoint.every == 0 or step == c.sft.steps:
        phase.save()
  return state.params


def train_batch(prompts: Sequence[Prompt], tok: Tokenizer, length: int) -> TrainBatch:
  """Demonstrations as one padded batch; the fields of a rollout are not used and hold 0."""
  tokens_BT, mask_BT = sources.pack_demonstrations(prompts, tok, length)
  prompt_B = [len(prompt.tokens) for prompt in prompts]
  end_B = np.maximum(prompt_B, length - np.argmax(mask_BT[:, ::-1] > 0, axis=1))
  zeros_BT = np.zeros(tokens_BT.shape, np.float32)
  return TrainBatch(
    tokens_BT=tokens_BT,
    segments_BT=(np.arange(length)[None] < end_B[:, None]).astype(np.int32),
    mask_BT=mask_BT,
    advantage_B=zeros_BT[:, 0],
    old_logp_BT=zeros_BT,
    sampler_logp_BT=zeros_BT,
  )


def finished(run: Run) -> bool:
  """Whether the cold start of this workdir has come to its end."""
  c = run.config
  directory = c.checkpoint.of(run.workdir, "sft")
  # The first process may have begun to write while another one still looks: its answer counts.
  if not multihost_utils.broadcast_one_to_all(np.int32(directory.exists())):
    return False
  with contextlib.closing(Checkpointer(run.workdir, "sft", c.checkpoint)) as checkpoints:
    return checkpoints.latest() == c.sft.steps


def params_after(run: Run) -> Any:
  """The parameters that a finished cold start left in this workdir."""
  c = run.config
  like = abstract_state(c.model, run.mesh, _optimizer(run))
  with contextlib.closing(Checkpointer(run.workdir, "sft", c.checkpoint)) as checkpoints:
    state, _ = checkpoints.restore(c.sft.steps, like)
  return jax.block_until_ready(state.params)


def _optimizer(run: Run):
  return optimizer.make(run.config.sft_optimizer, run.config.sft.steps)
