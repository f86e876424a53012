"""Merges the metrics of an iteration's updates into one metrics row."""

import functools
from typing import Any, NamedTuple

import jax

from gspo_jax.learner.metrics import VOLATILITY
from gspo_jax.objectives.reductions import compute, merge

# Metrics reported by mini-batch, too.
BY_MINIBATCH = (
  *("ratio/deviation", "ratio/std", "kl/k3", "clip_fraction/sequence"),
  *(f"clip_fraction/token{side}" for side in ("", "/high", "/low", "/dual")),
  *("loss", VOLATILITY),
)
# Metrics without a value if no token is of the current weights, or no response of an age.
COMPARISONS = ("mismatch/", "by_age/", VOLATILITY)


class Compared(NamedTuple):
  """A comparison's scalar, and whether nothing was compared.

  Then there is no metric: 0 would mean perfect agreement.
  """

  value: jax.Array
  empty: jax.Array

  def compute(self) -> jax.Array | None:
    return None if self.empty else self.value


@jax.jit
def summarize(minibatches: tuple[dict[str, Any], ...]) -> dict[str, jax.Array | Compared]:
  """Merges the metrics of an iteration's updates into scalars.

  `minibatch/i/...` shows the policy's growing distance from the old policy; on mini-batch 0 the
  ratio is 1. i continues over epochs. Sampler and trainer are compared on mini-batch 0 only, before
  any update. The comparison by version (`version_metrics`) covers all mini-batches, since its
  log-probs come from a pass before the updates.
  """
  row = _scalars(functools.reduce(merge, minibatches))
  for i, metrics in enumerate(minibatches):
    scalars = _scalars({k: v for k, v in metrics.items() if k in BY_MINIBATCH})
    row |= {f"minibatch/{i}/{name}": value for name, value in scalars.items()}
  all_minibatches = "mismatch/current/", "mismatch/older/"

  def is_sampler(name: str) -> bool:
    sampler = name.startswith("mismatch/") or name == f"{VOLATILITY}/sampler"
    return sampler and not name.startswith(all_minibatches)

  return row | _scalars({k: v for k, v in minibatches[0].items() if is_sampler(k)})


def _scalars(metrics: dict[str, Any]) -> dict[str, jax.Array | Compared]:
  """Divides sums. A vector over layers becomes several scalars.

  These are the mean, the maximum, and one scalar per layer.
  """
  compared = {k: v for k, v in metrics.items() if k.startswith(COMPARISONS)}
  row = compute({k: v for k, v in metrics.items() if k not in compared})
  for name, reduction in compared.items():
    value, empty = reduction.compute(), reduction.empty.all()
    scalars = {name: value}
    if name == VOLATILITY:
      scalars = {f"{name}/mean": value.mean(), f"{name}/max_layer": value.max()}
      scalars |= {f"{name}/layer_{i:02d}": layer for i, layer in enumerate(value)}
    row |= {k: Compared(x, empty) for k, x in scalars.items()}
  return row
