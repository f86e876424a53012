"""Command line: python -m gspo_jax.aot --config=configs/moe_aime.py --topology=v5p:4x4x4

Compiles every program of a run for a TPU topology on a machine that has no TPU, and says for each
what it needs and how fast it could be. Needs `pip install 'libtpu==0.0.42.*'`. Exits with an error
if a program does not fit.
"""

import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed JAX would look for a TPU

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from jax.experimental import topologies
from jax.sharding import NamedSharding
from ml_collections import config_flags

from gspo_jax import config as configuration
from gspo_jax import hlo_costs, optimizer, roofline, sharding, train_step
from gspo_jax.models import cache as kv_cache
from gspo_jax.models import routing, transformer
from gspo_jax.roofline import GIB
from gspo_jax.sampling.sampler import SamplingConfig, row_keys, sample
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import TrainBatch, TrainState

PROGRAMS = ("train", "score", "publish", "prefill", "decode")

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/moe_aime.py.")
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:4x4x4", "CHIP:AxBxC, of v4, v5e, v5p, v6e, tpu7x.")
_SEQUENCES = flags.DEFINE_integer(
  "sequences", 0, "Per update, in one micro-batch; 0: as configured. Decoding has as many slots."
)
_LENGTH = flags.DEFINE_integer("length", 0, "Tokens per sequence; 0: as configured.")
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Which to compile.")
_SEARCH = flags.DEFINE_bool("search", False, "Try meshes and micro-batch sizes, recommend one.")
_JSON = flags.DEFINE_string("json", "", "Also write the report to this file.")


@dataclasses.dataclass(frozen=True)
class Case:
  """What is compiled: a configuration at one batch shape."""

  config: configuration.RunConfig
  sequences: int  # per update
  microbatches: int
  length: int

  @property
  def model(self):
    return self.config.model

  @property
  def rows(self) -> int:
    """Sequences at once: of a micro-batch, of a scoring pass and of decoding."""
    return self.sequences // self.microbatches


@dataclasses.dataclass(frozen=True)
class Program:
  function: Callable
  arguments: tuple[Any, ...]
  work: roofline.Work | None  # None: moves data only
  trains: bool = False


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  try:
    config = configuration.from_dict(_CONFIG.value.to_dict())
    case = make_case(config, _SEQUENCES.value, _LENGTH.value)
    unknown = set(_PROGRAMS.value) - set(PROGRAMS)
    if unknown:
      raise ValueError(f"--programs={','.join(sorted(unknown))}: known are {', '.join(PROGRAMS)}")
    if _SEARCH.value:
      rows = search(case, _TOPOLOGY.value)
    else:
      rows = report(case, _TOPOLOGY.value, _PROGRAMS.value)
  except ValueError as error:
    sys.exit(f"gspo_jax.aot: {error}")
  if _JSON.value:
    Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n")
  if not any(row["fits"] for row in rows) if _SEARCH.value else not all(r["fits"] for r in rows):
    failed = "; ".join(f"{r['program']} {r['error']}" for r in rows if not r["fits"])
    sys.exit(f"gspo_jax.aot: does not fit {_TOPOLOGY.value}: {failed}")


def make_case(config: configuration.RunConfig, sequences: int = 0, length: int = 0) -> Case:
  """The configured batch, or `sequences` x `length` in one micro-batch."""
  rl = config.rl
  return Case(
    config,
    sequences or rl.prompts * rl.group_size // rl.minibatches,
    1 if sequences else rl.microbatches,
    length or config.data.max_prompt_tokens + config.sampling.max_new_tokens,
  )


def devices_of(topology: str) -> list:
  """Descriptions of the devices of a topology. ValueError without libtpu or with a wrong name."""
  chip, _ = roofline.parse(topology)
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE=chip.host,
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # nothing is executed: several may compile at once
  )
  try:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
  except Exception as error:  # whatever the plugin raises
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ValueError(
      f"--topology={topology}: {reason} (is libtpu installed? pip install 'libtpu==0.0.42.*')"
    ) from error


