"""Penalties of length: terms to add to a reward before advantages are computed.

Accuracy and dynamic sampling should use the reward without these terms.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives import checks
from gspo_jax.objectives.checks import Number


def overlong_penalty(length: ArrayLike, max_length: Number, buffer: Number) -> Array:
  """Penalty of −1 from max_length tokens on, preceded by a linear ramp.

  The penalty is 0 up to max_length − buffer tokens, and decreases linearly to −1 at max_length. All
  lengths are in tokens.

  Shapes: any shape -> the same shape.
  Reference: arXiv:2503.14476 (soft overlong punishment), where max_length is 20,480 and buffer is
  4,096.

  Example:
    >>> print(overlong_penalty(jnp.array([85, 90, 120]), max_length=100, buffer=20))
    [-0.25 -0.5  -1.  ]
  """
  checks.require(buffer > 0, "buffer must be positive")
  checks.require(max_length >= buffer, "max_length must not be smaller than buffer")
  excess = _length(length) - (max_length - buffer)
  return -jnp.clip(excess / buffer, 0, 1)


def token_cost(length: ArrayLike, price: Number) -> Array:
  """Penalty of −`price` for each token.

  Shapes: any shape -> the same shape.
  Reference: arXiv:2510.22477 (Agent-GSPO) penalises verbosity in the reward. We have read only its
  abstract.

  Example:
    >>> print(token_cost(jnp.array([50, 100]), price=0.01))
    [-0.5 -1. ]
  """
  checks.require(price >= 0, "price must not be negative")
  return -price * _length(length)


def _length(length: ArrayLike) -> Array:
  """Checks lengths, and returns them in float32 or wider."""
  length = jnp.asarray(length)
  checks.require(length >= 0, "length must not be negative")
  dtype = length.dtype if jnp.issubdtype(length.dtype, jnp.floating) else jnp.float32
  return length.astype(jnp.promote_types(dtype, jnp.float32))
