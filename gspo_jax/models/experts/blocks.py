"""Expert products without a kernel: rows are grouped in blocks, each for one expert.

An assignment is a pair of a token and an expert it chose; a row is the data of an assignment.
`apply_blocks` loops over all blocks. `apply_batched` multiplies the first C rows of every expert at
once, and loops over blocks of the remaining rows. `moe` documents arguments and results of both.

Axes: X tokens, k choices, A = X·k assignments, R rows of a block, Z slots for rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.settings.mesh import AXES

Activation = Callable[[jax.Array, jax.Array], jax.Array]  # (x gate, x up) -> hidden values


def swiglu(a: jax.Array, u: jax.Array) -> jax.Array:
  """silu(a) · u."""
  return jax.nn.silu(a) * u


@flax.struct.dataclass
class ExpertWeights:
  """Weights of the experts, or their gradients or layouts."""

  gate: Any  # [E, D, F]
  up: Any  # [E, D, F]
  down: Any  # [E, F, D]
  gate_bias: Any = None  # [E, F]. None if there is no bias.
  up_bias: Any = None  # [E, F]. None if there is no bias.
  activation: Activation = flax.struct.field(pytree_node=False, default=swiglu)

  def layout(self, gate: Any, down: Any, bias: Any) -> "ExpertWeights":
    """Combines layouts: `gate` also applies to up, and `bias` to both biases."""
    biases = {} if self.gate_bias is None else dict(gate_bias=bias, up_bias=bias)
    return self.replace(gate=gate, up=gate, down=down, **biases)


def mean_load(experts_Xk: jax.Array, w: ExpertWeights) -> float:
  """Returns the mean number of assignments per expert, over all devices' experts."""
  return experts_Xk.size / (w.gate.shape[0] * sharding.axis_size("expert"))


def take(table: jax.Array, rows: jax.Array) -> jax.Array:
  """Gathers rows of the table; zeros for indices out of range."""
  return table.at[rows].get(mode="fill", fill_value=0)


class Layout(NamedTuple):
  """Slots of the assignments to local experts, grouped by expert.

  For example, four tokens choose the experts 0, 1, 0, 0 (k = 1), and a block has R = 2 rows. Then
  `slot_A` is [0, 4, 1, 2], `assignment_Z` [0, 2, 3, 4, 1, 4, 4, 4], and `end_E` [2, 3].
  """

  slot_A: jax.Array  # Slot of an assignment; Z for an expert of another device.
  assignment_Z: jax.Array  # Assignment in a slot, token · k + choice; A for an empty slot.
  end_E: jax.Array  # Cumulative number of blocks by expert.


