"""Estimates the time of an iteration as a sum: sampling, scoring, updates, publication.

Arithmetic on the bounds of compiled programs and on assumed lengths (`lengths`). It excludes
verification, evaluation, checkpoints and the host. Collectives without overlap add to the time of
their program.
"""

import collections
import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax import sharding
from gspo_jax.aot import chips
from gspo_jax.aot.estimate import LowerBounds, device_bytes, filled_cache, needed, position_bytes
from gspo_jax.aot.programs import Case, sampler_params, state_of
from gspo_jax.learner import packing
from gspo_jax.models import flops
from gspo_jax.sampling.requests import Sizes, sizes
from gspo_jax.settings.passes import iteration_passes


@dataclasses.dataclass(frozen=True)
class Part:
  """Calls of a program in an iteration, and their time."""

  name: str
  calls: float  # Calls of its program; for decode, steps.
  seconds: float
  binds: str  # Binding resource of its program.


@dataclasses.dataclass(frozen=True)
class Iteration:
  """Estimate of an iteration."""

  parts: tuple[Part, ...]
  tokens: float  # Response tokens.
  chips: int

  @property
  def seconds(self) -> float:
    return sum(part.seconds for part in self.parts)

  @property
  def speed(self) -> float:
    """Tokens of responses per second and chip, end to end."""
    return self.tokens / self.seconds / self.chips

  @property
  def binds(self) -> Part:
    """Part with the most seconds."""
    return max(self.parts, key=lambda part: part.seconds)


