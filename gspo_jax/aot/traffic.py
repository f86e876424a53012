"""Bytes that an instruction of a compiled program moves through HBM.

Rules:

  - Operands are read once, and results written once. An array has the size of its layout, padding
    included. Only arrays in HBM count, so a copy between HBM and vector memory counts once.
  - A slice or gather reads as many bytes as its result has, also within a fusion.
  - An update in place (dynamic-update-slice, scatter) writes the updated elements alone. An update
    that adds also reads these elements. If the compiler copies the array first, the copy counts
    separately.
  - A Pallas kernel counts as in `kernels`, usually by its `pl.CostEstimate(bytes_accessed=...)`.
"""

import re
from collections.abc import Sequence

from gspo_jax.aot import kernels
from gspo_jax.aot.hlo import Array, Instruction

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# First parts of the names of fusions that start a collective, or wait for it (`carried`).
START, DONE = "async-collective-start", "async-collective-done"
# Operations without traffic. The bodies of loops, branches and calls are counted separately.
FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast while conditional call iota after-all "
  "partition-id replica-id opt-barrier recv send-done".split()
)
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")
# Operations with one operand element per result element. If only a slice of the result is used,
# only the same number of operand elements is read.
_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose", "negate", "reverse")
# Custom calls without traffic.
_MARKS = ("AllocateBuffer", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "Sharding")


def carried(instruction: Instruction) -> Instruction | None:
  """Returns the asynchronous collective in a fusion; None for other instructions.

  The TPU compiler splits a collective over several fusions. The first starts the collective, and
  the last waits for its end. Fusions between them compute meanwhile.
  """
  if instruction.op != "fusion" or "all-reduce-scatter" in instruction.called("calls"):
    return None
  body = instruction.body("calls")
  return next((x for x in body if x.op in COLLECTIVES and "chain_id=" in x.attributes), None)


def free(instruction: Instruction) -> bool:
  """Whether an instruction itself moves no bytes and takes no time."""
  marks = (f'custom_call_target="{mark}' in instruction.attributes for mark in _MARKS)
  return instruction.op in FREE or instruction.op.endswith("-start") or any(marks)


def hbm_bytes(instruction: Instruction) -> float:
  """Bytes read from HBM and written to it by one execution of an instruction."""
  inputs = instruction.inputs
  if free(instruction):
    return 0.0
  if instruction.op == "send":
    return _hbm(inputs)
  # Other asynchronous operations count at their ends, where the result is the written array alone.
  if instruction.op.endswith("-done"):
    kind, sources = inputs[0].op.removesuffix("-start"), inputs[0].inputs
    if kind in ("call", "async"):
      return 0.0
    if kind == "fusion":
      return _fusion(inputs[0], instruction.arrays)
    return _sliced(instruction, sources[:1]) if kind in _SLICES else instruction.hbm + _hbm(sources)
  if instruction.op == "fusion":
    if carried(instruction) and instruction.name.startswith(START):
      return _hbm(inputs)
    if carried(instruction) and instruction.name.startswith(DONE):
      return instruction.hbm
    return _fusion(instruction, instruction.arrays)
  if instruction.kernel:
    return kernels.hbm_bytes(instruction)
  if instruction.op in _SLICES:
    return _sliced(instruction, inputs)
  if instruction.op in _UPDATES:
    written = _update(instruction).elements * _passes(instruction)
    targets = (len(instruction.operands) - 1) // 2 if instruction.op == "scatter" else 1
    return _hbm(inputs[targets:]) + written * _each(instruction)
  return instruction.hbm + _hbm(inputs)


def _hbm(instructions: Sequence[Instruction]) -> float:
  """Bytes of the instructions' results in HBM."""
  return sum(x.hbm for x in instructions)


def _sliced(instruction: Instruction, inputs: Sequence[Instruction]) -> float:
  """Bytes of a slice or gather from the first input. The further inputs are indices."""
  read = instruction.elements * _each(inputs[0])
  return read + instruction.hbm + _hbm(inputs[1:])


def _each(instruction: Instruction) -> float:
  """Bytes in HBM per element of the result."""
  return instruction.hbm / max(instruction.elements, 1)


