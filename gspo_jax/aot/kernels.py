"""Bytes that a Pallas kernel moves between HBM and vector memory.

These bytes may exceed the size of operands and results, since a kernel may read the same block
several times. A kernel can state its bytes in a cost estimate. JAX's splash attention does not, so
this module computes the bytes from the kernel's grid.
"""

import math
import re

from gspo_jax.aot.hlo import Instruction


def hbm_bytes(instruction: Instruction) -> float:
  """Returns the HBM bytes of a kernel, from the first available source.

  The sources are, in this order:

    - a `jax.named_scope("hbm_bytes=N")` around the call
    - the formula for splash attention
    - the kernel's own estimate
    - the sizes of operands and results in HBM
  """
  if stated := re.findall(r"hbm_bytes=(\d+)", instruction.path):
    return float(stated[-1])
  if splash_bytes := _splash(instruction):
    return splash_bytes
  arrays = (instruction, *instruction.inputs)
  if stated := re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes):
    elsewhere = sum(x.bytes - x.hbm for x in arrays)  # Bytes of arrays outside HBM.
    return max(float(stated[1]) - elsewhere, 0.0)
  return sum(x.hbm for x in arrays)


def _splash(instruction: Instruction) -> float | None:
  """Returns the HBM bytes of JAX's causal splash attention.

  Returns None for other kernels, for splash attention without segments, and if the block sizes are
  not stated. The kernel has three phases: fwd, and the gradients dq of queries and dkv of keys and
  values. A grid's loops, outermost first, are over query heads, blocks of queries and blocks of
  keys. For dkv they are over blocks of keys, query heads and blocks of queries. Blocks after the
  diagonal are not read. Blocks skipped between segments count as read.

  Operands are the mask's scalars, q, k, v, segments of q and of k. The backward phases also take
  the logsumexp, the output's gradient, and a sum for each query. Some masks also need the queries'
  positions, which come last. `times` counts the reads of each operand after the scalars. In fwd and
  dq, a query head reads all keys `f` times. In dkv, the queries of a head are read `f` times.
  """
  named = re.match(r"splash_mha_(fwd|dq|dkv)_segmented", instruction.name)
  if not named:
    return None
  phase = named[1]
  sides = dict(re.findall(r"(block_q\w*|block_kv\w*)\W+(\d+)", instruction.attributes))
  suffix = "" if phase == "fwd" else f"_{phase}"
  try:
    block_q, block_kv = (int(sides[f"block_{x}{suffix}"]) for x in ("q", "kv"))
  except KeyError:
    return None
  scalars = [x for x in instruction.inputs if x.shape.startswith("s8[")]
  arrays = [x for x in instruction.inputs if not x.shape.startswith("s8[")]
  (N, T, _), (K, S, _) = (x.arrays[0].dims[-3:] for x in arrays[:2])
  # Maximum number of visible blocks in a row of the mask, or for dkv in a column.
  most = scalars[0].arrays[0].dims[-2 if phase == "dkv" else -1] if scalars else math.inf
  if phase == "dkv":
    visible = [T // block_q - j * block_kv // block_q for j in range(S // block_kv)]
    f = sum(min(n, most) for n in visible) * block_q / T
    times = [f, 1, 1, N * f, 1, f, f, f, N * f]
  else:
    visible = [-(-(i + 1) * block_q // block_kv) for i in range(T // block_q)]
    f = sum(min(n, most) for n in visible) * block_kv / S
    times = [1, N / K * f, N / K * f, N, N * f] + [1, 1, 1] * (phase == "dq") + [N]
  read = sum(n * x.hbm for n, x in zip(times, arrays))
  return read + instruction.hbm + sum(x.hbm for x in scalars)
