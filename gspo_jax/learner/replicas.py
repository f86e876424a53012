"""Sums gradients over replicas (mesh axis `data`) once per update.

Summing for each layer and micro-batch would be slow over the network between replicas.
"""

from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.settings.mesh import AXES
from gspo_jax.sharding import P


def apart(params: Any) -> Any:
  """Marks parameters: their gradients are not yet summed over replicas.

  The gradient of a marked parameter stays separate on each replica until `summed`.
  """
  if sharding.axis_size("data") == 1:
    return params
  return jax.tree.map(
    lambda x: jax.sharding.reshard(x, P(*sharding.spec_of(x), reduced={"data"})), params
  )


def summed(grads: Any) -> Any:
  """Sums gradients over replicas, unless they are summed already.

  Within a replica, devices with the same shard of a weight divide its gradient among them. Each
  device sums its part over replicas, and the sums are gathered within the replica.
  """
  if sharding.axis_size("data") == 1:
    return grads
  return jax.tree.map(_sum, grads)


def _sum(x: jax.Array) -> jax.Array:
  split = sharding.spec_of(x)
  if not jax.typeof(x).sharding.spec.unreduced:
    return x
  divided = _divide(x.shape, split)
  part = jax.sharding.reshard(x, P(*divided, unreduced={"data"}))
  return jax.sharding.reshard(jax.sharding.reshard(part, divided), split)


def _divide(shape: tuple[int, ...], split: P) -> P:
  """Splits the largest possible dimension over a replica's unused axes."""
  used = {axis for axes in split for axis in sharding.each(axes)}
  further = tuple(axis for axis in AXES if axis not in used | {"data"})
  for dimension in sorted(range(len(shape)), key=lambda i: -shape[i]):
    axes = (*sharding.each(split[dimension]), *further)
    if shape[dimension] % sharding.axis_size(axes) == 0:
      return P(*split[:dimension], axes, *split[dimension + 1 :])
  return split
