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
from collections.abc import Iterator, Mapping, Sequence

from gspo_jax.aot import hlo, kernels, links
from gspo_jax.aot.hlo import Instruction

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# These move nothing, or what their body moves is counted there.
_FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast while conditional call iota after-all "
  "partition-id replica-id opt-barrier recv send-done".split()
)
# Nothing that a collective could be hidden behind.
_IDLE = (_FREE | {"copy", "send"}) - {"while", "conditional", "call"}
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")
# Element by element, so that a slice of the result needs a slice of the operand.
_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose", "negate", "reverse")
_NOTHING = ("AllocateBuffer", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "Sharding")


@dataclasses.dataclass(frozen=True)
class Item:
  """What an instruction moves."""

  instruction: Instruction
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
  # Bytes that a device sends to other slices; of these, while it does something else.
  network: float = 0.0
  network_hidden: float = 0.0


def costs(
  text: str, rates: Mapping[str, float] | None = None, torus: links.Torus | None = None
) -> Costs:
  """Counts a program's costs in its compiled text (`compiled.as_text()`).

  rates: by the name of a scope or a kernel.
  torus: where the partitions are; None: all collectives go around whole sides.
  """
  total, module, rates = Costs(), hlo.parse(text), rates or {}
  for instruction, times, covered in executed(module, rates):
    if kind := collective_of(instruction):
      _add_collective(total, kind, instruction, times, covered, torus)
    if instruction.op == "recv":
      sent = times * network_bytes(instruction)
      total.network += sent
      total.network_hidden += sent if covered else 0.0
    moved = hbm_bytes(instruction)
    if instruction.kernel:
      moved *= next((n for name, n in rates.items() if _named(instruction, name)), 1)
    if moved:
      total.memory += times * moved
      total.items.append(Item(instruction, moved, times))
  return total


def executed(
  module: hlo.Module, rates: Mapping[str, float] | None = None
) -> Iterator[tuple[Instruction, float, bool]]:
  """All that a program does and is not control flow, how often, and whether it is a collective
  during which something else is done."""
  return _executed([*module.computations[module.entry].values()], 1.0, rates or {})


def of_kernel(total: Costs, name: str) -> float:
  """Bytes through HBM of all calls of a Pallas kernel."""
  return sum(item.bytes * item.times for item in total.items if _named(item.instruction, name))


def _executed(
  body: Sequence[Instruction], times: float, rates: Mapping[str, float]
) -> Iterator[tuple[Instruction, float, bool]]:
  """`executed`, of a computation. In a loop that `rates` has counted they count no other one."""
  covered = overlapped(body)
  for instruction in body:
    if instruction.op == "while":
      scopes = re.split(r"[/()]", instruction.path)
      rate = next((n for name, n in rates.items() if name in scopes), None)
      turns = trips(instruction) if rate is None else rate
      inside = rates if rate is None else {}
      yield from _executed(instruction.body("body"), times * turns, inside)
    elif instruction.op == "conditional":
      yield from _executed(instruction.branch(), times, rates)
    elif instruction.op in ("call", "call-start", "async-start"):
      yield from _executed(instruction.body("to_apply", "calls"), times, rates)
    else:
      yield instruction, times, instruction.name in covered


def _add_collective(
  total: Costs,
  kind: str,
  instruction: Instruction,
  times: float,
  covered: bool,
  torus: links.Torus | None,
) -> None:
  started, attributes = instruction.op.endswith("-start"), instruction.attributes
  if inner := carried(instruction):
    instruction, attributes = inner, inner.attributes
  elif instruction.op == "fusion":
    body = instruction.body("calls")
    attributes = next((x.attributes for x in body if x.op == "all-reduce"), attributes)
  members = links.members(attributes)
  n = len(members)
  if n < 2:
    return
  operand = sum(x.bytes for x in instruction.inputs)
  if kind == "all-gather":
    result = instruction.bytes
    size = result - operand if started and result > operand * n else result
    sent = size * (n - 1) / n
  elif kind == "collective-permute":
    size = sent = operand
  else:
    size = operand
    sent = size * (n - 1) / n * (2 if kind == "all-reduce" else 1)
  total.count[kind] += times
  total.moved[kind] += times * size
  share = torus.share(members, one_way=kind == "collective-permute") if torus else 1.0
  total.wire += times * sent
  total.ring_wire += times * sent / share
  if covered:
    total.hidden += times * sent
    total.ring_hidden += times * sent / share


