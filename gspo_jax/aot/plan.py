"""Text of --dry_run: configuration, data, memory and operations of a run.

Memory and operations are computed from shapes. No weights are loaded, and no program of the run is
compiled.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding, teacher
from gspo_jax.aot import programs
from gspo_jax.aot.estimate import activation_bytes, device_bytes, trained_params
from gspo_jax.aot.programs import Case
from gspo_jax.aot.table import axes
from gspo_jax.inputs import Inputs
from gspo_jax.inputs.devices import workloads
from gspo_jax.learner.state import TrainState, state_of_phase
from gspo_jax.models import flops, head, remat, transformer
from gspo_jax.runs import provenance
from gspo_jax.settings import passes
from gspo_jax.settings.reading import default
from gspo_jax.settings.run import RunConfig
from gspo_jax.system import accelerators
from gspo_jax.system.accelerators import GIB
from gspo_jax.system.meshes import mesh_devices, use_mesh
from gspo_jax.system.text import clock_text, visible

# Two fitted factors of the memory estimate. The estimate differs by less than 20 % from compiled
# updates of SmolLM2 on a CPU and of Qwen3-30B-A3B on TPUs.
ALL = 2  # Activations saved without remat, relative to remat="both".
# Arrays of equal size in memory at the same time. For parameters: gradients, their sum over
# micro-batches, and the update. For logits: the logits, their softmax, and its gradient.
COPIES = 3
# Moments of the estimate.
UPDATE, COLD_START = "in an update", "in an update of the cold start"


def lines(inputs: Inputs, rewards: Sequence[str] = (), topology: str = "") -> list[str]:
  """Returns the lines of --dry_run.

  Args:
    inputs: inputs of the run.
    rewards: rewards of the first problem's gold answer and of an empty response; () to omit them.
    topology: name of the devices; "" for the devices of this machine.
  """
  config = inputs.config
  differs = provenance.difference(dataclasses.asdict(default()), dataclasses.asdict(config))
  devices = mesh_devices(inputs.meshes.trainer)
  count, active = transformer.count(config.model)
  each = f", {active:,} of them for each token" if active < count else ""
  held_out = sum(len(b.problems) for b in inputs.data.held_out)
  text = [
    f"model: {count:,} parameters{each}, of the family {config.model.family}",
    "configuration, differences from the defaults (docs/keys.md):",
    *(f"  {line}" for line in differs or ["nothing"]),
    f"devices: {len(devices)} x {devices[0].device_kind} ({axes(inputs.meshes.trainer)})",
  ]
  if config.rollout_mesh.enabled:
    shape = axes(inputs.meshes.sampler)
    text.append(f"rollout mesh: {inputs.meshes.sampler.size} further devices ({shape})")
  if config.has_iterations and config.critic.name != "none":
    apart = config.critic.name == "model"
    model = transformer.table(config.model) if apart else None
    declared = jax.tree.leaves(head.critic_table(config.model, model))
    trunk = "a separate model" if apart else "a head on the policy's trunk"
    text.append(f"critic: {sum(math.prod(w.shape) for w in declared):,} parameters, {trunk}")
  if taught := inputs.teacher:
    number, _ = transformer.count(taught.model)
    text.append(f"teacher: {number:,} parameters, frozen, {taught.source.path}")
  text.append(f"data: {len(inputs.data.train_prompts):,} prompts, {held_out:,} held-out problems")
  text += first_problem(inputs, rewards)
  text += memory(
    programs.resolve_remat(programs.make_case(config), inputs.meshes.trainer), inputs, devices[0]
  )
  example, extra = ("h100:8", "aot-cuda") if devices[0].platform == "gpu" else ("v5p:4x4x4", "tpu")
  if config.has_iterations:
    text.append(
      f"  python -m gspo_jax.aot --config=... --topology={topology or example} prints the "
      f"compiler's own figures (pip install -e '.[{extra}]')"
    )
  if "sft" in config.job:
    tokens = config.sft.batch * config.sft.max_tokens
    text.append(
      f"cold start: at most {config.sft.steps:,} updates of {config.sft.batch:,} demonstrations, "
      f"{tokens:,} tokens with padding"
    )
  return text + (iteration(config, devices, inputs.teacher) if config.has_iterations else [])


def first_problem(inputs: Inputs, rewards: Sequence[str]) -> list[str]:
  """Returns lines on the first problem: its prompt as text, answer and rewards.

  The lines also have the environment's answers in a trial conversation. If the run has no training
  prompts, the problem is the first held-out problem that the run's own verifier scores. Returns []
  if there is no such problem. Arguments are as in `lines`.
  """
  if not (prompts := inputs.data.main_prompts):
    return []
  first, names = prompts[0], inputs.tokenizer.token_bytes()
  prompt, answers = inputs.trial or (first.tokens, ())

  def quoted(tokens: Sequence[int]) -> list[str]:
    decoded = b"".join(names[i] for i in tokens).decode(errors="replace")
    return [f"  | {visible(line)}" for line in decoded.split("\n")]

  text = [
    f"first problem, {first.id}, a prompt of {len(prompt):,} tokens:",
    *quoted(prompt),
    f"  its answer: {visible(first.answer):.200}",
  ]
  if rewards:
    gold, empty = rewards
    # Equal rewards are suspicious for a user's function alone. For the package's verifiers the gold
    # answer may be no valid response, e.g. the tests of a program.
    own_function = ":" in inputs.config.reward.name
    remark = f"; a response is right from {inputs.config.reward.threshold:g} on"
    if gold == empty:
      remark += " (alike: nothing is learned from a group with equal rewards)"
    text.append(
      f"  reward of this answer as the response: {gold}; of an empty response: {empty}"
      f"{remark if own_function else ''}"
    )
  for turn, answer in zip(("this answer as a turn", "an empty turn"), answers):
    if answer.failure:
      text.append(f"  the environment fails on {turn}: it {answer.failure}")
    else:
      verb = "ends" if answer.over else "answers:"
      if answer.over and not answer.done:
        verb = "its answer does not fit into sampling.max_new_tokens, which ends the conversation"
      text.append(f"  on {turn} the environment gives {answer.reward:g} and {verb}")
      text += quoted(answer.observation) if answer.observation else []
  return text


def memory(case: Case, inputs: Inputs, device: jax.Device) -> list[str]:
  """Returns lines on a device's memory, with estimates for the temporary arrays of an update."""
  c, mesh, samples_on = case.config, inputs.meshes.trainer, inputs.meshes.sampler
  sampler, state = programs.sampler_params(case, samples_on), programs.state_of(case, mesh)
  sampling = {"the sampler's weights": device_bytes(sampler)}
  if c.engine.name == "local":
    loads = workloads(c, inputs.tokenizer, inputs.data.evaluations)
    states = [programs.sampling_state(case, load, samples_on, sampler)[1] for load in loads]
    sampling["cache, queue and slots"] = max(map(device_bytes, states), default=0)
  moments = {}
  if c.job == "eval":
    moments["while it samples"] = {"weights": device_bytes(state.params)} | sampling
  if c.has_iterations:
    critic_bytes = device_bytes(state.critic)
    lasting = {"weights and the optimizer's moments": device_bytes(state) - critic_bytes}
    if state.critic is not None:
      lasting["the critic's weights and moments"] = critic_bytes
    for name, params in programs.frozen_params(case, inputs.teacher, mesh).items():
      lasting[f"the {name}'s weights"] = device_bytes(params)
    moments[UPDATE] = lasting | update_memory(case, state, mesh, case.rows, case.length)
    if c.rollout_mesh.enabled:
      # Maximum number of newer versions of the weights that arrive while an old version samples.
      copies = max(1, c.rl.lag)
      newer = f"newer weights for the sampler, up to {copies} versions"
      sampling[newer] = copies * device_bytes(sampler)
      moments["of the rollout mesh"] = sampling
    elif c.engine.name == "local":
      moments["while it samples"] = lasting | sampling
  if "sft" in c.job:  # It trains all parameters, even if RL trains adapters.
    cold = state_of_phase(c, "sft", mesh)
    parts = update_memory(case, cold, mesh, c.sft.batch // c.sft.microbatches, c.sft.max_tokens)
    moments[COLD_START] = {"weights and the optimizer's moments": device_bytes(cold)} | parts
  limit = (device.memory_stats() or {}).get("bytes_limit")
  limit = limit or accelerators.memory(device.device_kind)
  text = []
  for moment, parts in moments.items():
    text += [f"memory of a device {moment}: {_amount(moment, sum(parts.values()), limit)}"]
    text += [f"  {size / GIB:>8.3g}  {name}" for name, size in parts.items()]
  return text


def update_memory(
  case: Case, state: TrainState, mesh: jax.sharding.Mesh, rows: int, length: int
) -> dict[str, float]:
  """Estimates the temporary arrays of an update, in bytes of a device by name.

  Args:
    case: configuration with a resolved `compute.remat`.
    state: state that the update trains.
    mesh: mesh of the updates.
    rows: sequences of a micro-batch.
    length: tokens of a sequence.
  """
  c, shards = case.config, sharding.batch_shards(mesh)
  activations = activation_bytes(case, mesh) * rows * length / shards
  if c.compute.remat == "none":
    activations *= ALL
  positions = rows * min(c.compute.logits_chunk or length, length) / shards
  logits = 4 * positions * c.model.vocab_size / mesh.shape["tensor"]
  with use_mesh(mesh):
    prefetched = remat.prefetched(c.model, c.compute)
  parts = {
    "gradients, their sum and the update": COPIES * device_bytes(trained_params(state)),
    f"activations (remat {c.compute.remat})": activations,
    "logits, their softmax and its gradient": COPIES * logits,
  }
  if prefetched:
    parts["the experts' gathered weights (compute.prefetch)"] = prefetched
  return parts


def _amount(moment: str, needed: float, limit: float | None) -> str:
  """Returns the needed memory as text, with a remedy above the limit."""
  text = f"{needed / GIB:,.3g}" + (f" of {limit / GIB:,.1f} GiB" if limit else " GiB")
  if not limit or needed <= limit:
    return text
  if moment == COLD_START:
    return f"{text}; too much: raise sft.microbatches or mesh.fsdp"
  if moment == UPDATE:
    return f"{text}; too much: raise rl.microbatches or mesh.fsdp, or set lora.rank"
  return f"{text}; too much: lower engine.slots or engine.cache_tokens"


def iteration(
  config: RunConfig, devices: Sequence[jax.Device], taught: teacher.Teacher | None
) -> list[str]:
  """Returns lines on an iteration's tokens, operations and minimum time.

  taught: the teacher; None for a run without a teacher.
  """
  c, rl = config, config.rl
  responses, prompt = rl.rows, c.data.max_prompt_tokens
  tokens = responses * c.sampling.max_new_tokens
  prompt_P, prompt_B = np.full(rl.prompts, prompt), np.full(responses, prompt)
  end_B = prompt_B + c.sampling.max_new_tokens
  forward = flops.forward_flops(c.model, prompt_P, prompt_B, end_B)
  work = flops.iteration_flops(c, taught and taught.model, prompt_B, end_B)
  total = c.sampled_share * forward + work.updates + work.passes
  peak, basis = accelerators.peak_flops(devices[0].device_kind), "at the devices' peak"
  if peak is None:
    peak = matmul_rate()
    devices = devices[:1] if devices[0].platform == "cpu" else devices  # CPU devices share cores.
    basis = f"at {peak:.3g} operations/s, measured with a large matrix product on this machine"
  seconds = total / peak / len(devices)
  least = clock_text(seconds * rl.iterations) if seconds * rl.iterations >= 1 else "under a second"
  return [
    f"iterations: {rl.iterations:,}, each of {responses:,} responses ({rl.prompts:,} prompts x "
    f"{rl.group_size:,}), at most {tokens:,} tokens, and {rl.updates:,} updates",
    f"operations: at most {total:.3g} in an iteration, {total * rl.iterations:.3g} in all "
    f"{rl.iterations:,} (without evaluations)",
    f"time: at least {least} {basis}, if all responses have full length ({seconds:.3g} s an "
    f"iteration). The actual time is far longer: decoding is bound by "
    "memory, and small models by the host. A run prints its remaining time from the second "
    "iteration on",
    *filter(None, [passes.describe_old_policy(c)]),
  ]


def matmul_rate(size: int = 2048) -> float:
  """Measures the FLOP/s of a float32 matrix product, best of three."""
  x = jnp.ones((size, size))
  product = jax.jit(jnp.dot)
  product(x, x).block_until_ready()  # The first call compiles.
  seconds = []
  for _ in range(3):
    start = time.perf_counter()
    product(x, x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds)
