"""Rotary positions: frequencies by rule, and their application to queries and keys."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.model_groups import RopeConfig


class Rotation(NamedTuple):
  """Rotary embedding of a kind of layer."""

  frequency_h: np.ndarray  # Radians per position, float32; half as many as rotated places.
  factor: float = 1.0  # On the rotated part of queries and keys.


@functools.lru_cache
def rotation_of(config: ModelConfig, local: bool) -> Rotation:
  """Returns the rotary embedding of global or local layers."""
  rope, theta = config.rope, config.local_rope_theta if local else config.rope_theta
  wave_h = waves(int(config.head_dim * rope.share) // 2, theta)
  if local and not rope.local:
    return Rotation(np.float32(1) / wave_h)
  return Rotation(RULES[rope.rule](wave_h, theta, rope), attention_factor(rope))


def waves(half: int, theta: float) -> np.ndarray:
  """Wavelengths over 2π, theta^(i/half), float32.

  NumPy rounds like Hugging Face, independently of the device's power function: at position 30,000
  the last bit of a frequency is a visible angle.
  """
  exponent_h = np.arange(half, dtype=np.float32) / np.float32(half)
  return np.power(theta, exponent_h, dtype=np.float64).astype(np.float32)


def _default(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  return np.float32(1) / wave_h


def _linear(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """All frequencies over the factor (arXiv:2306.15595)."""
  return np.float32(1) / wave_h / np.float32(rope.factor)


def _llama3(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """Long waves over the factor, short ones unchanged, a ramp between."""
  low, high, factor = map(np.float32, (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
  frequency_h = np.float32(1) / wave_h
  turns_h = np.float32(rope.original_length) / (np.float32(2 * math.pi) / frequency_h)
  smooth_h = np.clip((turns_h - low) / (high - low), 0, 1)
  return (1 - smooth_h) * frequency_h / factor + smooth_h * frequency_h


def _yarn(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """Interpolation by parts of the frequencies. YaRN, arXiv:2309.00071, eq. 23."""
  half = len(wave_h)

  def place(turns: float) -> float:
    return half * math.log(rope.original_length / (turns * 2 * math.pi)) / math.log(theta)

  low, high = place(rope.beta_fast), place(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * half - 1)
  ramp_h = (np.arange(half, dtype=np.float32) - low) / (high - low or 0.001)
  unscaled_h = 1 - np.clip(ramp_h, 0, 1).astype(np.float32)
  scaled_h = np.float32(1) / (np.float32(rope.factor) * wave_h)
  return scaled_h * (1 - unscaled_h) + np.float32(1) / wave_h * unscaled_h


RULES: dict[str, Callable[[np.ndarray, float, RopeConfig], np.ndarray]] = dict(
  default=_default, linear=_linear, llama3=_llama3, yarn=_yarn
)


def attention_factor(rope: RopeConfig) -> float:
  """Factor on rotated queries and keys, for YaRN."""
  if rope.rule != "yarn":
    return 1.0

  scales = rope.mscale, rope.mscale_all_dim
  over, under = scales if all(scales) else (1.0, 0.0)
  growth = 0.1 * math.log(rope.factor)
  return rope.attention_factor or (1 + over * growth) / (1 + under * growth)


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotary embedding, Hugging Face's half-split convention; angles in float32.

  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the two halves of the rotated places, with
  angle position · frequency.  RoFormer, arXiv:2104.09864, eq. 34.
  """
  half = len(rotation.frequency_h)
  if (rest := x_BTNH.shape[-1] - 2 * half) > 0:
    x_BTNh, rest_BTNh = x_BTNH[..., : 2 * half], x_BTNH[..., -rest:]
    return jnp.concatenate([rotate(x_BTNh, position_BT, rotation), rest_BTNh], axis=-1)
  frequency_h, factor = rotation
  position_BT11 = position_BT.astype(jnp.float32)[..., None, None]
  if sharding.platform() == "tpu":
    signed_H = np.concatenate([-frequency_h, frequency_h])
    cos, sin = _waves(position_BT11 * signed_H[None, None, None], factor)
    turned = x_BTNH.astype(jnp.float32) * cos + _swap_halves(x_BTNH) * sin
    return turned.astype(x_BTNH.dtype)
  cos, sin = _waves(position_BT11 * frequency_h[None, None, None], factor)
  x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)


def _waves(angle: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
  """Returns cosine and sine, times the factor."""
  waves = jnp.cos(angle), jnp.sin(angle)
  return waves if factor == 1 else (waves[0] * factor, waves[1] * factor)


def _swap_halves(x_BTNH: jax.Array) -> jax.Array:
  """Swaps the halves of H in float32: (x1, x2) -> (x2, x1).

  The product with zeros and ones is exact and fused into its reader. Slices of 128 lanes would go
  through float32 copies in memory on TPUs.
  """
  H = x_BTNH.shape[-1]
  swap_HH = jnp.asarray(np.roll(np.eye(H), H // 2, axis=0), x_BTNH.dtype)
  wide = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  return jnp.einsum("BTNH,Hh->BTNh", x_BTNH, swap_HH, **wide)


def scale_queries(q_BTNH: jax.Array, position_BT: jax.Array, rope: RopeConfig) -> jax.Array:
  """Queries times 1 + β log(1 + ⌊position / original length⌋)."""
  if not rope.query_beta:
    return q_BTNH
  periods_BT = jnp.floor(position_BT.astype(jnp.float32) / rope.original_length)
  scale_BT = 1 + rope.query_beta * jnp.log1p(periods_BT)
  return q_BTNH * scale_BT.astype(q_BTNH.dtype)[..., None, None]
