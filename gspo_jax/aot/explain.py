"""Lists the source lines with the most HBM traffic in a compiled program."""

import re
from collections import defaultdict
from collections.abc import Iterator

from gspo_jax.aot.hlo_costs import Costs, Item


def lines(costs: Costs, number: int, scale: float = 1.0) -> Iterator[str]:
  """Yields the source lines with the most HBM traffic, and their largest instructions.

  Args:
    costs: costs of the program.
    number: maximum number of source lines.
    scale: factor for bytes and counts, e.g. 1/32 for one of 32 decode steps.
  """
  groups: dict[str, list[Item]] = defaultdict(list)
  for item in costs.items:
    groups[item.instruction.source or "inserted by the compiler"].append(item)

  def total(items: list[Item]) -> float:
    return sum(item.bytes * item.times for item in items) * scale

  for source, items in sorted(groups.items(), key=lambda pair: -total(pair[1]))[:number]:
    moved = total(items)
    yield f"    {moved / 1e9:>9.2f} GB {moved / scale / max(costs.memory, 1):>5.1%}  {source}"
    kinds: dict[tuple, list[Item]] = defaultdict(list)
    for item in items:
      kinds[_name(item), _shape(item), item.times].append(item)
    largest = sorted(kinds.items(), key=lambda pair: -total(pair[1]))
    for (name, shape, times), equal in [x for x in largest if total(x[1]) > moved / 20][:6]:
      count = f"{len(equal)} x {times * scale:,.5g}"
      yield f"      {total(equal) / 1e9:>9.2f} GB  {count:>12} times  {shape:<28} {name}"


def _name(item: Item) -> str:
  """Returns an instruction's operation and the last parts of its path.

  Omits generic scopes such as jit and while. Marks recomputed ("again") and backward operations.
  """
  path = item.instruction.path
  generic = r"jit\(.*\)|while|body|closed_call|checkpoint|shard_map|"
  scopes = [part for part in path.split("/") if not re.fullmatch(generic, part)][-3:]
  pass_ = "again " if "rematted" in path else "backward " if "transpose(" in path else ""
  return f"{pass_}{item.instruction.op} {'/'.join(x for x in scopes if 'jvp' not in x)}".rstrip()


def _shape(item: Item) -> str:
  """Returns the shape of the first result, followed by "..." if there are further results."""
  shapes = re.findall(r"\b[a-z]+\d*\[[\d,]*\]", item.instruction.shape)
  return f"{shapes[0]}{', ...' if len(shapes) > 1 else ''}" if shapes else ""
