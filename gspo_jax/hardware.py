"""How much of the accelerators' speed an update uses."""

from collections.abc import Sequence

import jax
import numpy as np

from gspo_jax.accelerators import peak_flops
from gspo_jax.models import flops
from gspo_jax.models.sizes import ModelConfig


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