def network_bytes(instruction: Instruction) -> float:
  """Bytes that a device sends to other slices for what a `recv` returns: a collective among slices,
  whose parts within a slice are collectives of their own."""
  if not (kind := re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)):
    return 0.0
  slices = re.search(r'_xla_megascale_target="\{([\d,]+)\}', instruction.attributes)
  n = len(slices[1].split(",")) if slices else 1
  of_result = dict(
    ALL_REDUCE=2 * (n - 1) / n,
    ALL_GATHER=(n - 1) / n,
    ALL_TO_ALL=(n - 1) / n,
    REDUCE_SCATTER=n - 1,
  )
  return of_result.get(kind[1], 1.0) * instruction.arrays[0].bytes


def _named(kernel: Instruction, name: str) -> bool:
  return re.fullmatch(rf"{re.escape(name)}(\.\d+)*", kernel.name) is not None


_START, _DONE = "async-collective-start", "async-collective-done"


def carried(instruction: Instruction) -> Instruction | None:
  """The collective of a fusion that starts one, carries it along with work of its own, or waits for
  it: how the TPU compiler overlaps them, if it is told to."""
  if instruction.op != "fusion" or "all-reduce-scatter" in instruction.called("calls"):
    return None
  body = instruction.body("calls")
  return next((x for x in body if x.op in COLLECTIVES and "chain_id=" in x.attributes), None)


def overlapped(body: Sequence[Instruction]) -> set[str]:
  """Collectives of a computation during which something else is done: they are started, something
  runs, then they are waited for. The text of a compiled program is in the order of its schedule."""
  covered, under_way = set(), {}  # by what waits for them
  for instruction in body:
    inner = carried(instruction)
    channel = inner and re.search(r"channel_id=\d+|$", inner.attributes)[0]
    if inner and instruction.name.startswith(_START):
      under_way[channel] = instruction.name
    elif inner and instruction.name.startswith(_DONE):
      under_way.pop(channel, None)
    elif instruction.op.endswith("-done"):
      under_way = {key: x for key, x in under_way.items() if x not in instruction.operands}
    elif instruction.op == "recv":
      under_way[instruction.name] = instruction.name
    elif instruction.op.endswith("-start"):
      if instruction.op.removesuffix("-start") in COLLECTIVES:
        under_way[instruction.name] = instruction.name
    elif instruction.op not in _IDLE:
      covered |= set(under_way.values())
  return covered


def collective_of(instruction: Instruction) -> str:
  """Its kind, without "-start"; "" if it is none."""
  kind = instruction.op.removesuffix("-start")
  if inner := carried(instruction):
    kind = inner.op if instruction.name.startswith(_START) else ""
  elif instruction.op == "fusion" and "all-reduce-scatter" in instruction.called("calls"):
    kind = "reduce-scatter"  # how the TPU compiler may write one
  return kind if kind in COLLECTIVES else ""


def hbm_bytes(instruction: Instruction) -> float:
  """Bytes that an instruction reads from HBM and writes to it."""
  inputs = instruction.inputs
  if instruction.op in _FREE or instruction.op.endswith("-start"):
    return 0.0
  if any(f'custom_call_target="{x}' in instruction.attributes for x in _NOTHING):
    return 0.0
  if instruction.op == "send":
    return _hbm(inputs)
  if instruction.op.endswith("-done"):  # has the result of the whole; the start's has more in it
    kind, sources = inputs[0].op.removesuffix("-start"), inputs[0].inputs
    if kind in ("call", "async"):
      return 0.0
    return _sliced(instruction, sources[:1]) if kind in _SLICES else instruction.hbm + _hbm(sources)
  if instruction.op == "fusion":
    if carried(instruction) and instruction.name.startswith(_START):
      return _hbm(inputs)
    if carried(instruction) and instruction.name.startswith(_DONE):
      return instruction.hbm
    return _fusion(instruction)
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
  """Bytes in HBM for each element."""
  return instruction.hbm / max(instruction.elements, 1)


