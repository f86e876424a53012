"""Rotary positions and grouped-query attention.

Four formulations of the same sum, chosen by `ComputeConfig.attention`:

  plain      holds the [T, S] scores: short sequences, and one query at a time against a cache
  blockwise  online softmax over blocks of keys: anywhere, any length, no [T, S] array
  splash     JAX's Pallas kernel for TPU (interpreted elsewhere)
  cudnn      the flash attention of cuDNN, through jax.nn.dot_product_attention: GPU, 16 bit
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gspo_jax import sharding
from gspo_jax.sharding import AXES

NEGATIVE = -1e30  # finite: a row that may look at nothing gives a mean, not NaN
PLAIN = 128  # up to so many queries kernels bring nothing; blocks, up to twice as many
SLAB = 64  # queries of `plain` that share a product: about half of the scores are never made
BLOCK = 512  # queries and keys whose scores exist at once, of `blockwise`; on CPU at most
RESIDUAL = "attention"  # name of what the backward pass needs, for rematerialisation policies


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary embedding, Hugging Face's half-split convention; angles in float32.

  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the two halves of H, with angle
  position · theta^(-2i/H).  RoFormer, arXiv:2104.09864, eq. 34.
  """
  half = x_BTNH.shape[-1] // 2
  # NumPy rounds as Hugging Face does, whatever the device's power function: at position 30,000 the
  # last bit of a frequency is a visible turn.
  exponent_h = np.arange(half, dtype=np.float32) / np.float32(half)
  frequency_h = np.float32(1) / np.power(theta, exponent_h, dtype=np.float64).astype(np.float32)
  angle_BT1h = (position_BT.astype(jnp.float32)[..., None] * frequency_h[None, None])[:, :, None]
  cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
  x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)


def choose(implementation: str, queries: int, dtype) -> str:
  """The named formulation, or for "auto" what suits the length and the platform of the mesh."""
  if implementation != "auto":
    return implementation
  kernel = dict(tpu="splash", gpu="cudnn", cuda="cudnn").get(sharding.platform())
  if kernel == "cudnn" and jnp.dtype(dtype).itemsize > 2:
    kernel = None
  if queries <= (PLAIN if kernel else 2 * PLAIN):
    return "plain"
  return kernel or "blockwise"


def attend_self(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_BT: jax.Array,
  implementation: str = "plain",
) -> jax.Array:
  """Causal attention of a sequence to itself, within segments of equal id; [B, T, N, H].

  softmax(q kᵀ / √H) v over the keys at or before the query and of its segment, softmax in float32;
  N/K queries share each key.
  """
  T = q_BTNH.shape[1]
  if implementation == "plain":
    order_T, parts = np.arange(T), []
    for first in range(0, T, SLAB):  # to no key that comes after all of a slab's queries
      rows, keys = slice(first, first + SLAB), slice(first + SLAB)
      visible = (order_T[rows, None] >= order_T[None, keys])[None]
      visible &= segment_BT[:, rows, None] == segment_BT[:, None, keys]
      parts.append(attend(q_BTNH[:, rows], k_BTKH[:, keys], v_BTKH[:, keys], visible))
    return jnp.concatenate(parts, axis=1)
  if implementation == "splash":
    return attend_splash(q_BTNH, k_BTKH, v_BTKH, segment_BT)
  if implementation == "cudnn":
    return attend_cudnn(q_BTNH, k_BTKH, v_BTKH, segment_BT)
  order_BT = jnp.broadcast_to(jnp.arange(T)[None], segment_BT.shape)
  return attend_blockwise(q_BTNH, k_BTKH, v_BTKH, order_BT, segment_BT, segment_BT)


class Tree(NamedTuple):
  """What each `branches` rows hold, read as one: [trunk, branch, branch, ...]; every branch
  continues the trunk and knows of no other."""

  trunk: int  # positions, a multiple of `branches`
  branches: int


