"""Programs of benchmarks/gpu.py, compiled for a GPU, present or absent.

`fit` chooses the sizes of an update by the compiler's own count of memory, before anything runs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from scaling_points import ADAMW, make_step, random_batch, read_weights

from gspo_jax import sharding
from gspo_jax.aot import cuda, hlo_costs
from gspo_jax.learner import optimizer
from gspo_jax.learner.state import new_state as train_state
from gspo_jax.learner.step import WithHyperparameters
from gspo_jax.models import flops, remat, transformer
from gspo_jax.models.attention.triton import TILE
from gspo_jax.models.params import abstract_params
from gspo_jax.sampling import Workload
from gspo_jax.sampling.local import slots
from gspo_jax.sampling.requests import sizes
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig
from gspo_jax.settings.sizes import PUBLISHED
from gspo_jax.sharding import BATCH, P
from gspo_jax.system import accelerators

# "both" keeps products and attention of a layer, 1.3 MB a token of the dense model, and computes
# the rest again, which is cheap. Logits of 8 sequences take 2.5 GB.
COMPUTE = dataclasses.replace(REFERENCE, dtype="bfloat16", remat="both", logits_chunk=512)


def mesh_of(target: str) -> jax.sharding.Mesh:
  """Mesh of this process's first device, or of a `target` such as "h100"."""
  devices = jax.devices()
  if target:
    devices = cuda.devices_of(f"{target}:1")
  return sharding.make_mesh(MeshConfig(data=1, fsdp=1, expert=1, tensor=1), devices[:1])


def model_of(spec: dict[str, Any]) -> ModelConfig:
  return dataclasses.replace(PUBLISHED["Qwen3-1.7B-Base"], **spec["model"])


def compute_of(spec: dict[str, Any]) -> ComputeConfig:
  return dataclasses.replace(COMPUTE, experts=spec["experts"])


def engine_of(spec: dict[str, Any], steps: int = 64) -> EngineConfig:
  rows = spec["prompts"] * spec["group"]
  return EngineConfig(slots=rows, steps=steps, prefill_tokens=8192, cache_dtype="bfloat16")


def workload_of(spec: dict[str, Any], new: int) -> Workload:
  rows = spec["prompts"] * spec["group"]
  return Workload(SamplingConfig(1.0, 0, 1.0, 0.0, new), spec["prompt"], rows, spec["group"])


def usable_bytes() -> float:
  """Returns memory for arrays on the mesh's device; infinite if unknown."""
  chip = accelerators.find(sharding.device_kind())
  if chip and chip.cuda:
    return chip.usable
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get("bytes_limit", math.inf)


def operations(spec: dict[str, Any]) -> float:
  """Operations an update needs; nothing is computed twice."""
  return flops.work(model_of(spec), spec["rows"], spec["length"], spec["length"]).training()


def step_bytes(spec: dict[str, Any], positions: float) -> float:
  """Bytes a decode step has to read with so many positions in each row's cache."""
  config, rows = model_of(spec), spec["prompts"] * spec["group"]
  return 2 * (read_weights(config, rows) + cache_numbers(config, rows, positions))


def mean_positions(spec: dict[str, Any]) -> float:
  """Returns positions in a row's cache, on average over the steps."""
  return spec["prompt"] + (spec["new"] - 1) / 2


def cache_numbers(config: ModelConfig, rows: int, positions: float) -> float:
  """Returns keys and values in the cache."""
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * positions


