"""Reads a compiled program: bytes through memory and through each kind of collective, per device.

XLA's own cost analysis counts the body of a loop once; here a body counts as often as its condition
says. A loop whose length depends on data counts once: of ours, those are the pieces of expert rows,
one of which is the rule, and what a while loop of the sampler does per token.
"""

import dataclasses
import math
import re
from collections import defaultdict

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_BYTES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s64=8, u64=8, f64=8)
_SHAPE = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# These move nothing, or what their body moves is counted there.
_FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast while conditional call iota after-all "
  "copy-start copy-done partition-id replica-id opt-barrier custom-call-start".split()
)


@dataclasses.dataclass
class Costs:
  memory: float = 0.0  # bytes read and written by every instruction that is not fused away
  count: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  moved: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  wire: float = 0.0  # bytes that a device sends


def costs(text: str) -> Costs:
  """Counts a program's costs in its compiled text (`compiled.as_text()`)."""
  computations, entry = _split(text)
  total = Costs()
  _walk(entry, 1.0, computations, total)
  return total


def _split(text: str) -> tuple[dict[str, list[str]], str]:
  computations: dict[str, list[str]] = {}
  entry, lines = "", None
  for line in text.splitlines():
    if lines is None:
      header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
      if header:
        lines = computations.setdefault(header[2], [])
        entry = header[2] if header[1] else entry
    elif re.match(r"^\}(, |$)", line):  # not the end of metadata that runs over several lines
      lines = None
    else:
      lines.append(line.strip())
  return computations, entry


def _walk(name: str, times: float, computations: dict[str, list[str]], total: Costs) -> None:
  sizes: dict[str, float] = {}
  for line in computations.get(name, ()):
    found = _INSTRUCTION.match(line)
    if not found:
      continue
    result, shape, op, rest = found.groups()
    sizes[result] = _size(shape)
    if op == "while":
      body, condition = _called("body", rest), _called("condition", rest)
      _walk(body, times * _trips(computations.get(condition, ())), computations, total)
    elif op == "conditional":
      branches = re.findall(r"%([\w.\-]+)", re.search(r"branch_computations=\{(.*?)\}|$", rest)[0])
      for branch in branches[:1] or [_called("true_computation", rest)]:
        _walk(branch, times, computations, total)
    elif op in ("call", "async-start"):
      _walk(_called("to_apply", rest) or _called("calls", rest), times, computations, total)
    else:
      _one(op, shape, rest, times, sizes, computations, total)


def _one(op, shape, rest, times, sizes, computations, total: Costs) -> None:
  """One instruction that is not control flow."""
  kind = op.removesuffix("-start")
  operands = [sizes.get(x, 0.0) for x in re.findall(r"%([\w.\-]+)", rest.split("), ")[0])]
  fused = _called("calls", rest)
  if op == "fusion" and fused and "all-reduce-scatter" in fused:
    kind = "reduce-scatter"  # how the TPU compiler writes one
    rest = next((x for x in computations[fused] if " all-reduce(" in x), rest)
  if kind in COLLECTIVES:
    _collective(kind, _size(shape), sum(operands), rest, op.endswith("-start"), times, total)
  if op in _FREE or op.endswith("-done"):
    return
  if op == "fusion" and fused in computations:
    total.memory += times * _fusion(computations[fused], operands, _size(shape))
  elif op in ("dynamic-slice", "gather", "slice"):
    total.memory += times * 2 * _size(shape)
  elif op in ("slice-start", "dynamic-slice-start"):  # its shape holds the operands too
    total.memory += times * 2 * max(_size(shape) - sum(operands), 0.0)
  elif op == "dynamic-update-slice":
    total.memory += times * 2 * (operands[1] if len(operands) > 1 else 0)
  else:
    total.memory += times * (_size(shape) + sum(operands))


def _collective(kind, result, operand, rest, started, times, total: Costs) -> None:
  n = _group(rest)
  if n < 2 and kind != "collective-permute":
    return
  if kind == "all-gather":
    size = result - operand if started and result > operand * n else result
    sent = size * (n - 1) / n
  elif kind == "collective-permute":
    size = sent = operand
  else:
    size = operand
    sent = size * (n - 1) / n * (2 if kind == "all-reduce" else 1)
  total.count[kind] += times
  total.moved[kind] += times * size
  total.wire += times * sent


def _fusion(lines: list[str], operands: list[float], result: float) -> float:
  """Bytes of a fusion: of a parameter that is only sliced, the slices; of one updated in place,
  the update."""
  parameters, users, sizes, root, same = {}, defaultdict(list), {}, None, {}
  for line in lines:
    found = _INSTRUCTION.match(line)
    if not found:
      continue
    name, shape, op, rest = found.groups()
    sizes[name] = _size(shape)
    if op == "parameter":
      parameters[name] = int(rest.split(")")[0])
    names = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    if op == "bitcast":
      same[name] = same.get(names[0], names[0])
      continue
    for place, operand in enumerate(names):
      users[same.get(operand, operand)].append((op, place, name))
    if line.startswith("ROOT"):
      root = (op, names)
  total = 0.0
  for name, place in parameters.items():
    size = operands[place] if place < len(operands) else sizes[name]
    uses = users[name]
    if uses and all(op in ("dynamic-slice", "gather", "slice") and at == 0 for op, at, _ in uses):
      size = sum(sizes[user] for *_, user in uses)
    elif uses and all(op == "dynamic-update-slice" and at == 0 for op, at, _ in uses):
      size = 0.0
    total += min(size, operands[place] if place < len(operands) else size)
  if root and root[0] == "dynamic-update-slice":
    result = sizes.get(root[1][1], result)
  return total + result


def _size(shape: str) -> float:
  return sum(
    math.prod(int(n) for n in dims.split(",") if n) * _BYTES.get(dtype, 4)
    for dtype, dims in _SHAPE.findall(shape)
  )


def _called(key: str, text: str) -> str:
  found = re.search(rf"\b{key}=%?([\w.\-]+)", text)
  return found[1] if found else ""


def _trips(condition: list[str]) -> int:
  """Turns of a loop: the constant that its counter is compared with; 1 if there is none."""
  found = re.findall(r"s32\[\]\S* constant\((\d+)\)", "\n".join(condition))
  return int(found[0]) if len(found) == 1 else 1


def _group(text: str) -> int:
  """Devices that take part in one collective together."""
  if found := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
    return len(found[1].split(","))
  if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
    return int(found[2])
  if found := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", text):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
  return 1
