"""Gated delta rule: linear attention with a recurrent state of constant size.

Each head has a state S [H, J], a map from keys to values. A position lets the state decay, and
corrects the value that the state returns for its key:

  S_t = e^g_t S_{t-1} + k_t u_tᵀ,   u_t = β_t (v_t - e^g_t S_{t-1}ᵀ k_t),   y_t = S_tᵀ q_t

Gated Delta Networks, arXiv:2412.06464, equation 10. `step` computes one position, for decoding.
`chunked` computes a row in chunks, with products of matrices only (§3.3).

Letters in addition to those of structs.py:

  R  value heads per key head      i, j  positions of a chunk
  J  width of a value              C     positions of a convolution
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 64  # Positions of a chunk: for H = J = 128, the products within and between chunks balance.


class Inputs(NamedTuple):
  """Inputs of the rule. K key heads have R value heads each."""

  q_BTKH: jax.Array
  k_BTKH: jax.Array
  v_BTKRJ: jax.Array
  g_BTKR: jax.Array  # Logarithm of the decay, at most 0.
  beta_BTKR: jax.Array  # Write strength β, between 0 and 1.

  def masked(self, real_BT: jax.Array) -> "Inputs":
    """Makes padding neutral: it neither decays the state nor writes to it."""
    real_BTKR = real_BT[:, :, None, None]
    return self._replace(
      g_BTKR=jnp.where(real_BTKR, self.g_BTKR, 0),
      beta_BTKR=jnp.where(real_BTKR, self.beta_BTKR, 0),
    )


def step(inputs: Inputs, state_BKRHJ: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes one position, T = 1; returns outputs [B, 1, K, R, J] and states."""
  q_BKH, k_BKH, v_BKRJ, g_BKR, beta_BKR = (x[:, 0].astype(jnp.float32) for x in inputs)
  decay_BKRJ = jnp.exp(g_BKR)[..., None]
  # Sums of products: a matrix product would round its inputs on TPU, and gain nothing. Both sums
  # are over the old state, S_tᵀ q = e^g S_{t-1}ᵀ q + (k · q) u, so that one pass reads it for both.
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

  The backward pass recomputes each chunk from the state before it.

  Args:
    segment_BT: segment numbers. The state begins anew with each segment; 0 is padding, which
      changes no state. A segment is contiguous, except for padding.
    state_BKRHJ: states before the first position, which belong to the first position's segment.

  Returns:
    Outputs, float32 [B, T, K, R, J], undefined for padding; states after the last segment.
  """
  B, T = segment_BT.shape
  size = min(CHUNK, T)
  inputs = inputs.masked(segment_BT > 0)

  def split(x_BT: jax.Array) -> jax.Array:
    """Splits axis 1 into padded chunks, [c, B, size, ...]."""
    width = [(0, 0), (0, -T % size)] + [(0, 0)] * (x_BT.ndim - 2)
    x_BX = jnp.pad(x_BT, width)
    return jnp.moveaxis(x_BX.reshape(B, -1, size, *x_BT.shape[2:]), 1, 0)

  parts = *map(split, inputs), split(segment_BT)
  # Each chunk is one remat region: only the states between chunks are saved.
  body = jax.checkpoint(_chunk, prevent_cse=False)
  carry = state_BKRHJ, segment_BT[:, 0]
  if T <= CHUNK:
    (state_BKRHJ, _), y = body(carry, tuple(x[0] for x in parts))
    return y, state_BKRHJ
  (state_BKRHJ, _), y_cBiKRJ = jax.lax.scan(body, carry, parts)
  y_BXKRJ = jnp.moveaxis(y_cBiKRJ, 0, 1).reshape(B, -1, *y_cBiKRJ.shape[3:])
  return y_BXKRJ[:, :T], state_BKRHJ


def _chunk(carry, part):
  """Computes the positions of one chunk.

  Within a chunk, all u_i solve (I + A) U = B, with A_ij = β_i e^(G_i - G_j) k_iᵀ k_j for j < i, and
  the row β_i (v_i - e^G_i Sᵀ k_i) of B. G is the cumulative sum of g in i's segment.

  carry: states before the chunk, and the segments to which they belong.
  """
  state_BKRHJ, owner_B = carry
  *inputs, segment_Bi = part
  q_BiKH, k_BiKH, v_BiKRJ, g_BiKR, beta_BiKR = (x.astype(jnp.float32) for x in inputs)
  last_B = _last_segment(segment_Bi, owner_B)
  visible_Bij = jnp.tril(segment_Bi[:, :, None] == segment_Bi[:, None, :])
  # A sum over all segments would round a segment's decays by those of earlier segments.
  total_BiKR = _sums(visible_Bij, g_BiKR)
  total_BKRi = jnp.moveaxis(total_BiKR, 1, 3)
  between_BKRij = jnp.where(
    visible_Bij[:, None, None], total_BKRi[..., :, None] - total_BKRi[..., None, :], -jnp.inf
  )
  decay_BKRij = jnp.exp(between_BKRij)
  beta_BKRi = jnp.moveaxis(beta_BiKR, 1, 3)

  # State of earlier chunks, as each position of its segment sees it.
  seen_BiKR = jnp.exp(total_BiKR) * (segment_Bi == owner_B[:, None])[:, :, None, None]
  recalled_BiKRJ = jnp.einsum("BiKH,BKRHJ->BiKRJ", k_BiKH, state_BKRHJ) * seen_BiKR[..., None]
  kk_BKij = jnp.einsum("BiKH,BjKH->BKij", k_BiKH, k_BiKH)
  a_BKRij = jnp.tril(beta_BKRi[..., None] * kk_BKij[:, :, None] * decay_BKRij, -1)
  b_BiKRJ = beta_BiKR[..., None] * (v_BiKRJ - recalled_BiKRJ)
  u_BiKRJ = jnp.einsum("BKRij,BjKRJ->BiKRJ", inverse(a_BKRij), b_BiKRJ)

  qk_BKRij = jnp.einsum("BiKH,BjKH->BKij", q_BiKH, k_BiKH)[:, :, None] * decay_BKRij
  y_BiKRJ = jnp.einsum("BKRij,BjKRJ->BiKRJ", qk_BKRij, u_BiKRJ)
  y_BiKRJ += jnp.einsum("BiKH,BKRHJ->BiKRJ", q_BiKH, state_BKRHJ) * seen_BiKR[..., None]

  in_last_Bi = segment_Bi == last_B[:, None]
  end_B1KR = _sums(in_last_Bi[:, None], g_BiKR)
  kept_BKR = jnp.exp(end_B1KR[:, 0]) * (owner_B == last_B)[:, None, None]
  # Positions of other segments may have a positive exponent, so it is masked before `exp`.
  rest_BiKR = jnp.where(in_last_Bi[:, :, None, None], end_B1KR - total_BiKR, -jnp.inf)
  written_BKRHJ = jnp.einsum("BiKH,BiKRJ->BKRHJ", k_BiKH, u_BiKRJ * jnp.exp(rest_BiKR)[..., None])
  return (state_BKRHJ * kept_BKR[..., None, None] + written_BKRHJ, last_B), y_BiKRJ


def _sums(summed_Bij: jax.Array, x_BjKR: jax.Array) -> jax.Array:
  """Sums x_j over the marked positions j of each i, [B, i, K, R]."""
  ones_Bij = summed_Bij.astype(x_BjKR.dtype)
  return jnp.einsum("Bij,BjKR->BiKR", ones_Bij, x_BjKR, precision=jax.lax.Precision.HIGHEST)


def _last_segment(segment_BT: jax.Array, before_B: jax.Array) -> jax.Array:
  """Returns the number of each row's last segment, or `before_B` if the row is padding."""
  real_BT = segment_BT > 0
  index_T = jnp.arange(segment_BT.shape[1])
  last_B1 = jnp.max(jnp.where(real_BT, index_T[None], 0), axis=1, keepdims=True)
  last_B = jnp.take_along_axis(segment_BT, last_B1, axis=1)[:, 0]
  return jnp.where(real_BT.any(1), last_B, before_B)


