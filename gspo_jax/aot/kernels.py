"""Bytes that a Pallas kernel moves between HBM and vector memory."""

import re
from collections.abc import Sequence

from gspo_jax.aot.hlo import Instruction


def hbm_bytes(one: Instruction, operands: Sequence[Instruction]) -> float:
  """What the caller states, what the kernel states, what is known of it, or each operand and result
  once; as `hlo_costs` says."""
  if stated := re.findall(r"hbm_bytes=(\d+)", one.path):
    return float(stated[-1])
  near = sum(a.bytes for x in (one, *operands) for a in x.arrays if a.space)  # not through HBM
  if stated := re.search(r'"bytes_accessed":"?(\d+)', one.rest):
    return max(float(stated[1]) - near, 0.0)
  return one.hbm + sum(x.hbm for x in operands)
