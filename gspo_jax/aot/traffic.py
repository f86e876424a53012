"""Bytes that an instruction of a compiled program moves through HBM.

Rules:

  - An array counts with the padding of its layout, and only if it is in HBM, not in vector memory.
    A copy between memories counts on the side of HBM.
  - A slice or gather reads as many bytes as its result has, in a fusion too.
  - An update in place (dynamic-update-slice, scatter) writes the update alone; an update that adds
    reads as much, too. If the compiler copies the array first, the copy counts separately.
  - A Pallas kernel counts by its `pl.CostEstimate(bytes_accessed=...)`: all bytes between HBM and
    vector memory, repeated reads included. `jax.named_scope("hbm_bytes=N")` around the call
    overrides a missing or wrong estimate. Without either: `kernels.hbm_bytes`, or each operand and
    result once.
"""

import re
from collections.abc import Sequence

from gspo_jax.aot import kernels
from gspo_jax.aot.hlo import Array, Instruction

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
START, DONE = "async-collective-start", "async-collective-done"
# Operations without traffic; bodies of loops and branches are counted separately.
FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast while conditional call iota after-all "
  "partition-id replica-id opt-barrier recv send-done".split()
)
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")
# Elementwise: a slice of the result needs a slice of the operand.
_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose", "negate", "reverse")
_MARKS = ("AllocateBuffer", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "Sharding")


def carried(instruction: Instruction) -> Instruction | None:
  """Returns a fusion's overlapped collective; None for others.

  Such a fusion starts the collective, overlaps it, or waits for it. The TPU compiler makes them.
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
  """Bytes read from HBM and written to it by an instruction."""
  inputs = instruction.inputs
  if free(instruction):
    return 0.0
  if instruction.op == "send":
    return _hbm(inputs)
  if instruction.op.endswith("-done"):  # Its result is the array; the start's has further values.
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
  return sum(x.hbm for x in instructions)


def _sliced(instruction: Instruction, inputs: Sequence[Instruction]) -> float:
  read = instruction.elements * _each(inputs[0])
  return read + instruction.hbm + _hbm(inputs[1:])


def _each(instruction: Instruction) -> float:
  """Bytes in HBM per element."""
  return instruction.hbm / max(instruction.elements, 1)


def _update(instruction: Instruction) -> Instruction:
  """Returns the operand written by an update; a scatter's first of several."""
  place = 1 if instruction.op == "dynamic-update-slice" else (len(instruction.operands) + 1) // 2
  return instruction.siblings[instruction.operands[place]]


def _passes(instruction: Instruction) -> int:
  """Returns passes over an updated array: 1 to overwrite, 2 to add."""
  return 2 if any(x.root and x.op != "parameter" for x in instruction.body("to_apply")) else 1


def _root(body: Sequence[Instruction]) -> Instruction:
  return next(x for x in body if x.root)


def _fusion(instruction: Instruction, results: Sequence[Array]) -> float:
  """Bytes of a fusion; of sliced or updated operands, only the slices."""
  body, inputs = instruction.body("calls"), instruction.inputs
  if not body:
    return sum(array.hbm for array in results) + _hbm(inputs)
  total = 0.0
  passed = _passed(body) if carried(instruction) else set()
  for inner in body:
    if inner.op == "parameter" and inner.name not in passed:
      place = int(re.match(r"\d+", inner.attributes)[0])
      if place < len(inputs) and inputs[place].hbm:
        total += inputs[place].hbm * _read(inner) / max(inner.elements, 1)
  root = _root(body)
  for array, result in zip(results, root.inputs if root.op == "tuple" else [root]):
    if not array.space and result.name not in passed:
      total += _written(result, array.bytes)
  return total


def _passed(body: Sequence[Instruction]) -> set[str]:
  """Returns the values a fusion passes on unchanged for an overlapped collective."""
  computed = [x for x in body if x.op not in (*COLLECTIVES, "custom-call", "tuple")]
  used = {operand for x in computed for operand in x.operands}
  parameters = {x.name for x in body if x.op == "parameter"}
  return (parameters - used) | ({x.name for x in body} - {x.name for x in computed})


def _read(instruction: Instruction, result_elements: float | None = None) -> float:
  """Counts a fusion's reads of a value, in elements.

  result_elements: elements read of the fusion's result by an enclosing fusion. None means all.
  """
  needed = 0.0
  if instruction.root:
    needed = instruction.elements if result_elements is None else result_elements
  siblings = instruction.siblings.values()
  users = [(x, i) for x in siblings for i, y in enumerate(x.operands) if y == instruction.name]
  for user, place in users:
    if user.op in _SLICES and place == 0:
      needed += user.elements
    elif user.op in _UPDATES and place == 0:
      needed += _update(user).elements * (_passes(user) - 1)
    elif user.op in _THROUGH:
      needed += _read(user, result_elements)
    elif user.op == "fusion" and user.body("calls"):
      user_elements = _read(user, result_elements)
      parameters = [x for x in user.body("calls") if x.op == "parameter"]
      operands = [x for x in parameters if x.attributes.startswith(f"{place})")]
      needed += sum(_read(x, user_elements) for x in operands)
    else:
      needed += instruction.elements
  return min(needed, float(instruction.elements))


def _written(result: Instruction, size: float) -> float:
  """Bytes written for a result of a fusion."""
  result = _copied(result)
  if result.op == "fusion" and result.body("calls"):
    root = _root(result.body("calls"))
    return size if root.op == "tuple" else _written(root, size)
  if result.op not in _UPDATES:
    return size
  if _copied(result.inputs[0]).op != "parameter":
    return size  # A new array is written in full.
  return size * _update(result).elements / max(result.elements, 1)


def _copied(instruction: Instruction) -> Instruction:
  """Follows copies, bitcasts and copying fusions to their source."""
  while instruction.operands and instruction.operands[0] in instruction.siblings:
    body = instruction.body("calls") if instruction.op == "fusion" else [instruction]
    if not all(x.op in ("bitcast", "copy", "parameter") for x in body):
      break
    instruction = instruction.inputs[0]
  return instruction
