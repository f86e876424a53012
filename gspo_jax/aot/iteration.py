"""Estimates the time of an iteration as the sum of sampling, scoring, updates and publication.

The estimate multiplies the minimum time of each compiled program (`serial_s` of `chips.bound`) by
the number of its calls, which follows from assumed response lengths (module `lengths`). Decode
steps with idle slots take less time (`decode_seconds`). The estimate excludes verification,
evaluation, checkpoints and the host.
"""

import collections
import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax import sharding
from gspo_jax.aot import chips
from gspo_jax.aot.estimate import (
  LowerBounds,
  device_bytes,
  filled_cache,
  needed,
  position_bytes,
  sent_to_experts,
  state_bytes,
)
from gspo_jax.aot.programs import Case, sampler_params, state_of
from gspo_jax.learner import packing
from gspo_jax.models import flops
from gspo_jax.sampling.requests import Sizes, sizes
from gspo_jax.settings.passes import iteration_passes


@dataclasses.dataclass(frozen=True)
class Part:
  """Calls of one program in an iteration, and their total time."""

  name: str  # Name of the program.
  calls: float  # Number of calls. For decode, the number of steps.
  seconds: float  # Time of all calls.
  binds: str  # Slowest resource of the program: compute, hbm, interconnect or network.


@dataclasses.dataclass(frozen=True)
class Iteration:
  """Estimated time of an iteration."""

  parts: tuple[Part, ...]
  tokens: float  # Tokens of all responses.
  chips: int  # Number of chips.

  @property
  def seconds(self) -> float:
    return sum(part.seconds for part in self.parts)

  @property
  def speed(self) -> float:
    """Response tokens per chip and per second of the iteration."""
    return self.tokens / self.seconds / self.chips

  @property
  def binds(self) -> Part:
    """Program with the most time."""
    return max(self.parts, key=lambda part: part.seconds)


