"""Reads a compiled program: bytes through HBM and through each kind of collective, per device.

XLA's own cost analysis counts the body of a loop once; here a body counts as often as its condition
says. A loop whose length depends on data counts once: of ours, those are the pieces of expert rows,
one of which is the rule. What happens less often than the text says is in `rates`: the outermost
loop in a `jax.named_scope` of that name makes so many turns (`refill` of the sampler), and a kernel
of that name moves such a share of what it states (attention to a cache that is not full). A
conditional counts as if it were false: ours are true where something overflows.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gspo_jax.aot import hlo, links
from gspo_jax.aot.hlo import Instruction
from gspo_jax.aot.traffic import COLLECTIVES, DONE, START, carried, free, hbm_bytes
from gspo_jax.system.accelerators import Chip

_CALLS = ("call-start", "async-start")  # of what runs beside the rest, e.g. on a SparseCore


@dataclasses.dataclass(frozen=True)
class Item:
  """What an instruction moves."""

  instruction: Instruction
  bytes: float  # through HBM, each time
  times: float


@dataclasses.dataclass(frozen=True)
class Sent:
  """What a device sends for a collective."""

  kind: str  # one of `COLLECTIVES`
  bytes: float  # of the result, or of what is summed
  wire: float  # sent
  ring: float  # as many would take as long around a whole side of the torus


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
  text: str,
  rates: Mapping[str, float] | None = None,
  torus: links.Torus | None = None,
  chip: Chip | None = None,
) -> Costs:
  """Counts a program's costs in its compiled text (`compiled.as_text()`).

  rates: by the name of a scope or a kernel.
  torus: where the partitions are; None: all collectives go around whole sides.
  chip: for how much of a collective hides behind what runs meanwhile; None: all of it does.
  """
  total, module, rates = Costs(), hlo.parse(text), rates or {}
  for instruction, times, hidden in executed(module, rates, torus, chip):
    if sent := sent_for(instruction, torus):
      total.count[sent.kind] += times
      total.moved[sent.kind] += times * sent.bytes
      total.wire += times * sent.wire
      total.ring_wire += times * sent.ring
      total.hidden += times * sent.wire * hidden
      total.ring_hidden += times * sent.ring * hidden
    if instruction.op == "recv":
      received = times * network_bytes(instruction)
      total.network += received
      total.network_hidden += received * hidden
    moved = hbm_bytes(instruction)
    if instruction.kernel:
      moved *= next((n for name, n in rates.items() if _named(instruction, name)), 1)
    if moved:
      total.memory += times * moved
      total.items.append(Item(instruction, moved, times))
  return total


def executed(
  module: hlo.Module,
  rates: Mapping[str, float] | None = None,
  torus: links.Torus | None = None,
  chip: Chip | None = None,
) -> Iterator[tuple[Instruction, float, float]]:
  """All that a program does and is not control flow, how often, and of a collective the share
  during which something else is done."""

  def of_body(body: Sequence[Instruction], times: float, rates: Mapping[str, float]) -> Iterator:
    """In a loop that `rates` has counted they count no other one."""
    hidden = overlapped(body, torus, chip)
    for instruction in body:
      share = hidden.get(instruction.name, 0.0)
      if instruction.op == "while":
        scopes = re.split(r"[/()]", instruction.path)
        rate = next((n for name, n in rates.items() if name in scopes), None)
        turns = trips(instruction) if rate is None else rate
        inside = rates if rate is None else {}
        yield from of_body(instruction.body("body"), times * turns, inside)
      elif instruction.op == "conditional":
        yield from of_body(instruction.branch(), times, rates)
      elif instruction.op == "call":
        yield from of_body(instruction.body("to_apply"), times, rates)
      elif instruction.op in _CALLS:
        for inner, often, _ in of_body(_called(instruction), times, rates):
          yield inner, often, share
      else:
        yield instruction, times, share

  return of_body([*module.computations[module.entry].values()], 1.0, rates or {})


def of_kernel(total: Costs, name: str) -> float:
  """Bytes through HBM of all calls of a Pallas kernel."""
  return sum(item.bytes * item.times for item in total.items if _named(item.instruction, name))


def overlapped(
  body: Sequence[Instruction], torus: links.Torus | None = None, chip: Chip | None = None
) -> dict[str, float]:
  """Of each collective of a computation during which something else is done the share that this
  hides: it is started, something runs, then it is waited for. The text of a compiled program is in
  the order of its schedule. What runs hides one collective at a time, for as long as it takes; all
  of it, where `chip` is None."""
  time: dict[str, float] = {}  # that each collective takes
  left: dict[str, float] = {}  # of it
  under_way: dict[str | None, str] = {}  # by what waits for them

  def start(waits: str | None, name: str, sent: Sequence[Sent | None]) -> None:
    under_way[waits] = name
    ring = sum(x.ring for x in sent if x)
    time[name] = left[name] = ring / chip.ring_speed if chip and ring else 1.0

  for instruction in body:
    name, inner = instruction.name, carried(instruction)
    channel = inner and re.search(r"channel_id=\d+|$", inner.attributes)[0]
    if inner and name.startswith(DONE):
      under_way.pop(channel, None)
    elif instruction.op.endswith("-done"):
      under_way = {key: x for key, x in under_way.items() if x not in instruction.operands}
    elif instruction.op == "recv":
      start(name, name, [])
    elif inner and name.startswith(START):
      start(channel, name, [sent_for(instruction, torus)])
    elif instruction.op.endswith("-start"):
      parts = [sent_for(part, torus) for part in _inside(instruction)]
      if any(parts):
        start(name, name, parts)
    elif under_way:
      spent = seconds(instruction, chip)
      for name in under_way.values():
        hides = min(spent, left[name])
        left[name] -= hides
        spent -= hides if chip else 0.0
  return {name: 1 - left[name] / time[name] for name in time}


def seconds(instruction: Instruction, chip: Chip | None) -> float:
  """Time in which an instruction leaves the links alone, on a device of the chip: the compiler's
  estimate, or what its bytes through HBM or a kernel's operations take at least; 1 or 0, where
  `chip` is None."""
  if instruction.op == "while":
    return trips(instruction) * _total(instruction.body("body"), chip)
  if instruction.op == "conditional":
    return _total(instruction.branch(), chip)
  if instruction.op == "call":
    return _total(instruction.body("to_apply"), chip)
  if free(instruction) or instruction.op in ("copy", "send") or kind_of(instruction):
    return 0.0
  if chip is None:
    return 1.0
  said = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
  work = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.attributes)
  return max(
    int(said[1]) / chip.clock if said else 0.0,
    int(work[1]) * chip.devices / chip.flops if work else 0.0,
    hbm_bytes(instruction) * chip.devices / chip.hbm_speed,
  )


def _total(body: Sequence[Instruction], chip: Chip | None) -> float:
  return sum(seconds(instruction, chip) for instruction in body)


def _called(instruction: Instruction) -> list[Instruction]:
  return instruction.body("to_apply", "calls")


def _inside(instruction: Instruction) -> Iterator[Instruction]:
  """What a call does, or the instruction itself if it is none."""
  if instruction.op not in ("call", *_CALLS):
    yield instruction
    return
  for inner in _called(instruction):
    yield from _inside(inner)


def sent_for(instruction: Instruction, torus: links.Torus | None = None) -> Sent | None:
  """What a device sends for it; None if it is no collective of several devices."""
  if not (kind := kind_of(instruction)):
    return None
  started, attributes = instruction.op.endswith("-start"), instruction.attributes
  if inner := carried(instruction):
    instruction, attributes = inner, inner.attributes
  elif instruction.op == "fusion":
    body = instruction.body("calls")
    attributes = next((x.attributes for x in body if x.op == "all-reduce"), attributes)
  members = links.members(attributes)
  n = len(members)
  if n < 2:
    return None
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
  share = torus.share(members, one_way=kind == "collective-permute") if torus else 1.0
  return Sent(kind, size, sent, sent / share)


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


def kind_of(instruction: Instruction) -> str:
  """Its kind, without "-start"; "" if it is none."""
  kind = instruction.op.removesuffix("-start")
  if inner := carried(instruction):
    kind = inner.op if instruction.name.startswith(START) else ""
  elif instruction.op == "fusion" and "all-reduce-scatter" in instruction.called("calls"):
    kind = "reduce-scatter"  # how the TPU compiler may write one
  return kind if kind in COLLECTIVES else ""


def trips(loop: Instruction) -> int:
  """Turns of a loop: as XLA says, or the constant that its counter is compared with; 1 if there is
  none, or several."""
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
    return int(known[1])
  constants = [x for x in loop.body("condition") if x.op == "constant" and "s32[]" in x.shape]
  matches = (re.match(r"\d+", x.attributes) for x in constants)
  bounds = {int(match[0]) for match in matches if match} - {0}
  return bounds.pop() if len(bounds) == 1 else 1
