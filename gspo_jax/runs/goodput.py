"""Goodput: where the wall time of a run went, since it was first opened and over restarts."""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

OF_USE = ("sample", "score", "logp", "update")  # stages that `goodput` is the share of
_compiled = 0.0


def _listen(event: str, seconds: float, **_: Any) -> None:
  global _compiled
  if event == "/jax/core/compile/backend_compile_duration":
    _compiled += seconds


jax.monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds() -> float:
  """Seconds that this process has spent compiling programs, or reading them from the cache."""
  return _compiled


class Goodput:
  """Shares of the wall time, from the seconds per stage of each row.

  Time that is in no row of the run's was lost: from the last row that a checkpoint covers until the
  run is opened again it is `restart`, whatever was done in it. What is left, such as reading data
  or waiting for a sampler on devices of its own, is `wait`.
  """

  def __init__(self, clock: Callable[[], float] = time.time):
    self._clock = clock
    self._begun = self._opened = clock()
    self._seconds: dict[str, float] = collections.defaultdict(float)

  def resume(self, last: Mapping[str, Any]) -> None:
    """Goes on from the last row on file, at the first call in a process; {}: there is none."""
    if self._seconds:
      return
    clock, elapsed = last.get("wall/clock", self._opened), last.get("wall/seconds", 0.0)
    shares = {k.removeprefix("goodput/"): v for k, v in last.items() if k.startswith("goodput/")}
    self._seconds |= {name: v * elapsed for name, v in shares.items() if name != "wait"}
    self._begun = clock - elapsed
    self._seconds["restart"] += self._opened - clock

  def metrics(self, lap: Mapping[str, float]) -> dict[str, float]:
    """The row's shares so far, with its own `time/<stage>`, and the seconds since the start."""
    for name, seconds in lap.items():
      self._seconds[name.removeprefix("time/")] += seconds
    now = self._clock()
    elapsed = max(now - self._begun, 1e-9)
    shares = {name: seconds / elapsed for name, seconds in self._seconds.items()}
    shares["wait"] = max(0.0, 1 - sum(shares.values()))
    row = {f"goodput/{name}": share for name, share in shares.items()}
    of_use = sum(shares.get(name, 0.0) for name in OF_USE)
    return row | {"goodput": of_use, "wall/seconds": elapsed, "wall/clock": now}