def estimate(case: Case, mesh: Any, chips: int, rows: Mapping[str, Mapping[str, Any]]) -> Iteration:
  """Estimates an iteration from the rows of its compiled programs.

  The compiled update has one mini-batch. The compiled scoring pass has one micro-batch, or one
  packed mini-batch. The number of calls of such a program in an epoch is the number of the epoch's
  positions divided by the number of positions of the compiled batch. Positions include padding.

  Args:
    case: compiled configuration and batch.
    mesh: compiled mesh.
    chips: number of chips.
    rows: results of `compiler.examine`, by program.
  """
  c, shards = case.config, sharding.batch_shards(mesh)
  size, lengths, steps = _steps(case, mesh)
  rl = c.rl
  prompts_per_call = size.at_once(size.prompt) * shards
  processed = positions(case, lengths, shards)
  models = collections.Counter(declared.model for declared in iteration_passes(c))
  calls_per_pass = processed / (case.length * case.scored)
  full = c.sampled_share * sum(lengths) / size.slots
  calls = dict(
    prefill=c.sampled_share * -(-rl.prompts // prompts_per_call),
    decode=c.sampled_share * steps,
    score=models["policy"] * calls_per_pass,
    teacher=models["teacher"] * calls_per_pass,
    train=rl.epochs * processed / (case.length * case.sequences),
    publish=1,
  )
  seconds = {name: n * rows[name]["serial_s"] for name, n in calls.items() if n}
  if calls["decode"]:
    seconds["decode"] = decode_seconds(calls["decode"], full, rows["decode"])
  parts = (Part(name, calls[name], s, rows[name]["binds"]) for name, s in seconds.items())
  return Iteration(tuple(parts), float(sum(lengths)), chips)


def share(case: Case, mesh: Any) -> float:
  """Returns the processed fraction of an update's rows; 1 unless updates are packed.

  Packed responses of the assumed lengths leave some micro-batches empty, and the update skips them.
  """
  if not case.packed:
    return 1.0
  number = case.workload.trajectories
  processed = positions(case, case.lengths.sample(number), sharding.batch_shards(mesh))
  return processed / (number * case.workload.window)


def sampling_row(case: Case, mesh: Any, topology: str, row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns steps, seconds and speed of an iteration's sampling.

  The returned dict has the number of decode steps as `steps`, the seconds as `search_s`, and the
  tokens per second and chip as `speed`. Call this function under `jax.set_mesh(mesh)`.

  row: result of `compiler.examine` for the program "decode".
  """
  size, lengths, steps = _steps(case, mesh)
  seconds = decode_seconds(steps, sum(lengths) / size.slots, row)
  seconds += _prefill_seconds(case, size, mesh, topology)
  speed = sum(lengths) / seconds / chips.mesh_chips(topology, mesh)[1]
  return dict(steps=steps, search_s=seconds, speed=speed)


def sampling_bound(case: Case, mesh: Any, topology: str) -> LowerBounds:
  """Returns lower bounds on memory and time of an iteration's sampling.

  Nothing is compiled. Memory includes the training state, the sampler's weights and the cache. Call
  this function under `jax.set_mesh(mesh)`.
  """
  chip, number = chips.mesh_chips(topology, mesh)
  shards, per_chip = sharding.batch_shards(mesh), chip.devices
  size, lengths, steps = _steps(case, mesh)
  positions = size.pages * size.page or size.slots // shards * size.window
  memory = device_bytes(state_of(case, mesh)) + device_bytes(sampler_params(case, mesh))
  memory += positions * position_bytes(case, mesh)
  # Slots and entries of the queue have states of linear attention.
  memory += (size.slots // shards + size.entries) * state_bytes(case, mesh)
  work = flops.work(case.model, size.slots, 1, round(case.filled), decoding=True).forward()
  moved = steps * needed("decode", case, mesh)
  if size.pages:  # Idle slots read no pages.
    moved -= (steps - sum(lengths) / size.slots) * filled_cache(case, mesh)
  filling = _prefill_seconds(case, size, mesh, topology)
  sent = steps * sent_to_experts(case, mesh, topology, size.slots)
  seconds = chips.seconds(chip, number, steps * work, moved * per_chip, sent * per_chip)
  return LowerBounds(memory * per_chip, {name: n + filling for name, n in seconds.items()})


def _steps(case: Case, mesh: Any) -> tuple[Sizes, list[int], int]:
  """Returns the sampler's shapes, assumed response lengths, and decode steps of an iteration."""
  size = sizes(case.workload, case.engine, sharding.batch_shards(mesh))
  lengths = case.lengths.sample(case.workload.trajectories)
  return size, lengths, decode_steps(lengths, size.slots, not case.config.rl.partial)


def _prefill_seconds(case: Case, size: Sizes, mesh: Any, topology: str) -> float:
  """Minimum seconds of an iteration's prefills."""
  chip, number = chips.mesh_chips(topology, mesh)
  prompts_per_call = size.at_once(size.prompt) * size.shards
  work = flops.work(case.model, prompts_per_call, size.prompt, size.prompt, heads=1).forward()
  moved = needed("prefill", case, mesh) * chip.devices
  calls = -(-case.config.rl.prompts // prompts_per_call)
  return calls * max(chips.seconds(chip, number, work, moved).values())


def decode_seconds(steps: float, full: float, row: Mapping[str, Any]) -> float:
  """Returns the seconds of decode steps, some of them with idle slots.

  A step with all slots in use takes `serial_s`. A step with no slot in use takes `idle_s`, since
  attention skips the cache of idle slots. The time of any other step is interpolated linearly by
  the number of slots in use. If the row has no `idle_s`, every step takes `serial_s`.

  Args:
    steps: number of steps.
    full: number of steps if all slots were always in use: sampled tokens divided by slots.
    row: result of `compiler.examine` for the program "decode".
  """
  idle = row.get("idle_s", row["serial_s"])
  return steps * idle + full * (row["serial_s"] - idle)


def decode_steps(lengths: Sequence[int], slots: int, tail: bool = True) -> int:
  """Returns the decode steps to sample all responses.

  Responses are taken in order, each by the first free slot.

  tail: whether the iteration waits for its longest responses. If False, unfinished responses
  continue in the next iteration, so all slots are always in use.
  """
  if not tail:
    return -(-sum(lengths) // slots)
  ends = [0] * min(slots, len(lengths))
  for length in lengths:
    heapq.heappush(ends, heapq.heappop(ends) + length)
  return max(ends)


def positions(case: Case, lengths: Sequence[int], shards: int) -> float:
  """Returns the positions processed by all updates of an epoch, padding included.

  lengths: tokens of each response, without its prompt.
  """
  rl, window = case.config.rl, case.workload.window
  rows = len(lengths) // rl.minibatches  # Rows of an update without packing.
  if not rl.packed:
    return float(len(lengths) * window)
  microbatch_rows = max(rows // rl.microbatches, shards)  # At least one row per device.
  number = sum(
    packed_microbatches(
      part,
      window,
      shards,
      microbatch_rows // shards,
      round(case.prompt),
      case.group_size,
      case.config.sampling.max_new_tokens,
    )
    for part in np.split(np.array(lengths) + round(case.prompt), rl.minibatches)
  )
  return float(number * microbatch_rows * window)


def packed_microbatches(
  lengths: np.ndarray,
  window: int,
  shards: int,
  rows: int,
  prompt: int = 0,
  group_size: int = 1,
  response_tokens: int = 0,
) -> int:
  """Counts the micro-batches of an update with packed sequences.

  Args:
    lengths: tokens of each sequence, prompt included.
    window: tokens of a row.
    shards: number of parts into which the mesh splits the batch.
    rows: rows of a micro-batch per device.
    prompt: tokens of each prompt.
    group_size: number of consecutive sequences with the same prompt.
    response_tokens: maximum tokens of a response.
  """
  prompts = np.full(len(lengths), prompt)
  placed = packing.places(lengths, window, shards, prompts, group_size, response_tokens)
  return int(placed.row_B.max()) // rows + 1


def lines(total: Iteration, case: Case) -> list[str]:
  """Formats an estimate: a line for each program, between assumptions and total."""
  parts = (
    f"    {p.name:<10}{p.calls:>10,.6g} x {p.seconds / p.calls:>8.3g} s = {p.seconds:>8.4g} s"
    f" {p.seconds / total.seconds:>6.1%}  {p.binds}"
    for p in total.parts
  )
  return [
    f"one iteration: {total.tokens:,.0f} tokens of {case.config.rl.rows:,} responses, exponential "
    f"lengths of {case.lengths.mean:,.0f} in the mean and at most {case.lengths.most:,}, prompts "
    f"of {case.prompt:,.0f}",
    *parts,
    f"    {total.seconds:,.4g} s, {total.speed:,.0f} tokens/s/chip; {total.binds.name} takes most "
    f"of the time, bound by {total.binds.binds}",
  ]
