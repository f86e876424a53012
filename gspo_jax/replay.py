"""Repeats updates with NaN or infinity, and locates the cause.

`python -m gspo_jax.replay RUN/failures/rl_000012` reads the dump of a failed run
(runs/nonfinite.py). The exit code is 0 if all metrics are finite, 1 if a metric is NaN or infinite
again, and 2 if the dump cannot be read.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.begin_command("train")

import jax
import numpy as np
from etils import epath

from gspo_jax import sharding
from gspo_jax.learner import packing
from gspo_jax.learner.critic import optimizers
from gspo_jax.learner.passes import Learner, learner_of, log_probs
from gspo_jax.learner.state import state_of_phase
from gspo_jax.learner.step import make_rl_step, make_sft_step
from gspo_jax.learner.summary import summarize
from gspo_jax.runs import checkpoint, metrics, nonfinite
from gspo_jax.runs.checkpoint import restore_state
from gspo_jax.settings.reading import from_dict
from gspo_jax.structs import TrainBatch
from gspo_jax.system import files
from gspo_jax.system.arguments import Parser


def replay(directory: epath.Path) -> bool:
  """Repeats the updates of a dump, and prints non-finite values.

  Returns whether all metrics are finite. Raises ValueError if the dump cannot be read.
  """
  about, batches = nonfinite.load(directory)
  try:
    config = from_dict(about["config"])
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{directory / nonfinite.ABOUT}: {error}") from error
  say(f"{about['why']}; the dump has {len(batches)} mini-batches of that step")
  mesh, _ = sharding.make_meshes(config.mesh, config.rollout_mesh)
  with jax.set_mesh(mesh):
    phase = about["phase"]
    # Updates after a non-finite one are applied too.
    learner = dataclasses.replace(learner_of(config, phase), on_nonfinite="skip")
    tx, critic = optimizers(config, phase)
    if phase == "sft":
      step = make_sft_step(learner, tx)
    else:
      step = make_rl_step(learner, config.objective, tx, critic)
    experts = config.objective.replay if phase == "rl" else "none"
    compute = jax.jit(functools.partial(_log_probs, learner=learner, replay=experts))
    try:
      state = restore_state(directory / "state", state_of_phase(config, phase, mesh))
    except Exception as error:  # Orbax, TensorStore and file systems raise various types.
      reason = checkpoint.reason(error)
      raise ValueError(f"{directory / 'state'} cannot be restored: {reason}") from error
    state = state.replace(skipped=state.skipped * 0)
    all_finite = True
    for name, count in _counts(state.params):
      say(f"parameter {name}: {count} values not finite")
    for i, batch in enumerate(batches):
      plain = packing.undo(batch)
      if batch.inputs.places:  # A packed batch is packed again, for this machine's mesh.
        shards, responses = sharding.batch_shards(mesh), learner.response_tokens
        batch = packing.plan(plain, shards, learner.group_size, responses)
      batch, plain = sharding.put_batch((batch, plain), mesh)
      rows = _bad_rows(*jax.device_get(compute(state.params, plain)))
      state, row = step(state, batch)
      row = metrics.compute(summarize((row,)))
      names = [n for n in nonfinite.nonfinite(row) if not n.startswith("minibatch/")]
      say(f"mini-batch {i}: {', '.join(names) or 'all metrics finite'}")
      for line in rows:
        say(f"  {line}")
      all_finite &= not names
  return all_finite


def _log_probs(params: Any, batch: TrainBatch, *, learner: Learner, replay: str):
  """Returns log-probs [B, T] of three policies by name, and the mask.

  The log-probs of "policy" are computed with `params`. Those of "old" and "sampler" are recorded in
  the batch.
  """
  logp_BT, *_ = log_probs(params, batch.inputs, learner, replay, batch.old_experts_BTlk)
  return dict(policy=logp_BT, old=batch.old_logp_BT, sampler=batch.sampler_logp_BT), batch.mask_BT


def _bad_rows(logp: dict[str, np.ndarray], mask_BT: np.ndarray) -> Iterator[str]:
  """Yields a line for each policy with non-finite log-probs."""
  for name, logp_BT in logp.items():
    bad_BT = ~np.isfinite(logp_BT) & (mask_BT > 0)
    rows = np.flatnonzero(bad_BT.any(1))
    if len(rows):
      position = f"first in row {rows[0]} at token {int(np.argmax(bad_BT[rows[0]]))}"
      yield f"{name} log-probs: {bad_BT.sum()} not finite, in {len(rows)} rows, {position}"


def _counts(params: Any) -> Iterator[tuple[str, int]]:
  """Yields names of parameters with non-finite values, and their counts."""
  bad = jax.jit(lambda tree: jax.tree.map(lambda x: (~jax.numpy.isfinite(x)).sum(), tree))(params)
  for path, count in jax.tree_util.tree_leaves_with_path(jax.device_get(bad)):
    if count:
      yield jax.tree_util.keystr(path, simple=True, separator="."), count


def say(line: str) -> None:
  sys.stdout.write(line + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
  parser = Parser(
    prog="python -m gspo_jax.replay", description="Repeats updates with non-finite values."
  )
  parser.add_argument("directory", metavar="RUN/failures/PHASE_STEP")
  directory = parser.parse_args(arguments).directory
  try:
    return 0 if replay(files.located(directory, "the dump")) else 1
  except ValueError as error:
    parser.error(str(error))


if __name__ == "__main__":
  sys.exit(main())
