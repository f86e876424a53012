"""Reads a compiled program: bytes through HBM and through each kind of collective, per device.

XLA's own cost analysis counts the body of a loop once; here a body counts as often as its condition
says. A loop whose length depends on data counts once: of ours, those are the pieces of expert rows,
one of which is the rule. What happens less often than the text says is in `rates`: the outermost
loop in a `jax.named_scope` of that name makes so many turns (`refill` of the sampler), and a kernel
of that name moves such a share of what it states (attention to a cache that is not full). A
conditional counts as if it were false: ours are true where something overflows.

Rules, of what an instruction that is not fused away reads and writes:

  - An array counts with the padding of its layout, and only if it is in HBM: not what the compiler
    keeps in vector memory. A copy between memories counts on the side of HBM.
  - A slice and a gather read what they return, wherever in a fusion they are.
  - An update in place writes the update (dynamic-update-slice, scatter; of a sum it reads as much),
    if the array that it goes into is an operand: where it cannot be written in place, the compiler
    has put a copy before it, which counts.
  - A Pallas kernel counts as its `pl.CostEstimate(bytes_accessed=...)` says, of all that is moved
    between HBM and vector memory, blocks that are read again included. A kernel without one, or
    with a wrong one, can be called under `jax.named_scope("hbm_bytes=N")`, which goes first.
    Without either: `kernels.hbm_bytes`, or each operand and result once.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gspo_jax.aot import hlo, kernels, links
from gspo_jax.aot.hlo import Instruction, Module

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# These move nothing, or what their body moves is counted there.
_FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast while conditional call iota after-all "
  "partition-id replica-id opt-barrier".split()
)
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")
# Element by element, so that a slice of the result needs a slice of the operand.
_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose", "negate", "reverse")
_NOTHING = ("AllocateBuffer", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "Sharding")


@dataclasses.dataclass(frozen=True)
class Item:
  """What an instruction moves."""

  instruction: Instruction
  source: str  # FILE:LINE
  bytes: float  # through HBM, each time
  times: float


@dataclasses.dataclass
class Costs:
  memory: float = 0.0  # bytes through HBM
  items: list[Item] = dataclasses.field(default_factory=list)
  count: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  moved: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  wire: float = 0.0  # bytes that a device sends
  hidden: float = 0.0  # of these, while it does something else
  # As many would take as long around a whole side of the torus; of these, those that are hidden.
  ring_wire: float = 0.0
  ring_hidden: float = 0.0


def costs(
  text: str, rates: Mapping[str, float] | None = None, torus: links.Torus | None = None
) -> Costs:
  """Counts a program's costs in its compiled text (`compiled.as_text()`).

  rates: by the name of a scope or a kernel.
  torus: where the partitions are; None: all collectives go around whole sides.
  """
  counter = _Counter(hlo.parse(text), rates or {}, torus)
  counter.walk(counter.module.entry, 1.0)
  return counter.total


def of_kernel(total: Costs, name: str) -> float:
  """Bytes through HBM of all calls of a Pallas kernel."""
  return sum(item.bytes * item.times for item in total.items if _named(item.instruction, name))


class _Counter:
  def __init__(self, module: Module, rates: Mapping[str, float], torus: links.Torus | None):
    self.module, self.total = module, Costs()
    self._rates, self._torus = rates, torus

  def walk(self, name: str, times: float, rated: bool = False) -> None:
    """`rated`: inside a loop that `rates` has counted."""
    covered = overlapped(self.module.computations.get(name, ()), self.module)
    for instruction in self.module.computations.get(name, ()):
      if instruction.op == "while":
        rate = None if rated else self._rate(instruction)
        turns = trips(self.module, instruction) if rate is None else rate
        self.walk(instruction.called("body"), times * turns, rated or rate is not None)
      elif instruction.op == "conditional":
        self.walk(instruction.branches()[0], times, rated)
      elif instruction.op in ("call", "call-start", "async-start"):
        self.walk(instruction.called("to_apply", "calls"), times, rated)
      else:
        self._one(instruction, self.module.by_name[name], times, instruction.name in covered)

  def _rate(self, instruction: Instruction) -> float | None:
    parts = re.split(r"[/()]", instruction.path)
    return next((n for name, n in self._rates.items() if name in parts), None)

  def _one(
    self, instruction: Instruction, others: dict[str, Instruction], times: float, covered: bool
  ) -> None:
    """One instruction that is not control flow."""
    kind = collective_of(instruction, self.module)
    if kind:
      sent, around = self._collective(kind, instruction, others, times)
      self.total.wire += sent
      self.total.ring_wire += around
      if covered:
        self.total.hidden += sent
        self.total.ring_hidden += around
    moved = hbm_bytes(instruction, others, self.module)
    if instruction.kernel:
      moved *= next((n for name, n in self._rates.items() if _named(instruction, name)), 1)
    if moved:
      self.total.memory += times * moved
      self.total.items.append(Item(instruction, self.module.source(instruction), moved, times))

  def _collective(
    self, kind: str, instruction: Instruction, others, times: float
  ) -> tuple[float, float]:
    """Counts it; returns the bytes that it sends, and as many around a whole side of the torus."""
    started, rest = instruction.op.endswith("-start"), instruction.rest
    if instruction.op == "fusion":
      if inner := carried(instruction, self.module):
        instruction, rest, others = (
          inner,
          inner.rest,
          self.module.by_name[instruction.called("calls")],
        )
      else:
        body = self.module.computations[instruction.called("calls")]
        rest = next((x.rest for x in body if x.op == "all-reduce"), rest)
    members = links.members(rest)
    n = len(members)
    if n < 2:
      return 0.0, 0.0
    result = sum(array.bytes for array in instruction.arrays)
    operand = sum(
      array.bytes for x in instruction.operands if x in others for array in others[x].arrays
    )
    if kind == "all-gather":
      size = result - operand if started and result > operand * n else result
      sent = size * (n - 1) / n
    elif kind == "collective-permute":
      size = sent = operand
    else:
      size = operand
      sent = size * (n - 1) / n * (2 if kind == "all-reduce" else 1)
    self.total.count[kind] += times
    self.total.moved[kind] += times * size
    one_way = kind == "collective-permute"
    share = self._torus.share(members, one_way) if self._torus else 1.0
    return times * sent, times * sent / share


def _named(kernel: Instruction, name: str) -> bool:
  return re.fullmatch(rf"{re.escape(name)}(\.\d+)*", kernel.name) is not None


_START, _DONE = "async-collective-start", "async-collective-done"


def carried(instruction: Instruction, module: Module) -> Instruction | None:
  """The collective of a fusion that starts one, carries it along with work of its own, or waits for
  it: how the TPU compiler overlaps them, if it is told to."""
  if instruction.op != "fusion" or "all-reduce-scatter" in instruction.called("calls"):
    return None
  body = module.computations.get(instruction.called("calls"), ())
  return next((x for x in body if x.op in COLLECTIVES and "chain_id=" in x.rest), None)


def overlapped(body: Sequence[Instruction], module: Module) -> set[str]:
  """Collectives of a computation during which something else is done: they are started, something
  runs, then they are waited for. The text of a compiled program is in the order of its schedule."""
  covered, under_way = set(), {}  # by what waits for them
  for instruction in body:
    inner = carried(instruction, module)
    channel = inner and re.search(r"channel_id=\d+|$", inner.rest)[0]
    if inner and instruction.name.startswith(_START):
      under_way[channel] = instruction.name
    elif inner and instruction.name.startswith(_DONE):
      under_way.pop(channel, None)
    elif instruction.op.endswith("-done"):
      under_way = {key: x for key, x in under_way.items() if x not in instruction.operands}
    elif instruction.op.endswith("-start"):
      if instruction.op.removesuffix("-start") in COLLECTIVES:
        under_way[instruction.name] = instruction.name
    elif instruction.op in ("while", "conditional", "call") or instruction.op not in _FREE | {
      "copy"
    }:
      covered |= set(under_way.values())
  return covered


def collective_of(instruction: Instruction, module: Module) -> str:
  """Its kind, without "-start"; "" if it is none."""
  kind = instruction.op.removesuffix("-start")
  if inner := carried(instruction, module):
    kind = inner.op if instruction.name.startswith(_START) else ""
  elif instruction.op == "fusion" and "all-reduce-scatter" in instruction.called("calls"):
    kind = "reduce-scatter"  # how the TPU compiler may write one
  return kind if kind in COLLECTIVES else ""


def hbm_bytes(instruction: Instruction, others: dict[str, Instruction], module: Module) -> float:
  """Bytes that an instruction reads from HBM and writes to it."""
  operands = [others[x] for x in instruction.operands if x in others]
  if instruction.op in _FREE or any(
    f'custom_call_target="{x}' in instruction.rest for x in _NOTHING
  ):
    return 0.0
  if instruction.op.endswith(
    "-done"
  ):  # its result is that of the whole; the start's has more in it
    kind = operands[0].op.removesuffix("-start")
    if kind in ("call", "async"):
      return 0.0
    sources = [others[x] for x in operands[0].operands if x in others]
    read = (
      instruction.elements * _each(sources[0]) if kind in _SLICES else sum(x.hbm for x in sources)
    )
    return read + instruction.hbm
  if instruction.op.endswith("-start"):
    return 0.0
  if instruction.op == "fusion":
    if carried(instruction, module) and instruction.name.startswith(_START):
      return sum(x.hbm for x in operands)
    if carried(instruction, module) and instruction.name.startswith(_DONE):
      return instruction.hbm
    return _fusion(instruction, operands, module)
  if instruction.kernel:
    return kernels.hbm_bytes(instruction, operands)
  if instruction.op in _SLICES:
    return (
      instruction.elements * _each(operands[0]) + instruction.hbm + sum(x.hbm for x in operands[1:])
    )
  if instruction.op in _UPDATES:
    written = _update(instruction, others).elements * _passes(instruction, module)
    targets = (len(instruction.operands) - 1) // 2 if instruction.op == "scatter" else 1
    return sum(x.hbm for x in operands[targets:]) + written * _each(instruction)
  return instruction.hbm + sum(x.hbm for x in operands)


def _each(instruction: Instruction) -> float:
  """Bytes in HBM for each element."""
  return instruction.hbm / max(instruction.elements, 1)


def _update(instruction: Instruction, others: dict[str, Instruction]) -> Instruction:
  """What an update writes; of a scatter into several targets, the first one's."""
  place = 1 if instruction.op == "dynamic-update-slice" else (len(instruction.operands) + 1) // 2
  return others[instruction.operands[place]]


