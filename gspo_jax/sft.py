"""Cold start: supervised fine-tuning on demonstrations."""

import contextlib
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

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
from gspo_jax.runs.checkpoint import Checkpointer, DamagedError
from gspo_jax.runs.phase import Phase
from gspo_jax.structs import ModelInputs, Prompt, TrainBatch, TrainState
from gspo_jax.system import hosts

# Maximum number of held-out demonstrations. Of fewer than 256 demonstrations, half are held out.
HELD_OUT = 128


def sft(run: Run) -> Any:
  """Trains on demonstrations, and returns the parameters.

  Training ends after `sft.steps` updates, or when the held-out loss reaches `sft.target_loss`.

  Raises:
    Preempted: the run was asked to stop; the resume point is saved.
    NonFiniteError: NaN or infinity ends the run (`on_nonfinite`); state and mini-batches are saved.
  """
  c, tok = run.config, run.tokenizer
  tx, _ = optimizers(c, "sft")
  update, schedule = make_sft_step(learner_of(c, "sft"), tx), tx.hyperparameters
  prompts = run.inputs.data.demonstrations
  batches = sources.Batches(prompts, c.sft.batch, seed=c.seed_of("sft", "data"))
  # A metrics row is checked at the next report. Until then its mini-batches are kept.
  phase = run.phase("sft", c.sft.steps, updates=1, keep=2 * c.sft.log_every)
  done, state, host = phase.resume(
    like=lambda: state_of_phase(c, "sft", run.mesh),
    start=lambda: new_state(run.initial_params(), tx),
  )
  saved = host["position"] if host is not None else {}
  if saved:
    batches.set_state(saved["data"])
  loss = saved.get("held_out_loss")  # The newest one.
  validation, held_out_loss = held_out(run, prompts, saved.get("held_out", ()))

  def position() -> dict[str, Any]:
    return dict(data=batches.get_state(), held_out_loss=loss, held_out=[*validation.values()])

  with phase:
    phase.set_resume_point(done, state, position)
    for step in phase.steps():
      if _reached_target(run, loss):
        break
      chosen = batches.take(c.sft.batch, lambda prompt: prompt.id not in validation)
      batch = train_batch(chosen, tok, c.sft.max_tokens)
      phase.keep_batches(step, [batch])  # In host memory, since many batches are kept.
      with phase.stages("update"):
        state, metrics = update(state, sharding.put_batch(batch, run.mesh))
        row = dict(step=step, learning_rate=optimizer.last_rate(schedule, state.opt_state))
      if c.sft.target_loss and (step % c.sft.check_every == 0 or step == c.sft.steps):
        _wait(phase, state)
        with phase.stages("evaluate"):
          row["held_out_loss"] = loss = held_out_loss(state.params)
      phase.set_resume_point(step, state, position)
      last = step == c.sft.steps or _reached_target(run, loss)
      reported = step % c.sft.log_every == 0 or last or "held_out_loss" in row
      if reported:
        with phase.stages("update"):  # `report` waits for the previous row.
          phase.report(row | sources.skipped_rows(prompts) | summarize((metrics,)))
      if last or step % c.checkpoint.every == 0 or (reported and phase.is_time()):
        _wait(phase, state)
        with phase.stages("save"):
          phase.save(row)
      if reported:
        run.report.update(phase.stages)
      done = step
  if c.sft.target_loss and loss is not None and hosts.is_first():
    sys.stderr.write(_describe_end(done, loss, c.sft.target_loss))
  return state.params


def _describe_end(updates: int, loss: float, target: float) -> str:
  """Describes the end of a cold start; a warning if the held-out loss is above its target."""
  if loss <= target:
    return (
      f"cold start: ended after {updates} updates, with a held-out loss of {loss:.3g}, at most "
      f"sft.target_loss={target:g}\n"
    )
  return (
    f"warning: the cold start missed its target: after {updates} updates the held-out loss is "
    f"{loss:.3g}, above sft.target_loss={target:g}. Raise sft.steps, or tune sft_optimizer\n"
  )


def _wait(phase: Phase, state: TrainState) -> None:
  """Waits for dispatched updates, so that the next stage's time excludes them."""
  with phase.stages("update"):
    jax.block_until_ready(state)


