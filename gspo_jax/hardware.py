"""The accelerators of a run: whether it fits."""

import os

import jax
import jax.numpy as jnp

from gspo_jax.models import transformer
from gspo_jax.settings import passes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig


def check_memory(
  config: RunConfig, mesh: jax.sharding.Mesh, teacher: ModelConfig | None = None
) -> None:
  """ValueError if parameters, gradients and moments alone are more than the devices hold.

  config: a `config.RunConfig`.
  """
  count, _ = transformer.count(config.model)
  adapters = config.job in ("rl", "offline") and config.rl.lora_rank
  trained = config.job != "eval" and not adapters
  read = jnp.dtype(config.compute.dtype).itemsize  # of what is not trained
  needed = count * (16 if trained else 4)  # published weights are read in float32 at first
  if config.has_iterations and config.critic.name == "model":
    needed += 16 * count
  if config.has_iterations:
    frozen = passes.frozen(config, teacher).values()
    needed += read * sum(transformer.count(model)[0] for model in frozen)
  held = [
    (device.memory_stats() or {}).get("bytes_limit")
    for device in mesh.devices.flat
    if device in mesh.local_devices
  ]
  if None in held:  # a CPU, whose devices share the memory of the host
    held = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  there = sum(held) * len(mesh.devices.flat) // len(mesh.local_devices)
  if needed > there:
    raise ValueError(
      f"the model has {count:,} parameters, which take {needed / 2**30:,.0f} GiB: more than the "
      f"{there / 2**30:,.0f} GiB of the devices; make model.* smaller, or take more devices"
    )
