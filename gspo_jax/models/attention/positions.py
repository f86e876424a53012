"""Rotary position embeddings (RoPE): frequencies, and rotations of queries and keys.

`model.rope.rule` names the rule that scales frequencies for longer contexts: one of `RULES`.
"""

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
  """Rotary embedding of global or of local (windowed) layers."""

  # Radians per position, float32, one for each pair of rotated dimensions of a head.
  frequency_h: np.ndarray
  factor: float = 1.0  # Multiplies the rotated dimensions of queries and keys.


@functools.lru_cache
def rotation_of(config: ModelConfig, local: bool) -> Rotation:
  """Returns the rotary embedding of global or local layers."""
  rope, theta = config.rope, config.local_rope_theta if local else config.rope_theta
  wave_h = waves(int(config.head_dim * rope.share) // 2, theta)
  if local and not rope.local:
    return Rotation(np.float32(1) / wave_h)
  return Rotation(RULES[rope.rule](wave_h, theta, rope), attention_factor(rope))


def waves(half: int, theta: float) -> np.ndarray:
  """Returns wavelengths divided by 2π, theta^(i/half), in float32.

  Their inverses are the frequencies. The host computes the wavelengths, so that they are rounded as
  in Hugging Face, whatever the device. The last bit of a frequency matters, because at position
  30,000 it changes angles visibly.
  """
  exponent_h = np.arange(half, dtype=np.float32) / np.float32(half)
  return np.power(theta, exponent_h, dtype=np.float64).astype(np.float32)


def _default(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """Returns unscaled frequencies."""
  return np.float32(1) / wave_h


def _linear(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """Divides all frequencies by `rope.factor` (arXiv:2306.15595)."""
  return np.float32(1) / wave_h / np.float32(rope.factor)


def _llama3(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """Divides the frequencies of long waves by `rope.factor` (Llama 3).

  A wave is long if it makes fewer than `low_freq_factor` turns within the original context, and
  short if it makes more than `high_freq_factor`. Short waves are unchanged. Between these bounds,
  the divided and the unchanged frequency are interpolated.
  """
  low, high, factor = map(np.float32, (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
  frequency_h = np.float32(1) / wave_h
  turns_h = np.float32(rope.original_length) / (np.float32(2 * math.pi) / frequency_h)
  smooth_h = np.clip((turns_h - low) / (high - low), 0, 1)
  return (1 - smooth_h) * frequency_h / factor + smooth_h * frequency_h


def _yarn(wave_h: np.ndarray, theta: float, rope: RopeConfig) -> np.ndarray:
  """Divides low frequencies by `rope.factor`. YaRN, arXiv:2309.00071, eq. 23.

  Frequencies fall with their index. Up to index `low` they are unchanged, and from index `high` on
  they are divided. Between these indices, the divided and the unchanged frequency are interpolated
  linearly.
  """
  half = len(wave_h)

  def index(turns: float) -> float:
    """Returns the unrounded index of the wave with `turns` turns in the original length."""
    return half * math.log(rope.original_length / (turns * 2 * math.pi)) / math.log(theta)

  low, high = index(rope.beta_fast), index(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * half - 1)
  ramp_h = (np.arange(half, dtype=np.float32) - low) / (high - low or 0.001)
  unscaled_h = 1 - np.clip(ramp_h, 0, 1).astype(np.float32)
  scaled_h = np.float32(1) / (np.float32(rope.factor) * wave_h)
  return scaled_h * (1 - unscaled_h) + np.float32(1) / wave_h * unscaled_h


# Functions from (wavelengths / 2π, theta, configuration) to frequencies.
RULES: dict[str, Callable[[np.ndarray, float, RopeConfig], np.ndarray]] = dict(
  default=_default, linear=_linear, llama3=_llama3, yarn=_yarn
)


def attention_factor(rope: RopeConfig) -> float:
  """Returns YaRN's factor on rotated queries and keys, 1 for other rules."""
  if rope.rule != "yarn":
    return 1.0

  scales = rope.mscale, rope.mscale_all_dim
  numerator, denominator = scales if all(scales) else (1.0, 0.0)
  growth = 0.1 * math.log(rope.factor)
  return rope.attention_factor or (1 + numerator * growth) / (1 + denominator * growth)


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotates queries or keys by their positions, in float32.

  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for angles position · frequency, where x1 and x2
  are the two halves of the rotated dimensions, as in Hugging Face. RoFormer, arXiv:2104.09864,
  eq. 34. The result is multiplied by `rotation.factor`. Dimensions that are not rotated are
  unchanged.
  """
  half = len(rotation.frequency_h)
  if (rest := x_BTNH.shape[-1] - 2 * half) > 0:
    first_BTNh, rest_BTNh = x_BTNH[..., : 2 * half], x_BTNH[..., -rest:]
    return jnp.concatenate([rotate(first_BTNh, position_BT, rotation), rest_BTNh], axis=-1)
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
  """Returns cosine and sine of angles, times the factor."""
  waves = jnp.cos(angle), jnp.sin(angle)
  return waves if factor == 1 else (waves[0] * factor, waves[1] * factor)


def _swap_halves(x_BTNH: jax.Array) -> jax.Array:
  """Swaps the halves of H in float32: (x1, x2) -> (x2, x1).

  The swap is a product with a permutation matrix. The product is exact, and XLA fuses the product
  into the sum that reads it. On TPUs, slicing the last axis into halves would cut through the 128
  vector lanes, and write copies.
  """
  H = x_BTNH.shape[-1]
  swap_HH = jnp.asarray(np.roll(np.eye(H), H // 2, axis=0), x_BTNH.dtype)
  wide = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  return jnp.einsum("BTNH,Hh->BTNh", x_BTNH, swap_HH, **wide)


def scale_queries(q_BTNH: jax.Array, position_BT: jax.Array, rope: RopeConfig) -> jax.Array:
  """Scales queries with their position (Ministral 3).

  The factor is 1 + β log(1 + ⌊position / original length⌋) with β = `rope.query_beta`.
  """
  if not rope.query_beta:
    return q_BTNH
  periods_BT = jnp.floor(position_BT.astype(jnp.float32) / rope.original_length)
  scale_BT = 1 + rope.query_beta * jnp.log1p(periods_BT)
  return q_BTNH * scale_BT.astype(q_BTNH.dtype)[..., None, None]
