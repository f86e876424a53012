"""From the metrics of an iteration's updates to one row."""

import functools
from typing import Any

import jax

from gspo_jax.learner.metrics import VOLATILITY
from gspo_jax.objectives.reductions import compute, merge

# What the rows of an iteration have of each mini-batch as well.
APART = (
  *("ratio/deviation", "ratio/std", "kl/k3", "clip_fraction/sequence"),
  *(f"clip_fraction/token{side}" for side in ("", "/high", "/low", "/dual")),
  *("loss", VOLATILITY),
)


@jax.jit
def summarize(minibatches: tuple[dict[str, Any], ...]) -> dict[str, jax.Array]:
  """Scalars of one rollout's updates: all mini-batches merged, and what differs between them.

  `minibatch/i/...` shows the policy moving away from the one that sampled: on mini-batch 0 the
  ratio is 1. In further epochs i counts on. Sampler and trainer are compared on mini-batch 0 too,
  before any update; by version (`version_metrics`) on all, since that has a pass of its own.
  """
  row = _scalars(functools.reduce(merge, minibatches))
  for i, metrics in enumerate(minibatches):
    scalars = _scalars({k: v for k, v in metrics.items() if k in APART})
    row |= {f"minibatch/{i}/{name}": value for name, value in scalars.items()}
  of_all = "mismatch/current/", "mismatch/older/"

  def of_sampler(name: str) -> bool:
    sampler = name.startswith("mismatch/") or name == f"{VOLATILITY}/sampler"
    return sampler and not name.startswith(of_all)

  return row | compute({k: v for k, v in minibatches[0].items() if of_sampler(k)})


def _scalars(metrics: dict[str, Any]) -> dict[str, jax.Array]:
  """Divided; the one metric that is a vector over layers becomes its mean, its largest and each."""
  row = compute(metrics)
  if VOLATILITY in row:
    layers_l = row.pop(VOLATILITY)
    row |= {f"{VOLATILITY}/mean": layers_l.mean(), f"{VOLATILITY}/max_layer": layers_l.max()}
    row |= {f"{VOLATILITY}/layer_{i:02d}": layer for i, layer in enumerate(layers_l)}
  return row
