"""Pallas kernels for NVIDIA GPUs (Triton): products of rows sorted by expert.

A group is the consecutive rows of one expert. A group's tiles begin at the group's first row. In
its last tile, a mask excludes the rows of other groups. So rows need no padding in memory, and less
than one tile per group is wasted.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspo_jax import sharding
from gspo_jax.models.attention.triton import dot

# Maximum sizes of a tile: rows of `product`, other axes of a result, and the axis summed over.
ROWS, WIDTH, INNER = 128, 128, 64
LEAST = 16  # Minimum size of a tile.


def supports(*widths: int) -> bool:
  """Whether tiles of at least `LEAST` divide these widths of a matrix."""
  return all(math.gcd(width, LEAST) == LEAST for width in widths)


def product(
  x_RD: jax.Array, w_EDF: jax.Array, count_E: jax.Array, transposed: bool, dtype: Any
) -> jax.Array:
  """Multiplies each group's rows with its matrix; returns [R, F]. See `groups._ragged`."""
  (R, D), F = x_RD.shape, w_EDF.shape[1 if transposed else 2]
  tm, tn, tk = math.gcd(R, ROWS), math.gcd(F, WIDTH), math.gcd(D, INNER)
  expert_t, start_t, end_t = _tiles(count_E, R, tm)

  def kernel(expert_ref, start_ref, end_ref, x_ref, w_ref, y_ref):
    t, columns = pl.program_id(0), pl.ds(pl.program_id(1) * tn, tn)
    expert, start, end = expert_ref[t], start_ref[t], end_ref[t]
    rows, mask = _rows(start, end, R, tm)

    def add(k, total):
      inner = pl.ds(k * tk, tk)
      x = triton.load(x_ref.at[rows, inner], mask=mask, other=0.0)
      w = w_ref[expert, columns, inner].T if transposed else w_ref[expert, inner, columns]
      return total + dot(x, w)

    inner_tiles = jnp.clip(end - start, 0, 1) * (D // tk)  # 0 for an empty tile of rows.
    y = jax.lax.fori_loop(0, inner_tiles, add, jnp.zeros((tm, tn), jnp.float32))
    triton.store(y_ref.at[rows, columns], y.astype(y_ref.dtype), mask=mask)

  grid = len(expert_t), F // tn
  # `aot` reads this name. The number includes empty tiles, so it is an upper bound.
  with jax.named_scope(f"flops={2 * len(expert_t) * tm * D * F}"):
    return _call(kernel, (R, F), dtype, grid)(expert_t, start_t, end_t, x_RD, w_EDF)


def outer(x_RD: jax.Array, y_RF: jax.Array, count_E: jax.Array, dtype: Any) -> jax.Array:
  """Sums xᵀ y over the rows of each group, [E, D, F]."""
  (R, D), F = x_RD.shape, y_RF.shape[1]
  tm, tn, tk = math.gcd(R, INNER), math.gcd(F, WIDTH), math.gcd(D, WIDTH)
  end_E = jnp.cumsum(count_E)

  def kernel(start_ref, end_ref, x_ref, y_ref, out_ref):
    expert = pl.program_id(0)
    inner, columns = pl.ds(pl.program_id(1) * tk, tk), pl.ds(pl.program_id(2) * tn, tn)
    first, end = start_ref[expert], end_ref[expert]

    def add(i, total):
      rows, mask = _rows(first + i * tm, end, R, tm)
      x = triton.load(x_ref.at[rows, inner], mask=mask, other=0.0)
      y = triton.load(y_ref.at[rows, columns], mask=mask, other=0.0)
      return total + dot(x.T, y)

    total = jnp.zeros((tk, tn), jnp.float32)
    total = jax.lax.fori_loop(0, (end - first + tm - 1) // tm, add, total)
    out_ref[expert, inner, columns] = total.astype(out_ref.dtype)

  grid = len(count_E), D // tk, F // tn
  with jax.named_scope(f"flops={2 * (R + len(count_E) * tm) * D * F}"):
    return _call(kernel, (len(count_E), D, F), dtype, grid)(end_E - count_E, end_E, x_RD, y_RF)


def _tiles(count_E: jax.Array, R: int, tm: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns three arrays by tile: expert, first row, and end of the expert's rows.

  The number of tiles is an upper bound that is known while tracing. Unused tiles have end 0.
  """
  end_E, tiles_E = jnp.cumsum(count_E), -(-count_E // tm)
  last_E = jnp.cumsum(tiles_E)
  tile_t = jnp.arange(R // tm + len(count_E), dtype=jnp.int32)
  expert_t = jnp.minimum((last_E[None] <= tile_t[:, None]).sum(1), len(count_E) - 1)
  index_t = tile_t - (last_E - tiles_E)[expert_t]
  start_t = (end_E - count_E)[expert_t] + index_t * tm
  end_t = jnp.where(tile_t < last_E[-1], end_E[expert_t], 0)
  return tuple(a.astype(jnp.int32) for a in (expert_t, start_t, end_t))


def _rows(start: jax.Array, end: jax.Array, R: int, tm: int):
  """Returns a slice of `tm` rows in bounds, and its mask [tm, 1].

  The mask is True for start <= row < end.
  """
  first = jnp.minimum(start, R - tm)
  row = first + jnp.arange(tm)
  return pl.ds(first, tm), ((row >= start) & (row < end))[:, None]


def _call(kernel, shape: tuple[int, ...], dtype: Any, grid: tuple[int, ...]):
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(shape, dtype),
    grid=grid,
    compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
    interpret=sharding.platform() != "gpu",
    name="expert_product",
  )
