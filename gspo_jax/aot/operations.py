"""Counts the floating-point operations of matrix products in a GPU program's compiled text.

Products are dots (also within fusions), calls of cuBLAS, attention of cuDNN, and Pallas kernels. A
kernel counts as N operations if its call is in a `jax.named_scope("flops=N")`, and else as none.
"""

import math
import re

from gspo_jax.aot.hlo import Instruction


def products(instruction: Instruction) -> float:
  """Returns the operations of an instruction's products; 0 without products."""
  if instruction.op in ("fusion", "fusion-start"):
    return sum(map(products, instruction.body("calls")))
  if instruction.op == "dot":
    return _dot(instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
  if instruction.cudnn:
    return _attention(instruction)
  if instruction.target.startswith("__cublas$"):
    return _dot(instruction, r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
  stated = re.findall(r"flops=(\d+)", instruction.path)  # Scope around a Pallas kernel.
  return float(stated[-1]) if stated and instruction.op == "custom-call" else 0.0


def _dot(instruction: Instruction, contracted: str) -> float:
  match, dims = re.search(contracted, instruction.attributes), instruction.inputs[0].arrays[0].dims
  inner = math.prod(dims[int(n)] for n in re.findall(r"\d+", match[1])) if match else 1
  return 2.0 * instruction.arrays[0].elements * inner


def _attention(instruction: Instruction) -> float:
  """Counts two products in the forward pass, five in the backward pass.

  With a causal mask, about half of each product counts.
  """
  scores = re.search(
    r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]', instruction.attributes
  )
  *rows, queries, keys = (int(n) for n in re.findall(r"\d+", scores[1]))
  visible = (keys + 1) / 2 if '"CAUSAL"' in instruction.attributes else keys
  width = instruction.inputs[0].arrays[0].dims[-1]
  number = 5 if "Backward" in instruction.target else 2
  return 2.0 * number * math.prod(rows) * queries * visible * width