def attend_tree(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_BT: jax.Array,
  tree: Tree,
  implementation: str = "plain",
) -> jax.Array:
  """`attend_self` of every path, which is the trunk and one of its branches; [B, T, N, H]."""
  S, G = tree

  def paths(x_BT):
    x_RX = x_BT.reshape(-1, G * x_BT.shape[1], *x_BT.shape[2:])
    trunk_RS, branch_RX = x_RX[:, :S], x_RX[:, S:]
    branch_RGU = branch_RX.reshape(len(x_RX), G, -1, *x_BT.shape[2:])
    trunk_RGS = jnp.broadcast_to(trunk_RS[:, None], (*branch_RGU.shape[:2], *trunk_RS.shape[1:]))
    path_RGX = jnp.concatenate([trunk_RGS, branch_RGU], axis=2)
    return path_RGX.reshape(len(x_BT), -1, *x_BT.shape[2:])

  y_BX = attend_self(*map(paths, (q_BTNH, k_BTKH, v_BTKH, segment_BT)), implementation)
  y_RGX = y_BX.reshape(-1, G, *y_BX.shape[1:])
  branch_RX = y_RGX[:, :, S:].reshape(len(y_RGX), -1, *y_BX.shape[2:])
  return jnp.concatenate([y_RGX[:, 0, :S], branch_RX], axis=1).reshape(q_BTNH.shape)


def attend_cache(
  q_BTNH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, position_BT: jax.Array
) -> jax.Array:
  """Queries at `position_BT` to the slots 0..position of a cache; [B, T, N, H]."""
  (B, T, N, H), (K, S) = q_BTNH.shape, v_BKSH.shape[1:3]
  if T > PLAIN and T * S > PLAIN * PLAIN:
    one = jnp.ones((B, 1), jnp.int32)
    segments = (jnp.broadcast_to(one, (B, n)) for n in (T, S))
    k_BSKH, v_BSKH = jnp.moveaxis(k_BKHS, 3, 1), jnp.moveaxis(v_BKSH, 2, 1)
    return attend_blockwise(q_BTNH, k_BSKH, v_BSKH, position_BT, *segments)
  q_BTKnH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
  score = jnp.einsum("BTKnH,BKHS->BKTnS", q_BTKnH, k_BKHS, preferred_element_type=jnp.float32)
  visible_BTS = position_BT[:, :, None] >= jnp.arange(S)[None, None]
  score = jnp.where(visible_BTS[:, None, :, None], score, NEGATIVE)
  weight = jax.nn.softmax(score, axis=-1).astype(v_BKSH.dtype)
  y_BKTnH = jnp.einsum("BKTnS,BKSH->BKTnH", weight, v_BKSH)
  return jnp.swapaxes(y_BKTnH, 1, 2).reshape(B, T, N, H)


def attend(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, visible_BTS: jax.Array
) -> jax.Array:
  """softmax(q kᵀ / √H) v over the visible keys, softmax in float32; N/K queries share each key."""
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[2]
  q_BTKnH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
  score = jnp.einsum("BTKnH,BSKH->BKnTS", q_BTKnH, k_BSKH, preferred_element_type=jnp.float32)
  score = jnp.where(visible_BTS[:, None, None], score, NEGATIVE)
  weight = jax.nn.softmax(score, axis=-1).astype(v_BSKH.dtype)
  return jnp.einsum("BKnTS,BSKH->BTKnH", weight, v_BSKH).reshape(B, T, N, H)


