"""Checks of a recorded run before resuming it."""

import dataclasses
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from etils import epath

from gspo_jax.learner.state import state_of_phase
from gspo_jax.runs import checkpoint, provenance
from gspo_jax.settings.run import RunConfig

# Keys, or sections with a dot, that decide which arrays a training state has.
_STATE_KEYS = dict(
  rl=(
    *("model.", "lora.rank", "lora.matrices", "rl_optimizer.clip_norm", "critic.name"),
    *("critic_optimizer.clip_norm", "objective.adaptive_clip."),
  ),
  sft=("model.", "sft_optimizer.clip_norm"),
)


def check_state(config: RunConfig, workdir: Path | epath.Path, mesh: jax.sharding.Mesh) -> None:
  """Raises ValueError, naming keys, if the newest checkpoint has another training state.

  Args:
    config: current configuration.
    workdir: directory of the run.
    mesh: the trainer's mesh.
  """
  recorded = provenance.read(workdir)
  changed = provenance.changes(recorded, dataclasses.asdict(config)) if recorded else []
  has_phase = dict(rl=config.has_iterations, sft="sft" in config.job)
  for phase, keys in _STATE_KEYS.items():
    directory = config.checkpoint.phase_directory(workdir, phase)
    steps = checkpoint.finished(directory) if has_phase[phase] else []
    suspects = [line for line in changed if line.startswith(keys)]
    if steps and suspects:
      path = directory / str(steps[-1])
      with checkpoint.readable(path):
        stored = ocp.PyTreeCheckpointHandler().metadata(path / "state")
      if checkpoint.shapes(stored) != checkpoint.shapes(state_of_phase(config, phase, mesh)):
        raise ValueError(
          f"checkpoint {path} has another training state than the configuration "
          f"({'; '.join(suspects)}): put this back, or use another --workdir"
        )
    if steps:  # The run resumes in this phase.
      return
