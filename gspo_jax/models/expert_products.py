"""Expert products: SwiGLU experts applied to the rows that chose them, in four formulations.

  blocks    a loop over blocks of rows that share an expert: the fastest on CPU
  batched   one batched product with some rows of every expert: the fastest on CPU for few tokens
  ragged    `lax.ragged_dot` on rows sorted by expert
  megablox  JAX's Pallas grouped matmul for TPU (interpreted elsewhere)

All take x [X, D], gate weights and expert indices [X, k], and the weights of the E experts that
this device holds; index E means: held by another device. They return, in x's dtype, [X, D]:
Σ_k gate_k · expert_{index_k}(x) over the held experts. No buffer depends on the routing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.sharding import AXES


class ExpertWeights(NamedTuple):
  gate: jax.Array  # [E, D, F]
  up: jax.Array  # [E, D, F]
  down: jax.Array  # [E, F, D]


class Layout(NamedTuple):
  """Assignments (token, choice) grouped by expert, each expert's share padded to whole blocks.

  With A = X·k assignments and blocks of R rows there are at most ceil(A/R) + E blocks.
  """

  slot_A: jax.Array  # where assignment a went; len(choice_Z) for one that no local expert takes
  choice_Z: jax.Array  # assignment (token · k + choice) in slot z; A for padding
  end_E: jax.Array  # blocks up to and with those of each expert


def _places(index_Xk: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Whether expert e takes assignment a; how many it takes up to there, with it; how many in all.

  A running count is several times as fast as sorting: there are few experts.
  """
  one_AE = index_Xk.reshape(-1)[:, None] == jnp.arange(num_experts)[None]
  place_AE = jnp.cumsum(one_AE, axis=0, dtype=jnp.int32)
  return one_AE, place_AE, place_AE[-1]


