"""The cold start: supervised fine-tuning on demonstrations."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import sharding
from gspo_jax.data import sources
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.learner import optimizer
from gspo_jax.learner.critic import optimizers
from gspo_jax.learner.passes import learner_of
from gspo_jax.learner.state import new_state, state_of_phase
from gspo_jax.learner.step import make_sft_loss, make_sft_step
from gspo_jax.learner.summary import summarize
from gspo_jax.run import Run
from gspo_jax.runs.checkpoint import Checkpointer
from gspo_jax.structs import ModelInputs, Prompt, TrainBatch


def sft(run: Run) -> Any:
  """Trains until the held-out loss is down to `sft.target_loss`, for at most `sft.steps` updates,
  and returns the parameters. Warns on the terminal where these were not enough.

  Raises:
    Preempted: the machine is about to go; where the run stands has been saved.
    NonFiniteError: NaN or infinity; what the update met has been saved.
  """
  c, tok = run.config, run.tokenizer
  (tx, _), rates = optimizers(c, "sft"), optimizer.rates(c.sft_optimizer, c.sft.steps)
  update = make_sft_step(learner_of(c, "sft"), tx)
  prompts = run.inputs.data.demonstrations
  batches = sources.Batches(prompts, c.sft.batch, seed=c.seed_of("sft", "data"))
  kept_out, held_out_loss = held_out(run, prompts)
  # A row is fetched when the next one is due, so batches are kept for as long.
  phase = run.phase("sft", c.sft.steps, updates=1, keep=2 * c.sft.log_every)
  done, state, host = phase.resume(
    like=lambda: state_of_phase(c, "sft", run.mesh),
    start=lambda: new_state(run.initial_params(), tx),
  )
  loss = None  # held-out, as far as it has been looked at
  if host is not None:
    batches.set_state(host["position"]["data"])
    loss = host["position"]["held_out_loss"]

  def position() -> dict[str, Any]:
    return dict(data=batches.get_state(), held_out_loss=loss)

  with phase:
    phase.stand(done, state, position)
    for step in phase.steps():
      if _learned(run, loss):
        break
      taken = batches.take(c.sft.batch, lambda prompt: prompt.id not in kept_out)
      batch = train_batch(taken, tok, c.sft.max_tokens)
      phase.hold(step, [batch])  # on the host: there are many
      with phase.stages("update"):
        state, metrics = update(state, sharding.put_batch(batch, run.mesh))
        # Whatever is dispatched waits where too much is under way already.
        row = dict(step=step, learning_rate=optimizer.last_rate(rates, state.step))
      if c.sft.target_loss and (step % c.sft.check_every == 0 or step == c.sft.steps):
        with phase.stages("evaluate"):
          row["held_out_loss"] = loss = held_out_loss(state.params)
      phase.stand(step, state, position)
      last = step == c.sft.steps or _learned(run, loss)
      reported = step % c.sft.log_every == 0 or last or "held_out_loss" in row
      if reported:
        with phase.stages("update"):  # which the row before is waited for with
          phase.report(row | sources.skipped_rows(prompts) | summarize((metrics,)))
      if last or step % c.checkpoint.every == 0 or (reported and phase.is_time()):
        with phase.stages("save"):
          phase.save()
      done = step
  if loss is not None and not _learned(run, loss) and jax.process_index() == 0:
    sys.stderr.write(
      f"warning: the cold start has not worked: after {done} updates the held-out loss is "
      f"{loss:.3g}, above sft.target_loss={c.sft.target_loss:g}. Raise sft.steps, or tune "
      "sft_optimizer\n"
    )
  return state.params


def held_out(run: Run, source: Sequence[Prompt]) -> tuple[frozenset[str], Callable[[Any], float]]:
  """Ids of the demonstrations that the cold start does not train on, the same ones whatever the
  seed, none without `sft.target_loss`; and the mean over their tokens of -log π(token), in nats, of
  the policy with given parameters.
  """
  c = run.config
  count, rows = c.sft.check_problems, c.sft.batch // c.sft.microbatches
  prompts, batches, sums_of = [], [], make_sft_loss(learner_of(c, "sft"))
  if c.sft.target_loss:
    prompts = next(sources.Batches(source, count, seed=0))
  for start in range(0, len(prompts), rows):  # as many at once as fit into an update
    chosen = prompts[start : start + rows]
    filled = chosen + prompts[:1] * (rows - len(chosen))
    batch = train_batch(filled, run.tokenizer, c.sft.max_tokens)
    batch.mask_BT[len(chosen) :] = 0  # rows that only fill the batch
    batches.append(sharding.put_batch(batch, run.mesh))

  def loss(params: Any) -> float:
    sums = jax.device_get([sums_of(params, batch) for batch in batches])
    return float(sum(s.numerator for s in sums) / sum(s.denominator for s in sums))

  return frozenset(prompt.id for prompt in prompts), loss


def _learned(run: Run, loss: float | None) -> bool:
  """Whether a held-out loss is as low as the cold start is to bring it."""
  return loss is not None and loss <= run.config.sft.target_loss


def train_batch(prompts: Sequence[Prompt], tok: Tokenizer, length: int) -> TrainBatch:
  """Demonstrations as one padded batch; the fields of a rollout are not used and hold 0."""
  tokens_BT, mask_BT = sources.pack_demonstrations(prompts, tok, length)
  prompt_B = [len(prompt.tokens) for prompt in prompts]
  end_B = np.maximum(prompt_B, length - np.argmax(mask_BT[:, ::-1] > 0, axis=1))
  zeros_BT = np.zeros(tokens_BT.shape, np.float32)
  segments_BT = (np.arange(length)[None] < end_B[:, None]).astype(np.int32)
  return TrainBatch(
    ModelInputs(tokens_BT, segments_BT),
    mask_BT=mask_BT,
    advantage_B=zeros_BT[:, 0],
    old_logp_BT=zeros_BT,
    sampler_logp_BT=zeros_BT,
  )


def finished(run: Run) -> bool:
  """Whether the cold start of this workdir has come to its end. RL that has begun goes on from its
  own checkpoints, whatever is left of the cold start's."""
  begun = _has_checkpoints(run, "rl")
  if not _has_checkpoints(run, "sft"):
    if begun and jax.process_index() == 0:
      gone = run.config.checkpoint.of(run.workdir, "sft")
      sys.stderr.write(f"{gone} is gone; RL has begun and goes on without it\n")
    return begun
  if begun:
    return True
  with contextlib.closing(Checkpointer(run.workdir, "sft", run.config.checkpoint)) as checkpoints:
    return _end(run, checkpoints) is not None


