"""Rotary positions and grouped-query attention.

Four formulations of the same sum, chosen by `ComputeConfig.attention`:

  plain      holds the [T, S] scores: short sequences, and one query at a time against a cache
  blockwise  online softmax over blocks of keys: anywhere, any length, no [T, S] array
  splash     JAX's Pallas kernel for TPU (interpreted elsewhere)
  cudnn      the flash attention of cuDNN, through jax.nn.dot_product_attention: GPU, 16 bit
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models.attention.blocks import (
  NEGATIVE,
  RESIDUAL,
  Scores,
  attend_blockwise,
  pad,
  softcap,
)

PLAIN = 128  # up to so many queries kernels bring nothing; blocks, up to twice as many
SLAB = 64  # queries of `plain` that share a product: about half of the scores are never made


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


def choose(
  implementation: str,
  queries: int,
  dtype: Any,
  scores: Scores | None = None,
  gaps: bool = False,
  width: int = 128,
) -> str:
  """Names the formulation: the one asked for, or what suits the length and the mesh's platform.

  Args:
    implementation: as `ComputeConfig.attention`.
    scores: None: without window and bound.
    gaps: whether padding may lie between the keys of a segment.
    width: H, of one head.

  Raises:
    ValueError: a formulation by name that does not have such scores or heads.
  """
  if missing := lacks(implementation, dtype, scores, gaps, width):
    raise ValueError(f"compute.attention={implementation!r} has no {missing}: set it to auto")
  if implementation != "auto":
    return implementation
  kernel = dict(tpu="splash", gpu="cudnn", cuda="cudnn").get(sharding.platform())
  if lacks(kernel, dtype, scores, gaps, width):
    kernel = None
  if queries <= (PLAIN if kernel else 2 * PLAIN):
    return "plain"
  return kernel or "blockwise"


def lacks(
  implementation: str | None, dtype: Any, scores: Scores | None, gaps: bool, width: int
) -> str:
  """Names what of such scores and heads a kernel does not have; "": it has all."""
  window, cap = (scores.window, scores.cap) if scores else (0, 0.0)
  if implementation == "splash" and window and gaps:  # it measures by places in the row
    return "sliding window where responses share their prompt"
  if implementation != "cudnn":
    return ""
  if cap:
    return "soft bound on scores"
  if window:
    return "sliding window"
  if jnp.dtype(dtype).itemsize > 2:
    return f"{jnp.dtype(dtype).name}, 16-bit types alone"
  if width % 8 or width > _widest_head():
    return f"heads of {width} here: they are multiples of 8, and {_widest_head()} at most"
  return ""


def _widest_head() -> int:
  """Of cuDNN's attention on these devices."""
  capability = getattr(jax.local_devices()[0], "compute_capability", "0")
  return 256 if float(capability) >= 9 else 128  # Hopper


def attend_self(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_BT: jax.Array,
  implementation: str = "plain",
  scores: Scores | None = None,
  position_BT: jax.Array | None = None,
) -> jax.Array:
  """Causal attention of a sequence to itself, within segments of equal id; [B, T, N, H].

  softmax(q kᵀ / √H) v over the keys at or before the query and of its segment, softmax in float32;
  N/K queries share each key. `scores` says what else there is to a score, `position_BT` what its
  window is measured by; default: the place in the row.
  """
  T, scores = q_BTNH.shape[1], scores or Scores(q_BTNH.shape[3] ** -0.5)
  order_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], segment_BT.shape)
  position_BT = order_BT if position_BT is None else position_BT
  if implementation == "plain":
    order_T, parts = np.arange(T), []
    for first in range(0, T, SLAB):  # to no key that comes after all of a slab's queries
      rows, keys = slice(first, first + SLAB), slice(first + SLAB)
      visible = (order_T[rows, None] >= order_T[None, keys])[None]
      visible &= segment_BT[:, rows, None] == segment_BT[:, None, keys]
      if scores.window:
        visible &= position_BT[:, rows, None] - position_BT[:, None, keys] < scores.window
      parts.append(attend(q_BTNH[:, rows], k_BTKH[:, keys], v_BTKH[:, keys], visible, scores))
    return jnp.concatenate(parts, axis=1)
  if implementation == "splash":
    return attend_splash(q_BTNH, k_BTKH, v_BTKH, segment_BT, scores)
  if implementation == "cudnn":
    return attend_cudnn(q_BTNH, k_BTKH, v_BTKH, segment_BT, scores)
  return attend_blockwise(
    q_BTNH, k_BTKH, v_BTKH, order_BT, (segment_BT, segment_BT), scores, (position_BT, position_BT)
  )