def block_layout(index_Xk: jax.Array, num_experts: int, rows: int) -> Layout:
  """Groups assignments by expert; index `num_experts` means: held by another device."""
  A = index_Xk.size
  Z = (-(-A // rows) + num_experts) * rows
  one_AE, place_AE, count_E = _places(index_Xk, num_experts)
  blocks_E = -(-count_E // rows)
  end_E = jnp.cumsum(blocks_E)
  slot_AE = ((end_E - blocks_E) * rows)[None] + place_AE - 1
  return Layout(*_slots(one_AE, slot_AE, Z), end_E)


def _slots(one_AE: jax.Array, slot_AE: jax.Array, Z: int) -> tuple[jax.Array, jax.Array]:
  """The slot of each assignment, given those it would have with each expert, and the assignment in
  each slot."""
  A = one_AE.shape[0]
  slot_A = jnp.where(one_AE.any(1), jnp.where(one_AE, slot_AE, 0).sum(1), Z)
  empty_Z, number_A = jnp.full(Z, A, jnp.int32), jnp.arange(A, dtype=jnp.int32)
  return slot_A, empty_Z.at[slot_A].set(number_A, mode="drop")


def block_rows(index_Xk: jax.Array, w: ExpertWeights, backward: bool = False) -> int:
  """Rows per block, a power of two: enough that XLA computes a product on several cores, but at
  most half of an expert's fair share, or padding costs more than it brings."""
  most = 1 << max(3, int(share(index_Xk, w)).bit_length() - 2)
  _, D, F = w.gate.shape
  if not backward and most * D * F < 2**23:
    return min(most, 16)  # one core has it anyway
  return min(most, 1 << max(3, 24 - (D * F - 1).bit_length()))


@jax.custom_vjp
def apply_blocks(
  x_XD: jax.Array, gate_Xk: jax.Array, index_Xk: jax.Array, w: ExpertWeights, sink: ExpertWeights
) -> jax.Array:
  """SwiGLU experts one after the other, each as a loop over its blocks; only used blocks run.

  `sink`, of w's shapes, receives the gradient of the weights in its own dtype.
  """
  return _blocks_forward(x_XD, gate_Xk, index_Xk, w, sink)[0]


def _take(table: jax.Array, rows: jax.Array) -> jax.Array:
  return table.at[rows].get(mode="fill", fill_value=0)


def _each_expert(layout: Layout, w: ExpertWeights, start: Any, expert: Callable) -> Any:
  """Scans `expert(carry, first block, end, weights)`: a weight is read once, not once per block."""
  start_E = jnp.concatenate([jnp.zeros_like(layout.end_E[:1]), layout.end_E[:-1]])
  step = lambda carry, part: expert(carry, *part)  # noqa: E731
  return jax.lax.scan(step, sharding.vary(start, AXES), (start_E, layout.end_E, w))


def _blocks_forward(x_XD, gate_Xk, index_Xk, w, sink):
  (X, k), D = index_Xk.shape, x_XD.shape[1]
  R = block_rows(index_Xk, w)
  layout = block_layout(index_Xk, w.gate.shape[0], R)
  gate_A = gate_Xk.reshape(X * k)

  def expert(y_ZD, start, end, w):
    def body(i, y_ZD):
      choice_R = jax.lax.dynamic_slice(layout.choice_Z, (i * R,), (R,))
      x_RD = _take(x_XD, choice_R // k)  # A // k = X: padding stays out of range
      h_RF = jax.nn.silu(x_RD @ w.gate) * (x_RD @ w.up) * _take(gate_A, choice_R)[:, None]
      return jax.lax.dynamic_update_slice(y_ZD, h_RF @ w.down, (i * R, 0))

    return jax.lax.fori_loop(start, end, body, y_ZD), None

  y_ZD = jnp.zeros((layout.choice_Z.shape[0], D), x_XD.dtype)
  y_ZD, _ = _each_expert(layout, w, y_ZD, expert)
  y_XD = _take(y_ZD, layout.slot_A).reshape(X, k, D).sum(1)
  return y_XD, (x_XD, gate_Xk, index_Xk, w, sink)


def _blocks_backward(residuals, dy_XD):
  x_XD, gate_Xk, index_Xk, w, sink = residuals
  (X, k), D = index_Xk.shape, x_XD.shape[1]
  R = block_rows(index_Xk, w, backward=True)
  layout = block_layout(index_Xk, w.gate.shape[0], R)
  gate_A, Z = gate_Xk.reshape(X * k), layout.choice_Z.shape[0]

  def expert(carry, start, end, w):
    def body(i, carry):
      dx_ZD, dgate_Z, dw = carry
      choice_R = jax.lax.dynamic_slice(layout.choice_Z, (i * R,), (R,))
      gate_R1 = _take(gate_A, choice_R)[:, None]
      x_RD, dy_RD = _take(x_XD, choice_R // k), _take(dy_XD, choice_R // k)
      a_RF, u_RF = x_RD @ w.gate, x_RD @ w.up
      sigmoid = jax.nn.sigmoid(a_RF)
      h_RF = a_RF * sigmoid * u_RF
      dh_RF = dy_RD @ w.down.T
      dgate_R = jnp.sum(h_RF * dh_RF, axis=-1)
      dh_RF = dh_RF * gate_R1
      da_RF = dh_RF * u_RF * sigmoid * (1 + a_RF * (1 - sigmoid))
      du_RF = dh_RF * a_RF * sigmoid
      products = x_RD.T @ da_RF, x_RD.T @ du_RF, (h_RF * gate_R1).T @ dy_RD
      dw = jax.tree.map(lambda total, part: total + part, dw, ExpertWeights(*products))
      dx_RD = da_RF @ w.gate.T + du_RF @ w.up.T
      dx_ZD = jax.lax.dynamic_update_slice(dx_ZD, dx_RD, (i * R, 0))
      return dx_ZD, jax.lax.dynamic_update_slice(dgate_Z, dgate_R, (i * R,)), dw

    dw = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), sink)
    *carry, dw = jax.lax.fori_loop(start, end, body, (*carry, sharding.vary(dw, AXES)))
    return tuple(carry), dw

  zeros = jnp.zeros((Z, D), x_XD.dtype), jnp.zeros(Z, gate_Xk.dtype)
  (dx_ZD, dgate_Z), dw = _each_expert(layout, w, zeros, expert)
  dx_XD = _take(dx_ZD, layout.slot_A).reshape(X, k, D).sum(1)
  dgate_Xk = _take(dgate_Z, layout.slot_A).reshape(X, k)
  return dx_XD, dgate_Xk, None, None, dw


apply_blocks.defvjp(_blocks_forward, _blocks_backward)


@jax.custom_vjp
def apply_batched(
  x_XD: jax.Array, gate_Xk: jax.Array, index_Xk: jax.Array, w: ExpertWeights, sink: ExpertWeights
) -> jax.Array:
  """All experts at once with C rows each, and a loop over blocks of C rows for what is left over.

  For so few tokens that the time is that of reading the weights, which are not copied here. Its
  gradient is that of `apply_blocks`.
  """
  return _batched_forward(x_XD, gate_Xk, index_Xk, w, sink)[0]


def _batched_forward(x_XD, gate_Xk, index_Xk, w, sink):
  (X, k), (E, D, _) = index_Xk.shape, w.gate.shape
  C = min(X, max(8, 1 << (2 * math.ceil(share(index_Xk, w)) - 1).bit_length()))
  one_AE, place_AE, count_E = _places(index_Xk, E)
  # An expert's first C assignments have slots of their own, e·C on. Of the others there are at
  # most A / C blocks, since each that is begun comes after C that are not among them.
  begun_E = jnp.cumsum(jnp.maximum(-(-count_E // C) - 1, 0))
  first_E = jnp.concatenate([jnp.zeros_like(begun_E[:1]), begun_E[:-1]])
  own_AE = jnp.arange(E)[None] * C + place_AE - 1
  over_AE = (E + first_E - 1)[None] * C + place_AE - 1
  Z = (E + X * k // C) * C
  slot_A, choice_Z = _slots(one_AE, jnp.where(place_AE <= C, own_AE, over_AE), Z)
  x_ZD = _take(x_XD, choice_Z // k)
  gate_Z1 = _take(gate_Xk.reshape(X * k), choice_Z)[:, None]

  def multiply(x, gate, w):
    return (jax.nn.silu(x @ w.gate) * (x @ w.up) * gate) @ w.down

  y_ECD = multiply(x_ZD[: E * C].reshape(E, C, D), gate_Z1[: E * C].reshape(E, C, 1), w)

  def block(i, y_ZD):
    expert = jnp.sum(begun_E <= i)  # the first that has more
    of_expert = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, expert, 0, False), w)
    rows = lambda a: jax.lax.dynamic_slice_in_dim(a, (E + i) * C, C)  # noqa: E731
    y_CD = multiply(rows(x_ZD), rows(gate_Z1), of_expert)
    return jax.lax.dynamic_update_slice_in_dim(y_ZD, y_CD, (E + i) * C, axis=0)

  y_ZD = jnp.pad(y_ECD.reshape(E * C, D), ((0, Z - E * C), (0, 0)))
  y_ZD = jax.lax.fori_loop(0, begun_E[-1], block, y_ZD)
  return _take(y_ZD, slot_A).reshape(X, k, D).sum(1), (x_XD, gate_Xk, index_Xk, w, sink)


apply_batched.defvjp(_batched_forward, _blocks_backward)


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


# name: (rows of each group times its matrix, a total plus their outer products)
GROUPED = dict(ragged=(_ragged, _ragged_outer), megablox=(_megablox, _megablox_outer))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(name, x_XD, gate_Xk, index_Xk, w, sink):
  """Rows sorted by expert, in pieces of a fixed size; as many pieces as the routing fills."""
  return _grouped_forward(name, x_XD, gate_Xk, index_Xk, w, sink)[0]


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


def _grouped_forward(name, x_XD, gate_Xk, index_Xk, w, sink):
  (X, k), gate_A = index_Xk.shape, gate_Xk.reshape(-1)
  pieces, R = _pieces(index_Xk, w.gate.shape[0])
  times = GROUPED[name][0]

  def body(i, y_XD):
    row_R, choice_R, count_E = _piece(pieces, R, k, i, X)
    x_RD = _take(x_XD, row_R)
    h_RF = jax.nn.silu(times(x_RD, w.gate, count_E)) * times(x_RD, w.up, count_E)
    y_RD = times(h_RF * _take(gate_A, choice_R)[:, None], w.down, count_E)
    # Rows beyond the last group belong to nobody; what a kernel leaves there is undefined.
    y_RD = jnp.where((row_R < X)[:, None], y_RD, 0)
    return y_XD.at[row_R].add(y_RD.astype(y_XD.dtype), mode="drop")

  y_XD = sharding.vary(jnp.zeros(x_XD.shape, jnp.float32), AXES)
  y_XD = jax.lax.fori_loop(0, -(-pieces.end_E[-1] // R), body, y_XD)
  return y_XD.astype(x_XD.dtype), (x_XD, gate_Xk, index_Xk, w, sink)


def _grouped_backward(name, residuals, dy_XD):
  x_XD, gate_Xk, index_Xk, w, sink = residuals
  (X, k), gate_A = index_Xk.shape, gate_Xk.reshape(-1)
  pieces, R = _pieces(index_Xk, w.gate.shape[0])
  times, outer = GROUPED[name]

  def body(i, carry):
    dx_XD, dgate_A, dw = carry
    row_R, choice_R, count_E = _piece(pieces, R, k, i, X)
    real_R1, gate_R1 = (row_R < X)[:, None], _take(gate_A, choice_R)[:, None]
    x_RD, dy_RD = _take(x_XD, row_R), _take(dy_XD, row_R)
    a_RF, u_RF = times(x_RD, w.gate, count_E), times(x_RD, w.up, count_E)
    sigmoid = jax.nn.sigmoid(a_RF)
    h_RF = a_RF * sigmoid * u_RF
    dh_RF = times(dy_RD, w.down, count_E, True)
    dgate_R = jnp.sum(jnp.where(real_R1, h_RF * dh_RF, 0), axis=-1, dtype=jnp.float32)
    dh_RF = dh_RF * gate_R1
    da_RF = dh_RF * u_RF * sigmoid * (1 + a_RF * (1 - sigmoid))
    du_RF = dh_RF * a_RF * sigmoid
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

apply_ragged = functools.partial(_grouped, "ragged")
apply_megablox = functools.partial(_grouped, "megablox")

FORMS = dict(
  blocks=apply_blocks, batched=apply_batched, ragged=apply_ragged, megablox=apply_megablox
)
PALLAS = (apply_megablox,)
FEW = 8  # assignments per expert up to which `batched` is faster than `blocks` on CPU


def choose(implementation: str, share: float = math.inf):
  """The named form, or for "auto" what suits the platform of the mesh and the load: `share`
  assignments per expert."""
  if implementation == "auto":
    on_cpu = "batched" if share <= FEW else "blocks"
    implementation = dict(cpu=on_cpu, tpu="megablox").get(sharding.platform(), "ragged")
  return FORMS[implementation]


def share(index_Xk: jax.Array, w: ExpertWeights) -> float:
  """Assignments per expert if all are chosen equally often, of this and of other devices."""
  return index_Xk.size / (w.gate.shape[0] * sharding.axis_size("expert"))
