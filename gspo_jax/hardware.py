"""The accelerators of a run: whether it fits, and how much of their speed an update uses."""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.models import flops, transformer
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.system.accelerators import peak_flops


def forward_flops(
  config: ModelConfig, prompt_P: np.ndarray, prompt_B: np.ndarray, end_B: np.ndarray
) -> float:
  """Model FLOPs of a forward pass over responses from `prompt_B` to `end_B` and each prompt once,
  without padding. An update takes three times as many."""
  parts = flops.work(config, 1, prompt_P, prompt_P), flops.work(config, 1, end_B - prompt_B, end_B)
  return sum(float(np.sum(part.forward())) for part in parts)


def utilisation(
  operations: float, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
  """Model FLOPs per second of the updates, and their share of the devices' peak where it is
  known; what is calculated twice counts once."""
  speed = operations / seconds
  found = {"flops_per_second/update": speed}
  peak = peak_flops(devices[0].device_kind)
  return found if peak is None else found | {"mfu/update": speed / (peak * len(devices))}


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
  if config.has_iterations and config.needs_reference:
    needed += read * count
  if teacher is not None:
    needed += read * transformer.count(teacher)[0]
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
