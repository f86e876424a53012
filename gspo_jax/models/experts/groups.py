"""Expert products by grouped kernels: each group of rows is multiplied by its own matrix.

A group is the rows of one expert. An assignment is a pair of a token and an expert it chose; a
row is the data of an assignment. Assignments are sorted by expert and computed in pieces of R rows.
`moe` documents the arguments and results of `apply_ragged`, `apply_megablox` and `apply_triton`.

Axes: X tokens, k choices, A = X·k assignments, E local experts, R rows of a piece.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax import sharding
from gspo_jax.models.experts.blocks import Activation, ExpertWeights, hidden_gradients, swiglu
from gspo_jax.models.experts.tiles import outer_tiles, product_tiles
from gspo_jax.settings.mesh import AXES
from gspo_jax.system import accelerators

SLACK = 1.25  # Rows of a piece, relative to the mean number of assignments per device.
HIDDEN = "hidden"  # Name of the products with gate and up in rematerialisation policies.


class Kernels(NamedTuple):
  """Kernels of an implementation, with the arguments of `_ragged` and `_ragged_outer`."""

  multiply: Callable  # Multiplies rows with their group's matrix.
  outer: Callable  # Sums outer products over each group's rows.
  saves_hidden: bool = False  # Whether to save the first piece's products with gate and up.


@flax.struct.dataclass
class GroupedWeights:
  """Weights of the experts for the kernels, or their gradients or layouts."""

  gate_up: tuple[Any, ...]  # (gate, up), each [E, D, F], or (both side by side,) [E, D, 2F].
  down: Any  # [E, F, D]
  biases: tuple[Any, ...]  # Biases of gate and up, in the form of `gate_up`; () if none.
  activation: Activation = flax.struct.field(pytree_node=False, default=swiglu)


def separate(w: ExpertWeights) -> GroupedWeights:
  """Returns the weights with gate and up as two matrices."""
  biases = () if w.gate_bias is None else (w.gate_bias, w.up_bias)
  return GroupedWeights((w.gate, w.up), w.down, biases, w.activation)


def joined(w: ExpertWeights) -> GroupedWeights:
  """Joins gate and up, so one product reads the rows for both."""
  w = separate(w)
  gate_up, biases = ((jnp.concatenate(x, axis=-1),) if x else () for x in (w.gate_up, w.biases))
  return w.replace(gate_up=gate_up, biases=biases)


def _ragged(x_RD, w_EDF, count_E, transposed=False, dtype=None) -> jax.Array:
  """Multiplies each group's rows with its matrix; returns [R, F].

  Rows are sorted by group; rows beyond the last group have undefined results.

  count_E: number of rows of each group.
  transposed: whether matrices are [E, F, D].
  dtype: dtype of the result. None means the dtype of x.
  """
  w_EDF = jnp.swapaxes(w_EDF, 1, 2) if transposed else w_EDF
  return jax.lax.ragged_dot(x_RD, w_EDF, count_E, preferred_element_type=dtype or x_RD.dtype)


def _ragged_outer(x_RD, y_RF, count_E, dtype, total=None) -> jax.Array:
  """Sums xᵀ y over the rows of each group, [E, D, F].

  total: array to which the sums are added. None means 0.
  """
  dimensions = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  # Rows beyond the groups are undefined. They may be NaN, and 0 · NaN is NaN.
  real_R1 = (jnp.arange(x_RD.shape[0]) < count_E.sum())[:, None]
  x_RD, y_RF = (jnp.where(real_R1, x, 0) for x in (x_RD, y_RF))
  product_EDF = jax.lax.ragged_dot_general(
    x_RD, y_RF, count_E, dimensions, preferred_element_type=dtype
  )
  return product_EDF if total is None else total + product_EDF


def _megablox(x_RD, w_EDF, count_E, transposed=False, dtype=None) -> jax.Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

  dtype = dtype or x_RD.dtype
  (R, inner), outer = x_RD.shape, w_EDF.shape[1 if transposed else 2]
  size, out_size = x_RD.dtype.itemsize, dtype.itemsize
  tiles, hbm_bytes = product_tiles(R, inner, outer, len(w_EDF), size, out_size, _vector_memory())
  with jax.named_scope(f"hbm_bytes={hbm_bytes}"):  # `aot` reads this name.
    return gmm(
      x_RD, w_EDF, count_E, dtype, tiles, transpose_rhs=transposed, interpret=_interpreted()
    )


def _megablox_outer(x_RD, y_RF, count_E, dtype, total=None) -> jax.Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  (R, inner), outer, E = x_RD.shape, y_RF.shape[1], len(count_E)
  sizes = x_RD.dtype.itemsize, dtype.itemsize * (1 if total is None else 2)
  tiles, hbm_bytes = outer_tiles(inner, R, outer, E, *sizes, _vector_memory())
  with jax.named_scope(f"hbm_bytes={hbm_bytes}"):
    return tgmm(x_RD.T, y_RF, count_E, dtype, tiles, existing_out=total, interpret=_interpreted())


def _triton(x_RD, w_EDF, count_E, transposed=False, dtype=None) -> jax.Array:
  from gspo_jax.models.experts import triton  # Slow import.

  if not triton.supports(*w_EDF.shape[1:]):
    return _ragged(x_RD, w_EDF, count_E, transposed, dtype)
  return triton.product(x_RD, w_EDF, count_E, transposed, dtype or x_RD.dtype)


def _triton_outer(x_RD, y_RF, count_E, dtype, total=None) -> jax.Array:
  from gspo_jax.models.experts import triton

  if not triton.supports(x_RD.shape[1], y_RF.shape[1]):
    return _ragged_outer(x_RD, y_RF, count_E, dtype, total)
  product_EDF = triton.outer(x_RD, y_RF, count_E, dtype)
  return product_EDF if total is None else total + product_EDF


def _vector_memory() -> int:
  return accelerators.vector_memory(sharding.device_kind())


def _interpreted() -> bool:
  return sharding.platform() != "tpu"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(kernels, x_XD, gate_Xk, experts_Xk, w, sink):
  """Applies experts to rows sorted by expert, piece by piece."""
  return _grouped_forward(kernels, x_XD, gate_Xk, experts_Xk, w, sink)[0]


class Pieces(NamedTuple):
  """Assignments sorted by expert, padded to Z, a multiple of R.

  Assignments to other devices' experts follow those to local experts, and are not computed.

  For example, two tokens choose the experts [1, 0] and [0, 2], and only 0 and 1 are local. The
  assignments 0 to 3 are sorted as 1, 2, 0, 3. `end_E` is [2, 3], so assignment 3 is not computed.
  """

  assignment_Z: jax.Array  # Index on A, token · k + choice; A for padding.
  end_E: jax.Array  # Cumulative number of assignments by expert.


def _pieces(experts_Xk: jax.Array, num_local: int) -> tuple[Pieces, int]:
  """Sorts assignments; returns the pieces and R.

  R is about `SLACK` times the mean number of assignments per device, so one piece usually suffices.
  """
  A = experts_Xk.size
  expert_A = experts_Xk.reshape(A)
  R = min(A, math.ceil(SLACK * A / sharding.axis_size("expert")))
  R = -(-R // 512) * 512 if R > 512 else max(16, 1 << (R - 1).bit_length())
  count_E = jnp.sum(expert_A[:, None] == jnp.arange(num_local)[None], axis=0, dtype=jnp.int32)
  order_A = jnp.argsort(expert_A, stable=True)
  return Pieces(jnp.pad(order_A, (0, -A % R), constant_values=A), jnp.cumsum(count_E)), R


def _piece(pieces: Pieces, R: int, k: int, i: jax.Array, X: int):
  """Returns tokens and assignments of piece i, and the number of rows per expert.

  Rows beyond the local experts' assignments have token X and assignment X·k, both out of range.
  """
  position_R = i * R + jnp.arange(R)
  assignment_R = jax.lax.dynamic_slice(pieces.assignment_Z, (i * R,), (R,))
  assignment_R = jnp.where(position_R < pieces.end_E[-1], assignment_R, X * k)
  edge_E = jnp.clip(pieces.end_E - i * R, 0, R)
  # Kernels need at least one row. In an empty piece, the last expert has a row of padding.
  edge_E = edge_E.at[-1].max(1)
  return assignment_R // k, assignment_R, jnp.diff(edge_E, prepend=jnp.zeros_like(edge_E[:1]))


def _each_piece(body, number: jax.Array, carry, first: tuple[jax.Array, ...] = ()):
  """Loops over pieces. The first piece is outside the loop, so it may overlap with collectives.

  number: number of pieces in use.
  first: saved products of the first piece with gate and up; () if they are not saved.
  """
  carry = body(0, carry, first)

  def loop(carry):
    return jax.lax.fori_loop(1, number, body, carry)

  return jax.lax.cond(number > 1, loop, lambda carry: carry, carry)


def _rows(table: jax.Array, row_R: jax.Array) -> jax.Array:
  """Gathers rows of the table; padding receives an arbitrary row."""
  return table.at[row_R].get(mode="clip")


def _hidden(multiply, x_RD, w: GroupedWeights, count_E) -> tuple[jax.Array, ...]:
  """Returns the products x gate and x up, plus biases; one array if gate and up are joined."""
  parts = tuple(multiply(x_RD, w_EDF, count_E) for w_EDF in w.gate_up)
  if not w.biases:
    return parts
  expert_R = _expert_of_rows(len(x_RD), count_E)
  return tuple(x + _rows(bias_EF, expert_R) for x, bias_EF in zip(parts, w.biases, strict=True))


def _apart(hidden: tuple[jax.Array, ...]) -> list[jax.Array]:
  """Returns the products with gate and with up as two arrays."""
  return [*hidden] if len(hidden) == 2 else jnp.split(hidden[0], 2, axis=1)


def _expert_of_rows(R: int, count_E: jax.Array) -> jax.Array:
  """Returns each row's expert, and E for rows beyond the groups."""
  return (jnp.cumsum(count_E)[None] <= jnp.arange(R)[:, None]).sum(1)


