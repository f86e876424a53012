"""Weights & Biases, for those who want it beside metrics.jsonl and TensorBoard."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Log = Callable[[Mapping[str, float]], None]


def open_wandb(project: str, workdir: Path, config: Mapping[str, Any]) -> tuple[Log, Callable]:
  """Functions that log figures and that end the run.

  A workdir has one run of the project: continuing the former continues the latter. Weights & Biases
  takes steps in rising order only; so each phase has a step of its own, `<phase>/step`, as its
  x-axis. (After a resume it shows the steps that were made again twice.)

  Raises:
    ValueError: the package is not installed.
  """
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      f"--config.wandb={project} needs the package wandb: pip install 'gspo-jax[wandb]', or set it "
      "to ''"
    ) from error
  name = Path(workdir).resolve()
  run = wandb.init(
    project=project,
    id=f"{name.name}-{zlib.crc32(str(name).encode()):08x}",
    name=name.name,
    resume="allow",
    dir=str(workdir),
    config=dict(config),
  )
  for phase in ("sft", "rl", "eval"):
    run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
  return run.log, run.finish
