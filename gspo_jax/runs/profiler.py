"""Traces of JAX's profiler: an iteration, one of its stages, or the first steps of a stage."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from gspo_jax.settings.training import ProfileConfig


class Profiler:
  """Writes the trace configured in section `profile`, and serves live profiles.

  There is no server if `profile.port` is 0.

    with profiler("update", iteration):
      for batch in batches:
        state = update(state, batch)
        profiler.count("update", 1, state)

  Args:
    config: section `profile`.
    directory: directory of the trace.

  Raises:
    ValueError: the server cannot be started at `profile.port`.
  """

  def __init__(self, config: ProfileConfig, directory: Path):
    self._config, self._directory = config, directory
    self._remaining: int | None = None  # Steps until the trace ends; None outside a trace.
    try:  # The server lives as long as this object.
      self._server = jax.profiler.start_server(config.port) if config.port else None
    except Exception as error:
      raise ValueError(
        f"profile.port={config.port}: {type(error).__name__}: {error}; choose a free port"
      ) from error

  @contextlib.contextmanager
  def __call__(self, stage: str, iteration: int) -> Iterator[None]:
    """Traces the block if section `profile` selects its stage and iteration.

    The trace ends with the block, or earlier by `count`.
    """
    if (stage, iteration) != (self._config.stage, self._config.iteration):
      yield
      return
    jax.profiler.start_trace(str(self._directory))
    self._remaining = self._config.steps
    try:
      yield
    finally:
      self._stop()

  def count(self, stage: str, steps: int, result: Any = None) -> None:
    """Counts dispatched steps. If `profile.steps` is above 0, ends the trace after so many steps.

    Args:
      stage: stage of the steps. Steps of a stage that is not traced are not counted.
      steps: number of dispatched steps.
      result: arrays of the last step. The trace's end waits until they are computed. None means
        that it waits for nothing.
    """
    if self._remaining is None or stage != self._config.stage or not self._config.steps:
      return
    self._remaining -= steps
    if self._remaining <= 0:
      jax.block_until_ready(result)
      self._stop()

  def _stop(self) -> None:
    if self._remaining is not None:
      self._remaining = None
      jax.profiler.stop_trace()
