"""Gated delta rule: linear attention with a recurrent state of constant size.

Each value head has a state S [H, J], a map from keys to values. A position t lets the state decay,
and corrects the value that the state returns for the key k_t:

  S_t = e^g_t S_{t-1} + k_t u_tᵀ,   u_t = β_t (v_t - e^g_t S_{t-1}ᵀ k_t),   y_t = S_tᵀ q_t

Gated Delta Networks, arXiv:2412.06464, equation 10. `step` computes one position, for decoding.
`chunked` computes a row in chunks, with products of matrices only (§3.3).

Letters in addition to those of structs.py:

  R  value heads per key head      i, j  positions of a chunk
  J  width of a value              C     positions of a convolution
  c  chunks of a group
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

CHUNK = 64  # Positions of a chunk. Longer chunks need more products, shorter ones more steps.
GROUP = 16  # Maximum number of chunks that are computed in parallel, except for their states.
INVERSE = "delta_inverse"  # Name of inverses, which the backward pass does not compute again.


class Inputs(NamedTuple):
  """Inputs of the rule. K key heads have R value heads each."""

  q_BTKH: jax.Array
  k_BTKH: jax.Array
  v_BTKRJ: jax.Array
  g_BTKR: jax.Array  # Logarithm of the decay, at most 0.
  beta_BTKR: jax.Array  # Write strength β, between 0 and 1.

  def masked(self, real_BT: jax.Array) -> "Inputs":
    """Makes padding neutral: padding does not change the state."""
    real_BTKR = real_BT[:, :, None, None]
    return self._replace(
      g_BTKR=jnp.where(real_BTKR, self.g_BTKR, 0),
      beta_BTKR=jnp.where(real_BTKR, self.beta_BTKR, 0),
    )


def step(inputs: Inputs, state_BKRHJ: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes one position, T = 1; returns outputs [B, 1, K, R, J] and states."""
  q_BKH, k_BKH, v_BKRJ, g_BKR, beta_BKR = (x[:, 0].astype(jnp.float32) for x in inputs)
  decay_BKRJ = jnp.exp(g_BKR)[..., None]
  # No matrix products are used, since these would round their inputs on TPU, and would not be
  # faster. Since S_tᵀ q = e^g S_{t-1}ᵀ q + (k · q) u, both sums are over the old state. So one pass
  # reads the state for both.
  k_BKRHJ, q_BKRHJ = k_BKH[:, :, None, :, None], q_BKH[:, :, None, :, None]
  recalled_BKRJ, y_BKRJ = (jnp.sum(state_BKRHJ * x, axis=3) for x in (k_BKRHJ, q_BKRHJ))
  u_BKRJ = beta_BKR[..., None] * (v_BKRJ - decay_BKRJ * recalled_BKRJ)
  y_BKRJ = decay_BKRJ * y_BKRJ + jnp.sum(k_BKH * q_BKH, axis=2)[..., None, None] * u_BKRJ
  state_BKRHJ = state_BKRHJ * decay_BKRJ[:, :, :, None] + k_BKRHJ * u_BKRJ[:, :, :, None]
  return y_BKRJ[:, None], state_BKRHJ


