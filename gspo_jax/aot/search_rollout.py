"""Finds the slots, the cache and the layout with which sampling is fastest, on a given mesh.

Fastest: most tokens of responses per second of prefill and decoding, for the assumed lengths
(`lengths`), in the memory that the training state leaves.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.aot import chips, estimate, iteration, needed
from gspo_jax.aot.compiler import compile_one, devices_of
from gspo_jax.aot.programs import Case, programs
from gspo_jax.aot.search import Search, print_outcome
from gspo_jax.aot.table import print_line, print_row
from gspo_jax.models import flops
from gspo_jax.sampling.requests import sizes
from gspo_jax.system.accelerators import Chip


@dataclasses.dataclass(frozen=True)
class Choice:
  """What a search of the sampling chooses."""

  slots: int
  cache_tokens: int  # 0: all windows whole
  prefill_tokens: int
  rollout_experts: str

  def __str__(self) -> str:
    cache = f"{self.cache_tokens:,}" if self.cache_tokens else "whole windows"
    return f"{self.slots} slots, {cache}, {self.prefill_tokens}, {self.rollout_experts}"

  def of(self, case: Case) -> Case:
    """The case with these settings."""
    engine = dataclasses.replace(case.config.engine, **self.engine)
    mesh = dataclasses.replace(case.config.mesh, rollout_experts=self.rollout_experts)
    config = dataclasses.replace(case.config, engine=engine, mesh=mesh)
    return dataclasses.replace(case, config=config, slots=0)

  @property
  def engine(self) -> dict[str, int]:
    names = "slots", "cache_tokens", "prefill_tokens"
    return {name: getattr(self, name) for name in names}

  def lines(self) -> str:
    """Lines for a configuration file."""
    keys = ", ".join(f"{key}={value}" for key, value in self.engine.items())
    return f'engine=dict({keys}),\nmesh=dict(rollout_experts="{self.rollout_experts}"),'


def search(case: Case, topology: str, tries: int) -> list[dict[str, Any]]:
  """Searches, printing what is compiled, what was not and why, the best few and one's lines.

  Returns the rows of what was compiled, the best first.
  """
  print_line(
    f"sampling on {topology}: lengths of {case.lengths.mean:,.0f} in the mean and at most "
    f"{case.lengths.most:,}; slots, positions of the cache, tokens of a prefill, "
    "chips that experts are split over"
  )
  shown = []

  def show(row: dict[str, Any], header: bool) -> None:
    print_row(row | dict(collectives={}), header=header)
    if "search_s" in row:
      print_line(f"    {row['steps']:,} steps, {row['speed']:,.0f} tokens/s/chip while sampling")

  def told(row: dict[str, Any]) -> None:
    show(row, not shown)
    shown.append(row)

  found = start(case, topology, tries, told)
  begin = start_of(case)
  found.stage([begin], 1)
  shards = sharding.batch_shards(sharding.make_mesh(case.config.mesh, devices_of(topology)))
  found.stage(list(choices(case, shards, found.best or begin)), tries)
  found.stage(list(prefills(found.best or begin)), 1)
  print_outcome(found, show)
  ranked = found.ranked()
  if ranked:
    print_line(f"recommended:\n{ranked[0].lines()}")
  rows = [found.rows[choice] for choice in [*ranked, *(found.rows.keys() - set(ranked))]]
  return rows or [dict(program="decode", fits=False, error=found.needs())]


def start_of(case: Case) -> Choice:
  """The configuration's own settings."""
  engine = case.engine
  slots = engine.slots_for(case.workload.trajectories)
  layout = case.config.mesh.rollout_experts
  return Choice(slots, engine.cache_tokens, engine.prefill_tokens, layout)


def choices(case: Case, shards: int, near: Choice) -> Iterator[Choice]:
  """Slots: one of each device, doubled up to all responses; each with the cache for all windows
  and with the one for the assumed lengths; experts on all chips, if these divide them, and on those
  of an `expert` group."""
  layouts = ("auto", "expert") if case.model.num_experts else (near.rollout_experts,)
  most, slots = case.workload.trajectories, shards
  while slots <= most:
    for cache in (0, pool(case, slots, shards)):
      for layout in layouts:
        some = dict(slots=slots, cache_tokens=cache, rollout_experts=layout)
        yield dataclasses.replace(near, **some)
    slots *= 2


