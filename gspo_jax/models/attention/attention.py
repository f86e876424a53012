"""Grouped-query attention.

Four implementations, chosen by `ComputeConfig.attention`:

  plain      stores the [T, S] scores; for short sequences, and for few queries to a cache
  blockwise  online softmax over blocks of keys, without a [T, S] array; for any device and length
  splash     JAX's Pallas kernel for TPU (interpreted elsewhere); module `splash`
  cudnn      cuDNN's flash attention (jax.nn.dot_product_attention); for NVIDIA GPUs, 16-bit types
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models.attention.blocks import (
  NEGATIVE,
  Scores,
  attend_blockwise,
  gather,
  softcap,
)
from gspo_jax.system import accelerators

FORMULATIONS = ("plain", "blockwise", "splash", "cudnn")
PLAIN = 128  # Maximum queries per row for `plain` under "auto"; doubled if no kernel is usable.
CUDNN = "dot_product_attention_fwd_wrapper"  # Name of cuDNN's primitive, for `remat`.
SLAB = 64  # Queries in one product of `plain`. The product skips keys after its last query.


def choose(
  implementation: str,
  queries: int,
  dtype: Any,
  scores: Scores | None = None,
  gaps: bool = False,
  width: int = 128,
) -> str:
  """Chooses the implementation of attention.

  "auto" chooses `plain` for few queries, else the platform's kernel if it supports the other
  arguments, else `blockwise`. Any other `implementation` is returned unchanged. Raises ValueError
  if that implementation does not support the other arguments.

  queries: T, queries per row.
  scores: window, soft bound and sinks. None means no window, bound or sinks.
  gaps: whether padding may lie between the keys of a segment.
  width: H, width of a head.
  """
  if feature := lacks(implementation, dtype, scores, gaps, width):
    able = [name for name in FORMULATIONS if not lacks(name, dtype, scores, gaps, width)]
    raise ValueError(
      f"compute.attention={implementation!r} does not support {feature}: set it to auto or "
      f"{', '.join(able)}"
    )
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
  """Describes the first feature without support; returns "" if all have support."""
  scores = scores or Scores(1.0)
  window, cap = scores.window, scores.cap
  if implementation == "splash" and window and gaps:  # The kernel counts padding as positions.
    return "a sliding window where responses share their prompt"
  if implementation != "cudnn":
    return ""
  if cap:
    return "a soft bound on scores (model.attn_logit_softcapping)"
  if window:
    return "a sliding window"
  if scores.sink_N is not None:
    return "sinks"
  if jnp.dtype(dtype).itemsize > 2:
    return f"{jnp.dtype(dtype).name}, only 16-bit types"
  if width % 8 or width > _widest_head():
    return f"heads of width {width}, only multiples of 8 up to {_widest_head()} on this device"
  return ""


def _widest_head() -> int:
  """Returns the largest H of cuDNN's attention on the mesh's devices."""
  chip = accelerators.find(sharding.device_kind())
  if chip and chip.cuda:
    major = chip.cuda.capability[0]
  else:  # A GPU without an entry in `accelerators`.
    major = float(getattr(jax.local_devices()[0], "compute_capability", "0"))
  return 256 if major >= 9 else 128  # 9 is Hopper.


def attend_self(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  implementation: str = "plain",
  scores: Scores | None = None,
  position_BS: jax.Array | None = None,
) -> jax.Array:
  """Computes causal attention from the last T of S tokens, [B, T, N, H].

  softmax(q kᵀ / √H) v over the keys of the query's segment, up to the query's position. Softmax is
  in float32; N/K query heads share a key head.

  Args:
    segment_BS: segment numbers of all S tokens; 0 is padding, with arbitrary results.
    implementation: one of `FORMULATIONS`.
    scores: scale, window, soft bound and sinks. None means scale 1/√H alone.
    position_BS: positions that measure the window, for `plain` and `blockwise`. None means the
      index in the row.
  """
  (B, T, _, H), S = q_BTNH.shape, k_BSKH.shape[1]
  scores, first = scores or Scores(H**-0.5), S - T
  segment_BT = segment_BS[:, first:]
  if implementation == "splash":
    from gspo_jax.models.attention import splash  # Slow import.

    return splash.attend(q_BTNH, k_BSKH, v_BSKH, segment_BS, scores)
  if implementation == "cudnn":
    return attend_cudnn(q_BTNH, k_BSKH, v_BSKH, segment_BS, scores)
  order_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], (B, S))
  position_BS = order_BS if position_BS is None else position_BS
  position_BT = position_BS[:, first:]
  if implementation == "blockwise":
    segments, positions = (segment_BT, segment_BS), (position_BT, position_BS)
    return attend_blockwise(
      q_BTNH, k_BSKH, v_BSKH, order_BS[:, first:], segments, scores, positions
    )
  order_S, slabs = np.arange(S), []
  for start in range(0, T, SLAB):  # Keys later than all queries of a slab are skipped.
    queries, keys = slice(start, start + SLAB), slice(first + start + SLAB)
    visible = (order_S[first:][queries, None] >= order_S[None, keys])[None]
    visible &= segment_BT[:, queries, None] == segment_BS[:, None, keys]
    if scores.window:
      visible &= position_BT[:, queries, None] - position_BS[:, None, keys] < scores.window
    slabs.append(attend(q_BTNH[:, queries], k_BSKH[:, keys], v_BSKH[:, keys], visible, scores))
  return jnp.concatenate(slabs, axis=1)


class Tree(NamedTuple):
  """Layout of a group of responses with a shared prompt: [trunk, branch, branch, ...].

  The trunk is the prompt except its last token. That token begins every branch, since the token
  after it differs between branches. A branch attends to the trunk and itself. The layout of a group
  is one long sequence, stored as `branches` consecutive rows of equal length. For the prompt "abc"
  and the responses "de" and "fg", the trunk is "ab", and the rows are "abcd" and "ecfg".
  """

  trunk: int  # S, number of positions of the trunk; a multiple of `branches`.
  branches: int  # Number of branches of a trunk. Each branch has U positions.

  def split(self, x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits rows [B, T, ...] into R trunks [R, S, ...] and branches [B, U, ...]."""
    x_RX = x_BT.reshape(-1, self.branches * x_BT.shape[1], *x_BT.shape[2:])
    return x_RX[:, : self.trunk], x_RX[:, self.trunk :].reshape(len(x_BT), -1, *x_BT.shape[2:])

  def join(self, x_RS: jax.Array, x_BU: jax.Array) -> jax.Array:
    """Undoes `split`."""
    x_RX = x_BU.reshape(len(x_RS), -1, *x_BU.shape[2:])
    return jnp.concatenate([x_RS, x_RX], axis=1).reshape(len(x_BU), -1, *x_BU.shape[2:])


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
  """Attends within trunks, and from each branch to its trunk and itself.

  A trunk's keys and values are repeated for each branch. `position_BT` measures the window, since a
  trunk may end with padding. If there is no window, `position_BT` may be None.
  """

  def path(x_RS, x_BU):
    """Joins each branch to a copy of its trunk, [B, S + U, ...]."""
    return jnp.concatenate([jnp.repeat(x_RS, tree.branches, axis=0), x_BU], axis=1)

  (q_RSNH, q_BUNH), *keys = map(tree.split, (q_BTNH, k_BTKH, v_BTKH, segment_BT))
  position_RS = position_BX = None
  if position_BT is not None:
    position_RS, position_BU = tree.split(position_BT)
    position_BX = path(position_RS, position_BU)
  trunk_keys, path_keys = [x_RS for x_RS, _ in keys], itertools.starmap(path, keys)
  y_RSNH = attend_self(q_RSNH, *trunk_keys, implementation, scores, position_RS)
  y_BUNH = attend_self(q_BUNH, *path_keys, implementation, scores, position_BX)
  return tree.join(y_RSNH, y_BUNH)


