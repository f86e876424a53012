"""Reads a compiled program: bytes through HBM and through each kind of collective, per device.

XLA's own cost analysis counts the body of a loop once. This one multiplies the body by the loop's
trip count, or by 1 if that depends on data (chunks of expert rows, usually a single one). `rates`
overrides these by name: for the outermost loop in a `jax.named_scope` of that name, the rate is the
trip count (the sampler's `refill`); for a kernel of that name, the fraction of its stated bytes
(attention to a partly filled cache). Of a conditional's branches, the one with cuDNN's attention
counts, else the "false" branch: in this package "true" means overflow.
"""

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gspo_jax.aot import hlo, links, operations
from gspo_jax.aot.hlo import Instruction
from gspo_jax.aot.traffic import COLLECTIVES, DONE, START, carried, free, hbm_bytes
from gspo_jax.system.accelerators import Chip

_CALLS = ("call-start", "async-start")  # Concurrent calls, e.g. on a SparseCore.


@dataclasses.dataclass(frozen=True)
class Item:
  """Traffic of an instruction."""

  instruction: Instruction
  bytes: float  # Through HBM, per execution.
  times: float


@dataclasses.dataclass(frozen=True)
class Sent:
  """Traffic of a device for a collective."""

  kind: str  # one of `COLLECTIVES`
  bytes: float  # Bytes of the result, or of the summands.
  wire: float  # Bytes sent.
  ring: float  # Bytes over both links of a ring with the same time; see `links`.
  network: float = 0.0  # Bytes sent to GPUs of other hosts.


@dataclasses.dataclass
class Costs:
  """Costs of a program per device."""

  memory: float = 0.0  # Bytes through HBM.
  items: list[Item] = dataclasses.field(default_factory=list)
  count: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  moved: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  wire: float = 0.0  # Bytes sent per device.
  hidden: float = 0.0  # Part of `wire` overlapped with other work.
  # Sum of `Sent.ring`, and the overlapped part.
  ring_wire: float = 0.0
  ring_hidden: float = 0.0
  # Bytes sent to other slices per device, and the overlapped part.
  network: float = 0.0
  network_hidden: float = 0.0
  products: float = 0.0  # Floating-point operations of `operations`; GPUs only.