def attend_blockwise(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  order_BT: jax.Array,
  segment_BT: jax.Array,
  segment_BS: jax.Array,
  block: int = 0,
) -> jax.Array:
  """`attend` in blocks: query t sees key s if s <= order_t and their segments are equal.

  Scores exist for one block of queries and one of keys at a time, forward and backward, and blocks
  beyond the last visible key are skipped. FlashAttention, arXiv:2205.14135, algorithms 1 and 4.
  `block` is the number of queries and of keys; 0: what suits the platform.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  block = block or block_size(B * N)
  R, C = _even(T, block), _even(S, block)
  # Padded queries come first of all (order -1: no block of keys), padded keys are of no segment.
  q = _blocks(q_BTNH * (H**-0.5), R).reshape(-1, B, R, K, N // K, H)
  order, query_segment = _blocks(order_BT, R, -1), _blocks(segment_BT, R, -1)
  k, v = _pad(k_BSKH, C), _pad(v_BSKH, C)
  y_iBRKnH = _flash(q, k, v, order, query_segment, _pad(segment_BS, C, -2), C)
  return jnp.moveaxis(y_iBRKnH, 0, 1).reshape(B, -1, N, H)[:, :T].astype(q_BTNH.dtype)


def block_size(rows: int) -> int:
  """A power of two. On CPU, scores of `rows` heads that stay in a core's cache, about a megabyte:
  blocks of 512 take twice as long."""
  if sharding.platform() != "cpu":
    return BLOCK
  fits = math.isqrt(max(2**18 // rows, 64**2))
  return min(BLOCK, 1 << (fits.bit_length() - 1))


def _even(length: int, block: int) -> int:
  """About `block`, so that blocks of equal size have little padding; a multiple of 8 if several."""
  parts = round(length / block)
  return length if parts <= 1 else -(-length // parts // 8) * 8


def _pad(x_BT: jax.Array, size: int, value: int = 0) -> jax.Array:
  """Axis 1 to a multiple of `size`."""
  width = [(0, 0), (0, -x_BT.shape[1] % size)] + [(0, 0)] * (x_BT.ndim - 2)
  return jnp.pad(x_BT, width, constant_values=value)


def _blocks(x_BT: jax.Array, size: int, value: int = 0) -> jax.Array:
  """[B, T, ...] -> [T / size, B, size, ...], padded."""
  x = _pad(x_BT, size, value)
  return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _flash(q, k, v, order, query_segment, key_segment, C):
  return _flash_forward(q, k, v, order, query_segment, key_segment, C)[0]


def _keys(j, C, *arrays):
  return (jax.lax.dynamic_slice_in_dim(x, j * C, C, axis=1) for x in arrays)


def _scores(q_BRKnH, k_BCKH, order_BR, query_segment_BR, key_segment_BC, j):
  """Masked float32 scores [B, K, n, R, C] of one block of queries and block j of keys."""
  score = jnp.einsum("BRKnH,BCKH->BKnRC", q_BRKnH, k_BCKH, preferred_element_type=jnp.float32)
  C = k_BCKH.shape[1]
  visible = order_BR[:, :, None] >= (j * C + jnp.arange(C))[None, None]
  visible &= query_segment_BR[:, :, None] == key_segment_BC[:, None, :]
  return jnp.where(visible[:, None, None], score, NEGATIVE)


def _flash_forward(q, k, v, order, query_segment, key_segment, C):
  """q [i, B, R, K, n, H]; k, v [B, S, K, H] -> float32 output like q, and residuals."""
  _, B, R, K, n, H = q.shape

  def one(block):
    q_BRKnH, order_BR, segment_BR = block

    def body(j, carry):
      most, total, sum_BKnRH = carry
      k_BCKH, v_BCKH, segment_BC = _keys(j, C, k, v, key_segment)
      score = _scores(q_BRKnH, k_BCKH, order_BR, segment_BR, segment_BC, j)
      new = jnp.maximum(most, score.max(-1))
      weight = jnp.exp(score - new[..., None])
      scale = jnp.exp(most - new)
      part = jnp.einsum(
        "BKnRC,BCKH->BKnRH",
        weight.astype(v.dtype),
        v_BCKH,
        preferred_element_type=jnp.float32,
      )
      total = total * scale + weight.sum(-1)
      return new, total, sum_BKnRH * scale[..., None] + part

    full = lambda value, *more: jnp.full((B, K, n, R, *more), value, jnp.float32)  # noqa: E731
    start = sharding.vary((full(NEGATIVE), full(0.0), full(0.0, H)), AXES)
    last = jnp.minimum(order_BR.max() // C + 1, k.shape[1] // C)
    most, total, sum_BKnRH = jax.lax.fori_loop(0, last, body, start)
    total = jnp.maximum(total, 1e-30)
    y = jnp.moveaxis(sum_BKnRH / total[..., None], 3, 1)
    return y, most + jnp.log(total)

  y, lse = jax.lax.map(one, (q, order, query_segment))
  y, lse = (checkpoint_name(x, RESIDUAL) for x in (y.astype(q.dtype), lse))
  return y, (q, k, v, order, query_segment, key_segment, y, lse)


def _flash_backward(C, residuals, dy):
  q, k, v, order, query_segment, key_segment, y, lse = residuals
  wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def one(carry, block):
    q_BRKnH, order_BR, segment_BR, y_BRKnH, lse_BKnR, dy_BRKnH = block
    delta_BRKn = jnp.sum(dy_BRKnH.astype(jnp.float32) * y_BRKnH, axis=-1)
    delta_BKnR = jnp.moveaxis(delta_BRKn, 1, 3)

    def body(j, carry):
      dq, dk, dv = carry
      k_BCKH, v_BCKH, segment_BC = _keys(j, C, k, v, key_segment)
      score = _scores(q_BRKnH, k_BCKH, order_BR, segment_BR, segment_BC, j)
      weight = jnp.exp(score - lse_BKnR[..., None])
      dweight = wide("BRKnH,BCKH->BKnRC", dy_BRKnH, v_BCKH)
      dscore = (weight * (dweight - delta_BKnR[..., None])).astype(q.dtype)
      dq = dq + wide("BKnRC,BCKH->BRKnH", dscore, k_BCKH)
      dk_BCKH = wide("BKnRC,BRKnH->BCKH", dscore, q_BRKnH)
      dv_BCKH = wide("BKnRC,BRKnH->BCKH", weight.astype(q.dtype), dy_BRKnH)
      old = _keys(j, C, dk, dv)
      dk, dv = (
        jax.lax.dynamic_update_slice_in_dim(total, before + part, j * C, axis=1)
        for total, before, part in zip((dk, dv), old, (dk_BCKH, dv_BCKH))
      )
      return dq, dk, dv

    dq = sharding.vary(jnp.zeros(q_BRKnH.shape, jnp.float32), AXES)
    last = jnp.minimum(order_BR.max() // C + 1, k.shape[1] // C)
    dq, dk, dv = jax.lax.fori_loop(0, last, body, (dq, *carry))
    return (dk, dv), dq.astype(q.dtype)

  zeros = sharding.vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v)), AXES)
  blocks = (q, order, query_segment, y, lse, dy)
  (dk, dv), dq = jax.lax.scan(one, zeros, blocks)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_flash.defvjp(_flash_forward, _flash_backward)


def attend_splash(
  q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_BT: jax.Array
) -> jax.Array:
  """The Pallas kernel of JAX for TPU; interpreted on other platforms.

  T is padded to whole blocks, with a segment of its own, and H to the 128 lanes of the hardware.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

  _, T, N, H = q_BTNH.shape
  block = 512 if T >= 512 else 128
  segments = splash.SegmentIds(*[_pad(segment_BT, block, -1)] * 2)
  lanes = ((0, 0), (0, 0), (0, 0), (0, -H % 128))
  q, k, v = (
    jnp.swapaxes(jnp.pad(_pad(x, block), lanes), 1, 2) for x in (q_BTNH * (H**-0.5), k_BTKH, v_BTKH)
  )
  kernel = _splash_kernel(N, q.shape[2], block, sharding.platform() != "tpu")
  y_BNTH = jax.vmap(kernel)(q, k, v, segments)
  return jnp.swapaxes(y_BNTH, 1, 2)[:, :T, :, :H]


def _splash_kernel(heads: int, length: int, block: int, interpret: bool):
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  mask = splash.CausalMask((length, length))
  largest = math.gcd(
    length, 1024
  )  # keys that stay in fast memory; scores exist for `block` of them
  return splash.make_splash_mha(
    splash.MultiHeadMask([mask] * heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash.BlockSizes(
      block_q=block,
      block_kv=largest,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=largest,
      block_kv_dkv_compute=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    residual_checkpoint_name=RESIDUAL,
    interpret=interpret,
  )


def attend_cudnn(
  q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_BT: jax.Array
) -> jax.Array:
  """cuDNN's flash attention, for rows of one segment that may be followed by padding.

  There a causal mask is enough: padding comes last, so that no token sees it. cuDNN takes no
  segments without a [T, T] array, so packed rows, seen at run time, go through `attend_blockwise`.
  """

  def fused(q, k, v, _):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

  first_B1 = segment_BT[:, :1]
  padded = jnp.all((segment_BT == first_B1) | (segment_BT == 0))
  by_blocks = functools.partial(attend_self, implementation="blockwise")
  return jax.lax.cond(padded, fused, by_blocks, q_BTNH, k_BTKH, v_BTKH, segment_BT)
