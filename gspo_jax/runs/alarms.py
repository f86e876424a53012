"""Warnings by configured thresholds, before a run dies.

Runs of GRPO with long responses or experts die slowly and look alive meanwhile: the entropy goes,
the ratio runs away from 1, the gradient jumps, the reward falls and does not come back
(arXiv:2507.18071, §3). Each warning is printed when its condition begins and again when it has
ended and begins anew; the metric `warning/<name>` is 1 in all iterations in which it holds.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from gspo_jax.settings.training import AlarmConfig


class Alarms:
  """Looks at one row of metrics after the other. What it remembers follows from the rows, so that a
  resumed run is given those it has on file and goes on as if it had not been interrupted."""

  def __init__(self, config: AlarmConfig, rows: Iterable[Mapping[str, Any]] = ()):
    self._config = config
    self._norms: collections.deque[float] = collections.deque(maxlen=config.window)
    self._rewards: collections.deque[float] = collections.deque(maxlen=config.window)
    self._best = -float("inf")
    self._on: set[str] = set()
    for row in rows:
      self(row)

  def __call__(self, row: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The metrics to add to the row, and a line for each warning that begins with it."""
    found = {name: text for name, text in self._look(row) if text}
    begun = [f"warning at step {row['step']}: {found[n]}" for n in found if n not in self._on]
    self._on = set(found)
    return {f"warning/{name}": 1.0 for name in found}, begun

  def _look(self, row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(name, what is wrong; empty if nothing is) of each alarm that has something to look at."""
    c = self._config
    names = ("grad_norm", "entropy", "ratio/deviation", "reward/mean")
    norm, entropy, deviation, reward = (_finite(row.get(name)) for name in names)
    if norm:  # 0: no group had anything to teach, as often while a task is still too hard
      full = len(self._norms) == c.window
      usual = statistics.median(self._norms) if full else float("inf")
      high = c.grad_norm and norm > c.grad_norm * usual
      yield "grad_norm", high and f"gradient norm {norm:.3g}, and its median is {usual:.3g}"
      self._norms.append(norm)
    if entropy is not None and row.get("ratio/mean") != 0:  # 0: no token was trained on
      low = c.entropy and entropy < c.entropy
      yield "entropy", low and f"the policy's entropy is down to {entropy:.3g} nats per token"
    if deviation is not None:
      high = c.ratio and deviation > c.ratio
      yield "ratio", high and f"importance ratios are off 1 by {deviation:.3g} in the mean"
    for name, distance in _mismatches(row):
      high = c.mismatch and distance > c.mismatch * row["clip_range"]
      yield name, high and _MISMATCHES[name][1].format(distance, row["clip_range"])
    if reward is not None:
      self._rewards.append(reward)
      if len(self._rewards) == c.window:
        mean = statistics.fmean(self._rewards)
        self._best = max(self._best, mean)
        low = c.reward and mean < self._best - c.reward
        text = f"the reward has fallen to {mean:.3g}, mean of {c.window}, from {self._best:.3g}"
        yield "reward", low and text
    shares = [v for k, v in row.items() if k.endswith("verifier/unknown")]  # of evaluations too
    share = max(filter(None, map(_finite, shares)), default=None)
    if share is not None:
      high = c.unknown and share > c.unknown
      yield "unknown", high and f"the verifier failed on {share:.2%} of the responses"


# Name: the metric, and what to say of it and of the clip range.
_MISMATCHES = dict(
  mismatch=(
    "mismatch/sequence/mean",
    "the trainer's log-probs are off the sampler's by {:.2g} in the mean, and the clip range is "
    "{:.2g}: old_logp=sampler clips on policy, with old_logp=recompute the batch is off policy",
  ),
  recomputed=(
    "mismatch/recomputed",
    "recomputed old log-probs are off the update's own by {:.2g} in the mean, and the clip range "
    "is {:.2g}: rounding clips from the second mini-batch on",
  ),
)


def _mismatches(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
  """(name, distance) of the log-probs that the row compares, where something is clipped."""
  for name, (metric, _) in _MISMATCHES.items():
    distance = _finite(row.get(metric))
    if distance is not None and row.get("clip_range"):
      yield name, abs(distance)


def _finite(value: float | None) -> float | None:
  """An update that was left out has no figures: NaN, or null on file."""
  return value if value is not None and math.isfinite(value) else None