def report(case: Case, topology: str, names: list[str]) -> list[dict[str, Any]]:
  """Compiles the named programs, prints a line for each, and returns the lines."""
  mesh = sharding.make_mesh(case.config.mesh, devices_of(topology))
  check(case, mesh)
  print_line(title(case, topology, mesh))
  rows = []
  with jax.set_mesh(mesh):
    for name, program in programs(case, mesh, names):
      row = dict(program=name) | compile_one(program, topology, case.config.compute.remat)
      print_row(row, header=not rows)
      rows.append(row)
  return rows


def check(case: Case, mesh: jax.sharding.Mesh) -> None:
  """ValueError if rows or weights do not divide over the mesh."""
  shards = sharding.batch_shards(mesh)
  if case.rows % shards:
    raise ValueError(
      f"{case.rows} sequences of a micro-batch do not divide over the {shards} devices of "
      "mesh.data x mesh.fsdp x mesh.expert: change mesh, sequences or micro-batches"
    )
  transformer.shardings(case.model, sharding.TRAIN, mesh)


def compile_one(program: Program, topology: str, remat: str) -> dict[str, Any]:
  """Memory per chip, work, traffic and the time that they need at least."""
  chip, chips = roofline.parse(topology)
  per_chip = jax.sharding.get_mesh().size / chips  # devices: two on chips whose cores are apart
  started = time.perf_counter()
  row: dict[str, Any] = dict(fits=False, hbm_gib=chip.hbm / GIB)
  try:
    compiled = program.function.trace(*program.arguments).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    message = next((x for x in str(error).splitlines() if "exceed" in x.lower()), str(error))
    return row | dict(error=message.strip()[:300], compile_s=time.perf_counter() - started)
  memory, costs = compiled.memory_analysis(), hlo_costs.costs(compiled.as_text())
  peak = memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
  row["peak_gib"] = peak * per_chip / GIB
  row["fits"] = peak * per_chip <= chip.hbm
  if not row["fits"]:
    row["error"] = f"needs {row['peak_gib']:.1f} GiB a chip of {row['hbm_gib']:.0f}"
  useful = flops = 0.0
  if program.work:
    useful = program.work.training() if program.trains else program.work.forward()
    flops = program.work.executed(remat) if program.trains else useful
  traffic = costs.memory * per_chip, costs.wire * per_chip
  return row | dict(
    compile_s=time.perf_counter() - started,
    model_flops=useful,
    executed_flops=flops,
    hbm_bytes=traffic[0],
    wire_bytes=traffic[1],
    collectives={
      kind: dict(count=costs.count[kind], bytes=costs.moved[kind] * per_chip)
      for kind in sorted(costs.count)
    },
    **roofline.bound(chip, chips, flops, useful, *traffic),
  )


def programs(case: Case, mesh, names: list[str]) -> Iterator[tuple[str, Program]]:
  """The jitted functions of a run with the shapes and shardings of their arguments."""
  c = case.config
  train_params = abstract_params(case, mesh, sharding.TRAIN, jnp.float32)
  dtype = jnp.dtype(c.compute.dtype)
  sample_params = abstract_params(case, mesh, sharding.ROLLOUT, dtype)
  learner = train_step.Learner(
    c.model,
    c.compute,
    c.sampling.temperature,
    case.microbatches,
    c.objective.load_balance_coef,
  )
  for name in names:
    if name == "train":
      tx = optimizer.make(c.rl_optimizer, c.rl.iterations * c.rl.minibatches)
      moments = jax.tree.map(lambda x: abstract(x, mesh), jax.eval_shape(tx.init, train_params))
      state = TrainState(shaped((), jnp.int32, mesh, P()), train_params, moments)
      step = train_step.make_rl_step(learner, c.objective, tx)
      work = roofline.work(case.model, case.sequences, case.length, case.length)
      yield name, Program(step, (state, batch_of(case, mesh, case.sequences)), work, trains=True)
    if name == "score":
      arguments = train_params, batch_of(case, mesh, case.rows)
      work = roofline.work(case.model, case.rows, case.length, case.length)
      yield name, Program(train_step.make_score(learner), arguments, work)
    if name == "publish":
      layout = transformer.shardings(c.model, sharding.ROLLOUT, mesh)
      yield name, Program(sharding.publisher(layout, dtype), (train_params,), None)
    if name in ("prefill", "decode"):
      yield name, sampling_program(name, case, mesh, sample_params)


