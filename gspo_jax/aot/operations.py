"""Counts floating-point operations of a program's products in its compiled text.

Included are dots, fused or not, and cuBLAS's products; excluded is cuDNN's attention.
"""

import math
import re
from collections.abc import Mapping

from gspo_jax.aot import hlo, hlo_costs
from gspo_jax.aot.hlo import Instruction


def products(text: str, rates: Mapping[str, float] | None = None) -> float:
  """Operations of one device; `rates` as in `hlo_costs.costs`."""
  walked = hlo_costs.executed(hlo.parse(text), rates)
  return sum(times * _operations(instruction) for instruction, times, _ in walked)


def _operations(instruction: Instruction) -> float:
  if instruction.op == "fusion":
    return sum(map(_operations, instruction.body("calls")))
  if instruction.op == "dot":
    return _dot(instruction, r"lhs_contracting_dims={([\d,]*)}")
  if instruction.op != "custom-call":
    return 0.0
  target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
  name = target[1] if target else ""
  if "gemm" in name or "matmul" in name:
    return _dot(instruction, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
  return 0.0


def _dot(instruction: Instruction, contracted: str) -> float:
  match = re.search(contracted, instruction.attributes)
  dims = instruction.inputs[0].arrays[0].dims
  inner = math.prod(dims[int(n)] for n in re.findall(r"\d+", match[1])) if match else 1
  return 2.0 * instruction.arrays[0].elements * inner
