"""Expert products by grouped kernels: rows sorted by expert, each group times its own matrix.

`moe` says what `apply_ragged` and `apply_megablox` take and return.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.expert_blocks import ExpertWeights, hidden_gradients, take
from gspo_jax.sharding import AXES


def _ragged(x_RD: jax.Array, w_EDF: jax.Array, count_E: jax.Array, transposed=False) -> jax.Array:
  w_EDF = jnp.swapaxes(w_EDF, 1, 2) if transposed else w_EDF
  return jax.lax.ragged_dot(x_RD, w_EDF, count_E, preferred_element_type=x_RD.dtype)


def _ragged_outer(x_RD: jax.Array, y_RF: jax.Array, count_E: jax.Array, total: jax.Array):
  """total + xᵀ y over the rows of each group: [E, D, F]."""
  numbers = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  # Beyond the groups there may be anything, and 0 times it may be NaN.
  real_R1 = (jnp.arange(x_RD.shape[0]) < count_E.sum())[:, None]
  x_RD, y_RF = (jnp.where(real_R1, x, 0) for x in (x_RD, y_RF))
  return total + jax.lax.ragged_dot_general(
    x_RD, y_RF, count_E, numbers, preferred_element_type=total.dtype
  )


def _tiles(rows: int, inner: int, outer: int) -> tuple[int, int, int]:
  """Tiles of the Pallas kernel: they fit a TPU core's vector memory, twice, with room to spare."""
  whole = lambda size, most: min(most, -(-size // 128) * 128)  # noqa: E731
  return math.gcd(rows, 512), whole(inner, 1024), whole(outer, 1024)


def _megablox(x_RD: jax.Array, w_EDF: jax.Array, count_E: jax.Array, transposed=False) -> jax.Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

  return gmm(
    x_RD,
    w_EDF,
    count_E,
    x_RD.dtype,
    _tiles,
    transpose_rhs=transposed,
    interpret=sharding.platform() != "tpu",
  )


def _megablox_outer(x_RD: jax.Array, y_RF: jax.Array, count_E: jax.Array, total: jax.Array):
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  tiles = lambda D, R, F: (math.gcd(R, 512), min(D, 512), min(F, 1024))  # noqa: E731
  interpret = sharding.platform() != "tpu"
  # Adding up inside the kernel (existing_out) needs more vector memory than these tiles leave.
  return total + tgmm(x_RD.T, y_RF, count_E, total.dtype, tiles, interpret=interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(kernels, x_XD, gate_Xk, index_Xk, w, sink):
  """Rows sorted by expert, in pieces of a fixed size; as many pieces as the routing fills.

  kernels: the rows of each group times its matrix, and a total plus their outer products.
  """
  return _grouped_forward(kernels, x_XD, gate_Xk, index_Xk, w, sink)[0]


class Pieces(NamedTuple):
  """Assignments sorted by expert, those of other devices last, padded to whole pieces of R."""

  choice_Z: jax.Array  # assignment (token · k + choice); A for padding
  end_E: jax.Array  # where each expert's assignments end


def _pieces(index_Xk: jax.Array, held: int) -> tuple[Pieces, int]:
  """The pieces, and R: twice a device's fair share, so that one piece is the rule."""
  A = index_Xk.size
  expert_A = index_Xk.reshape(A)
  R = min(A, -(-2 * A // sharding.axis_size("expert")))
  R = -(-R // 512) * 512 if R > 512 else max(8, 1 << (R - 1).bit_length())
  count_E = jnp.sum(expert_A[:, None] == jnp.arange(held)[None], axis=0, dtype=jnp.int32)
  order_A = jnp.argsort(expert_A, stable=True)
  return Pieces(jnp.pad(order_A, (0, -A % R), constant_values=A), jnp.cumsum(count_E)), R


def _piece(pieces: Pieces, R: int, k: int, i: jax.Array, X: int):
  """Piece i: token of each row (X where there is none), assignment, rows per expert."""
  position_R = i * R + jnp.arange(R)
  choice_R = jax.lax.dynamic_slice(pieces.choice_Z, (i * R,), (R,))
  choice_R = jnp.where(position_R < pieces.end_E[-1], choice_R, X * k)
  edge_E = jnp.clip(pieces.end_E - i * R, 0, R)
  return choice_R // k, choice_R, jnp.diff(edge_E, prepend=jnp.zeros_like(edge_E[:1]))


def _grouped_forward(kernels, x_XD, gate_Xk, index_Xk, w, sink):
  (X, k), gate_A = index_Xk.shape, gate_Xk.reshape(-1)
  pieces, R = _pieces(index_Xk, w.gate.shape[0])
  times, _ = kernels

  def body(i, y_XD):
    row_R, choice_R, count_E = _piece(pieces, R, k, i, X)
    x_RD = take(x_XD, row_R)
    h_RF = jax.nn.silu(times(x_RD, w.gate, count_E)) * times(x_RD, w.up, count_E)
    y_RD = times(h_RF * take(gate_A, choice_R)[:, None], w.down, count_E)
    # Rows beyond the last group belong to nobody; what a kernel leaves there is undefined.
    y_RD = jnp.where((row_R < X)[:, None], y_RD, 0)
    return y_XD.at[row_R].add(y_RD.astype(y_XD.dtype), mode="drop")

  y_XD = sharding.vary(jnp.zeros(x_XD.shape, jnp.float32), AXES)
  y_XD = jax.lax.fori_loop(0, -(-pieces.end_E[-1] // R), body, y_XD)
  return y_XD.astype(x_XD.dtype), (x_XD, gate_Xk, index_Xk, w, sink)


def _grouped_backward(kernels, residuals, dy_XD):
  x_XD, gate_Xk, index_Xk, w, sink = residuals
  (X, k), gate_A = index_Xk.shape, gate_Xk.reshape(-1)
  pieces, R = _pieces(index_Xk, w.gate.shape[0])
  times, outer = kernels

  def body(i, carry):
    dx_XD, dgate_A, dw = carry
    row_R, choice_R, count_E = _piece(pieces, R, k, i, X)
    real_R1, gate_R1 = (row_R < X)[:, None], take(gate_A, choice_R)[:, None]
    x_RD, dy_RD = take(x_XD, row_R), take(dy_XD, row_R)
    a_RF, u_RF = times(x_RD, w.gate, count_E), times(x_RD, w.up, count_E)
    dh_RF = times(dy_RD, w.down, count_E, True)
    h_RF, da_RF, du_RF = hidden_gradients(a_RF, u_RF, dh_RF * gate_R1)
    dgate_R = jnp.sum(jnp.where(real_R1, h_RF * dh_RF, 0), axis=-1, dtype=jnp.float32)
    dx_RD = times(da_RF, w.gate, count_E, True) + times(du_RF, w.up, count_E, True)
    dx_RD = jnp.where(real_R1, dx_RD, 0).astype(dx_XD.dtype)
    products = (x_RD, da_RF), (x_RD, du_RF), (h_RF * gate_R1, dy_RD)
    dw = [outer(a, b, count_E, total) for total, (a, b) in zip(dw, products)]
    dgate_A = dgate_A.at[choice_R].set(dgate_R, mode="drop")
    return dx_XD.at[row_R].add(dx_RD, mode="drop"), dgate_A, ExpertWeights(*dw)

  zeros = jnp.zeros(x_XD.shape, jnp.float32), jnp.zeros(X * k, jnp.float32)
  zeros = *zeros, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sink)
  used = -(-pieces.end_E[-1] // R)
  dx_XD, dgate_A, dw = jax.lax.fori_loop(0, used, body, sharding.vary(zeros, AXES))
  dgate_Xk = dgate_A.reshape(X, k).astype(gate_Xk.dtype)
  return dx_XD.astype(x_XD.dtype), dgate_Xk, None, None, dw


_grouped.defvjp(_grouped_forward, _grouped_backward)

apply_ragged = functools.partial(_grouped, (_ragged, _ragged_outer))
apply_megablox = functools.partial(_grouped, (_megablox, _megablox_outer))
