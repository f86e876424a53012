"""JAX's Pallas attention kernel for TPU, without the blocks between two segments.

The kernel takes a causal mask and segment numbers. By itself it computes all causal blocks. If
responses of 8,192 tokens in the mean fill rows of 32,768, six of ten such blocks have no query and
key of the same segment. This module removes them from the mask of each row.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
  SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from gspo_jax import sharding
from gspo_jax.models.attention import blocks
from gspo_jax.models.attention.blocks import RESIDUAL, Scores, pad
from gspo_jax.system import accelerators


def attend(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BS: jax.Array, scores: Scores
) -> jax.Array:
  """Attends causally within segments, [B, T, N, H]; see `attention.attend_self`.

  T and S are padded to whole blocks; the padding has segment -1. H is padded to a multiple of 128.
  """
  (_, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
  q_block, k_block = (512 if n >= 512 else 128 for n in (T, S))
  segments = splash_attention.SegmentIds(
    pad(segment_BS[:, S - T :], q_block, -1), pad(segment_BS, k_block, -1)
  )
  lanes = ((0, 0), (0, 0), (0, 0), (0, -H % 128))
  q, k, v = (
    jnp.swapaxes(jnp.pad(pad(x, block), lanes), 1, 2)  # Heads first.
    for x, block in ((q_BTNH * scores.scale, q_block), (k_BSKH, k_block), (v_BSKH, k_block))
  )
  shape = q.shape[2], k.shape[2]
  interpret = sharding.platform() != "tpu"
  kernel = make(N, shape, q.shape[3], (q_block, k_block), S - T, scores, interpret)

  def attend_row(q, k, v, segments):
    row_kernel = skip(kernel, segments, S - T) if S > blocks.SHORT else kernel
    return row_kernel(q, k, v, segments, scores.sink_N)

  y_BNTH = jax.vmap(attend_row)(q, k, v, segments)
  return jnp.swapaxes(y_BNTH, 1, 2)[:, :T, :, :H]


def make(
  heads: int,
  shape: tuple[int, int],
  width: int,
  multiples: tuple[int, int],
  first: int,
  scores: Scores,
  interpret: bool,
) -> SplashAttentionKernel:
  """Builds the kernel; query 0 has the index `first` among the keys.

  shape, width: padded numbers of queries and keys, and padded H.
  multiples: divisors of `shape`, the blocks of some of the loops.
  """
  mask = splash_attention.CausalMask(shape, offset=first)
  if scores.window:
    mask = splash_attention.LocalMask(shape, (scores.window - 1, 0), offset=first)
  # Each block of queries reads all keys, and in the backward pass each block of keys reads all
  # queries. So the largest blocks that fit in the chip's vector memory have the least traffic from
  # HBM. For 32 heads and 32,768 positions on v5p, the traffic of a layer is 22 GB. With blocks of
  # half the size, the traffic would be 36 GB.
  (queries, keys), (q_block, k_block) = shape, multiples
  most = 1024 * accelerators.vector_memory(sharding.device_kind()) // 2**24
  return splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([mask] * heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash_attention.BlockSizes(
      block_q=math.gcd(queries, most),
      block_kv=math.gcd(keys, 1024),
      block_kv_compute=k_block,
      block_q_dkv=q_block,
      block_kv_dkv=math.gcd(keys, most * 2 if width <= 128 else most),
      block_kv_dkv_compute=k_block,
      block_q_dq=math.gcd(queries, most),
      block_kv_dq=k_block,
    ),
    attn_logits_soft_cap=scores.cap or None,
    residual_checkpoint_name=RESIDUAL,
    interpret=interpret,
  )


def skip(kernel: SplashAttentionKernel, segments: Any, first: int) -> SplashAttentionKernel:
  """Returns the kernel for a row; it skips blocks without a common segment.

  segments: `SegmentIds` of the padded row.
  first: index of query 0 among the keys.
  """
  sizes, kv = kernel.kwargs["block_sizes"], segments.kv[None]
  positions = jnp.arange(kv.shape[1], dtype=jnp.int32)[None]
  query = segments.q[None], first + positions[:, : len(segments.q)]

  def visible(q_size: int, k_size: int) -> jax.Array:
    q_ranges = blocks.segment_ranges(*query, q_size)
    return blocks.overlap(q_ranges, blocks.segment_ranges(kv, positions, k_size))[0]

  return SplashAttentionKernel(
    _masked(kernel.fwd_mask_info, visible(sizes.block_q, sizes.block_kv), axis=1),
    _masked(kernel.dq_mask_info, visible(sizes.block_q_dq, sizes.block_kv_dq), axis=1),
    _masked(kernel.dkv_mask_info, visible(sizes.block_q_dkv, sizes.block_kv_dkv), axis=0),
    **kernel.kwargs,
  )


def _masked(mask: MaskInfo, visible_qk: jax.Array, axis: int) -> MaskInfo:
  """Removes invisible blocks from a mask, and the loads of their data.

  The kernel visits the blocks of `data_next` along an axis, and computes those whose `block_mask`
  is above 0. A removed entry has the data of the next block to compute, which is then loaded once.

  axis: 1 if the entries of a line are blocks of keys, 0 if they are blocks of queries.
  """
  if mask.data_next is None:
    return mask
  data, kind = mask.data_next[0].astype(jnp.int32), mask.block_mask[0]
  computed = (kind > 0) & jnp.take_along_axis(visible_qk, data, axis)
  number = data.shape[axis]
  entry = jax.lax.broadcasted_iota(jnp.int32, data.shape, axis)
  following = jax.lax.cummin(jnp.where(computed, entry, number), axis, reverse=True)
  last = jnp.where(computed, entry, 0).max(axis, keepdims=True)
  data = jnp.take_along_axis(data, jnp.where(following < number, following, last), axis)
  return mask._replace(
    data_next=data.astype(mask.data_next.dtype)[None],
    block_mask=jnp.where(computed, kind, 0)[None],
  )
