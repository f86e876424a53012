"""What TPU chips can do, and how long a program takes at least on one of them."""

import dataclasses
import math
import re
from collections.abc import Sequence

import jax
import numpy as np

from gspo_jax.models import transformer
from gspo_jax.models.sizes import ModelConfig

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  flops: float  # bfloat16, per second
  hbm: float  # bytes
  hbm_speed: float  # bytes per second
  ici_speed: float  # bytes per second, sum over links, both directions
  axes: int  # of the torus
  host: str  # what TPU_ACCELERATOR_TYPE is set to: one host of them
  kinds: tuple[str, ...]  # what JAX calls a device of it
  source: str
  devices: int = 1  # that JAX sees of one chip


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
# As the page named on each line gives them, per chip. Where versions of a page differ: v5e's and
# v6e's 800 and 1600 GB/s are also printed as 819 and 1638, 1.024 times as much, which is what the
# tpu7x page has for v6e; the GB of capacities are GiB. The v4 page has no figure for the links: 6
# of 50 GB/s each way is what others quote from arXiv:2304.01433, whose table we have not seen.
# Links in use reach less: https://jax-ml.github.io/scaling-book/tpus has 45 GB/s for each of v4 and
# v5e, and 90 for v5p, v6e and tpu7x, where the pages give 50 and 100.
CHIPS = {
  "v4": Chip(275e12, 32 * GIB, 1.2e12, 600e9, 3, "v4-8", ("TPU v4",), _DOCS + "v4"),
  "v5e": Chip(
    197e12, 16 * GIB, 0.819e12, 400e9, 2, "v5litepod-4", ("TPU v5 lite", "TPU v5e"), _DOCS + "v5e"
  ),
  "v5p": Chip(459e12, 95 * GIB, 2.765e12, 1200e9, 3, "v5p-8", ("TPU v5", "TPU v5p"), _DOCS + "v5p"),
  "v6e": Chip(
    918e12, 32 * GIB, 1.638e12, 800e9, 2, "v6e-4", ("TPU v6 lite", "TPU v6e"), _DOCS + "v6e"
  ),
  "tpu7x": Chip(2307e12, 192 * GIB, 7.38e12, 1200e9, 3, "tpu7x-8", ("TPU7x",), _DOCS + "tpu7x", 2),
}


# Dense bfloat16 without sparsity, per second: data sheets of NVIDIA's SXM modules.
GPUS = {"NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12}


def peak_flops(kind: str) -> float | None:
  """Of one device, bfloat16, per second; None for an unknown kind (`jax.Device.device_kind`)."""
  for chip in CHIPS.values():
    if kind in chip.kinds:
      return chip.flops / chip.devices
  return next((flops for name, flops in GPUS.items() if kind.startswith(name)), None)


def utilisation(
  config: ModelConfig,
  prompt_P: np.ndarray,
  prompt_B: np.ndarray,
  end_B: np.ndarray,
  seconds: float,
  devices: Sequence[jax.Device],
) -> dict[str, float]:
  """Of the updates on responses from `prompt_B` to `end_B` and on the prompts, each of them once:
  model FLOPs per second, without padding and without what is computed twice; and their share of
  the devices' peak, where that is known."""
  parts = work(config, 1, prompt_P, prompt_P), work(config, 1, end_B - prompt_B, end_B)
  speed = sum(float(np.sum(part.training())) for part in parts) / seconds
  found = {"flops_per_second/update": speed}
  peak = peak_flops(devices[0].device_kind)
  return found if peak is None else found | {"mfu/update": speed / (peak * len(devices))}


def parse(topology: str) -> tuple[Chip, int]:
  """The chip and their number of e.g. "v5p:4x4x4". ValueError says what is known."""
  name, _, shape = topology.partition(":")
  if name not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
    raise ValueError(f"--topology={topology}: want CHIP:AxB or CHIP:AxBxC, CHIP of {list(CHIPS)}")
  return CHIPS[name], math.prod(int(n) for n in shape.split("x"))


@dataclasses.dataclass(frozen=True)
class Work:
  """Floating-point operations of one pass over the whole batch, by part of the model."""

  dense: float  # projections and dense feed-forward layers
  experts: float
  attention: float  # scores and their sum over values
  head: float

  def forward(self) -> float:
    return self.dense + self.experts + self.attention + self.head

  def training(self) -> float:
    """Forward and backward without recomputation: what utilisation is measured against."""
    return 3 * self.forward()

  def executed(self, remat: str) -> float:
    """With recomputation. Experts and the head recompute their own; attention's backward pass has
    five products to the forward pass's two."""
    again = 0 if remat in ("none", "dots") else 1
    scores = 0 if remat in ("none", "attention") else 1
    dense, attention = 3 + again, 3.5 + scores
    return dense * self.dense + 11 / 3 * self.experts + attention * self.attention + 4 * self.head


def work(config: ModelConfig, sequences: int, queries: int, keys: int, heads: int = 0) -> Work:
  """Work for `queries` new tokens of each sequence, the last of which sees `keys` positions.

  `heads`: at how many positions logits are needed; 0: at all.
  """
  tokens = sequences * queries
  _, active = transformer.count(config)
  moe_layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
  experts = moe_layers * config.experts_per_token * 3
  experts *= config.hidden_size * config.moe_intermediate_size
  vocabulary = config.vocab_size * config.hidden_size
  dense = active - experts - vocabulary * (1 if config.tie_word_embeddings else 2)
  seen = keys - (queries - 1) / 2  # on average
  scores = 4 * config.num_layers * config.num_heads * config.head_dim * seen
  return Work(
    dense=2 * tokens * dense,
    experts=2 * tokens * experts,
    attention=tokens * scores,
    head=2 * (heads or tokens) * vocabulary,
  )


def bound(
  chip: Chip, chips: int, flops: float, useful: float, hbm_bytes: float, wire_bytes: float
) -> dict[str, float | str]:
  """Seconds that each resource needs at least, which one binds, and utilisation if it were reached.

  `flops` and `useful` are of the whole batch; the bytes are per chip. A collective is taken to run
  over one axis of the torus, both ways: what a mesh axis laid along it gets.
  """
  seconds = dict(
    compute=flops / chips / chip.flops,
    hbm=hbm_bytes / chip.hbm_speed,
    interconnect=wire_bytes / (chip.ici_speed / 2 / chip.axes),
  )
  binds = max(seconds, key=seconds.get)
  return dict(
    **{f"{name}_s": value for name, value in seconds.items()},
    binds=binds,
    bound_s=seconds[binds],
    mfu=useful / chips / chip.flops / max(seconds[binds], 1e-12),
  )
