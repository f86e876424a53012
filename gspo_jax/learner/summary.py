"""Merges the metrics of an iteration's updates into one row of scalars."""

import functools
from typing import Any, NamedTuple

import jax

from gspo_jax.learner.metrics import VOLATILITY
from gspo_jax.objectives.reductions import compute, merge

# Metrics that are also reported for each mini-batch.
BY_MINIBATCH = (
  *("ratio/deviation", "ratio/std", "kl/k3", "clip_fraction/sequence"),
  *(f"clip_fraction/token{side}" for side in ("", "/high", "/low", "/dual")),
  *("loss", VOLATILITY),
)
# Prefixes of metrics that have no value if nothing can be compared: for example, if the current
# weights have sampled no token, or if no response has a certain age.
COMPARISONS = ("mismatch/", "by_age/", VOLATILITY)


class Compared(NamedTuple):
  """The scalar of a comparison, which may be empty.

  The value of an empty comparison is 0. Without `empty`, this 0 would mean perfect agreement.
  """

  value: jax.Array
  empty: jax.Array  # bool: nothing was compared.

  def compute(self) -> jax.Array | None:
    """Returns the scalar; None if nothing was compared."""
    return None if self.empty else self.value


@jax.jit
def summarize(minibatches: tuple[dict[str, Any], ...]) -> dict[str, jax.Array | Compared]:
  """Merges the metrics of an iteration's updates into scalars.

  `minibatch/i/...` are metrics of update i, counted from 0 over all epochs. They show how the
  policy moves away from the old policy.

  Metrics that compare sampler and trainer are those of the first mini-batch, before any update. The
  metrics of `version_metrics` are an exception. They are over all mini-batches, since a pass before
  the updates has computed the trainer's log-probs.

  Args:
    minibatches: metrics of each update, not yet divided.
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
  """Computes scalars from reductions.

  A vector over layers becomes its mean, its maximum, and one scalar per layer.
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
