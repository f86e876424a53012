"""Generalized advantage estimation (GAE) from a value model, over tokens or over turns."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from gspo_jax.objectives import aggregation, checks
from gspo_jax.objectives.checks import Number


def gae(
  reward_BT: ArrayLike,
  value_BT: ArrayLike,
  mask_BT: ArrayLike,
  discount: Number = 1.0,
  trace: Number = 0.95,
  *,
  last_value_B: ArrayLike | None = None,
  response_BT: ArrayLike | None = None,
) -> tuple[Array, Array]:
  """Generalized advantage estimation: advantages and returns of tokens.

  δ_t = r_t + γ V_{t+1} − V_t,  Â_t = δ_t + γλ Â_{t+1},  R_t = Â_t + V_t.

  γ is `discount` and λ is `trace`. t + 1 is the next unmasked token of the response. Masked
  positions are skipped. Their rewards are ignored, and their results are 0. After the last token, Â
  is 0 and V is `last_value_B`, by default 0. In `last_value_B`, pass the value of the state after
  the last token for a truncated response, and 0 for any other response (arXiv:1712.00378).

  Shapes: [B,T] ×3, [B] -> [B,T] advantages, [B,T] returns.
  Reference: arXiv:1506.02438.
  Raises: ValueError for `last_value_B` with packed rows, since these have several responses.

  Example:
    >>> reward_BT = jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> value_BT = jnp.full((2, 3), 0.5)
    >>> advantage_BT, return_BT = gae(reward_BT, value_BT, jnp.ones((2, 3)), trace=0.5)
    >>> print(advantage_BT.round(4))
    [[ 0.125  0.25   0.5  ]
     [-0.125 -0.25  -0.5  ]]
  """
  value_BT, tokens = aggregation.tokens(value_BT, "value_BT", mask_BT, response_BT)
  mask_BT, dtype = tokens.mask_BT, value_BT.dtype
  reward_BT = checks.constant(reward_BT, "reward_BT", mask_BT, dtype, ("BT",))
  value_BT = checks.constant(value_BT, "value_BT", mask_BT, dtype, ("BT",))
  last_B1 = jnp.zeros((1, 1), dtype)
  if last_value_B is not None:
    if response_BT is not None:
      raise ValueError(
        "last_value_B has one value per row, but response_BT packs several responses into a row: "
        "place each response in a separate row"
      )
    last_B1 = checks.constant(last_value_B, "last_value_B", mask_BT, dtype, ("B",))
  checks.numbers(discount=discount, trace=trace)
  for name, factor in ("discount", discount), ("trace", trace):
    checks.require((factor >= 0) & (factor <= 1), f"{name} must be in [0, 1]")
  skip_BT = 1 - mask_BT.astype(dtype)
  response_BX = jnp.zeros((), int) if tokens.response_BT is None else tokens.response_BT
  has_next_BT = _next_is_alike(jnp.broadcast_to(response_BX, mask_BT.shape), mask_BT)
  # V_{t+1}. At masked positions, `backward` returns the value of the next unmasked token.
  next_value_BT = jnp.where(has_next_BT, _shift(backward(skip_BT, value_BT)), last_B1)
  delta_BT = jnp.where(mask_BT, reward_BT + discount * next_value_BT - value_BT, 0)
  carry_BT = jnp.where(has_next_BT, discount * trace, 0)
  carry_BT = jnp.where(mask_BT, carry_BT, 1).astype(dtype)
  advantage_BT = jnp.where(mask_BT, backward(carry_BT, delta_BT), 0)
  return advantage_BT, jnp.where(mask_BT, advantage_BT + value_BT, 0)


def turn_gae(
  reward_BT: ArrayLike,
  value_BT: ArrayLike,
  mask_BT: ArrayLike,
  turn_BT: ArrayLike,
  discount: Number = 1.0,
  trace: Number = 0.95,
  *,
  last_value_B: ArrayLike | None = None,
) -> tuple[Array, Array]:
  """Generalized advantage estimation over turns, repeated at their tokens.

  δ_u = r_u + γ V_{u+1} − V_u,  Â_u = δ_u + γλ Â_{u+1},  R_u = Â_u + V_u.

  V_u is the value at the first token of turn u, and r_u the sum of the rewards of the turn's
  tokens. γ and λ apply once per turn, whatever its length. All tokens of turn u have the advantage
  Â_u and the return R_u. `turn_BT` is the number of each token's turn, in [0, T). Consecutive turns
  must have different numbers. `last_value_B` is that of `gae`.

  Shapes: [B,T] ×4, [B] -> [B,T] advantages, [B,T] returns.
  Reference: arXiv:1506.02438 with turns as steps. The code of RAGEN (arXiv:2504.20073) has a GAE of
  two levels. `turn_gae` is the upper level, over turns. The lower level, over the tokens of a turn,
  is not included.

  Example:
    >>> reward_BT = jnp.array([[0.0, 0.0, 0.0, 1.0]])
    >>> value_BT, turn_BT = jnp.array([[0.5, 9.0, 0.75, 9.0]]), jnp.array([[0, 0, 1, 1]])
    >>> advantage_BT, _ = turn_gae(reward_BT, value_BT, jnp.ones((1, 4)), turn_BT, trace=0.5)
    >>> print(advantage_BT)
    [[0.375 0.375 0.25  0.25 ]]
  """
  value_BT, tokens = aggregation.tokens(value_BT, "value_BT", mask_BT, None)
  mask_BT, dtype = tokens.mask_BT, value_BT.dtype
  reward_BT = checks.constant(reward_BT, "reward_BT", mask_BT, dtype, ("BT",))
  turn_BT = checks.ids(turn_BT, "turn_BT", mask_BT)
  same_turn_BT = _next_is_alike(turn_BT, mask_BT)
  first_BT = mask_BT & ~_reversed(_next_is_alike(*map(_reversed, (turn_BT, mask_BT))))
  # At the first token of a turn, `total_BT` is the sum of the turn's rewards.
  total_BT = backward((same_turn_BT | ~mask_BT).astype(dtype), reward_BT)

  def at_all_tokens(x_BT: Array) -> Array:
    """Repeats the values of first tokens at all tokens of their turns."""
    since_first_BT = _reversed((~first_BT).astype(dtype))
    return jnp.where(mask_BT, _reversed(backward(since_first_BT, _reversed(x_BT))), 0)

  advantage_BT, return_BT = gae(
    total_BT, value_BT, first_BT, discount, trace, last_value_B=last_value_B
  )
  return at_all_tokens(advantage_BT), at_all_tokens(return_BT)


def backward(a_BT: Array, b_BT: Array) -> Array:
  """Computes x_t = b_t + a_t x_{t+1}, from the end of each row."""

  def combine(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
    return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

  return jax.lax.associative_scan(combine, (a_BT, b_BT), reverse=True, axis=1)[1]


def _next_is_alike(id_BT: Array, mask_BT: Array) -> Array:
  """Whether the next unmasked token has the same id; False at masked positions."""
  id_BT = jnp.where(mask_BT, 1 + id_BT, 0)
  # Id of the next unmasked token, 0 if there is none.
  next_id_BT = _shift(backward(1 - mask_BT.astype(id_BT.dtype), id_BT))
  return mask_BT & (next_id_BT == id_BT)


def _shift(x_BT: Array) -> Array:
  """Returns x_{t+1}, and 0 at the end of a row."""
  return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))


def _reversed(x_BT: Array) -> Array:
  return jnp.flip(x_BT, axis=1)