def chunked(
  inputs: Inputs, segment_BT: jax.Array, state_BKRHJ: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes T positions in chunks; equals `step` at each position, up to rounding.

  The backward pass recomputes each group of chunks from the states before the group.

  Args:
    segment_BT: segment numbers. Each new segment begins with a state of zeros. 0 is padding, which
      changes no state. A segment is contiguous, except for padding.
    state_BKRHJ: states before the first position, which belong to the first position's segment.

  Returns:
    Outputs, float32 [B, T, K, R, J], undefined for padding; states after the last token.
  """
  B, T = segment_BT.shape
  size = min(CHUNK, T)
  chunks = -(-T // size)
  group = -(-chunks // -(-chunks // GROUP))  # Chunks of a group.
  inputs = inputs.masked(segment_BT > 0)

  def split(x_BT: jax.Array) -> jax.Array:
    """Splits axis 1 into padded groups of chunks, [groups, c, B, i, ...]."""
    width = [(0, 0), (0, -T % (group * size))] + [(0, 0)] * (x_BT.ndim - 2)
    x_BX = jnp.pad(x_BT, width)
    return jnp.moveaxis(x_BX.reshape(B, -1, group, size, *x_BT.shape[2:]), 0, 2)

  parts = *map(split, inputs), split(segment_BT)
  # Each group is one remat region: only the states between groups and the inverses are saved.
  policy = jax.checkpoint_policies.save_only_these_names(INVERSE)
  body = jax.checkpoint(_group, prevent_cse=False, policy=policy)
  carry = state_BKRHJ, segment_BT[:, 0]
  if chunks == group:
    (state_BKRHJ, _), y = body(carry, tuple(x[0] for x in parts))
    y_cBiKRJ = y
  else:
    (state_BKRHJ, _), y = jax.lax.scan(body, carry, parts)
    y_cBiKRJ = y.reshape(-1, *y.shape[2:])
  y_BXKRJ = jnp.moveaxis(y_cBiKRJ, 0, 1).reshape(B, -1, *y_cBiKRJ.shape[3:])
  return y_BXKRJ[:, :T], state_BKRHJ


def _group(carry, part):
  """Computes the positions of a group of chunks; all but the states in parallel.

  Within a chunk, all u_i solve (I + A) U = B. For j < i in i's segment, A_ij is
  β_i e^(G_i - G_j) k_iᵀ k_j; all other A_ij are 0. Row i of B is β_i (v_i - e^G_i Sᵀ k_i). G_i is
  the sum of g over the positions of i's segment in the chunk, up to i. S is the state before the
  chunk, or 0 if that state belongs to another segment than i.

  carry: states before the group, and the segments to which they belong.
  """
  state_BKRHJ, before_B = carry
  *inputs, segment_cBi = part
  q_cBiKH, k_cBiKH, v_cBiKRJ, g_cBiKR, beta_cBiKR = (x.astype(jnp.float32) for x in inputs)
  q_cBKiH, k_cBKiH = (jnp.moveaxis(x, 3, 2) for x in (q_cBiKH, k_cBiKH))
  v_cBKRiJ = jnp.moveaxis(v_cBiKRJ, 2, 4)
  g_cBKRi, beta_cBKRi = (jnp.moveaxis(x, 2, 4) for x in (g_cBiKR, beta_cBiKR))
  owner_cB, last_cB = _owners(segment_cBi, before_B)
  same_cBij = segment_cBi[..., :, None] == segment_cBi[..., None, :]
  visible_cBij = jnp.tril(same_cBij)
  # Sums are within a segment. In sums over all segments, long earlier segments would round away
  # the decays of a later one.
  total_cBKRi = _sums(visible_cBij, g_cBKRi)
  between = total_cBKRi[..., :, None] - total_cBKRi[..., None, :]
  decay_cBKRij = jnp.exp(jnp.where(visible_cBij[:, :, None, None], between, -jnp.inf))

  # Decay of the state before the chunk up to each position; 0 at positions of other segments.
  owned_cBi = segment_cBi == owner_cB[..., None]
  seen_cBKRi = jnp.exp(total_cBKRi) * owned_cBi[:, :, None, None]
  kk_cBKij = jnp.einsum("cBKiH,cBKjH->cBKij", k_cBKiH, k_cBKiH)
  a_cBKRij = beta_cBKRi[..., None] * kk_cBKij[:, :, :, None] * decay_cBKRij
  x_cBKRij = inverse(jnp.tril(a_cBKRij, -1)) * beta_cBKRi[..., None, :]

  in_last_cBi = segment_cBi == last_cB[..., None]
  all_cBKR1 = _sums(in_last_cBi[:, :, None], g_cBKRi)
  kept_cBKR = jnp.exp(all_cBKR1[..., 0]) * (owner_cB == last_cB)[:, :, None, None]
  # Decays after a position, summed directly, because a difference of two long sums is less exact.
  later_cBKRi = _sums(jnp.triu(same_cBij, 1), g_cBKRi)
  left_cBKRi = jnp.exp(later_cBKRi) * in_last_cBi[:, :, None, None]

  def advance(state_BKRHJ, chunk):
    k_BKiH, v_BKRiJ, x_BKRij, seen_BKRi, left_BKRi, kept_BKR = chunk
    recalled_BKRiJ = jnp.einsum("BKiH,BKRHJ->BKRiJ", k_BKiH, state_BKRHJ) * seen_BKRi[..., None]
    u_BKRiJ = jnp.einsum("BKRij,BKRjJ->BKRiJ", x_BKRij, v_BKRiJ - recalled_BKRiJ)
    written_BKRHJ = jnp.einsum("BKiH,BKRiJ->BKRHJ", k_BKiH, u_BKRiJ * left_BKRi[..., None])
    return state_BKRHJ * kept_BKR[..., None, None] + written_BKRHJ, (state_BKRHJ, u_BKRiJ)

  chunk = k_cBKiH, v_cBKRiJ, x_cBKRij, seen_cBKRi, left_cBKRi, kept_cBKR
  state_BKRHJ, (state_cBKRHJ, u_cBKRiJ) = jax.lax.scan(advance, state_BKRHJ, chunk)
  qk_cBKij = jnp.einsum("cBKiH,cBKjH->cBKij", q_cBKiH, k_cBKiH)
  y_cBKRiJ = jnp.einsum("cBKRij,cBKRjJ->cBKRiJ", qk_cBKij[:, :, :, None] * decay_cBKRij, u_cBKRiJ)
  read_cBKRiJ = jnp.einsum("cBKiH,cBKRHJ->cBKRiJ", q_cBKiH, state_cBKRHJ)
  y_cBKRiJ += read_cBKRiJ * seen_cBKRi[..., None]
  return (state_BKRHJ, last_cB[-1]), jnp.moveaxis(y_cBKRiJ, 4, 2)


def _owners(segment_cBi: jax.Array, before_B: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the segments of the states before and after each chunk, [c, B].

  A chunk of padding alone does not change the segment.
  """

  def following(before_B, segment_Bi):
    real_Bi = segment_Bi > 0
    index_i = jnp.arange(segment_Bi.shape[1])
    last_B1 = jnp.max(jnp.where(real_Bi, index_i[None], 0), axis=1, keepdims=True)
    last_B = jnp.take_along_axis(segment_Bi, last_B1, axis=1)[:, 0]
    last_B = jnp.where(real_Bi.any(1), last_B, before_B)
    return last_B, (before_B, last_B)

  return jax.lax.scan(following, before_B, segment_cBi)[1]


def _sums(summed_cBij: jax.Array, g_cBKRj: jax.Array) -> jax.Array:
  """Sums g_j over the marked positions j of each i, [c, B, K, R, i]."""
  ones_cBij = summed_cBij.astype(g_cBKRj.dtype)
  exact = jax.lax.Precision.HIGHEST
  return jnp.einsum("cBij,cBKRj->cBKRi", ones_cBij, g_cBKRj, precision=exact)


@jax.custom_vjp
def inverse(a_ij: jax.Array) -> jax.Array:
  """(I + A)⁻¹ for strictly lower triangular matrices A [..., i, j].

  Inverts diagonal blocks of 2, 4, 8, ... rows. A block [[X, 0], [A', Y]] has the inverse
  [[X⁻¹, 0], [-Y⁻¹ A' X⁻¹, Y⁻¹]]. The sum of powers of -A would need fewer products, but its terms
  grow exponentially for equal keys.
  """
  # On TPU, HIGH keeps about 16 bits of each factor. JAX's default keeps 8 bits.
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGH)
  index = np.arange(a_ij.shape[-1])
  x_ij, rows = jnp.broadcast_to(np.eye(len(index), dtype=a_ij.dtype), a_ij.shape), 1
  while rows < len(index):
    block = index // rows
    below = (block[:, None] % 2 == 1) & (block[:, None] == block[None] + 1)
    part_ij = jnp.where(np.broadcast_to(below, a_ij.shape), a_ij, 0)
    # For blocks of two rows, X and Y are 1.
    x_ij = x_ij - (part_ij if rows == 1 else product(product(x_ij, part_ij), x_ij))
    rows *= 2
  return x_ij