def block_layout(experts_Xk: jax.Array, num_experts: int, R: int, C: int = 0) -> Layout:
  """Assigns slots: C per expert first, the rest in blocks of R.

  The first C assignments of expert e have the slots from e·C; the blocks follow these E·C slots.
  Index `num_experts` means an expert of another device.

  The number of slots must be known while tracing, so it is an upper bound. There are at most
  A/R + E blocks, since an expert's last block may have a single row. If C ≥ R, there are at most
  A/R blocks, since an expert with blocks has C further assignments outside its blocks.
  """
  A, E = experts_Xk.size, num_experts
  chosen_AE = experts_Xk.reshape(A)[:, None] == jnp.arange(E)[None]
  # Each assignment's rank at its expert, from 1. For few experts a sort would be several times
  # slower.
  rank_AE = jnp.cumsum(chosen_AE, axis=0, dtype=jnp.int32)
  blocks_E = -(-jnp.maximum(rank_AE[-1] - C, 0) // R)
  end_E = jnp.cumsum(blocks_E)
  slot_AE = E * C + ((end_E - blocks_E) * R)[None] + rank_AE - 1 - C
  if C:
    slot_AE = jnp.where(rank_AE <= C, jnp.arange(E)[None] * C + rank_AE - 1, slot_AE)
  Z = E * C + (A // R + (0 if C >= R else E)) * R
  slot_A = jnp.where(chosen_AE.any(1), jnp.where(chosen_AE, slot_AE, 0).sum(1), Z)
  empty_Z, index_A = jnp.full(Z, A, jnp.int32), jnp.arange(A, dtype=jnp.int32)
  return Layout(slot_A, empty_Z.at[slot_A].set(index_A, mode="drop"), end_E)


def block_rows(experts_Xk: jax.Array, w: ExpertWeights, backward: bool = False) -> int:
  """Returns R, the rows of a block, a power of two.

  To limit padding, R is at most 8 or half of the mean load, whichever is larger. If this limit
  permits, R is large enough for XLA to compute the product of a block on several cores. In the
  backward pass, each block adds to the gradients of all weights of an expert. To have fewer such
  additions, R is at least 64 in the backward pass, if the limit permits.
  """
  largest = 1 << max(3, int(mean_load(experts_Xk, w)).bit_length() - 2)
  _, D, F = w.gate.shape
  if not backward and largest * D * F < 2**23:
    return min(largest, 16)  # Such small products run on one core for any number of rows.
  return min(largest, 1 << max(6 if backward else 3, 24 - (D * F - 1).bit_length()))


@jax.custom_vjp
def apply_blocks(
  x_XD: jax.Array, gate_Xk: jax.Array, experts_Xk: jax.Array, w: ExpertWeights, sink: ExpertWeights
) -> jax.Array:
  """Applies the experts in turn, each to its blocks.

  `sink` has the weights' shapes. Its values are not read, and its gradient is that of the weights,
  in the dtype of `sink`.
  """
  return _blocks_forward(x_XD, gate_Xk, experts_Xk, w, sink)[0]


def _each_expert(layout: Layout, w: ExpertWeights, start: Any, expert: Callable) -> Any:
  """Scans `expert(carry, first block, end block, weights)` over experts.

  start: initial carry.
  """
  start_E = jnp.concatenate([jnp.zeros_like(layout.end_E[:1]), layout.end_E[:-1]])
  start = sharding.vary(start, AXES)
  return jax.lax.scan(lambda carry, x: expert(carry, *x), start, (start_E, layout.end_E, w))


_multiply = functools.partial(sharding.product, "...RD,...DF->...RF")


def _hidden(x_RD: jax.Array, w: ExpertWeights) -> tuple[jax.Array, jax.Array]:
  """Returns the products x gate and x up, plus biases."""
  return (
    add_bias(_multiply(x_RD, w.gate), w.gate_bias),
    add_bias(_multiply(x_RD, w.up), w.up_bias),
  )


def add_bias(x_RF: jax.Array, bias_F: jax.Array | None) -> jax.Array:
  """Adds a bias to all rows of an expert. None adds nothing."""
  return x_RF if bias_F is None else x_RF + bias_F[..., None, :]


def _expert(x_RD: jax.Array, gate_R: jax.Array, w: ExpertWeights) -> jax.Array:
  """Returns gate · expert(x), for rows [R, D] of one expert, or [E, R, D] of several."""
  return _multiply(w.activation(*_hidden(x_RD, w)) * gate_R[..., None], w.down)


def hidden_gradients(a_RF, u_RF, dh_RF, activation: Activation = swiglu):
  """Returns h = activation(a, u) and the gradients of a and u."""
  if activation is not swiglu:
    h_RF, backward = jax.vjp(activation, a_RF, u_RF)
    return h_RF, *backward(dh_RF)
  sigmoid = jax.nn.sigmoid(a_RF)
  da_RF = dh_RF * u_RF * sigmoid * (1 + a_RF * (1 - sigmoid))
  return a_RF * sigmoid * u_RF, da_RF, dh_RF * a_RF * sigmoid


def _expert_gradients(x_RD, dy_RD, gate_R, w, dtype):
  """Returns gradients of x, of the gate weights, and of the expert's weights in `dtype`."""
  outer = functools.partial(jnp.matmul, preferred_element_type=dtype)
  gate_R1, dh_RF = gate_R[..., None], _multiply(dy_RD, w.down.mT)
  h_RF, da_RF, du_RF = hidden_gradients(*_hidden(x_RD, w), dh_RF * gate_R1, w.activation)
  dgate_R = jnp.sum(h_RF * dh_RF, axis=-1)
  pairs = (x_RD, da_RF), (x_RD, du_RF), (h_RF * gate_R1, dy_RD)
  gradients = [outer(x.mT, y) for x, y in pairs]
  if w.gate_bias is not None:
    gradients += [d_RF.sum(-2, dtype=dtype) for d_RF in (da_RF, du_RF)]
  dw = ExpertWeights(*gradients, activation=w.activation)
  return _multiply(da_RF, w.gate.mT) + _multiply(du_RF, w.up.mT), dgate_R, dw


def _rows(
  assignment: jax.Array, gate_Xk: jax.Array, *arrays_XD: jax.Array
) -> tuple[jax.Array, ...]:
  """Gathers the assignments' rows of each array, and their gate weights.

  An empty slot has assignment A, token A // k = X: both are out of range, so the results are 0.
  """
  rows = (take(a, assignment // gate_Xk.shape[1]) for a in arrays_XD)
  return *rows, take(gate_Xk.reshape(-1), assignment)


def _sum_choices(y_ZD: jax.Array, layout: Layout, k: int) -> jax.Array:
  """Sums the results of each token's k assignments, [Z, D] -> [X, D]."""
  return take(y_ZD, layout.slot_A).reshape(-1, k, y_ZD.shape[1]).sum(1)


def _token_gradients(dx_ZD, dgate_Z, layout, experts_Xk):
  """Returns gradients by token, [X, D] and [X, k], from gradients by slot."""
  dgate_Xk = take(dgate_Z, layout.slot_A).reshape(experts_Xk.shape)
  return _sum_choices(dx_ZD, layout, experts_Xk.shape[1]), dgate_Xk


def _update_rows(total: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
  """Writes `part` to the rows from `start` on."""
  return jax.lax.dynamic_update_slice_in_dim(total, part, start, axis=0)


def _blocks_forward(x_XD, gate_Xk, experts_Xk, w, sink):
  R = block_rows(experts_Xk, w)
  layout = block_layout(experts_Xk, w.gate.shape[0], R)

  def expert(y_ZD, start, end, w):
    def body(i, y_ZD):
      assignment_R = jax.lax.dynamic_slice(layout.assignment_Z, (i * R,), (R,))
      return _update_rows(y_ZD, _expert(*_rows(assignment_R, gate_Xk, x_XD), w), i * R)

    return jax.lax.fori_loop(start, end, body, y_ZD), None

  y_ZD = jnp.zeros((len(layout.assignment_Z), x_XD.shape[1]), x_XD.dtype)
  y_ZD, _ = _each_expert(layout, w, y_ZD, expert)
  return _sum_choices(y_ZD, layout, experts_Xk.shape[1]), (x_XD, gate_Xk, experts_Xk, w, sink)


def _blocks_backward(residuals, dy_XD):
  x_XD, gate_Xk, experts_Xk, w, sink = residuals
  R = block_rows(experts_Xk, w, backward=True)
  layout = block_layout(experts_Xk, w.gate.shape[0], R)
  Z = len(layout.assignment_Z)

  def expert(carry, start, end, w):
    def body(i, carry):
      dx_ZD, dgate_Z, dw = carry
      assignment_R = jax.lax.dynamic_slice(layout.assignment_Z, (i * R,), (R,))
      rows = _rows(assignment_R, gate_Xk, x_XD, dy_XD)
      dx_RD, dgate_R, dw_part = _expert_gradients(*rows, w, sink.gate.dtype)
      dw = jax.tree.map(jnp.add, dw, dw_part)
      return _update_rows(dx_ZD, dx_RD, i * R), _update_rows(dgate_Z, dgate_R, i * R), dw

    dw = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), sink)
    *carry, dw = jax.lax.fori_loop(start, end, body, (*carry, sharding.vary(dw, AXES)))
    return tuple(carry), dw

  zeros = jnp.zeros((Z, x_XD.shape[1]), x_XD.dtype), jnp.zeros(Z, gate_Xk.dtype)
  (dx_ZD, dgate_Z), dw = _each_expert(layout, w, zeros, expert)
  return *_token_gradients(dx_ZD, dgate_Z, layout, experts_Xk), None, None, dw


apply_blocks.defvjp(_blocks_forward, _blocks_backward)


def batched_rows(X: int, load: float) -> tuple[int, int]:
  """Returns C, and R ≤ C, the rows of a block.

  C is about 1.2 times `load`, the mean number of assignments per expert. C is at most X, and at
  least 8 if X permits. R is at most 64 on CPU, and at most 256 elsewhere, since a GPU needs larger
  blocks to be busy.
  """
  most = 6 if sharding.platform() == "cpu" else 8  # Exponents of 2.
  C = min(X, max(8, -(-int(1.2 * load) // 8) * 8))
  return C, min(C, 1 << max(3, min(most, C.bit_length() - 2)))


@jax.custom_vjp
def apply_batched(
  x_XD: jax.Array, gate_Xk: jax.Array, experts_Xk: jax.Array, w: ExpertWeights, sink: ExpertWeights
) -> jax.Array:
  """Applies all experts to C rows each, then to blocks of further rows.

  `apply_blocks` describes `sink`.
  """
  return _batched_forward(x_XD, gate_Xk, experts_Xk, w, sink)[0]


def _each_block(
  layout: Layout, C: int, R: int, w: ExpertWeights, carry: Any, step: Callable
) -> Any:
  """Loops `step(carry, first slot, assignments, expert, weights)` over the blocks."""

  def body(i, carry):
    expert = jnp.sum(layout.end_E <= i)  # The expert of block i.
    start = len(w.gate) * C + i * R
    assignment_R = jax.lax.dynamic_slice(layout.assignment_Z, (start,), (R,))
    w_expert = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, expert, 0, False), w)
    return step(carry, start, assignment_R, expert, w_expert)

  return jax.lax.fori_loop(0, layout.end_E[-1], body, carry)


def _slots(layout: Layout, part_EC: jax.Array) -> jax.Array:
  """Pads values of the first E·C slots with zeros, [E, C, ...] -> [Z, ...]."""
  part = part_EC.reshape(-1, *part_EC.shape[2:])
  rest = len(layout.assignment_Z) - len(part)
  return jnp.pad(part, ((0, rest), *[(0, 0)] * (part.ndim - 1)))


def multiply_batched(
  x_XD: jax.Array, gate_Xk: jax.Array, experts_Xk: jax.Array, w: ExpertWeights, load: float
) -> jax.Array:
  """Returns the result of `apply_batched`, without gradients.

  load: mean number of assignments per expert.
  """
  E, (C, R) = len(w.gate), batched_rows(len(x_XD), load)
  layout = block_layout(experts_Xk, E, R, C)

  def block(y_ZD, start, assignment_R, expert, w):
    return _update_rows(y_ZD, _expert(*_rows(assignment_R, gate_Xk, x_XD), w), start)

  def with_blocks(y_ECD):
    y_ZD = _each_block(layout, C, R, w, _slots(layout, y_ECD), block)
    return _sum_choices(y_ZD, layout, experts_Xk.shape[1])

  def without_blocks(y_ECD):
    return _sum_choices(y_ECD.reshape(E * C, -1), layout, experts_Xk.shape[1])

  y_ECD = _expert(*_rows(layout.assignment_Z[: E * C].reshape(E, C), gate_Xk, x_XD), w)
  # Without blocks, the results need no padding.
  return jax.lax.cond(layout.end_E[-1] > 0, with_blocks, without_blocks, y_ECD)


def _batched_forward(x_XD, gate_Xk, experts_Xk, w, sink):
  y_XD = multiply_batched(x_XD, gate_Xk, experts_Xk, w, mean_load(experts_Xk, w))
  return y_XD, (x_XD, gate_Xk, experts_Xk, w, sink)


def _batched_backward(residuals, dy_XD):
  x_XD, gate_Xk, experts_Xk, w, sink = residuals
  E, (C, R) = len(w.gate), batched_rows(len(x_XD), mean_load(experts_Xk, w))
  layout = block_layout(experts_Xk, E, R, C)

  def gradients(assignment, w):
    return _expert_gradients(*_rows(assignment, gate_Xk, x_XD, dy_XD), w, sink.gate.dtype)

  def block(carry, start, assignment_R, expert, w):
    dx_ZD, dgate_Z, dw = carry
    dx_RD, dgate_R, dw_part = gradients(assignment_R, w)
    dw = jax.tree.map(lambda total, part: total.at[expert].add(part), dw, dw_part)
    return _update_rows(dx_ZD, dx_RD, start), _update_rows(dgate_Z, dgate_R, start), dw

  dx_ECD, dgate_EC, dw = gradients(layout.assignment_Z[: E * C].reshape(E, C), w)
  carry = _slots(layout, dx_ECD), _slots(layout, dgate_EC), dw
  dx_ZD, dgate_Z, dw = _each_block(layout, C, R, w, carry, block)
  return *_token_gradients(dx_ZD, dgate_Z, layout, experts_Xk), None, None, dw


apply_batched.defvjp(_batched_forward, _batched_backward)
