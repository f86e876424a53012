"""Costs of length: terms to add to a reward before advantages are made of it.

Filter groups (dynamic sampling) and report accuracy by the reward without them.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives import checks
from gspo_jax.objectives.checks import Number


def overlong_penalty(length: ArrayLike, max_length: Number, buffer: Number) -> Array:
  """Penalty from 0 at max_length − buffer tokens linearly to −1 at max_length.

  It stays −1 beyond.

  Shapes: any -> the same. Lengths are in tokens.
  Reference: arXiv:2503.14476 (soft overlong punishment; 20,480 and 4,096 tokens there).

  Example:
    >>> print(overlong_penalty(jnp.array([85, 90, 120]), max_length=100, buffer=20))
    [-0.25 -0.5  -1.  ]
  """
  checks.require(buffer > 0, "buffer must be positive")
  checks.require(max_length >= buffer, "max_length must not be smaller than buffer")
  excess = _length(length) - (max_length - buffer)
  return -jnp.clip(excess / buffer, 0, 1)


def token_cost(length: ArrayLike, price: Number) -> Array:
  """The cost of tokens, −λ for each, λ being `price`.

  Shapes: any -> the same.
  Reference: arXiv:2510.22477 (Agent-GSPO), from its abstract: a reward that penalises verbosity.

  Example:
    >>> print(token_cost(jnp.array([50, 100]), price=0.01))
    [-0.5 -1. ]
  """
  checks.require(price >= 0, "price must not be negative")
  return -price * _length(length)


def _length(length: ArrayLike) -> Array:
  length = jnp.asarray(length)
  checks.require(length >= 0, "length must not be negative")
  return length.astype(jnp.promote_types(length.dtype, jnp.float32))
