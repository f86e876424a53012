"""Goodput: the share of wall time spent in useful stages, since a run was first opened."""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

USEFUL = ("sample", "score", "logp", "update")  # The stages that count in goodput.
_compiled = 0.0  # Seconds.


def _listen(event: str, seconds: float, **_: Any) -> None:
  global _compiled
  if event == "/jax/core/compile/backend_compile_duration":
    _compiled += seconds


jax.monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds() -> float:
  """Returns the seconds of compilation in this process, including reads of cached programs."""
  return _compiled


class Goodput:
  """Computes shares of the wall time, from the seconds per stage of each step.

  Two shares belong to no stage. `restart` is the time from the last retained row of metrics.jsonl
  to the opening of the resumed run, and thus includes lost work. `wait` is the rest of the
  wall time, such as loading weights or reading data.
  """

  def __init__(self, clock: Callable[[], float] = time.time):
    self._clock = clock
    self._start = self._opened = clock()
    self._seconds: dict[str, float] = collections.defaultdict(float)

  def resume(self, last: Mapping[str, Any]) -> None:
    """Continues from the last row of metrics.jsonl. Only the first call has an effect.

    Args:
      last: last metrics row; {} for a run without rows.
    """
    if self._seconds:
      return
    clock, elapsed = last.get("wall/clock", self._opened), last.get("wall/seconds", 0.0)
    shares = {k.removeprefix("goodput/"): v for k, v in last.items() if k.startswith("goodput/")}
    self._seconds |= {name: v * elapsed for name, v in shares.items() if name != "wait"}
    self._start = clock - elapsed
    self._seconds["restart"] += self._opened - clock

  def metrics(self, lap: Mapping[str, float]) -> dict[str, float]:
    """Adds a step's seconds. Returns the shares of the run's wall time so far, as metrics.

    Args:
      lap: seconds of the step by `time/<stage>`.
    """
    for name, seconds in lap.items():
      self._seconds[name.removeprefix("time/")] += seconds
    clock = self._clock()
    elapsed = max(clock - self._start, 1e-9)
    shares = {name: seconds / elapsed for name, seconds in self._seconds.items()}
    shares["wait"] = max(0.0, 1 - sum(shares.values()))
    row = {f"goodput/{name}": share for name, share in shares.items()}
    useful = sum(shares.get(name, 0.0) for name in USEFUL)
    return row | {"goodput": useful, "wall/seconds": elapsed, "wall/clock": clock}