class Paths(NamedTuple):
  """Layout of packed rows [R, T] with shared prefixes, on one device.

  A path is a prefix and one of its continuations. The packed rows store a prefix once. Attention
  runs on rows [R, F] instead, with all paths in full, one after another. If the packed row "abcdef"
  has prefix "ab" and continuations "cd" and "ef", attention's row is "abcdabef", `read_RF` is
  0 1 2 3 0 1 4 5, `segment_RF` is 1 1 1 1 2 2 2 2, and `back_RT` is 0 1 2 3 6 7.
  """

  read_RF: jax.Array  # int32: index of the token in the flattened [R, T]; R·T for padding.
  segment_RF: jax.Array  # int32: number of the path; 0 is padding.
  back_RT: jax.Array  # int32: index in the flattened [R, F] of the token's place in one path.


def attend_paths(
  q_RTNH: jax.Array,
  k_RTKH: jax.Array,
  v_RTKH: jax.Array,
  paths: Paths,
  implementation: str = "plain",
  scores: Scores | None = None,
) -> jax.Array:
  """Attends within every path, [R, T, N, H].

  Each path is a segment for `attend_self`. A token of a shared prefix has equal results in all
  paths of the prefix; one of these results is returned.
  """
  inputs = (gather(x_RT, paths.read_RF) for x_RT in (q_RTNH, k_RTKH, v_RTKH))
  y_RFNH = attend_self(*inputs, paths.segment_RF, implementation, scores)
  return gather(y_RFNH, paths.back_RT)