def _end(run: Run, checkpoints: Checkpointer) -> int | None:
  """The update after which the cold start ended; None: it has not."""
  step = checkpoints.latest()
  if step is None or step >= run.config.sft.steps:
    return step
  return step if _learned(run, checkpoints.host(step)["position"]["held_out_loss"]) else None


def _has_checkpoints(run: Run, phase: str) -> bool:
  directory = run.config.checkpoint.of(run.workdir, phase)
  # The first process may have begun to write while another one still looks: its answer counts.
  if not multihost_utils.broadcast_one_to_all(np.int32(directory.exists())):
    return False
  with contextlib.closing(Checkpointer(run.workdir, phase, run.config.checkpoint)) as checkpoints:
    return checkpoints.latest() is not None


def params_after(run: Run) -> Any:
  """The parameters that a finished cold start left in this workdir.

  Raises:
    ValueError: its last checkpoint is gone or damaged.
  """
  c = run.config
  with contextlib.closing(Checkpointer(run.workdir, "sft", c.checkpoint)) as checkpoints:
    end = _end(run, checkpoints)
    if end is None:
      raise ValueError(
        f"the last checkpoint in {checkpoints.directory} is gone or damaged, and RL needs the "
        "parameters that the cold start ended with (the KL penalty does to the end): put it back, "
        "or use another --workdir"
      )
    state, _ = checkpoints.restore(end, state_of_phase(c, "sft", run.mesh))
  return jax.block_until_ready(state.params)