class Tree(NamedTuple):
  """Layout of each `branches` rows read as one, [trunk, branch, branch, ...]: a branch continues
  the trunk and knows of no other."""

  trunk: int  # positions, a multiple of `branches`
  branches: int


def attend_tree(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_BT: jax.Array,
  tree: Tree,
  implementation: str = "plain",
  scores: Scores | None = None,
  position_BT: jax.Array | None = None,
) -> jax.Array:
  """`attend_self` of every path, which is the trunk and one of its branches; [B, T, N, H].

  Between a short trunk and its branches lies padding: a window needs `position_BT`.
  """
  S, G = tree

  def paths(x_BT):
    x_RX = x_BT.reshape(-1, G * x_BT.shape[1], *x_BT.shape[2:])
    trunk_RS, branch_RX = x_RX[:, :S], x_RX[:, S:]
    branch_RGU = branch_RX.reshape(len(x_RX), G, -1, *x_BT.shape[2:])
    trunk_RGS = jnp.broadcast_to(trunk_RS[:, None], (*branch_RGU.shape[:2], *trunk_RS.shape[1:]))
    path_RGX = jnp.concatenate([trunk_RGS, branch_RGU], axis=2)
    return path_RGX.reshape(len(x_BT), -1, *x_BT.shape[2:])

  position_BX = None if position_BT is None else paths(position_BT)
  along = map(paths, (q_BTNH, k_BTKH, v_BTKH, segment_BT))
  y_BX = attend_self(*along, implementation, scores, position_BX)
  y_RGX = y_BX.reshape(-1, G, *y_BX.shape[1:])
  branch_RX = y_RGX[:, :, S:].reshape(len(y_RGX), -1, *y_BX.shape[2:])
  return jnp.concatenate([y_RGX[:, 0, :S], branch_RX], axis=1).reshape(q_BTNH.shape)


