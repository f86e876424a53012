"""Rotary positions and grouped-query attention."""

import jax
import jax.numpy as jnp
import numpy as np

NEGATIVE = -1e30  # finite: a row that may look at nothing gives a mean, not NaN


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary embedding, Hugging Face's half-split convention; angles in float32.

  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the two halves of H, with angle
  position · theta^(-2i/H).  RoFormer, arXiv:2104.09864, eq. 34.
  """
  half = x_BTNH.shape[-1] // 2
  # NumPy rounds as Hugging Face does, whatever the device's power function: at position 30,000 the
  # last bit of a frequency is a visible turn.
  exponent_h = np.arange(half, dtype=np.float32) / np.float32(half)
  frequency_h = np.float32(1) / np.power(theta, exponent_h, dtype=np.float64).astype(np.float32)
  angle_BT1h = (position_BT.astype(jnp.float32)[..., None] * frequency_h[None, None])[:, :, None]
  cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
  x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)


def attend(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, visible_BTS: jax.Array
) -> jax.Array:
  """softmax(q kᵀ / √H) v over the visible keys, softmax in float32; N/K queries share each key."""
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[2]
  q_BTKnH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
  score = jnp.einsum("BTKnH,BSKH->BKnTS", q_BTKnH, k_BSKH, preferred_element_type=jnp.float32)
  score = jnp.where(visible_BTS[:, None, None], score, NEGATIVE)
  weight = jax.nn.softmax(score, axis=-1).astype(v_BSKH.dtype)
  return jnp.einsum("BKnTS,BSKH->BTKnH", weight, v_BSKH).reshape(B, T, N, H)
