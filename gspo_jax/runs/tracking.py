"""Writers for TensorBoard and, optionally, Weights & Biases."""

import sys
import time
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax.system.files import writing


def find_wandb(project: str) -> types.ModuleType:
  """Imports the package wandb. Raises ValueError if wandb is not installed."""
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      f"--config.wandb={project} needs the package wandb: pip install '.[wandb]', or set it to ''"
    ) from error
  return wandb


def open_wandb(project: str, workdir: Path, config: Mapping[str, Any]) -> Any:
  """Opens a Weights & Biases run: an object with `log(metrics)` and `finish()`.

  A workdir has one W&B run, which a resumed run continues. W&B accepts steps in rising order only,
  but each phase counts its own steps. So each phase has its own x-axis, `<phase>/step`. (If a
  resumed run repeats steps, W&B shows these steps twice.)

  Raises:
    ValueError: wandb is not installed, or cannot start a run, for example without an API key.
  """
  wandb, name = find_wandb(project), Path(workdir).resolve()
  try:
    run = wandb.init(
      project=project,
      id=f"{name.name}-{zlib.crc32(str(name).encode()):08x}",
      name=name.name,
      resume="allow",
      dir=str(workdir),
      config=dict(config),
    )
  except Exception as error:  # Includes errors of W&B's server.
    raise ValueError(f"--config.wandb={project}: {error}; correct it, or set it to ''") from error
  for phase in ("sft", "rl", "eval"):
    run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
  return run


class EventFile:
  """Scalars for TensorBoard, on disk when `write` returns.

  This class calls tensorboardX's EventsWriter directly, without the thread of SummaryWriter. On a
  full disk that thread ends. Then further scalars block forever, and so does `close` after Ctrl-C.
  """

  def __init__(self, directory: Path, purge_step: int | None):
    """Opens a new file. TensorBoard hides older events at or above `purge_step`."""
    # tensorboardX would import torch, for the name of one type. That takes a second and 0.2 GB.
    absent = sys.modules.setdefault("torch", None) is None
    try:
      from tensorboardX import event_file_writer
      from tensorboardX.proto import event_pb2
    finally:
      if absent:
        del sys.modules["torch"]
    self._event, self._directory = event_pb2.Event, directory
    with writing(directory):
      directory.mkdir(parents=True, exist_ok=True)
      self._file = event_file_writer.EventsWriter(str(directory / "events"))
    if purge_step is not None:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._append(purge_step, session_log=start)

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes one event with all scalars of a step.

    Args:
      step: number of the step.
      scalars: values by tag.
    """
    values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
    self._append(step, summary={"value": values})

  def close(self) -> None:
    with writing(self._directory):
      self._file.close()

  def _append(self, step: int, **content: Any) -> None:
    with writing(self._directory):
      self._file.write_event(self._event(wall_time=time.time(), step=step, **content))
      self._file.flush()