def _update(instruction: Instruction) -> Instruction:
  """What an update writes; of a scatter into several targets, the first one's."""
  place = 1 if instruction.op == "dynamic-update-slice" else (len(instruction.operands) + 1) // 2
  return instruction.siblings[instruction.operands[place]]


def _passes(instruction: Instruction) -> int:
  """1 if an update replaces what is there; 2 if it reads it too, to add to it."""
  return 2 if any(x.root and x.op != "parameter" for x in instruction.body("to_apply")) else 1


def _root(body: Sequence[Instruction]) -> Instruction:
  return next(x for x in body if x.root)


def _fusion(instruction: Instruction) -> float:
  """Bytes of a fusion: of what it only slices, the slices; of what it updates in place, those."""
  body, inputs = instruction.body("calls"), instruction.inputs
  if not body:
    return instruction.hbm + _hbm(inputs)
  total = 0.0
  passed = _passed(body) if carried(instruction) else set()
  for inner in body:
    if inner.op == "parameter" and inner.name not in passed:
      place = int(re.match(r"\d+", inner.attributes)[0])
      if place < len(inputs) and inputs[place].hbm:
        total += inputs[place].hbm * _read(inner) / max(inner.elements, 1)
  root = _root(body)
  for array, result in zip(instruction.arrays, root.inputs if root.op == "tuple" else [root]):
    if not array.space and result.name not in passed:
      total += _written(result, array.bytes)
  return total


def _passed(body: Sequence[Instruction]) -> set[str]:
  """What a fusion holds for a collective that it carries along, and hands on."""
  computed = [x for x in body if x.op not in (*COLLECTIVES, "custom-call", "tuple")]
  used = {operand for x in computed for operand in x.operands}
  parameters = {x.name for x in body if x.op == "parameter"}
  return (parameters - used) | ({x.name for x in body} - {x.name for x in computed})


def _read(instruction: Instruction, wanted: float | None = None) -> float:
  """How many elements of a value of a fusion are needed.

  wanted: of the fusion's result, by what it is itself fused into; None: all.
  """
  needed = 0.0
  if instruction.root:
    needed = instruction.elements if wanted is None else wanted
  siblings = instruction.siblings.values()
  users = [(x, i) for x in siblings for i, y in enumerate(x.operands) if y == instruction.name]
  for user, place in users:
    if user.op in _SLICES and place == 0:
      needed += user.elements
    elif user.op in _UPDATES and place == 0:
      needed += _update(user).elements * (_passes(user) - 1)
    elif user.op in _THROUGH:
      needed += _read(user, wanted)
    elif user.op == "fusion" and user.body("calls"):
      of_user = _read(user, wanted)
      parameters = [x for x in user.body("calls") if x.op == "parameter"]
      taken = [x for x in parameters if x.attributes.startswith(f"{place})")]
      needed += sum(_read(x, of_user) for x in taken)
    else:
      needed += instruction.elements
  return min(needed, float(instruction.elements))


def _written(result: Instruction, size: float) -> float:
  """Bytes of a result that a fusion writes."""
  result = _copied(result)
  if result.op == "fusion" and result.body("calls"):
    root = _root(result.body("calls"))
    return size if root.op == "tuple" else _written(root, size)
  if result.op not in _UPDATES:
    return size
  if _copied(result.inputs[0]).op != "parameter":
    return size  # made here: all of it is written
  return size * _update(result).elements / max(result.elements, 1)


def _copied(instruction: Instruction) -> Instruction:
  """What this is a copy of."""
  while instruction.op in ("bitcast", "copy") and instruction.operands[0] in instruction.siblings:
    instruction = instruction.inputs[0]
  return instruction


def trips(loop: Instruction) -> int:
  """Turns of a loop: as XLA says, or the constant that its counter is compared with; 1 if there is
  none, or several."""
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
    return int(known[1])
  constants = [x for x in loop.body("condition") if x.op == "constant" and "s32[]" in x.shape]
  matches = (re.match(r"\d+", x.attributes) for x in constants)
  bounds = {int(match[0]) for match in matches if match} - {0}
  return bounds.pop() if len(bounds) == 1 else 1