def held_out(
  run: Run, source: Sequence[Prompt], saved: Sequence[int] = ()
) -> tuple[dict[str, int], Callable[[Any], float]]:
  """Returns checksums of held-out demonstrations by id, and a function for their loss.

  The function maps parameters to the mean of -log π(token) over tokens, in nats. The ids do not
  depend on the run's seed. If `sft.target_loss` is 0, there are no ids, and the function fails.

  saved: checksums of a checkpoint. In changed data these demonstrations stay held out, and no
    others.
  """
  c = run.config
  count, rows = min(HELD_OUT, len(source) // 2), c.sft.batch // c.sft.microbatches
  prompts, batches, sums_of = [], [], make_sft_loss(learner_of(c, "sft"))
  if c.sft.target_loss:
    if isinstance(source, sources.Mixture):  # Weights could hold out a whole small source.
      source = sources.Mixture(source.sources)
    prompts = next(sources.Batches(source, count, seed=0))
    if saved and {*map(_checksum, prompts)} != (before := {*saved}):
      candidates = map(source.__getitem__, range(len(source)))
      prompts = [prompt for prompt in candidates if _checksum(prompt) in before] or prompts
  for start in range(0, len(prompts), rows):  # Batches have the size of a micro-batch.
    chosen = prompts[start : start + rows]
    filled = chosen + prompts[:1] * (rows - len(chosen))
    batch = train_batch(filled, run.tokenizer, c.sft.max_tokens)
    batch.mask_BT[len(chosen) :] = 0  # Masks the rows that only fill the batch.
    batches.append(sharding.put_batch(batch, run.mesh))

  def loss(params: Any) -> float:
    sums = jax.device_get([sums_of(params, batch) for batch in batches])
    return float(sum(s.numerator for s in sums) / sum(s.denominator for s in sums))

  return {prompt.id: _checksum(prompt) for prompt in prompts}, loss


def _checksum(prompt: Prompt) -> int:
  """Returns a checksum of a demonstration, without its id."""
  return zlib.crc32(repr((prompt.question, prompt.demonstration)).encode())


def _reached_target(run: Run, loss: float | None) -> bool:
  """Whether a held-out loss has reached `sft.target_loss`; False if `loss` is None."""
  return loss is not None and loss <= run.config.sft.target_loss


def train_batch(prompts: Sequence[Prompt], tok: Tokenizer, length: int) -> TrainBatch:
  """Builds a batch of demonstrations, padded to `length` tokens. Its RL fields are 0."""
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
  """Whether the cold start of this workdir has ended. If RL has checkpoints, it has."""
  rl_started = _has_checkpoints(run, "rl")
  if not _has_checkpoints(run, "sft"):
    if rl_started and hosts.is_first():
      directory = run.config.checkpoint.phase_directory(run.workdir, "sft")
      sys.stderr.write(f"{directory} is missing; RL has checkpoints and resumes without it\n")
    return rl_started
  if rl_started:
    return True
  with contextlib.closing(Checkpointer(run.workdir, "sft", run.config.checkpoint)) as checkpoints:
    return _end(run, checkpoints) is not None


def _end(run: Run, checkpoints: Checkpointer) -> int | None:
  """Returns the last update of a finished cold start; None for an unfinished one."""
  step = checkpoints.latest()
  if step is None or step >= run.config.sft.steps:
    return step
  try:
    loss = checkpoints.host(step)["position"]["held_out_loss"]
  except DamagedError:  # Training resumes from the checkpoint before it.
    return None
  return step if _reached_target(run, loss) else None


def _has_checkpoints(run: Run, phase: str) -> bool:
  directory = run.config.checkpoint.phase_directory(run.workdir, phase)
  # All hosts use the first host's result, since the first host may create the directory before the
  # other hosts check.
  if not hosts.broadcast(directory.exists()):
    return False
  with contextlib.closing(Checkpointer(run.workdir, phase, run.config.checkpoint)) as checkpoints:
    return checkpoints.latest() is not None


def params_after(run: Run) -> Any:
  """Restores the parameters of this workdir's finished cold start.

  Raises:
    ValueError: the cold start's last checkpoint is missing or damaged.
  """
  c = run.config
  with contextlib.closing(Checkpointer(run.workdir, "sft", c.checkpoint)) as checkpoints:
    end = _end(run, checkpoints)
    if end is None:
      raise ValueError(
        f"{checkpoints.directory} has no checkpoint of a cold start's end by sft.steps and "
        "sft.target_loss, and RL needs its parameters, to begin from and as the reference of a KL "
        "penalty: restore the checkpoint or these keys, or use another --workdir"
      )
    state, _ = checkpoints.restore(end, state_of_phase(c, "sft", run.mesh))
  return jax.block_until_ready(state.params)
