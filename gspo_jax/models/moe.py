"""Mixture of experts: routing, dropless dispatch, expert parallelism.

The router is computed in the global view. Dispatch and experts run in `shard_map`: devices on the
`expert` axis gather each other's tokens, every device applies the experts it holds to whichever of
these tokens chose them, and the sum over devices is scattered back. No buffer depends on the
routing, so no token is ever dropped.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.sizes import ModelConfig
from gspo_jax.sharding import AXES, BATCH, P


@flax.struct.dataclass
class RouterStats:
  """Sums over the real tokens of a batch, per layer where stacked; divided once, by `summary`."""

  load_E: jax.Array  # assignments to each expert
  probability_E: jax.Array  # router probability of each expert
  entropy: jax.Array  # of the router distribution, nats
  z: jax.Array  # (logsumexp of the router logits)²
  tokens: jax.Array
  dropped: jax.Array  # assignments that no expert computed: 0, since dispatch is dropless


def route(
  x_BTD: jax.Array,
  router_DE: jax.Array,
  config: ModelConfig,
  valid_BT: jax.Array,
  replay_BTk: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, RouterStats]:
  """Gate weights and expert indices of every token, [B, T, k] each, and router statistics.

  Softmax over all experts in float32, top-k, renormalised if `norm_topk_prob`, as Qwen3-MoE does.
  `replay_BTk` replaces the choice where it is >= 0 (-1: no route recorded); the gate weights are
  always those of the current router, gathered from the dense probabilities, so its gradient flows.
  """
  logit_BTE = sharding.einsum(
    "BTD,DE->BTE", x_BTD.astype(jnp.float32), router_DE.astype(jnp.float32), out=P(BATCH)
  )
  p_BTE = jax.nn.softmax(logit_BTE, axis=-1)
  _, index_BTk = jax.lax.top_k(p_BTE, config.experts_per_token)
  if replay_BTk is not None:
    index_BTk = jnp.where(replay_BTk >= 0, replay_BTk, index_BTk)
  one_hot_BTkE = jax.nn.one_hot(index_BTk, config.num_experts, dtype=jnp.float32)
  gate_BTk = jnp.einsum("BTkE,BTE->BTk", one_hot_BTkE, p_BTE)
  if config.norm_topk_prob:
    gate_BTk = gate_BTk / gate_BTk.sum(-1, keepdims=True)

  valid_BT = valid_BT.astype(jnp.float32)
  z_BT = jax.nn.logsumexp(logit_BTE, axis=-1) ** 2
  entropy_BT = -jnp.sum(p_BTE * jnp.log(jnp.maximum(p_BTE, 1e-30)), axis=-1)
  stats = RouterStats(
    load_E=(one_hot_BTkE * valid_BT[..., None, None]).sum((0, 1, 2)),
    probability_E=(p_BTE * valid_BT[..., None]).sum((0, 1)),
    entropy=(entropy_BT * valid_BT).sum(),
    z=(z_BT * valid_BT).sum(),
    tokens=valid_BT.sum(),
    dropped=jnp.zeros(()),
  )
  return gate_BTk, index_BTk.astype(jnp.int32), stats


def load_balance(stats: RouterStats, config: ModelConfig) -> jax.Array:
  """E · Σ_e f_e P_e averaged over layers; 1 when balanced. Switch Transformer, 2101.03961, eq. 4.

  f_e is the share of assignments that went to expert e, P_e its mean router probability.
  """
  tokens = jnp.maximum(stats.tokens, 1)[..., None]
  f = stats.load_E / (tokens * config.experts_per_token)
  return jnp.mean(config.num_experts * jnp.sum(f * stats.probability_E / tokens, axis=-1))


def experts(
  x_BTD: jax.Array,
  gate_BTk: jax.Array,
  index_BTk: jax.Array,
  weights: "ExpertWeights",
  implementation: str,
) -> jax.Array:
  """Σ_k gate_k · expert_{index_k}(x), [B, T, D], with the experts split over the mesh."""
  apply = {"blocks": apply_blocks, "ragged": apply_ragged}[implementation]

  def on_each_device(x_BTD, gate_BTk, index_BTk, weights):
    B, T, D = x_BTD.shape
    flat = lambda a: sharding.all_gather(a.reshape(B * T, -1), "expert")  # noqa: E731
    held = weights.gate.shape[0]
    local_Xk = flat(index_BTk) - held * sharding.axis_index("expert")
    local_Xk = jnp.where((local_Xk >= 0) & (local_Xk < held), local_Xk, held)
    tokens = sharding.vary((flat(x_BTD), flat(gate_BTk), local_Xk), ("tensor",))
    y_XD = apply(*tokens, sharding.vary(weights, ("data", "fsdp")))
    y_XD = sharding.psum(sharding.psum_scatter(y_XD, "expert"), "tensor")
    return y_XD.reshape(B, T, D)

  batch, weight_specs = P(BATCH), ExpertWeights(*[P("expert", None, "tensor")] * 2, W_DOWN)
  run = sharding.shard_map(
    on_each_device, in_specs=(batch, batch, batch, weight_specs), out_specs=batch
  )
  return run(x_BTD, gate_BTk.astype(x_BTD.dtype), index_BTk, weights)


W_DOWN = P("expert", "tensor", None)


class ExpertWeights(NamedTuple):
  gate: jax.Array  # [E, D, F]
  up: jax.Array  # [E, D, F]
  down: jax.Array  # [E, F, D]


class Layout(NamedTuple):
  """Assignments (token, choice) sorted by expert, each expert's share padded to whole blocks.

  With A = X·k assignments and blocks of R rows there are at most ceil(A/R) + E blocks.
  """

  slot_A: jax.Array  # where assignment a went; len(row_Z) for one that no local expert takes
  row_Z: jax.Array  # token in slot z; X for padding
  choice_Z: jax.Array  # assignment in slot z; A for padding
  expert_of_block: jax.Array
  blocks: jax.Array  # blocks in use


def block_layout(index_Xk: jax.Array, num_experts: int, rows: int) -> Layout:
  """Groups assignments by expert; index `num_experts` means: held by another device."""
  X, k = index_Xk.shape
  A = X * k
  most_blocks = -(-A // rows) + num_experts
  expert_A = index_Xk.reshape(A)
  count_E = jnp.sum(expert_A[:, None] == jnp.arange(num_experts)[None], axis=0)
  blocks_E = -(-count_E // rows)
  last_block_E = jnp.cumsum(blocks_E)
  order_A = jnp.argsort(expert_A, stable=True)
  sorted_A = expert_A[order_A]
  zero = jnp.zeros(1, count_E.dtype)
  first_sorted = jnp.concatenate([zero, jnp.cumsum(count_E)])[sorted_A]
  first_block = jnp.concatenate([zero, last_block_E])[sorted_A]
  slot = first_block * rows + jnp.arange(A) - first_sorted
  slot = jnp.where(sorted_A < num_experts, slot, most_blocks * rows)
  empty = jnp.full(most_blocks * rows, A, order_A.dtype)
  choice_Z = empty.at[slot].set(order_A, mode="drop")
  return Layout(
    slot_A=jnp.zeros(A, slot.dtype).at[order_A].set(slot),
    row_Z=choice_Z // k,  # A // k = X: padding stays out of range
    choice_Z=choice_Z,
    expert_of_block=jnp.searchsorted(last_block_E, jnp.arange(most_blocks), side="right"),
    blocks=last_block_E[-1],
  )


def block_rows(assignments: int, num_experts: int) -> int:
  """Rows per block: about an expert's fair share, a power of two from 8 to 128."""
  share = max(1, assignments // max(1, num_experts))
  return min(128, max(8, 1 << (share - 1).bit_length()))


@jax.custom_vjp
def apply_blocks(
  x_XD: jax.Array, gate_Xk: jax.Array, index_Xk: jax.Array, w: ExpertWeights
) -> jax.Array:
  """SwiGLU experts as a loop over blocks of rows that share an expert; only used blocks run.

  The fastest dropless form on CPU, where `lax.ragged_dot` expands to every expert times every row.
  """
  return _blocks_forward(x_XD, gate_Xk, index_Xk, w)[0]


def _take(table: jax.Array, rows: jax.Array) -> jax.Array:
  return table.at[rows].get(mode="fill", fill_value=0)


def _blocks_forward(x_XD, gate_Xk, index_Xk, w):
  X, k = index_Xk.shape
  D = x_XD.shape[1]
  R = block_rows(X * k, w.gate.shape[0])
  layout = block_layout(index_Xk, w.gate.shape[0], R)

  def body(i, y_ZD):
    x_RD = _take(x_XD, jax.lax.dynamic_slice(layout.row_Z, (i * R,), (R,)))
    e = layout.expert_of_block[i]
    h_RF = jax.nn.silu(x_RD @ w.gate[e]) * (x_RD @ w.up[e])
    return jax.lax.dynamic_update_slice(y_ZD, h_RF @ w.down[e], (i * R, 0))

  y_ZD = sharding.vary(jnp.zeros((layout.row_Z.shape[0], D), x_XD.dtype), AXES)
  y_ZD = jax.lax.fori_loop(0, layout.blocks, body, y_ZD)
  y_XkD = _take(y_ZD, layout.slot_A).reshape(X, k, D)
  return jnp.einsum("XkD,Xk->XD", y_XkD, gate_Xk), (x_XD, gate_Xk, layout, w)


def _blocks_backward(residuals, dy_XD):
  x_XD, gate_Xk, layout, w = residuals
  (X, k), D = gate_Xk.shape, x_XD.shape[1]
  Z = layout.row_Z.shape[0]
  R = Z // layout.expert_of_block.shape[0]
  gate_A = gate_Xk.reshape(X * k)

  def body(i, carry):
    dx_ZD, dgate_Z, dw = carry
    rows = jax.lax.dynamic_slice(layout.row_Z, (i * R,), (R,))
    gate_R = _take(gate_A, jax.lax.dynamic_slice(layout.choice_Z, (i * R,), (R,)))
    x_RD, dy_RD = _take(x_XD, rows), _take(dy_XD, rows)
    e = layout.expert_of_block[i]
    a_RF, u_RF = x_RD @ w.gate[e], x_RD @ w.up[e]
    sigmoid = jax.nn.sigmoid(a_RF)
    h_RF = a_RF * sigmoid * u_RF
    dh_RF = dy_RD @ w.down[e].T
    dgate_R = jnp.sum(h_RF * dh_RF, axis=-1)
    dh_RF = dh_RF * gate_R[:, None]
    da_RF = dh_RF * u_RF * sigmoid * (1 + a_RF * (1 - sigmoid))
    du_RF = dh_RF * a_RF * sigmoid
    dw = ExpertWeights(
      gate=dw.gate.at[e].add(x_RD.T @ da_RF),
      up=dw.up.at[e].add(x_RD.T @ du_RF),
      down=dw.down.at[e].add(h_RF.T @ (dy_RD * gate_R[:, None])),
    )
    dx_RD = da_RF @ w.gate[e].T + du_RF @ w.up[e].T
    dx_ZD = jax.lax.dynamic_update_slice(dx_ZD, dx_RD, (i * R, 0))
    return dx_ZD, jax.lax.dynamic_update_slice(dgate_Z, dgate_R, (i * R,)), dw

  zeros = (
    jnp.zeros((Z, D), x_XD.dtype),
    jnp.zeros(Z, gate_Xk.dtype),
    jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), w),
  )
  dx_ZD, dgate_Z, dw = jax.lax.fori_loop(0, layout.blocks, body, sharding.vary(zeros, AXES))
  dx_XD = _take(dx_ZD, layout.slot_A).reshape(X, k, D).sum(1)
  dgate_Xk = _take(dgate_Z, layout.slot_A).reshape(X, k)
  return dx_XD, dgate_Xk, None, dw


apply_blocks.defvjp(_blocks_forward, _blocks_backward)


def apply_ragged(
  x_XD: jax.Array, gate_Xk: jax.Array, index_Xk: jax.Array, w: ExpertWeights
) -> jax.Array:
  """The same with `lax.ragged_dot` on rows sorted by expert: what accelerators have kernels for."""
  X, k = index_Xk.shape
  E = w.gate.shape[0]
  expert_A = index_Xk.reshape(X * k)
  order_A = jnp.argsort(expert_A, stable=True)
  count_E = jnp.sum(expert_A[:, None] == jnp.arange(E)[None], axis=0).astype(jnp.int32)
  ragged = functools.partial(jax.lax.ragged_dot, group_sizes=count_E)
  x_AD = x_XD[order_A // k]
  y_AD = ragged(jax.nn.silu(ragged(x_AD, w.gate)) * ragged(x_AD, w.up), w.down)
  # Rows beyond the last group belong to experts of other devices; what is there is undefined.
  y_AD = jnp.where((expert_A[order_A] < E)[:, None], y_AD, 0)
  y_AD = y_AD * gate_Xk.reshape(X * k)[order_A][:, None]
  return jnp.zeros_like(x_XD).at[order_A // k].add(y_AD)