def update(spec: dict[str, Any]) -> tuple[WithHyperparameters, tuple[Any, ...]]:
  """Returns an update and its abstract arguments."""
  config, mesh = model_of(spec), jax.sharding.get_mesh()
  tx = optimizer.make(ADAMW, 1000)
  params = abstract_params(config, mesh, sharding.TRAIN, "float32")
  state = _placed(jax.eval_shape(lambda params: train_state(params, tx), params))
  rows = jax.eval_shape(
    lambda: jax.tree.map(jnp.asarray, random_batch(config, spec["rows"], spec["length"], 1))
  )
  layout = NamedSharding(mesh, P(BATCH))
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), rows)
  step = make_step(config, compute_of(spec), tx, microbatches=spec["rows"] // spec["at_once"])
  return step, (state, batch)


def sampling(spec: dict[str, Any]) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
  """Returns prefill and a single decode step, with abstract arguments."""
  config, mesh, engine = model_of(spec), jax.sharding.get_mesh(), engine_of(spec, steps=1)
  workload = workload_of(spec, spec["new"])
  size = sizes(workload, engine, 1)
  params = abstract_params(config, mesh, sharding.ROLLOUT, "bfloat16")
  params = _placed(jax.eval_shape(lambda p: transformer.decoding_params(p, config), params))
  new_state = functools.partial(slots.new_state, stop_ids=1, dtype=engine.cache_dtype)
  state = _placed(jax.eval_shape(lambda: new_state(config, params.depths, size)))
  options = dict(model=config, compute=compute_of(spec), record_routing=False)
  prompts = size.at_once(size.prompt)

  def field(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((prompts, *shape), dtype, sharding=NamedSharding(mesh, P(BATCH)))

  def decode(*arguments):
    return slots.decode(*arguments, steps=1, sampling=workload.sampling, **options)

  def prefill(*arguments):
    return slots.prefill(*arguments, piece=engine.prefill_tokens, **options)

  fields = jax.tree.map(lambda x: field(x.dtype, *x.shape[1:]), state.queue)
  numbers, tokens = field(jnp.int32), field(jnp.int32, size.prompt)
  cancelled = jax.ShapeDtypeStruct((size.slots,), jnp.int32, sharding=NamedSharding(mesh, P()))
  return dict(
    prefill=(jax.jit(prefill, donate_argnums=1), (params, state, tokens, fields, numbers, numbers)),
    decode=(jax.jit(decode, donate_argnums=1), (params, state, cancelled)),
  )


def _placed(tree: Any) -> Any:
  """Gives abstract arrays the layout of their types on the mesh in use."""
  mesh = jax.sharding.get_mesh()

  def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    layout = NamedSharding(mesh, P(*x.sharding.spec) if x.sharding else P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

  return jax.tree.map(place, tree)


def compiled(function: Callable, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
  return function.trace(*arguments).lower().compile()


def peak_bytes(program: jax.stages.Compiled) -> float:
  memory = program.memory_analysis()
  return memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes


def fit(spec: dict[str, Any]) -> tuple[dict[str, Any], WithHyperparameters]:
  """Compiles the largest update within memory; returns sizes and update.

  It fits if XLA computes no product again to save memory.

  Raises:
    MemoryError: a single layer and sequence do not fit.
  """
  usable = usable_bytes()
  spec = first_guess(spec, usable)
  while True:
    step, arguments = update(spec)
    step = step.compile(*arguments)
    program = step.function
    peak, layers, at_once = peak_bytes(program), spec["model"]["num_layers"], spec["at_once"]
    again = len(re.findall(r"(?:dot|gemm|cublas)[\w.-]*\.remat\d* = ", program.as_text()))
    print(
      f"{layers} layers, {at_once} sequences at once: {peak / 1e9:.1f} GB of {usable / 1e9:.1f}, "
      f"{again} products again to save memory",
      flush=True,
    )
    if peak <= usable and not again:
      return spec, step
    if layers == at_once == 1:
      raise MemoryError("one layer and one sequence do not fit")
    spec = smaller(spec)


def first_guess(spec: dict[str, Any], usable: float) -> dict[str, Any]:
  """Limits the layers of experts: their state takes 60 % of the memory."""
  layers, at_most = spec["model"]["num_layers"], remat.ROOM * usable / remat.STATE
  if not spec["model"]["num_experts"]:
    return spec
  while layers > 1 and transformer.count(model_of(with_layers(spec, layers)))[0] > at_most:
    layers -= 1
  return with_layers(spec, layers)


def smaller(spec: dict[str, Any]) -> dict[str, Any]:
  """Takes one layer from a mixture of experts; halves another model's sequences at once first."""
  layers, at_once = spec["model"]["num_layers"], spec["at_once"]
  if layers == 1 or (at_once > 1 and not spec["model"]["num_experts"]):
    return spec | dict(at_once=at_once // 2)
  return with_layers(spec, layers - 1)


def with_layers(spec: dict[str, Any], layers: int) -> dict[str, Any]:
  return spec | dict(model=spec["model"] | dict(num_layers=layers))


def check(spec: dict[str, Any]) -> list[dict[str, Any]]:
  """Compiles the programs of a task; returns memory, operations and bytes.

  Raises:
    MemoryError: a program does not fit.
  """
  if spec["task"] == "train":
    spec, step = fit(spec)
    program, text = step.function, step.function.as_text()
    executed = hlo_costs.costs(text).products
    sizes = f"{spec['model']['num_layers']} layers, {spec['at_once']} sequences at once"
    return [_row("update", program, sizes) | dict(executed=executed, needed=operations(spec))]
  rows = []
  for name, (function, arguments) in sampling(spec).items():
    program = compiled(function, arguments)
    row = _row(name, program, f"{spec['model']['num_layers']} layers")
    if name == "decode":
      window, positions = spec["prompt"] + spec["new"], mean_positions(spec)
      rates = dict(cache_attention=(positions + TILE / 2) / window)
      moved = hlo_costs.costs(program.as_text(), rates).memory
      row |= dict(executed=moved, needed=step_bytes(spec, positions))
    rows.append(row)
  return rows


def _row(name: str, program: jax.stages.Compiled, sizes: str) -> dict[str, Any]:
  peak, usable = peak_bytes(program), usable_bytes()
  if peak > usable:
    raise MemoryError(f"{name} needs {peak / 1e9:.1f} GB of {usable / 1e9:.1f}")
  return dict(program=name, peak=peak, usable=usable, sizes=sizes, executed=None, needed=None)