def attend_cache(
  q_BTNH: jax.Array,
  k_BKHS: jax.Array,
  v_BKSH: jax.Array,
  position_BT: jax.Array,
  scores: Scores | None = None,
) -> jax.Array:
  """Queries at `position_BT` to the slots 0..position of a cache; [B, T, N, H]."""
  (B, T, N, H), (K, S) = q_BTNH.shape, v_BKSH.shape[1:3]
  scores = scores or Scores(H**-0.5)
  slot_1S = jnp.arange(S, dtype=jnp.int32)[None]
  if T > PLAIN and T * S > PLAIN * PLAIN:
    k_BSKH, v_BSKH = jnp.moveaxis(k_BKHS, 3, 1), jnp.moveaxis(v_BKSH, 2, 1)
    segments = jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32)
    positions = position_BT, jnp.broadcast_to(slot_1S, (B, S))
    return attend_blockwise(q_BTNH, k_BSKH, v_BSKH, position_BT, segments, scores, positions)
  q_BTKnH = q_BTNH.reshape(B, T, K, N // K, H) * scores.scale
  score = jnp.einsum("BTKnH,BKHS->BKTnS", q_BTKnH, k_BKHS, preferred_element_type=jnp.float32)
  visible_BTS = position_BT[:, :, None] >= slot_1S[None]
  if scores.window:
    visible_BTS &= position_BT[:, :, None] - slot_1S[None] < scores.window
  score = jnp.where(visible_BTS[:, None, :, None], softcap(score, scores.cap), NEGATIVE)
  weight = jax.nn.softmax(score, axis=-1).astype(v_BKSH.dtype)
  y_BKTnH = jnp.einsum("BKTnS,BKSH->BKTnH", weight, v_BKSH)
  return jnp.swapaxes(y_BKTnH, 1, 2).reshape(B, T, N, H)


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible_BTS: jax.Array,
  scores: Scores | None = None,
) -> jax.Array:
  """softmax(q kᵀ / √H) v over the visible keys, softmax in float32; N/K queries share each key."""
  B, T, N, H = q_BTNH.shape
  K, scores = k_BSKH.shape[2], scores or Scores(H**-0.5)
  q_BTKnH = q_BTNH.reshape(B, T, K, N // K, H) * scores.scale
  score = jnp.einsum("BTKnH,BSKH->BKnTS", q_BTKnH, k_BSKH, preferred_element_type=jnp.float32)
  score = jnp.where(visible_BTS[:, None, None], softcap(score, scores.cap), NEGATIVE)
  weight = jax.nn.softmax(score, axis=-1).astype(v_BSKH.dtype)
  return jnp.einsum("BKnTS,BSKH->BTKnH", weight, v_BSKH).reshape(B, T, N, H)


def attend_splash(
  q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_BT: jax.Array, scores: Scores
) -> jax.Array:
  """The Pallas kernel of JAX for TPU; interpreted on other platforms.

  T is padded to whole blocks, with a segment of its own, and H to the 128 lanes of the hardware.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

  _, T, N, H = q_BTNH.shape
  block = 512 if T >= 512 else 128
  segments = splash.SegmentIds(*[pad(segment_BT, block, -1)] * 2)
  lanes = ((0, 0), (0, 0), (0, 0), (0, -H % 128))
  q, k, v = (
    jnp.swapaxes(jnp.pad(pad(x, block), lanes), 1, 2)  # heads first
    for x in (q_BTNH * scores.scale, k_BTKH, v_BTKH)
  )
  kernel = _splash_kernel(N, *q.shape[2:], block, scores, sharding.platform() != "tpu")
  y_BNTH = jax.vmap(kernel)(q, k, v, segments)
  return jnp.swapaxes(y_BNTH, 1, 2)[:, :T, :, :H]


def _splash_kernel(
  heads: int, length: int, width: int, block: int, scores: Scores, interpret: bool
):
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  mask = splash.CausalMask((length, length))
  if scores.window:
    mask = splash.LocalMask((length, length), (scores.window - 1, 0), offset=0)
  # Of queries and keys that stay in vector memory; scores exist for `block` keys. All keys are read
  # again for each block of queries, and the other way round: 32 heads of 32,768 positions on v5p
  # move 22 GB a layer so, and 36 with half of these. More do not fit there.
  large, larger = (math.gcd(length, n) for n in (1024, 2048 if width <= 128 else 1024))
  return splash.make_splash_mha(
    splash.MultiHeadMask([mask] * heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash.BlockSizes(
      block_q=large,
      block_kv=large,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=larger,
      block_kv_dkv_compute=block,
      block_q_dq=large,
      block_kv_dq=block,
    ),
    attn_logits_soft_cap=scores.cap or None,
    residual_checkpoint_name=RESIDUAL,
    interpret=interpret,
  )


def attend_cudnn(
  q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_BT: jax.Array, scores: Scores
) -> jax.Array:
  """cuDNN's flash attention, for rows of one segment that may be followed by padding.

  There a causal mask is enough: padding comes last, so that no token sees it. cuDNN takes no
  segments without a [T, T] array, so other rows, seen at run time, go through `attend_blockwise`:
  packed ones, and prompts that are shared by responses and shorter than their place.
  """

  def fused(q, k, v, _):
    return jax.nn.dot_product_attention(
      q, k, v, scale=scores.scale, is_causal=True, implementation="cudnn"
    )

  before_BT, after_BT = segment_BT[:, :-1], segment_BT[:, 1:]
  padded = jnp.all((after_BT == before_BT) | (after_BT == 0))
  by_blocks = functools.partial(attend_self, implementation="blockwise", scores=scores)
  return jax.lax.cond(padded, fused, by_blocks, q_BTNH, k_BTKH, v_BTKH, segment_BT)