@jax.custom_vjp
def inverse(a_ij: jax.Array) -> jax.Array:
  """(I + A)⁻¹ for strictly lower triangular matrices A [..., i, j].

  Inverts diagonal blocks of 1, 2, 4, ... rows: a block of twice the size with halves X and Y and
  the part A' below its diagonal has the inverse [[X⁻¹, 0], [-Y⁻¹ A' X⁻¹, Y⁻¹]]. The sum of powers
  of A would need fewer products, but its terms grow exponentially for equal keys.
  """
  index = np.arange(a_ij.shape[-1])
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  x_ij, size = None, 1
  while size < len(index):
    block = index // size
    below = (block[:, None] % 2 == 1) & (block[:, None] == block[None] + 1)
    part_ij = jnp.where(np.broadcast_to(below, a_ij.shape), a_ij, 0)
    if x_ij is None:
      x_ij = np.broadcast_to(np.eye(len(index), dtype=a_ij.dtype), a_ij.shape) - part_ij
    else:
      x_ij = x_ij - product(product(x_ij, part_ij), x_ij)
    size *= 2
  return jnp.ones_like(a_ij) if x_ij is None else x_ij


def _inverse_forward(a_ij):
  x_ij = inverse(a_ij)
  return x_ij, x_ij


def _inverse_backward(x_ij, dx_ij):
  transposed_ij = jnp.swapaxes(x_ij, -1, -2)
  return (-(transposed_ij @ dx_ij @ transposed_ij),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def convolve(
  x_BTY: jax.Array, w_YC: jax.Array, segment_BT: jax.Array, tail_BCY: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """silu(Σ_c w_c x_{t - C + 1 + c}) of each channel, over positions of t's segment.

  Args:
    x_BTY: inputs; Y stands for any number of axes.
    w_YC: weights of C positions.
    segment_BT: segment numbers, as for `chunked`.
    tail_BCY: the C - 1 inputs before the first position, of the first position's segment.

  Returns:
    Outputs in float32, and the tail after the last input that is not padding. The tail is undefined
    if padding lies before this input.
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
  if T == 1:  # Without a gather at every decode step.
    tail_BCY = jnp.where(jnp.expand_dims(real_BT, channels), x_BXY[:, 1:], x_BXY[:, :-1])
  else:
    index_BC = real_BT.sum(1)[:, None] + jnp.arange(C - 1)[None]
    tail_BCY = jnp.take_along_axis(x_BXY, jnp.expand_dims(index_BC, channels), axis=1)
  return jax.nn.silu(y_BTY), tail_BCY


def normalise(x_BTKH: jax.Array) -> jax.Array:
  """x / sqrt(Σ x² + 1e-6) over H, in float32."""
  x_BTKH = x_BTKH.astype(jnp.float32)
  return x_BTKH * jax.lax.rsqrt(jnp.sum(x_BTKH * x_BTKH, axis=-1, keepdims=True) + 1e-6)
