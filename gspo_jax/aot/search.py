"""Finds settings without compiling all of them.

A candidate takes a compilation of a minute or more. So few are compiled: one setting is changed at
a time, what arithmetic rules out is not compiled, and the rest is tried in the order of its lower
bounds. `search_training` and `search_rollout` say what the candidates are.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from gspo_jax.aot.estimate import Least
from gspo_jax.aot.table import print_line
from gspo_jax.system.accelerators import GIB

Choice: TypeAlias = Hashable  # a frozen dataclass whose str names it
WORTH = 0.02  # of the best time so far: what a candidate has to promise to be compiled


@dataclasses.dataclass
class Search:
  """What is known of every candidate that was looked at."""

  bound: Callable[[Choice], Least]  # ValueError: it does not divide
  measure: Callable[[Choice], dict[str, Any]]  # compiles; `fits`, and then `search_s`
  hbm: float  # bytes of a chip
  left: int  # compilations that may still be made
  # Why the first need not be compiled if the second, which was, fits; "" if it has to be.
  beside: Callable[[Choice, Choice], str] = lambda one, other: ""
  rows: dict[Choice, dict[str, Any]] = dataclasses.field(default_factory=dict)
  rejected: dict[Choice, str] = dataclasses.field(default_factory=dict)
  least: dict[Choice, Least] = dataclasses.field(default_factory=dict)

  @property
  def best(self) -> Choice | None:
    return next(iter(self.ranked()), None)

  def ranked(self) -> list[Choice]:
    """Those that fit, the fastest first; times within a hundredth are told apart by memory."""
    fits = [choice for choice, row in self.rows.items() if row["fits"]]
    order = lambda row: (float(f"{row['search_s']:.2g}"), row["peak_gib"])  # noqa: E731
    return sorted(fits, key=lambda choice: order(self.rows[choice]))

  def stage(self, choices: Sequence[Choice], most: int) -> None:
    """Compiles at most so many of the candidates: the fastest by their lower bounds, of those that
    may fit and may be faster than the best so far."""
    found = []
    for choice in dict.fromkeys(choices):
      if choice in self.rows:
        continue
      self.rejected.pop(choice, None)
      try:
        if choice not in self.least:
          self.least[choice] = self.bound(choice)
      except ValueError as error:
        self.rejected[choice] = f"does not divide: {error}"
        continue
      found.append(choice)
    order = lambda least: (least.bound_s, least.sum_s, least.memory)  # noqa: E731
    for choice in sorted(found, key=lambda choice: order(self.least[choice])):
      reason = self._against(choice)
      if not reason and (most <= 0 or self.left <= 0):
        reason = f"takes {self._says(choice)} at least; not compiled, since enough others were"
      if reason:
        self.rejected[choice] = reason
        continue
      self.rows[choice] = dict(program=str(choice)) | self.measure(choice)
      most, self.left = most - 1, self.left - 1

  def needs(self) -> str:
    """What is said where nothing fits."""
    if not self.least:
      return next(iter(self.rejected.values()), "no mesh divides it")
    tried = [row["error"] for row in self.rows.values()]
    need = min(least.memory for least in self.least.values()) / GIB
    return tried[-1] if tried else f"needs {need:.1f} GiB a chip at least of {self.hbm / GIB:.0f}"

  def _against(self, choice: Choice) -> str:
    """Why a candidate need not be compiled; "" if it has to be."""
    least = self.least[choice]
    if least.memory > self.hbm:
      too_many = (least.memory - self.hbm) / GIB
      return f"needs {least.memory / GIB:.0f} GiB a chip at least, {too_many:.0f} too many"
    for other, row in self.rows.items():
      too_large = not (row["fits"] or row.get("of_kernel"))
      if too_large and least.memory >= self.least[other].memory:
        return f"{least.memory / GIB:.1f} GiB at least, not fewer than {other}, which did not fit"
      if row["fits"] and (reason := self.beside(choice, other)):
        return reason
    best = self.best
    if best and least.bound_s > (1 - WORTH) * self.rows[best]["search_s"]:
      return f"takes {self._says(choice)} at least; {self.rows[best]['search_s']:.3g} s was reached"
    return ""

  def _says(self, choice: Choice) -> str:
    least = self.least[choice]
    names = ("compute_s", "hbm_s", "interconnect_s")
    binds = max(names, key=lambda name: getattr(least, name)).removesuffix("_s")
    return f"{least.bound_s:.3g} s ({binds})"


def print_outcome(found: Search, print_row: Callable[[dict[str, Any], bool], None]) -> None:
  """What was not compiled and why, the candidates that came nearest first; and the best few."""
  most = 12
  if found.rejected:
    print_line("not compiled:")
  for choice, reason in list(found.rejected.items())[:most]:
    print_line(f"    {choice!s:<44}{reason}")
  if len(found.rejected) > most:
    print_line(f"    and {len(found.rejected) - most} more")
  if len(found.rows) > 1:
    print_line("best:")
    for i, choice in enumerate(found.ranked()[:3]):
      print_row(found.rows[choice], not i)