def sampling_program(name: str, case: Case, mesh, params: Any) -> Program:
  """Prompts into a fresh cache, or one token for every sequence of a full one, in place."""
  c, rows = case.config, case.rows
  settings = SamplingConfig(c.sampling.temperature, 0, 1.0, c.sampling.max_new_tokens)
  prompt = min(c.data.max_prompt_tokens, case.length // 2)

  def prefill(params, tokens_BT, lengths_B):
    cache = kv_cache.allocate(c.model, rows, case.length, jnp.dtype(c.compute.dtype))
    segments = (jnp.arange(prompt)[None] < lengths_B[:, None]).astype(jnp.int32)
    out = transformer.forward(
      params, c.model, tokens_BT, segments=segments, cache=cache, compute=c.compute
    )
    last = jnp.arange(prompt)[None, :, None] == lengths_B[:, None, None] - 1
    return next_token(params, jnp.where(last, out.hidden_BTD, 0).sum(1), lengths_B), out.cache

  def decode(params, cache, token_B, position_B):
    out = transformer.forward(
      params,
      c.model,
      token_B[:, None],
      positions=position_B[:, None],
      cache=cache,
      compute=c.compute,
    )
    return next_token(params, out.hidden_BTD[:, 0], position_B), out.cache

  def next_token(params, hidden_BD, position_B):
    logits_BTV = transformer.head_logits(params, hidden_BD[:, None], c.compute)
    logits_BV = sharding.reshard(logits_BTV, P(BATCH))[:, 0]
    index_B = sharding.reshard(jnp.arange(rows), P(BATCH))
    keys = row_keys(0, position_B.astype(jnp.uint32), index_B)
    return sample(logits_BV, keys, position_B, settings)

  by_row = lambda *shape: shaped((rows, *shape), jnp.int32, mesh, P(BATCH))  # noqa: E731
  if name == "prefill":
    work = roofline.work(case.model, rows, prompt, prompt, heads=rows)
    return Program(jax.jit(prefill), (params, by_row(prompt), by_row()), work)
  cache = jax.eval_shape(
    lambda: kv_cache.allocate(c.model, rows, case.length, jnp.dtype(c.compute.dtype))
  )
  cache = jax.tree.map(lambda x: shaped(x.shape, x.dtype, mesh, kv_cache.SPEC), cache)
  work = roofline.work(case.model, rows, 1, case.length)
  return Program(jax.jit(decode, donate_argnums=1), (params, cache, by_row(), by_row()), work)


def batch_of(case: Case, mesh, rows: int) -> TrainBatch:
  field = lambda dtype, *more: shaped((rows, *more), dtype, mesh, P(BATCH))  # noqa: E731
  tokens, real = field(jnp.int32, case.length), field(jnp.float32, case.length)
  routes, model = None, case.model
  if case.config.objective.replay != "none":
    layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
    stored = routing.storage_dtype(model.num_experts)
    routes = field(stored, case.length, layers, model.experts_per_token)
  return TrainBatch(
    tokens_BT=tokens,
    segments_BT=tokens,
    mask_BT=real,
    advantage_B=field(jnp.float32),
    old_logp_BT=real,
    sampler_logp_BT=real,
    ref_logp_BT=real if case.config.objective.kl_coef else None,
    routing_BTlk=routes,
    sampler_routing_BTlk=routes,
  )


def abstract_params(case: Case, mesh, rules: sharding.Rules, dtype) -> Any:
  shapes = jax.eval_shape(lambda: transformer.init(case.model, jax.random.key(0)))
  layout = transformer.shardings(case.model, rules, mesh)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), shapes, layout)


def abstract(x: jax.ShapeDtypeStruct, mesh) -> jax.ShapeDtypeStruct:
  return shaped(x.shape, x.dtype, mesh, P() if x.sharding is None else x.sharding.spec)


