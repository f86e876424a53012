"""Says which instructions of a compiled program move most bytes through HBM, and where they come
from."""

import re
from collections import defaultdict
from collections.abc import Iterator

from gspo_jax.aot.hlo_costs import Costs, Item


def lines(costs: Costs, number: int, scale: float = 1.0) -> Iterator[str]:
  """The `number` source lines whose instructions move most, and each one's largest instructions.

  scale: of bytes and counts, e.g. 1/32 for one of 32 decode steps.
  """
  groups: dict[str, list[Item]] = defaultdict(list)
  for item in costs.items:
    groups[item.instruction.source or "inserted by the compiler"].append(item)

  def total(items: list[Item]) -> float:
    return sum(item.bytes * item.times for item in items) * scale

  for source, items in sorted(groups.items(), key=lambda pair: -total(pair[1]))[:number]:
    moved = total(items)
    yield f"    {moved / 1e9:>9.2f} GB {moved / scale / max(costs.memory, 1):>5.1%}  {source}"
    alike: dict[tuple, list[Item]] = defaultdict(list)
    for item in items:
      alike[_name(item), _shape(item), item.times].append(item)
    largest = sorted(alike.items(), key=lambda pair: -total(pair[1]))
    for (name, shape, times), those in [x for x in largest if total(x[1]) > moved / 20][:6]:
      often = f"{len(those)} x {times * scale:,.5g}"
      yield f"      {total(those) / 1e9:>9.2f} GB  {often:>12} times  {shape:<28} {name}"


def _name(item: Item) -> str:
  """Operation and path, without the parts that say nothing."""
  path = item.instruction.path
  dull = r"jit\(.*\)|while|body|closed_call|checkpoint|shard_map|"
  said = [part for part in path.split("/") if not re.fullmatch(dull, part)]
  pass_ = "again " if "rematted" in path else "backward " if "transpose(" in path else ""
  return f"{pass_}{item.instruction.op} {'/'.join(x for x in said[-3:] if 'jvp' not in x)}".rstrip()


def _shape(item: Item) -> str:
  """Its largest result."""
  shapes = re.findall(r"\b[a-z]+\d*\[[\d,]*\]", item.instruction.shape)
  return f"{shapes[0]}{', ...' if len(shapes) > 1 else ''}" if shapes else ""