def prefills(near: Choice) -> Iterator[Choice]:
  for power in range(11, 17):
    yield dataclasses.replace(near, prefill_tokens=1 << power)


def pool(case: Case, slots: int, shards: int) -> int:
  """Positions of a cache for so many slots of all devices.

  Of n responses of a device: n times the mean of what they fill and two standard deviations of the
  sum, each response's being its mean, as of exponential lengths; at least one window. In whole
  pages; 0 if that is no less than all windows.
  """
  n, page = slots // shards, case.engine.page_tokens
  window = -(-case.workload.window // page) + 1
  pages = max(window, math.ceil(case.filled * (n + 2 * math.sqrt(n)) / page))
  return 0 if pages >= n * window else pages * page * shards


def start(
  case: Case, topology: str, tries: int, told: Callable[[dict[str, Any]], None] = lambda row: None
) -> Search:
  """A search that compiles the decode steps for the topology, and tells of each row."""
  chip, number = chips.parse(topology)
  mesh = sharding.make_mesh(case.config.mesh, devices_of(topology))
  sampled = case.lengths.sample(case.workload.trajectories)
  state = estimate.held(estimate.state_of(case, mesh))

  def bound(choice: Choice) -> estimate.Least:
    with jax.set_mesh(mesh):
      return least(choice.of(case), mesh, chip, number, sampled, state)

  def measure(choice: Choice) -> dict[str, Any]:
    tried = choice.of(case)
    with jax.set_mesh(mesh):
      _, program = next(programs(tried, mesh, ["decode"]))
      row = dict(program=str(choice)) | compile_one(program, topology, case.config.compute.remat)
      if "serial_s" in row:
        size = sizes(tried.workload, tried.engine, sharding.batch_shards(mesh))
        row["steps"] = iteration.decode_steps(sampled, size.slots, not case.config.rl.partial)
        full = sum(sampled) / size.slots
        decoding = iteration.decode_seconds(row["steps"], full, row)
        row["search_s"] = decoding + prefill_s(tried, mesh, chip, number)
        row["speed"] = sum(sampled) / row["search_s"] / number
    told(row)
    return row

  return Search(bound, measure, chip.hbm, tries)


def least(
  case: Case, mesh: jax.sharding.Mesh, chip: Chip, number: int, sampled: list[int], state: float
) -> estimate.Least:
  """The least memory beside a training state of so many bytes of a device, and the least time of
  the prefills and of all decode steps."""
  model, per_chip = case.model, mesh.size / number
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  shards = sharding.batch_shards(mesh)
  positions = size.pages * size.page or size.slots // shards * size.window
  each = 2 * model.num_kv_heads * model.head_dim * model.num_layers / mesh.shape["tensor"]
  cache = positions * each * jnp.dtype(case.config.engine.cache_dtype).itemsize
  weights = estimate.held(needed.sampled(case, mesh))
  steps = iteration.decode_steps(sampled, size.slots, not case.config.rl.partial)
  work = flops.work(model, size.slots, 1, round(case.filled))
  filling, read = prefill_s(case, mesh, chip, number), needed.of("decode", case, mesh)
  in_tail = steps - sum(sampled) / size.slots  # in which a slot that is not in use reads no pages
  moved = steps * read - (in_tail * needed.cache(case, mesh) if size.pages else 0.0)
  return estimate.Least(
    (state + weights + cache) * per_chip,
    steps * work.forward() / number / chip.flops + filling,
    moved * per_chip / chip.hbm_speed + filling,
    0.0,
  )


def prefill_s(case: Case, mesh: jax.sharding.Mesh, chip: Chip, number: int) -> float:
  """Seconds that the prefills of an iteration take at least."""
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  at_once = size.at_once(size.prompt) * size.shards
  calls = -(-case.config.rl.prompts // at_once)
  work = flops.work(case.model, at_once, size.prompt, size.prompt, heads=1).forward()
  moved = needed.of("prefill", case, mesh) * mesh.size / number
  return calls * max(work / number / chip.flops, moved / chip.hbm_speed)