def _passes(instruction: Instruction, module: Module) -> int:
  """1 if an update replaces what is there; 2 if it reads it too, to add to it."""
  body = module.computations.get(instruction.called("to_apply"), ())
  return 2 if any(x.root and x.op != "parameter" for x in body) else 1


def _fusion(instruction: Instruction, operands: list[Instruction], module: Module) -> float:
  """Bytes of a fusion: of what it only slices, the slices; of what it updates in place, those."""
  name = instruction.called("calls")
  body = module.by_name.get(name)
  if body is None:
    return instruction.hbm + sum(x.hbm for x in operands)
  total = 0.0
  passed = _passed(body) if carried(instruction, module) else set()
  for inner in body.values():
    if inner.op == "parameter" and inner.name not in passed:
      place = int(re.match(r"\d+", inner.rest)[0])
      if place < len(operands) and operands[place].hbm:
        read = _read(inner, body, module)
        total += operands[place].hbm * read / max(inner.elements, 1)
  root = next(x for x in body.values() if x.root)
  results = [body[x] for x in root.operands] if root.op == "tuple" else [root]
  for array, result in zip(instruction.arrays, results):
    if not array.space and result.name not in passed:
      total += _written(result, array.bytes, body, module)
  return total


def _passed(body: dict[str, Instruction]) -> set[str]:
  """What a fusion holds for a collective that it carries along, and hands on."""
  computed = {x.name for x in body.values() if x.op not in (*COLLECTIVES, "custom-call", "tuple")}
  used = {operand for name in computed for operand in body[name].operands}
  parameters = {x.name for x in body.values() if x.op == "parameter"}
  return (parameters - used) | (body.keys() - computed)