def _inverse_forward(a_ij):
  x_ij = checkpoint_name(inverse(a_ij), INVERSE)
  return x_ij, x_ij


def _inverse_backward(x_ij, dx_ij):
  transposed_ij = jnp.swapaxes(x_ij, -1, -2)
  return (-(transposed_ij @ dx_ij @ transposed_ij),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def convolve(
  x_BTY: jax.Array, w_YC: jax.Array, segment_BT: jax.Array, tail_BCY: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes silu(Σ_c w_c x_{t - C + 1 + c}) of each channel, within t's segment.

  Args:
    x_BTY: inputs; Y means any number of axes.
    w_YC: weights of C positions.
    segment_BT: segment numbers, as for `chunked`.
    tail_BCY: the C - 1 inputs before the first position, in the first position's segment.

  Returns:
    Outputs in float32, and the new tail: the C - 1 last inputs that are not padding. The new tail
    is undefined if padding precedes an input.
  """
  T, C = x_BTY.shape[1], w_YC.shape[-1]
  x_BXY = jnp.concatenate([tail_BCY, x_BTY.astype(tail_BCY.dtype)], axis=1)
  first_BC = jnp.repeat(segment_BT[:, :1], C - 1, axis=1)
  segment_BX = jnp.concatenate([first_BC, segment_BT], axis=1)
  y_BTY = jnp.zeros((), jnp.float32)
  for c in range(C):
    same_BT = segment_BX[:, c : c + T] == segment_BT
    same_BTY = jnp.expand_dims(same_BT, range(2, x_BTY.ndim))
    y_BTY += jnp.where(same_BTY, x_BXY[:, c : c + T], 0) * w_YC[None, None, ..., c]
  real_BT, channels = segment_BT > 0, range(2, x_BTY.ndim)
  if T == 1:  # A decode step needs no gather.
    tail_BCY = jnp.where(jnp.expand_dims(real_BT, channels), x_BXY[:, 1:], x_BXY[:, :-1])
  else:
    index_BC = real_BT.sum(1)[:, None] + jnp.arange(C - 1)[None]
    tail_BCY = jnp.take_along_axis(x_BXY, jnp.expand_dims(index_BC, channels), axis=1)
  return jax.nn.silu(y_BTY), tail_BCY


def normalise(x_BTKH: jax.Array) -> jax.Array:
  """x / sqrt(Σ x² + 1e-6) over H, in float32."""
  x_BTKH = x_BTKH.astype(jnp.float32)
  return x_BTKH * jax.lax.rsqrt(jnp.sum(x_BTKH * x_BTKH, axis=-1, keepdims=True) + 1e-6)