def _update(instruction: Instruction) -> Instruction:
  """Returns the operand with the new values of an update.

  Operands of a scatter are n arrays, the indices, and n arrays of new values. Returns the first of
  the n arrays of new values.
  """
  index = 1 if instruction.op == "dynamic-update-slice" else (len(instruction.operands) + 1) // 2
  return instruction.siblings[instruction.operands[index]]


def _passes(instruction: Instruction) -> int:
  """Returns accesses per updated element: 1 to overwrite it, 2 to add."""
  return 2 if any(x.root and x.op != "parameter" for x in instruction.body("to_apply")) else 1


def _root(body: Sequence[Instruction]) -> Instruction:
  """Returns the instruction with a computation's result."""
  return next(x for x in body if x.root)


def _fusion(instruction: Instruction, results: Sequence[Array]) -> float:
  """Bytes of a fusion. If it slices or updates an operand, only the slice or update counts.

  results: arrays of the fusion's results.
  """
  body, inputs = instruction.body("calls"), instruction.inputs
  if not body:
    return sum(array.hbm for array in results) + _hbm(inputs)
  total = 0.0
  unchanged = _unchanged(body) if carried(instruction) else set()
  for inner in body:
    if inner.op == "parameter" and inner.name not in unchanged:
      index = int(re.match(r"\d+", inner.attributes)[0])
      if index < len(inputs) and inputs[index].hbm:
        total += inputs[index].hbm * _read(inner) / max(inner.elements, 1)
  root = _root(body)
  for array, result in zip(results, root.inputs if root.op == "tuple" else [root]):
    if not array.space and result.name not in unchanged:
      total += _written(result, array.bytes)
  return total


def _unchanged(body: Sequence[Instruction]) -> set[str]:
  """Returns the names of values outside a fusion's arithmetic.

  These are the results of collectives, kernels and tuples, and the parameters that no other
  instruction of the fusion reads.
  """
  computed = [x for x in body if x.op not in (*COLLECTIVES, "custom-call", "tuple")]
  used = {operand for x in computed for operand in x.operands}
  parameters = {x.name for x in body if x.op == "parameter"}
  return (parameters - used) | ({x.name for x in body} - {x.name for x in computed})


def _read(instruction: Instruction, result_elements: float | None = None) -> float:
  """Counts the elements read from a value by its users in a fusion.

  Each element counts at most once.

  result_elements: elements of the fusion's result that an enclosing fusion reads. None means all.
  """
  needed = 0.0
  if instruction.root:
    needed = instruction.elements if result_elements is None else result_elements
  siblings = instruction.siblings.values()
  users = [(x, i) for x in siblings for i, y in enumerate(x.operands) if y == instruction.name]
  for user, index in users:
    if user.op in _SLICES and index == 0:
      needed += user.elements
    elif user.op in _UPDATES and index == 0:
      needed += _update(user).elements * (_passes(user) - 1)
    elif user.op in _THROUGH:
      needed += _read(user, result_elements)
    elif user.op == "fusion" and user.body("calls"):
      user_elements = _read(user, result_elements)
      parameters = [x for x in user.body("calls") if x.op == "parameter"]
      operands = [x for x in parameters if x.attributes.startswith(f"{index})")]
      needed += sum(_read(x, user_elements) for x in operands)
    else:
      needed += instruction.elements
  return min(needed, float(instruction.elements))


def _written(result: Instruction, size: float) -> float:
  """Bytes written for a result of a fusion. Of an update in place, only the update counts.

  size: bytes of the whole result.
  """
  result = _copied(result)
  if result.op == "fusion" and result.body("calls"):
    root = _root(result.body("calls"))
    return size if root.op == "tuple" else _written(root, size)
  if result.op not in _UPDATES:
    return size
  if _copied(result.inputs[0]).op != "parameter":
    return size  # The updated array is new, and not a parameter updated in place.
  return size * _update(result).elements / max(result.elements, 1)


def _copied(instruction: Instruction) -> Instruction:
  """Returns the source of a value through copies, bitcasts and fusions of these."""
  while instruction.operands and instruction.operands[0] in instruction.siblings:
    body = instruction.body("calls") if instruction.op == "fusion" else [instruction]
    if not all(x.op in ("bitcast", "copy", "parameter") for x in body):
      break
    instruction = instruction.inputs[0]
  return instruction