def costs(
  text: str,
  rates: Mapping[str, float] | None = None,
  torus: links.Links | None = None,
  chip: Chip | None = None,
) -> Costs:
  """Counts a program's costs in its compiled text (`compiled.as_text()`).

  rates: trip count of a scope's loop, or fraction of a kernel's bytes, by name.
  torus: links between the partitions; None assumes rings around whole sides.
  chip: speeds, which limit the overlap of collectives; None assumes full overlap.
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
      total.network += times * sent.network
    if instruction.op == "recv":
      received = times * network_bytes(instruction)
      total.network += received
      total.network_hidden += received * hidden
    total.products += times * operations.products(instruction)
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
  torus: links.Links | None = None,
  chip: Chip | None = None,
) -> Iterator[tuple[Instruction, float, float]]:
  """Yields (instruction, executions, overlapped fraction), without control flow.

  The fraction is 0 except for collectives.
  """

  def walk(body: Sequence[Instruction], times: float, rates: Mapping[str, float]) -> Iterator:
    """Walks a body; `rates` apply to the outermost loop only."""
    hidden = overlapped(body, torus, chip)
    for instruction in body:
      share = hidden.get(instruction.name, 0.0)
      if instruction.op == "while":
        scopes = re.split(r"[/()]", instruction.path)
        rate = next((n for name, n in rates.items() if name in scopes), None)
        count = trips(instruction) if rate is None else rate
        inner_rates = rates if rate is None else {}
        yield from walk(instruction.body("body"), times * count, inner_rates)
      elif instruction.op == "conditional":
        yield from walk(instruction.branch(), times, rates)
      elif instruction.op == "call":
        yield from walk(instruction.body("to_apply"), times, rates)
      elif instruction.op in _CALLS:
        for inner, count, _ in walk(_called(instruction), times, rates):
          yield inner, count, share
      else:
        yield instruction, times, share

  return walk([*module.computations[module.entry].values()], 1.0, rates or {})


def kernel_bytes(total: Costs, name: str) -> float:
  """Bytes through HBM of all calls of a Pallas kernel."""
  return sum(item.bytes * item.times for item in total.items if _named(item.instruction, name))


def overlapped(
  body: Sequence[Instruction], torus: links.Links | None = None, chip: Chip | None = None
) -> dict[str, float]:
  """Returns the overlapped fraction of each asynchronous collective of a computation.

  Instructions between its start and its done overlap it: a compiled program's text is in schedule
  order. They hide one collective at a time, for their own duration, or all of it if `chip` is None.
  """
  time: dict[str, float] = {}  # Seconds by collective.
  remaining: dict[str, float] = {}  # Seconds not yet overlapped, by collective.
  pending: dict[str | None, str] = {}  # Collective by channel or waiting instruction.

  def start(waiting: str | None, name: str, sent: Sequence[Sent | None]) -> None:
    pending[waiting] = name
    ring = sum(x.ring for x in sent if x)
    time[name] = remaining[name] = ring / chip.ring_speed if chip and ring else 1.0

  for instruction in body:
    name, inner = instruction.name, carried(instruction)
    channel = inner and re.search(r"channel_id=\d+|$", inner.attributes)[0]
    if inner and name.startswith(DONE):
      pending.pop(channel, None)
    elif instruction.op.endswith("-done"):
      pending = {key: x for key, x in pending.items() if x not in instruction.operands}
    elif instruction.op == "recv":
      start(name, name, [])
    elif inner and name.startswith(START):
      start(channel, name, [sent_for(instruction, torus)])
    elif instruction.op.endswith("-start"):
      parts = [sent_for(part, torus) for part in _inside(instruction)]
      if any(parts):
        start(name, name, parts)
    elif pending:
      spent = seconds(instruction, chip)
      for name in pending.values():
        hides = min(spent, remaining[name])
        remaining[name] -= hides
        spent -= hides if chip else 0.0
  return {name: 1 - remaining[name] / time[name] for name in time}


def seconds(instruction: Instruction, chip: Chip | None) -> float:
  """Returns an instruction's seconds; 0 for instructions on the links, such as collectives.

  The maximum of three figures: the compiler's estimate, the minimum for the HBM traffic, and the
  minimum for a kernel's operations. If `chip` is None: 1 for any other instruction.
  """
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
  cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
  work = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.attributes)
  return max(
    int(cycles[1]) / chip.clock if cycles else 0.0,
    int(work[1]) * chip.devices / chip.flops if work else 0.0,
    hbm_bytes(instruction) * chip.devices / chip.hbm_speed,
  )


def _total(body: Sequence[Instruction], chip: Chip | None) -> float:
  return sum(seconds(instruction, chip) for instruction in body)


def _called(instruction: Instruction) -> list[Instruction]:
  return instruction.body("to_apply", "calls")


def _inside(instruction: Instruction) -> Iterator[Instruction]:
  """Yields the instructions of a call, or the instruction itself."""
  if instruction.op not in ("call", *_CALLS):
    yield instruction
    return
  for inner in _called(instruction):
    yield from _inside(inner)


def sent_for(instruction: Instruction, torus: links.Links | None = None) -> Sent | None:
  """Returns a collective's traffic; None for other instructions or a single device."""
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
  network = size * torus.network(kind, members) if torus else 0.0
  return Sent(kind, size, sent - network, (sent - network) / share, network)


def network_bytes(instruction: Instruction) -> float:
  """Bytes per device sent to other slices for a `recv`.

  A `recv` is part of a collective among slices; the parts within a slice are separate collectives.
  """
  if not (kind := re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)):
    return 0.0
  slices = re.search(r'_xla_megascale_target="\{([\d,]+)\}', instruction.attributes)
  n = len(slices[1].split(",")) if slices else 1
  factors = dict(
    ALL_REDUCE=2 * (n - 1) / n,
    ALL_GATHER=(n - 1) / n,
    ALL_TO_ALL=(n - 1) / n,
    REDUCE_SCATTER=n - 1,
  )
  return factors.get(kind[1], 1.0) * instruction.arrays[0].bytes


def _named(kernel: Instruction, name: str) -> bool:
  named = re.fullmatch(rf"{re.escape(name)}(\.\d+)*", kernel.name) is not None
  return named or name in kernel.path.split("/")  # On GPUs the path alone has the name.


def kind_of(instruction: Instruction) -> str:
  """Returns a collective's kind, without "-start"; "" for other instructions."""
  kind = instruction.op.removesuffix("-start")
  if inner := carried(instruction):
    kind = inner.op if instruction.name.startswith(START) else ""
  elif instruction.op == "fusion" and "all-reduce-scatter" in instruction.called("calls"):
    kind = "reduce-scatter"  # The TPU compiler fuses it this way.
  return kind if kind in COLLECTIVES else ""


def trips(loop: Instruction) -> int:
  """Returns a loop's trip count: XLA's own, the bound in its condition, or 1."""
  if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
    return int(match[1])
  condition = loop.body("condition")
  fused = itertools.chain(*(x.body("calls") for x in condition if x.op == "fusion"))
  bounds = _bounds(condition) or _bounds(fused)
  return bounds.pop() if len(bounds) == 1 else 1


def _bounds(instructions: Iterable[Instruction]) -> set[int]:
  """Returns the positive constants of a condition."""
  constants = (x for x in instructions if x.op == "constant" and "s32[]" in x.shape)
  matches = (re.match(r"\d+", x.attributes) for x in constants)
  return {int(match[0]) for match in matches if match} - {0}