def estimate(case: Case, mesh: Any, chips: int, rows: Mapping[str, Mapping[str, Any]]) -> Iteration:
  """Estimates a run's iteration from the report's rows by program.

  The time of updates and scoring passes is proportional to their positions, padding included.
  """
  c, shards = case.config, sharding.batch_shards(mesh)
  size, sampled, steps = _steps(case, mesh)
  rl = c.rl
  at_once = size.at_once(size.prompt) * shards
  read = positions(case, sampled, shards)
  models = collections.Counter(
    declared.model for declared in iteration_passes(c)
  )  # Passes by model.
  passes = read / (case.length * case.scored)
  full = c.sampled_share * sum(sampled) / size.slots
  calls = dict(
    prefill=c.sampled_share * -(-rl.prompts // at_once),
    decode=c.sampled_share * steps,
    score=models["policy"] * passes,
    teacher=models["teacher"] * passes,
    train=rl.epochs * read / (case.length * case.sequences),
    publish=1,
  )
  seconds = {name: n * rows[name]["serial_s"] for name, n in calls.items() if n}
  if calls["decode"]:
    seconds["decode"] = decode_seconds(calls["decode"], full, rows["decode"])
  parts = (Part(name, calls[name], s, rows[name]["binds"]) for name, s in seconds.items())
  return Iteration(tuple(parts), float(sum(sampled)), chips)


def share(case: Case, mesh: Any) -> float:
  """Returns the processed fraction of an update's rows: below 1 if packed.

  Packed responses of the assumed lengths leave some micro-batches empty, and these are skipped.
  """
  if not case.packed:
    return 1.0
  number = case.workload.trajectories
  read = positions(case, case.lengths.sample(number), sharding.batch_shards(mesh))
  return read / (number * case.workload.window)


def sampling_row(case: Case, mesh: Any, topology: str, row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns steps and seconds of an iteration's sampling.

  Call it under `jax.set_mesh(mesh)`.
  """
  size, sampled, steps = _steps(case, mesh)
  seconds = decode_seconds(steps, sum(sampled) / size.slots, row)
  seconds += _prefill_seconds(case, mesh, topology)
  speed = sum(sampled) / seconds / chips.mesh_chips(topology, mesh)[1]
  return dict(steps=steps, search_s=seconds, speed=speed)


def sampling_bound(case: Case, mesh: Any, topology: str) -> LowerBounds:
  """Lower bounds of sampling's memory and time.

  Call it under `jax.set_mesh(mesh)`.
  """
  chip, number = chips.mesh_chips(topology, mesh)
  shards, per_chip = sharding.batch_shards(mesh), chip.devices
  size, sampled, steps = _steps(case, mesh)
  positions = size.pages * size.page or size.slots // shards * size.window
  memory = device_bytes(state_of(case, mesh)) + device_bytes(sampler_params(case, mesh))
  memory += positions * position_bytes(case, mesh)
  work = flops.work(case.model, size.slots, 1, round(case.filled)).forward()
  moved = steps * needed("decode", case, mesh)
  if size.pages:  # Idle slots read no pages.
    moved -= (steps - sum(sampled) / size.slots) * filled_cache(case, mesh)
  filling = _prefill_seconds(case, mesh, topology)
  seconds = chips.seconds(chip, number, steps * work, moved * per_chip)
  return LowerBounds(memory * per_chip, {name: n + filling for name, n in seconds.items()})


def _steps(case: Case, mesh: Any) -> tuple[Sizes, list[int], int]:
  """Returns the sampler's shapes, response lengths and decode steps of an iteration."""
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  sampled = case.lengths.sample(case.workload.trajectories)
  return size, sampled, decode_steps(sampled, size.slots, not case.config.rl.partial)


def _prefill_seconds(case: Case, mesh: Any, topology: str) -> float:
  """Minimum seconds of an iteration's prefills."""
  chip, number = chips.mesh_chips(topology, mesh)
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  at_once = size.at_once(size.prompt) * size.shards
  work = flops.work(case.model, at_once, size.prompt, size.prompt, heads=1).forward()
  moved = needed("prefill", case, mesh) * chip.devices
  calls = -(-case.config.rl.prompts // at_once)
  return calls * max(chips.seconds(chip, number, work, moved).values())


def decode_seconds(steps: float, full: float, row: Mapping[str, Any]) -> float:
  """Seconds of `steps` decode steps.

  They sample as many tokens as `full` steps with all slots in use. Idle slots read nothing from a
  paged cache; a step of idle slots alone takes `idle_s`.
  """
  idle = row.get("idle_s", row["serial_s"])
  return steps * idle + full * (row["serial_s"] - idle)


def decode_steps(lengths: Sequence[int], slots: int, tail: bool = True) -> int:
  """Steps to sample all responses in order, each in the first free slot.

  tail: whether the iteration waits for its longest responses. False: unfinished responses continue
  in the next iteration, so all slots are always in use.
  """
  if not tail:
    return -(-sum(lengths) // slots)
  ends = [0] * min(slots, len(lengths))
  for length in lengths:
    heapq.heappush(ends, heapq.heappop(ends) + length)
  return max(ends)


def positions(case: Case, lengths: Sequence[int], shards: int) -> float:
  """Positions processed by the updates of an epoch, padding included."""
  rl, window = case.config.rl, case.workload.window
  rows = len(lengths) // rl.minibatches  # Rows of an update without packing.
  if not rl.packed:
    return float(len(lengths) * window)
  at_once = max(rows // rl.microbatches, shards)  # At least one row per device.
  number = sum(
    packed_microbatches(
      part,
      window,
      shards,
      at_once // shards,
      round(case.prompt),
      case.group_size,
      case.config.sampling.max_new_tokens,
    )
    for part in np.split(np.array(lengths) + round(case.prompt), rl.minibatches)
  )
  return float(number * at_once * window)


def packed_microbatches(
  lengths: np.ndarray,
  window: int,
  shards: int,
  rows: int,
  prompt: int = 0,
  group_size: int = 1,
  response_tokens: int = 0,
) -> int:
  """Micro-batches of an update for the sequences, with `rows` rows per device."""
  prompts = np.full(len(lengths), prompt)
  placed = packing.places(lengths, window, shards, prompts, group_size, response_tokens)
  return int(placed.row_B.max()) // rows + 1


def lines(total: Iteration, case: Case) -> list[str]:
  """Formats the estimate as lines."""
  parts = (
    f"    {p.name:<10}{p.calls:>10,.6g} x {p.seconds / p.calls:>8.3g} s = {p.seconds:>8.4g} s"
    f" {p.seconds / total.seconds:>6.1%}  {p.binds}"
    for p in total.parts
  )
  return [
    f"one iteration: {total.tokens:,.0f} tokens of "
    f"{case.config.rl.prompts * case.config.rl.group_size:,} responses, exponential lengths of "
    f"{case.lengths.mean:,.0f} in the mean and at most {case.lengths.most:,}, prompts of "
    f"{case.prompt:,.0f}",
    *parts,
    f"    {total.seconds:,.4g} s, {total.speed:,.0f} tokens/s/chip; {total.binds.name} takes most,"
    f" bound by {total.binds.binds}",
  ]