def _bias_gradient(d_RF: jax.Array, count_E: jax.Array, dtype: Any) -> jax.Array:
  """Sums gradients over the rows of each group, [E, F]."""
  expert_R = _expert_of_rows(len(d_RF), count_E)
  one_hot_RE = jax.nn.one_hot(expert_R, len(count_E), dtype=d_RF.dtype)
  # Rows beyond the groups may be NaN.
  d_RF = jnp.where((expert_R < len(count_E))[:, None], d_RF, 0)
  exact = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  return jnp.einsum("RE,RF->EF", one_hot_RE, d_RF, **exact).astype(dtype)


def _grouped_forward(kernels, x_XD, gate_Xk, experts_Xk, w, sink):
  """Returns outputs [X, D] and residuals."""
  (X, k), gate_A = experts_Xk.shape, gate_Xk.reshape(-1)
  pieces, R = _pieces(experts_Xk, len(w.down))
  multiply, first = kernels.multiply, ()
  if kernels.saves_hidden:  # Values inside the loop cannot be residuals.
    row_R, _, count_E = _piece(pieces, R, k, 0, X)
    first = _hidden(multiply, _rows(x_XD, row_R), w, count_E)
    first = tuple(checkpoint_name(x, HIDDEN) for x in first)

  def body(i, y_XD, hidden=()):
    row_R, assignment_R, count_E = _piece(pieces, R, k, i, X)
    a_RF, u_RF = _apart(hidden or _hidden(multiply, _rows(x_XD, row_R), w, count_E))
    h_RF = w.activation(a_RF, u_RF) * _rows(gate_A, assignment_R)[:, None]
    # Rows beyond the last group have undefined results, and the scatter drops them.
    y_RD = multiply(h_RF, w.down, count_E, dtype=y_XD.dtype)
    return y_XD.at[row_R].add(y_RD, mode="drop")

  y_XD = sharding.vary(jnp.zeros(x_XD.shape, x_XD.dtype), AXES)
  y_XD = _each_piece(body, -(-pieces.end_E[-1] // R), y_XD, first)
  return y_XD.astype(x_XD.dtype), (x_XD, gate_Xk, experts_Xk, w, sink, first)


def _grouped_backward(kernels, residuals, dy_XD):
  """Returns gradients of x, the router's gate weights, and `sink`.

  The gradient of `sink` is that of the experts' weights w (moe.py).
  """
  x_XD, gate_Xk, experts_Xk, w, sink, first = residuals
  (X, k), gate_A = experts_Xk.shape, gate_Xk.reshape(-1)
  pieces, R = _pieces(experts_Xk, len(w.down))
  multiply, outer, _ = kernels

  def body(i, carry, hidden=()):
    dx_XD, dgate_A, dw = carry
    row_R, assignment_R, count_E = _piece(pieces, R, k, i, X)
    gate_R1 = gate_A.at[assignment_R].get(mode="fill", fill_value=0)[:, None]
    x_RD, dy_RD = _rows(x_XD, row_R), _rows(dy_XD, row_R)
    dh_RF = multiply(dy_RD, w.down, count_E, True)
    a_RF, u_RF = _apart(hidden or _hidden(multiply, x_RD, w, count_E))
    h_RF, *dhidden = hidden_gradients(a_RF, u_RF, dh_RF * gate_R1, w.activation)
    dgate_R = jnp.sum(h_RF * dh_RF, axis=-1, dtype=jnp.float32)
    dhidden = dhidden if len(w.gate_up) == 2 else [jnp.concatenate(dhidden, axis=1)]
    parts = [multiply(d, m, count_E, True, dx_XD.dtype) for d, m in zip(dhidden, w.gate_up)]
    dx_XD = dx_XD.at[row_R].add(functools.reduce(jnp.add, parts), mode="drop")
    none = (None,) * len(dhidden)
    dw = dw or w.replace(gate_up=none, down=None, biases=none)  # The first piece has no total.
    gate_up = [outer(x_RD, d, count_E, dtype, total) for d, total in zip(dhidden, dw.gate_up)]
    biases = [_bias_gradient(d, count_E, dtype) for d in dhidden if w.biases]
    biases = [d if total is None else total + d for d, total in zip(biases, dw.biases)]
    down = outer(h_RF * gate_R1, dy_RD, count_E, dtype, dw.down)
    dw = w.replace(gate_up=tuple(gate_up), down=down, biases=tuple(biases))
    return dx_XD, dgate_A.at[assignment_R].set(dgate_R, mode="drop"), dw

  zeros = jnp.zeros(x_XD.shape, x_XD.dtype), jnp.zeros(X * k, jnp.float32)
  used, dtype = -(-pieces.end_E[-1] // R), sink.down.dtype
  dx_XD, dgate_A, dw = _each_piece(body, used, (*sharding.vary(zeros, AXES), None), first)
  dgate_Xk = dgate_A.reshape(X, k).astype(gate_Xk.dtype)
  return dx_XD.astype(x_XD.dtype), dgate_Xk, None, None, dw


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _apply(kernels, x_XD, gate_Xk, experts_Xk, w, sink):
  """Applies experts; `moe` documents arguments and result."""
  if isinstance(w, ExpertWeights):
    w, sink = separate(w), separate(sink)
  return _grouped(kernels, x_XD, gate_Xk, experts_Xk, w, sink)


apply_ragged = functools.partial(_apply, Kernels(_ragged, _ragged_outer))
apply_megablox = functools.partial(_apply, Kernels(_megablox, _megablox_outer))
apply_triton = functools.partial(_apply, Kernels(_triton, _triton_outer, saves_hidden=True))