def shaped(shape: tuple[int, ...], dtype, mesh, pspec: P) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pspec))


def search(case: Case, topology: str) -> list[dict[str, Any]]:
  """Compiles the train step on every mesh that divides, fewest micro-batches first, and recommends
  the one that fits with the shortest bound."""
  devices = devices_of(topology)
  print_line(f"{topology}: {case.sequences} sequences x {case.length} tokens per update")
  rows = []
  for mesh_config in candidates(case, len(devices)):
    for microbatches in divisors(case.sequences):
      tried = dataclasses.replace(
        case, config=dataclasses.replace(case.config, mesh=mesh_config), microbatches=microbatches
      )
      try:
        mesh = sharding.make_mesh(mesh_config, devices)
        check(tried, mesh)
      except ValueError:
        break  # more micro-batches divide no better
      with jax.set_mesh(mesh):
        _, program = next(programs(tried, mesh, ["train"]))
        row = compile_one(program, topology, case.config.compute.remat)
      shape = "x".join(str(n) for n in mesh.devices.shape)
      rows.append(dict(program=f"{shape}, {microbatches} micro", **row))
      print_row(rows[-1], header=len(rows) == 1)
      if row["fits"]:
        break  # fewer sequences at once would only gather the weights more often
  best = min((r for r in rows if r["fits"]), key=lambda r: r["bound_s"], default=None)
  if best:
    print_line(f"recommended: data x fsdp x expert x tensor = {best['program']}-batches")
  return rows


def candidates(case: Case, devices: int) -> Iterator[sharding.MeshConfig]:
  """Meshes of one slice: fsdp x expert x tensor, experts and heads divided evenly."""
  experts = case.model.num_experts or 1
  for expert, tensor in itertools.product(divisors(math.gcd(experts, devices)), (1, 2, 4)):
    fsdp = devices // (expert * tensor)
    whole = fsdp * expert * tensor == devices and case.sequences % (fsdp * expert) == 0
    # Between these expert widths lies the least traffic: weights on one side, tokens on the other.
    if whole and case.model.num_kv_heads % tensor == 0 and (experts == 1 or 4 <= expert <= 16):
      yield sharding.MeshConfig(1, fsdp, expert, tensor)


def divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def title(case: Case, topology: str, mesh) -> str:
  shape = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
  return (
    f"{topology}, mesh {shape}: {case.sequences} sequences x {case.length} tokens per update in "
    f"{case.microbatches} micro-batches"
  )


def print_row(row: dict[str, Any], header: bool) -> None:
  if header:
    print_line(
      f"{'program':<22}{'peak GiB':>10}{'of':>5}{'PFLOP':>9}{'HBM GB':>9}{'ICI GB':>8}"
      f"{'compute':>9}{'HBM':>8}{'ICI':>8}  {'binds':<13}{'MFU':>6}{'compile':>9}"
    )
  start = f"{row['program']:<22}"
  if "bound_s" not in row:
    print_line(f"{start}does not fit: {row['error']}")
    return
  seconds = "".join(f"{row[k]:>{w}.3g}" for k, w in zip(("compute_s", "hbm_s"), (9, 8)))
  print_line(
    f"{start}{row['peak_gib']:>10.2f}{row['hbm_gib']:>5.0f}{row['executed_flops'] / 1e15:>9.3g}"
    f"{row['hbm_bytes'] / 1e9:>9,.0f}{row['wire_bytes'] / 1e9:>8,.1f}{seconds}"
    f"{row['interconnect_s']:>8.3g}  {row['binds']:<13}{row['mfu']:>6.1%}{row['compile_s']:>8.0f}s"
  )
  for kind, moved in row["collectives"].items():
    print_line(f"    {kind:<20}{moved['count']:>8.0f} times{moved['bytes'] / 1e9:>10.3f} GB a chip")
  if not row["fits"]:
    print_line(f"    does not fit: {row['error']}")


def print_line(text: str) -> None:
  sys.stdout.write(text + "\n")
  sys.stdout.flush()


if __name__ == "__main__":
  flags.mark_flags_as_required(["config"])
  app.run(main)
