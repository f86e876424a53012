"""Sums over the responses of a batch, and the three ways of making one number of them.

U is the number of units in a row that ids [B, T] tell apart: 1 where there are no ids (a row is one
response), T where there are (responses packed into a row, segments of a response). Every sum over
units is one pass over T, whatever U is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives import checks
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.reductions import Mean


class Tokens(NamedTuple):
  """Tokens that count, the response each belongs to, and how many each response has."""

  mask_BT: Array  # bool
  response_BT: Array | None
  length_BU: Array  # floating

  def sums(self, x_BT: Array) -> Array:
    """Σ_t x_it over unmasked tokens, [B, U]."""
    return unit_sum(jnp.where(self.mask_BT, x_BT, 0), self.response_BT)

  def means(self, x_BT: Array) -> Array:
    """1/|y_i| Σ_t x_it, 0 for an empty response, [B, U]."""
    return self.sums(x_BT) / jnp.maximum(self.length_BU, 1)

  def common(self, x_BX: Array) -> Array:
    """Common value (or mean) of a response's tokens, [B, U]; keeps [B, 1]."""
    if x_BX.shape[1] == 1:
      return x_BX
    largest_BU = unit_max(jnp.where(self.mask_BT, x_BX, -jnp.inf), self.response_BT)
    largest_BU = jnp.where(self.length_BU > 0, largest_BU, 0)
    # The sum of the distances is exactly 0 where a sum of equal numbers would have been rounded.
    return largest_BU + self.means(x_BX - at_tokens(largest_BU, self.response_BT))

  def number(self) -> Array:
    return self.length_BU.sum()

  def responses(self) -> Array:
    """The number of nonempty responses."""
    return (self.length_BU > 0).sum(dtype=self.length_BU.dtype)


def tokens(
  value_BT: ArrayLike, name: str, mask_BT: ArrayLike, response_BT: ArrayLike | None
) -> tuple[Array, Tokens]:
  """Returns checked floats of tokens, called `name`, and their units."""
  value_BT = checks.log_probs(value_BT, name)
  mask_BT = checks.mask(mask_BT, "mask_BT", value_BT.shape)
  if response_BT is not None:
    response_BT = checks.ids(response_BT, "response_BT", mask_BT)
  length_BU = unit_sum(mask_BT.astype(value_BT.dtype), response_BT)
  value_BT = checks.tokens(value_BT, name, mask_BT, value_BT.dtype)
  return value_BT, Tokens(mask_BT, response_BT, length_BU)


def aggregate_tokens(
  x_BT: Array, tokens: Tokens, kind: str, max_length: Number | None = None
) -> Mean:
  """Reduces a loss per token, not yet divided. Empty responses do not count.

  "sequence": the mean over responses of the mean over their tokens. "token": the mean over all
  tokens. "constant": the sum over all tokens, divided by the number of responses × `max_length`.
  """
  if kind == "sequence":
    return Mean(tokens.means(x_BT).sum(), tokens.responses())
  total = jnp.where(tokens.mask_BT, x_BT, 0).sum()
  if kind == "token":
    return Mean(total, tokens.number())
  if kind == "constant":
    if max_length is None:
      raise ValueError('aggregate="constant" needs max_length')
    checks.numbers(max_length=max_length)
    checks.require(max_length > 0, "max_length must be positive")
    return Mean(total, tokens.responses() * max_length)
  raise ValueError(f'aggregate must be "sequence", "token" or "constant", got {kind!r}')


def unit_sum(x_BT: Array, id_BT: Array | None) -> Array:
  """Sums over the units of each row, [B, U]."""
  if id_BT is None:
    return x_BT.sum(axis=1, keepdims=True)
  return jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, x.shape[0]))(x_BT, id_BT)


def unit_max(x_BT: Array, id_BT: Array | None) -> Array:
  """Maxima over each row's units, [B, U]; -inf if empty."""
  if id_BT is None:
    return x_BT.max(axis=1, keepdims=True)
  return jax.vmap(lambda x, i: jax.ops.segment_max(x, i, x.shape[0]))(x_BT, id_BT)


def at_tokens(x_BU: Array, id_BT: Array | None) -> Array:
  """Repeats units' values at their tokens: [B, T], or [B, 1] for U = 1."""
  return x_BU if id_BT is None else jax.vmap(lambda x, i: x[i])(x_BU, id_BT)
