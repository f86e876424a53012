"""Sums gradients over replicas (mesh axis `data`) once per update.

By default, JAX would sum the gradient of each layer in each micro-batch, which is slow over the
network between replicas. So parameters are marked before the micro-batches (`apart`), and gradients
are summed after them (`summed`).
"""

from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.settings.mesh import AXES
from gspo_jax.sharding import P


def apart(params: Any) -> Any:
  """Marks parameters, so that gradients are not summed over replicas yet.

  The gradient of a marked parameter stays separate on each replica until `summed` is called.
  """
  if sharding.axis_size("data") == 1:
    return params
  return jax.tree.map(
    lambda x: jax.sharding.reshard(x, P(*sharding.spec_of(x), reduced={"data"})), params
  )


def summed(grads: Any) -> Any:
  """Sums gradients of marked parameters over replicas.

  The gradients of all other parameters are summed already.

  Several devices of a replica may have the same shard of a weight. These devices split the
  gradient. Each device sums one part over replicas, and the sums are gathered within the replica.
  """
  if sharding.axis_size("data") == 1:
    return grads
  return jax.tree.map(_sum, grads)


def _sum(x: jax.Array) -> jax.Array:
  """Sums one gradient over replicas, if it is not summed already."""
  split = sharding.spec_of(x)
  if not jax.typeof(x).sharding.spec.unreduced:
    return x
  divided = _divide(x.shape, split)
  part = jax.sharding.reshard(x, P(*divided, unreduced={"data"}))
  return jax.sharding.reshard(jax.sharding.reshard(part, divided), split)


def _divide(shape: tuple[int, ...], split: P) -> P:
  """Adds the mesh axes that `split` does not use to one dimension.

  The largest dimension that old and new axes together split evenly is chosen. If there is none,
  `split` is returned unchanged. Axis `data` is not added.
  """
  used = {axis for axes in split for axis in sharding.each(axes)}
  further = tuple(axis for axis in AXES if axis not in used | {"data"})
  for dimension in sorted(range(len(shape)), key=lambda i: -shape[i]):
    axes = (*sharding.each(split[dimension]), *further)
    if shape[dimension] % sharding.axis_size(axes) == 0:
      return P(*split[:dimension], axes, *split[dimension + 1 :])
  return split
