"""Sums over the tokens of each response or segment, and aggregation to one loss.

A unit is a whole response, or a segment of a response. Ids [B, T] give the unit of each token.
Arrays [B, U] have one value per unit. If there are no ids, each row is one unit and U = 1. If there
are ids, U = T, since a row may have as many units as tokens. A unit without tokens has the sum 0
and the maximum -inf. For example, the ids [[0, 0, 1]] and the values [[1, 2, 5]] give the sums
[[3, 5, 0]].
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
  """The unmasked tokens of a batch, and their responses."""

  mask_BT: Array  # bool: the token is not masked.
  response_BT: Array | None  # Response of each token. None if each row is one response.
  length_BU: Array  # Number of unmasked tokens of each response, floating point.

  def sums(self, x_BT: Array) -> Array:
    """Computes Σ_t x_it over unmasked tokens, [B, U]."""
    return unit_sum(jnp.where(self.mask_BT, x_BT, 0), self.response_BT)

  def means(self, x_BT: Array) -> Array:
    """Computes 1/|y_i| Σ_t x_it, [B, U]; 0 for empty responses."""
    return self.sums(x_BT) / jnp.maximum(self.length_BU, 1)

  def common(self, x_BX: Array) -> Array:
    """Reduces values of tokens [B, T] to their mean per response, [B, U].

    If the values of a response are equal, the mean is exactly this value, without rounding.
    An array [B, 1] is returned unchanged.
    """
    if x_BX.shape[1] == 1:
      return x_BX
    largest_BU = unit_max(jnp.where(self.mask_BT, x_BX, -jnp.inf), self.response_BT)
    largest_BU = jnp.where(self.length_BU > 0, largest_BU, 0)
    # The mean of equal values may be rounded. Their differences from the maximum are exactly 0.
    return largest_BU + self.means(x_BX - at_tokens(largest_BU, self.response_BT))

  def number(self) -> Array:
    """Returns the number of unmasked tokens."""
    return self.length_BU.sum()

  def responses(self) -> Array:
    """Returns the number of nonempty responses."""
    return (self.length_BU > 0).sum(dtype=self.length_BU.dtype)


def tokens(
  value_BT: ArrayLike, name: str, mask_BT: ArrayLike, response_BT: ArrayLike | None
) -> tuple[Array, Tokens]:
  """Checks the first array argument of a loss function, the mask and the ids of responses.

  Returns `value_BT` in float32 or wider, 0 at masked positions, and the `Tokens`.

  Args:
    name: name of `value_BT` in error messages.
    response_BT: response of each token in packed rows. None if each row is one response.
  """
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
  """Aggregates values of tokens to one `Mean`, with numerator and denominator still separate.

  `kind`: "sequence" is the mean over responses of the mean over their tokens. "token" is the mean
  over all tokens. "constant" is the sum over all tokens, divided by the number of responses times
  `max_length`. Empty responses are excluded.
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
  """Sums over the tokens of each unit, [B, U]."""
  if id_BT is None:
    return x_BT.sum(axis=1, keepdims=True)
  return jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, x.shape[0]))(x_BT, id_BT)


def unit_max(x_BT: Array, id_BT: Array | None) -> Array:
  """Returns each unit's maximum, [B, U]; -inf if empty."""
  if id_BT is None:
    return x_BT.max(axis=1, keepdims=True)
  return jax.vmap(lambda x, i: jax.ops.segment_max(x, i, x.shape[0]))(x_BT, id_BT)


def at_tokens(x_BU: Array, id_BT: Array | None) -> Array:
  """Repeats the value of each unit at its tokens, [B, T].

  If `id_BT` is None, `x_BU` [B, 1] is returned unchanged.
  """
  return x_BU if id_BT is None else jax.vmap(lambda x, i: x[i])(x_BU, id_BT)
