"""Counts a compiled program's bytes through HBM and through each kind of collective, per device.

XLA's own cost analysis counts the body of a loop once. This module multiplies the body's bytes by
the loop's trip count. If the trip count depends on data, the body counts once. An example is the
loop over chunks of expert rows, which usually has a single chunk.

`rates` are assumptions about data, by the name of a `jax.named_scope` or of a kernel. The rate of a
scope, such as the sampler's `refill`, is the trip count of the outermost loop in this scope. The
rate of a kernel, such as attention to a partly filled cache, is the counted fraction of the
kernel's bytes. For example, {"refill": 0.5, "paged_attention": 0.25} counts half an execution of
the body of the loop in `refill`, and a quarter of the kernel's bytes.

A conditional counts as its branch with cuDNN's attention or, if there is none, as its branch for a
false condition. In this package's programs for TPUs, conditions are rarely true. For example, one
condition is that more expert rows exist than fit into one chunk.
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

_CALLS = ("call-start", "async-start")  # Calls that overlap other work, e.g. on a SparseCore.


@dataclasses.dataclass(frozen=True)
class Item:
  """HBM traffic of an instruction."""

  instruction: Instruction
  bytes: float  # Bytes through HBM in one execution.
  times: float  # Number of executions.


@dataclasses.dataclass(frozen=True)
class Sent:
  """Traffic of one device for one execution of a collective."""

  kind: str  # One of `COLLECTIVES`.
  bytes: float  # Size of the operands, or of an all-gather's result.
  wire: float  # Bytes sent within the slice or host.
  ring: float  # `wire` divided by the collective's share of the links' speed (see `links`).
  network: float = 0.0  # Bytes sent to GPUs of other hosts.


@dataclasses.dataclass
class Costs:
  """Costs of a program per device: sums over all executed instructions."""

  memory: float = 0.0  # Bytes through HBM.
  items: list[Item] = dataclasses.field(default_factory=list)  # Instructions with HBM traffic.
  # Executions of collectives and sum of `Sent.bytes`, by kind.
  count: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  moved: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
  # Sum of `Sent.wire`, and the part of this sum that overlaps other work.
  wire: float = 0.0
  hidden: float = 0.0
  # Sum of `Sent.ring`, and its overlapped part.
  ring_wire: float = 0.0
  ring_hidden: float = 0.0
  # Bytes sent to other slices or hosts, and their overlapped part.
  network: float = 0.0
  network_hidden: float = 0.0
  # Operations of matrix products (`operations`), meaningful for GPUs only.
  products: float = 0.0


def costs(
  text: str,
  rates: Mapping[str, float] | None = None,
  torus: links.Links | None = None,
  chip: Chip | None = None,
) -> Costs:
  """Counts a program's costs per device.

  Args:
    text: compiled program (`compiled.as_text()`).
    rates: trip counts of loops and fractions of kernels' bytes, by name. None means no assumptions.
    torus: links between the devices. None means that all collectives have a share of 1 (`links`).
    chip: speeds, which limit the overlap of collectives. None means that a single instruction with
      work, between the start and the end of a collective, overlaps the whole collective.
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
  """Yields (instruction, number of executions, overlapped fraction) for a whole program.

  Loops, conditionals and calls are replaced by the instructions of their bodies. The fraction is
  the part of an instruction's transfers that overlaps other work. It can be above 0 only for
  asynchronous collectives, for a `recv`, and for instructions of an asynchronous call with a
  collective. Arguments are as in `costs`.
  """

  def walk(body: Sequence[Instruction], times: float, rates: Mapping[str, float]) -> Iterator:
    """Yields the tuples of `executed` for a body with `times` executions.

    A rate is for the outermost loop in its scope. Inner loops have their own trip counts.
    """
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
  """Returns the bytes through HBM of all calls of a Pallas kernel."""
  return sum(item.bytes * item.times for item in total.items if _named(item.instruction, name))


def overlapped(
  body: Sequence[Instruction], torus: links.Links | None = None, chip: Chip | None = None
) -> dict[str, float]:
  """Returns the overlapped fraction of each asynchronous collective, by name.

  A compiled program's text is in schedule order, so the instructions between a collective's start
  and its end overlap the collective. Each second of instructions overlaps one second of one pending
  collective, the earliest that is not yet fully overlapped. For example, if collectives of 2 and 3
  seconds are pending during 4 seconds of instructions, their fractions are 1 and 2/3. If `chip` is
  None, one instruction with work overlaps all pending collectives entirely.

  Args:
    body: instructions of a computation.
    torus: as in `costs`.
    chip: as in `costs`.
  """
  time: dict[str, float] = {}  # Seconds by collective; 1 if unknown.
  remaining: dict[str, float] = {}  # Seconds not yet overlapped, by collective.
  # Names of collectives between start and end, by starting instruction or by channel.
  pending: dict[str | None, str] = {}

  def start(
    waiting: str | None, name: str, sent: Sequence[Sent | None] = (), received: float = 0.0
  ) -> None:
    pending[waiting] = name
    ring = sum(x.ring for x in sent if x)
    duration = chip and ring / chip.ring_speed + received * chip.devices / chip.network
    time[name] = remaining[name] = duration or 1.0

  for instruction in body:
    name, inner = instruction.name, carried(instruction)
    channel = inner and re.search(r"channel_id=\d+|$", inner.attributes)[0]
    if inner and name.startswith(DONE):
      pending.pop(channel, None)
    elif instruction.op.endswith("-done"):
      pending = {key: x for key, x in pending.items() if x not in instruction.operands}
    elif instruction.op == "recv":
      start(name, name, received=network_bytes(instruction))
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
  """Returns an instruction's seconds of computation or HBM traffic.

  An instruction takes the longest of three times: the compiler's estimate, the HBM traffic at full
  speed, and a kernel's stated operations at full speed. If `chip` is None, it takes 1 second.
  Collectives, copies and instructions without work take 0 seconds. A loop, conditional or call
  takes the sum over its body's executions.
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
  """Yields all instructions within a call, or an instruction unchanged if it is no call."""
  if instruction.op not in ("call", *_CALLS):
    yield instruction
    return
  for inner in _called(instruction):
    yield from _inside(inner)


def sent_for(instruction: Instruction, torus: links.Links | None = None) -> Sent | None:
  """Returns a collective's traffic per device.

  Returns None for other instructions, and for a collective of a single device.
  """
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
  """Returns the bytes sent by a device to other slices, for a `recv`.

  XLA splits a collective among slices into collectives within each slice and a transfer between
  slices. A `recv` is the receiving end of such a transfer. Returns 0 if the `recv` has no transfer
  type, and so belongs to no collective.
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
  """Whether a kernel has this name."""
  named = re.fullmatch(rf"{re.escape(name)}(\.\d+)*", kernel.name) is not None
  return named or name in kernel.path.split("/")  # On GPUs the path alone has the name.


def kind_of(instruction: Instruction) -> str:
  """Returns a collective's kind, without "-start"; "" for other instructions."""
  kind = instruction.op.removesuffix("-start")
  if inner := carried(instruction):
    kind = inner.op if instruction.name.startswith(START) else ""
  elif instruction.op == "fusion" and "all-reduce-scatter" in instruction.called("calls"):
    kind = "reduce-scatter"  # The TPU compiler's "all-reduce-scatter" is a fused reduce-scatter.
  return kind if kind in COLLECTIVES else ""


def trips(loop: Instruction) -> int:
  """Returns a loop's trip count, or 1 if it depends on data.

  The trip count is the one that XLA states, or else the only positive constant of the loop's
  condition.
  """
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
