"""Sums over micro-batches, in the memory of one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def accumulate(function: Callable, number: int | jax.Array, combine: Callable, most: int) -> Any:
  """combine(combine(function(0), function(1)), function(2)) and so on, over `number` results.

  `number` may be known at run time only; it is at most `most`.
  """
  if most == 1:
    return function(0)
  none = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), jax.eval_shape(function, 0)
  )

  def go_on(carry):
    i, _ = carry
    return (i < number) & (i < most)  # hlo_costs.py counts a loop by a constant

  def body(carry):
    i, total = carry
    new = function(i)
    return i + 1, jax.tree.map(lambda a, b: jnp.where(i == 0, a, b), new, combine(total, new))

  return jax.lax.while_loop(go_on, body, (jnp.zeros((), jnp.int32), none))[1]
