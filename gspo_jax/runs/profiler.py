"""A window of JAX's profiler on a run: so many steps of one stage of one iteration."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from gspo_jax.settings.training import ProfileConfig


class Profiler:
  """Traces what the section `profile` asks for into `directory`, and serves whom it asks for.

    with profiler("update", iteration):
      for batch in batches:
        state = update(state, batch)
        profiler.count("update", 1, state)

  Raises:
    ValueError: there is no server to be had at `profile.port`.
  """

  def __init__(self, config: ProfileConfig, directory: Path):
    self._config, self._directory = config, directory
    self._left: int | None = None  # steps that are still to be traced; None: nothing is traced
    try:  # the server lives as long as what it returns
      self._server = jax.profiler.start_server(config.port) if config.port else None
    except Exception as error:
      raise ValueError(
        f"profile.port={config.port}: {type(error).__name__}: {error}; choose a free port"
      ) from error

  @contextlib.contextmanager
  def __call__(self, stage: str, iteration: int) -> Iterator[None]:
    """Traces the block if it is this stage of this iteration, until enough steps are counted."""
    if (stage, iteration) != (self._config.stage, self._config.iteration):
      yield
      return
    jax.profiler.start_trace(str(self._directory))
    self._left = self._config.steps
    try:
      yield
    finally:
      self._stop()

  def count(self, stage: str, steps: int, result: Any = None) -> None:
    """Says that so many steps of a stage were dispatched; `result` is there when they are done."""
    if self._left is None or stage != self._config.stage or not self._config.steps:
      return
    self._left -= steps
    if self._left <= 0:
      jax.block_until_ready(result)
      self._stop()

  def _stop(self) -> None:
    if self._left is not None:
      self._left = None
      jax.profiler.stop_trace()