def _read(instruction: Instruction, body, module: Module, wanted: float | None = None) -> float:
  """How many elements of a value of a fusion are needed.

  wanted: of the fusion's result, by what it is itself fused into; None: all.
  """
  users = [
    (x, place) for x in body.values() for place, y in enumerate(x.operands) if y == instruction.name
  ]
  needed = 0.0
  if instruction.root:
    needed = instruction.elements if wanted is None else wanted
  for user, place in users:
    if user.op in _SLICES and place == 0:
      needed += user.elements
    elif user.op in _UPDATES and place == 0:
      needed += _update(user, body).elements * (_passes(user, module) - 1)
    elif user.op in _THROUGH:
      needed += _read(user, body, module, wanted)
    elif user.op == "fusion" and user.called("calls") in module.by_name:
      inner = module.by_name[user.called("calls")]
      of_user = _read(user, body, module, wanted)
      taken = [x for x in inner.values() if x.op == "parameter" and x.rest.startswith(f"{place})")]
      needed += sum(_read(x, inner, module, of_user) for x in taken)
    else:
      needed += instruction.elements
  return min(needed, float(instruction.elements))


def _written(result: Instruction, size: float, body, module: Module) -> float:
  """Bytes of a result that a fusion writes."""
  result = _copied(result, body)
  if result.op == "fusion" and result.called("calls") in module.by_name:
    inner = module.by_name[result.called("calls")]
    root = next(x for x in inner.values() if x.root)
    return size if root.op == "tuple" else _written(root, size, inner, module)
  if result.op not in _UPDATES:
    return size
  if _copied(body[result.operands[0]], body).op != "parameter":
    return size  # made here: all of it is written
  return size * _update(result, body).elements / max(result.elements, 1)


def _copied(instruction: Instruction, body: dict[str, Instruction]) -> Instruction:
  """What this is a copy of."""
  while instruction.op in ("bitcast", "copy") and instruction.operands[0] in body:
    instruction = body[instruction.operands[0]]
  return instruction


def trips(module: Module, loop: Instruction) -> int:
  """Turns of a loop: as XLA says, or the constant that its counter is compared with; 1 if there is
  none, or several."""
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  body = module.computations.get(loop.called("condition"), ())
  constants = (re.match(r"\d+", x.rest) for x in body if x.op == "constant" and "s32[]" in x.shape)
  bounds = {int(x[0]) for x in constants if x} - {0}
  return bounds.pop() if len(bounds) == 1 else 1