def attend_cache(
  q_BTNH: jax.Array,
  k_BKHS: jax.Array,
  v_BKSH: jax.Array,
  position_BT: jax.Array,
  scores: Scores | None = None,
  implementation: str = "plain",
) -> jax.Array:
  """Attends from queries at `position_BT` to slots 0..position of a cache, [B, T, N, H].

  S is the number of slots; slot s holds position s.

  implementation: value of `ComputeConfig.attention`. "auto" runs a Pallas kernel (`triton`) for one
    query per row on GPU, if the kernel supports S and H. In any other case JAX's own operations are
    used, in blocks if there are many queries.
  """
  (B, T, N, H), (K, S) = q_BTNH.shape, v_BKSH.shape[1:3]
  scores = scores or Scores(H**-0.5)
  if implementation == "auto" and T == 1 and sharding.platform() == "gpu":
    from gspo_jax.models.attention import triton  # Slow import.

    if triton.supports(S, H):
      return triton.attend(q_BTNH[:, 0], k_BKHS, v_BKSH, position_BT[:, 0], scores)[:, None]
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
  weight = _softmax(score, scores.sink_N, (1, K, 1, N // K, 1)).astype(v_BKSH.dtype)
  y_BKTnH = jnp.einsum("BKTnS,BKSH->BKTnH", weight, v_BKSH)
  return jnp.swapaxes(y_BKTnH, 1, 2).reshape(B, T, N, H)


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible_BTS: jax.Array,
  scores: Scores | None = None,
) -> jax.Array:
  """softmax(q kᵀ / √H) v over the visible keys, [B, T, N, H]; see `attend_self`."""
  B, T, N, H = q_BTNH.shape
  K, scores = k_BSKH.shape[2], scores or Scores(H**-0.5)
  q_BTKnH = q_BTNH.reshape(B, T, K, N // K, H) * scores.scale
  score = jnp.einsum("BTKnH,BSKH->BKnTS", q_BTKnH, k_BSKH, preferred_element_type=jnp.float32)
  score = jnp.where(visible_BTS[:, None, None], softcap(score, scores.cap), NEGATIVE)
  weight = _softmax(score, scores.sink_N, (1, K, N // K, 1, 1)).astype(v_BSKH.dtype)
  return jnp.einsum("BKnTS,BSKH->BTKnH", weight, v_BSKH).reshape(B, T, N, H)


def _softmax(score: jax.Array, sink_N: jax.Array | None, by_head: tuple[int, ...]) -> jax.Array:
  """Computes the softmax over the last axis, with each head's sink in the denominator.

  by_head: shape in which sinks broadcast with the scores, 1 on every axis except those of heads.
  """
  if sink_N is None:
    return jax.nn.softmax(score, axis=-1)
  sink = jnp.broadcast_to(sink_N.reshape(by_head), (*score.shape[:-1], 1))
  return jax.nn.softmax(jnp.concatenate([score, sink], axis=-1), axis=-1)[..., :-1]


def attend_cudnn(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BS: jax.Array, scores: Scores
) -> jax.Array:
  """Attends with cuDNN's flash attention, for unpacked rows.

  An unpacked row is one segment, then padding. Such a row needs only a causal mask, since no token
  sees later padding. Packed rows would need a mask of [T, T] values. A device with a packed row
  runs `blockwise` for all its rows; this is decided at run time.
  """
  earlier = k_BSKH.shape[1] - q_BTNH.shape[1]  # Keys without a query.

  def fused(q, k, v, _):
    # cuDNN's causal mask aligns the first query with the first key.
    q = jnp.pad(q, ((0, 0), (earlier, 0), (0, 0), (0, 0)))
    y = jax.nn.dot_product_attention(
      q, k, v, scale=scores.scale, is_causal=True, implementation="cudnn"
    )
    return y[:, earlier:]

  before_BS, after_BS = segment_BS[:, :-1], segment_BS[:, 1:]
  padded = jnp.all((after_BS == before_BS) | (after_BS == 0))
  by_blocks = functools.partial(attend_self, implementation="blockwise", scores=scores)
  return jax.lax.cond(padded, fused, by_blocks, q_BTNH, k_BSKH, v_BSKH, segment_BS)
