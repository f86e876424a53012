"""Advantages of responses and turns, computed from rewards.

Advantages have no gradient. Arrays [P, G] have a value for each of the G responses of P groups.
valid_PG is 1 on responses to compare, by default on all. The rewards of all other responses are
ignored, and their advantages are 0.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.nn import logsumexp
from jax.typing import ArrayLike

from gspo_jax.objectives import checks
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.gae import backward

# Rewards of a group are equal up to rounding if their range, divided by the largest |reward|, is at
# most this number.
ROUNDING = 4 * float(jnp.finfo(jnp.float32).eps)


def group_advantages(
  reward_PG: ArrayLike,
  normalize: str = "std",
  epsilon: Number = 1e-6,
  *,
  valid_PG: ArrayLike | None = None,
) -> Array:
  """Advantages of responses relative to their group. [P,G] -> [P,G].

  Â_i = (r_i − mean{r}) / (std{r} + ε).

  The mean is over the group. `normalize` determines the divisor. "std" is the sample standard
  deviation of the group (ddof 1). "none" has no divisor (Dr. GRPO). "batch" is the sample standard
  deviation of all rewards of the batch, so that groups with nearly equal rewards do not have large
  advantages. With "leave_one_out", the advantage is r_i − mean_{j≠i} r_j, without a divisor (RLOO).

  A group has advantages of 0 if its rewards are equal up to rounding, or if it has only one valid
  response.

  Reference: arXiv:2507.18071, Eq. 6, which has no ε and does not define std; arXiv:2503.20783 for
  "none"; arXiv:2402.14740 for "leave_one_out"; arXiv:2508.08221, §4.1, for "batch".
  Raises: ValueError if a valid reward is not finite, or for an unknown `normalize`.

  Example:
    >>> print(group_advantages(jnp.array([[0.8, 0.4, 0.6], [1.0, 1.0, 1.0]])).round(3))
    [[ 1. -1.  0.]
     [ 0.  0.  0.]]
  """
  checks.numbers(epsilon=epsilon)
  reward_PG, valid_PG = _group(reward_PG, "reward_PG", valid_PG)
  size_P1 = valid_PG.sum(axis=1, keepdims=True, dtype=reward_PG.dtype)
  mean_P1 = reward_PG.sum(axis=1, keepdims=True) / jnp.maximum(size_P1, 1)
  deviation_PG = jnp.where(valid_PG, reward_PG - mean_P1, 0)
  if normalize == "std":
    variance_P1 = (deviation_PG**2).sum(axis=1, keepdims=True) / jnp.maximum(size_P1 - 1, 1)
    advantage_PG = deviation_PG / (jnp.sqrt(variance_P1) + epsilon)
  elif normalize == "none":
    advantage_PG = deviation_PG
  elif normalize == "leave_one_out":
    advantage_PG = deviation_PG * size_P1 / jnp.maximum(size_P1 - 1, 1)
  elif normalize == "batch":
    number = size_P1.sum()
    from_mean_PG = jnp.where(valid_PG, reward_PG - reward_PG.sum() / jnp.maximum(number, 1), 0)
    variance = (from_mean_PG**2).sum() / jnp.maximum(number - 1, 1)
    advantage_PG = deviation_PG / (jnp.sqrt(variance) + epsilon)
  else:
    kinds = '"std", "none", "leave_one_out" or "batch"'
    raise ValueError(f"normalize must be {kinds}, got {normalize!r}")
  # The mean of equal rewards may be rounded. Division by a tiny deviation would enlarge the error.
  return jnp.where(alike(reward_PG, valid_PG), 0, advantage_PG)


def constrained_advantages(
  rewards: Sequence,
  costs: Sequence,
  reward_weights: Sequence[Number],
  multipliers: Sequence[Number],
  epsilon: Number = 1e-6,
  *,
  valid_PG: ArrayLike | None = None,
) -> Array:
  """Advantages of several rewards and costs, standardised (Z) within groups.

  Â = Σ_j w_j Z(R_j) − Σ_k λ_k Z(C_k).

  Each reward R_j has a weight w_j, and each cost C_k a Lagrange multiplier λ_k ≥ 0. Z is
  `group_advantages`. If rewards were added before they are standardised, the influence of a reward
  would depend not only on its weight, but also on its standard deviation.

  Shapes: J rewards [P,G], K costs [P,G], J weights, K multipliers -> [P,G].
  Reference: arXiv:2602.05863 (constrained GRPO), where J is 1, and w_1 is the reward's multiplier.

  Example:
    >>> reward_PG, cost_PG = jnp.array([[0.8, 0.4, 0.6]]), jnp.array([[20.0, 10.0, 30.0]])
    >>> print(constrained_advantages([reward_PG], [cost_PG], [1.0], [0.5]).round(3))
    [[ 1.  -0.5 -0.5]]
  """
  if len(rewards) != len(reward_weights):
    raise ValueError(f"got {len(reward_weights)} reward_weights for {len(rewards)} rewards")
  if len(costs) != len(multipliers):
    raise ValueError(f"got {len(multipliers)} multipliers for {len(costs)} costs")
  if not (rewards or costs):
    raise ValueError("there are neither rewards nor costs")
  for weight in reward_weights:
    checks.numbers(reward_weights=weight)
  for multiplier in multipliers:
    checks.numbers(multipliers=multiplier)
    checks.require(multiplier >= 0, "multipliers must not be negative")
  terms: list[Array] = []
  for name, signals, weights in (
    ("rewards", rewards, reward_weights),
    ("costs", costs, [-multiplier for multiplier in multipliers]),
  ):
    for i, (signal, weight) in enumerate(zip(signals, weights)):
      signal_PG, _ = _group(signal, f"{name}[{i}]", valid_PG)
      if terms and signal_PG.shape != terms[0].shape:
        raise ValueError(
          f"{name}[{i}] has shape {signal_PG.shape}, expected [P, G] = {terms[0].shape}"
        )
      terms.append(weight * group_advantages(signal_PG, epsilon=epsilon, valid_PG=valid_PG))
  return sum(terms[1:], terms[0])


def gdpo_advantages(
  rewards: Sequence,
  costs: Sequence,
  reward_weights: Sequence[Number],
  multipliers: Sequence[Number],
  epsilon: Number = 1e-6,
  *,
  valid_PG: ArrayLike | None = None,
) -> Array:
  """GDPO: advantages of several rewards, standardised again over the batch.

  Â_i = A_i / (std{A} + ε),  A = Σ_j w_j Z(R_j) − Σ_k λ_k Z(C_k).

  The terms A_i are the `constrained_advantages` of the same arguments, and std{A} is their sample
  standard deviation over all valid responses of the batch. So the size of advantages does not
  depend on the number of rewards. The mean of A is 0 in each group, so no mean is subtracted. If
  all terms are 0, so are the advantages.

  Shapes: J rewards [P,G], K costs [P,G], J weights, K multipliers -> [P,G].
  Reference: arXiv:2601.05242, which has no costs.

  Example:
    >>> reward_PG, format_PG = jnp.array([[0.8, 0.4, 0.6]]), jnp.array([[1.0, 0.0, 0.5]])
    >>> print(gdpo_advantages([reward_PG, format_PG], [], [1.0, 1.0], []).round(3))
    [[ 1. -1.  0.]]
  """
  advantage_PG = constrained_advantages(
    rewards, costs, reward_weights, multipliers, epsilon, valid_PG=valid_PG
  )
  advantage_PG, valid_PG = _group(advantage_PG, "advantage_PG", valid_PG)
  variance = (advantage_PG**2).sum() / jnp.maximum(valid_PG.sum() - 1, 1)
  return jnp.where(variance > 0, advantage_PG / (jnp.sqrt(variance) + epsilon), 0)


def turn_advantages(
  reward_PGU: ArrayLike,
  valid_PGU: ArrayLike,
  discount: Number = 1.0,
  normalize: str = "std",
  epsilon: Number = 1e-6,
) -> Array:
  """Advantages of the turns of conversations, by their returns.

  R_iu = Σ_{v ≥ u} γ^(v−u) r_iv,  Â_iu = (R_iu − mean{R_·u}) / (std{R_·u} + ε).

  r_iu is the reward of turn u of response i, and γ is `discount`. The return R_iu includes the
  rewards of turn u and of later turns. The mean and the standard deviation are over the returns
  R_ju of those responses j of the group that have a turn u. The equation is that of `normalize`
  "std". The other values are those of `group_advantages`. If only last turns have rewards
  and γ = 1, the first turn has the advantage that `group_advantages` computes for the response.

  valid_PGU is 1 on existing turns. Turns that do not exist have an advantage of 0.

  Shapes: [P,G,U] ×2 -> [P,G,U].
  Reference: an addition, similar to arXiv:2511.14846 (GTPO), which also normalises discounted
  returns of turns. Process supervision in arXiv:2402.03300, §4.1.3, has one mean and deviation for
  the rewards of all steps, so that the number of steps affects the advantages of a response.
  Raises: ValueError if a valid reward is not finite, or for an unknown `normalize`.

  Example:
    >>> reward_PGU = jnp.array([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
    >>> valid_PGU = jnp.array([[[1, 1, 1], [1, 1, 0]]])
    >>> print(turn_advantages(reward_PGU, valid_PGU).round(3))
    [[[ 0.707  0.707  0.   ]
      [-0.707 -0.707  0.   ]]]
  """
  reward_PGU = jnp.asarray(reward_PGU)
  if reward_PGU.ndim != 3 or 0 in reward_PGU.shape:
    raise ValueError(f"reward_PGU has shape {reward_PGU.shape}, expected [P, G, U] > 0")
  checks.numbers(discount=discount)
  checks.require((discount >= 0) & (discount <= 1), "discount must be in [0, 1]")
  P, G, U = reward_PGU.shape
  valid_PGU = checks.mask(valid_PGU, "valid_PGU", reward_PGU.shape)
  reward_BU, valid_BU = _group(reward_PGU.reshape(P * G, U), "reward_PGU", valid_PGU.reshape(-1, U))
  carry_BU = jnp.full_like(reward_BU, discount)
  # The rounding error of a return is relative to the sum of absolute rewards.
  size_BU = backward(carry_BU, abs(reward_BU))
  return_XG, size_XG, valid_XG = (
    jnp.swapaxes(x.reshape(P, G, U), 1, 2).reshape(P * U, G)
    for x in (backward(carry_BU, reward_BU), size_BU, valid_BU)
  )
  advantage_XG = group_advantages(return_XG, normalize, epsilon, valid_PG=valid_XG)
  advantage_XG = jnp.where(alike(return_XG, valid_XG, size_XG), 0, advantage_XG)
  return jnp.swapaxes(advantage_XG.reshape(P, U, G), 1, 2)


def soft_value(reward_PG: ArrayLike, beta: Number, *, valid_PG: ArrayLike | None = None) -> Array:
  """Soft value of each prompt, from responses of the reference policy. [P,G] -> [P].

  Q̂_0 = β log( 1/G Σ_i exp(r_i/β) ).

  r_i are the valid rewards of a group. Q̂_0 is the argument `value_B` of `spo_loss`. For a group
  without a valid response, Q̂_0 is 0.

  Reference: arXiv:2503.05453.

  Example:
    >>> value_P = soft_value(jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), beta=0.5)
    >>> print(f"{value_P[0]:.4f}, {value_P[1]:.4f}")
    0.5705, 1.0000
  """
  checks.numbers(beta=beta)
  checks.require(beta > 0, "beta must be positive")
  reward_PG, valid_PG = _group(reward_PG, "reward_PG", valid_PG)
  scaled_PG = jnp.where(valid_PG, reward_PG / beta, -jnp.inf)
  size_P = valid_PG.sum(axis=1, dtype=reward_PG.dtype)
  mean_P = logsumexp(scaled_PG, axis=1) - jnp.log(jnp.maximum(size_P, 1))
  return jnp.where(size_P > 0, beta * mean_P, 0)


def soft_advantages(
  reward_PG: ArrayLike,
  beta: Number,
  value: Number | None = None,
  *,
  valid_PG: ArrayLike | None = None,
) -> Array:
  """Advantages for `soft_loss`. [P,G] -> [P,G].

  Â_i = r_i − Q̂_0.

  Q̂_0 is `value` for all prompts. If `value` is None, Q̂_0 is the `soft_value` of each group, and a
  group of equal rewards has advantages of 0. `soft_loss` then keeps the responses of this group as
  likely as under the reference policy.

  Reference: arXiv:2503.05453, where Q̂_0 is estimated from responses of the reference policy.
  Differs: the responses of a group may come from a better policy than the reference. Then
  `soft_value` is too large, and the loss raises the probability of right responses too little. If
  all responses of a group are right, the loss does not raise their probability at all.

  Example:
    >>> advantage_PG = soft_advantages(jnp.array([[1.0, 0.0, 0.0]]), beta=0.5)
    >>> print([f"{advantage:.4f}" for advantage in advantage_PG[0]])
    ['0.4295', '-0.5705', '-0.5705']
  """
  checks.numbers(value=value)
  value_P = soft_value(reward_PG, beta, valid_PG=valid_PG)
  reward_PG, valid_PG = _group(reward_PG, "reward_PG", valid_PG)
  if value is not None:
    return jnp.where(valid_PG, reward_PG - value, 0)
  alike_P1 = alike(reward_PG, valid_PG)  # The soft value of equal rewards may be rounded.
  return jnp.where(valid_PG & ~alike_P1, reward_PG - value_P[:, None], 0)


def selection_weights(
  reward_PG: ArrayLike,
  select: str = "best",
  right_from: Number | None = None,
  *,
  valid_PG: ArrayLike | None = None,
) -> Array:
  """Weights w ≥ 0 of responses to imitate with `rft_loss`. [P,G] -> [P,G].

  `select`: if it is "best", at most one response of each group has the weight 1, namely the first
  response with the largest reward. All other responses have the weight 0. If it is "reward", the
  weight is the reward itself. So if rewards are 0 and 1, all right responses are selected.

  Responses with rewards of 0 or less have the weight 0. If right responses may have such rewards,
  set `right_from`. Then "best" may also select responses with at least this reward.

  Reference: arXiv:2304.06767 for the best of K; arXiv:2308.01825 and arXiv:2203.14465 for all right
  responses.
  Differs: a group may have no selected response, since the best of G wrong answers is still wrong.
  "reward" also selects duplicates of a response, which arXiv:2308.01825 removes.
  Raises: ValueError if a valid reward is not finite, or for an unknown `select`.

  Example:
    >>> print(selection_weights(jnp.array([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])))
    [[0. 1. 0.]
     [0. 0. 0.]]
  """
  reward_PG, valid_PG = _group(reward_PG, "reward_PG", valid_PG)
  if select == "reward":
    return jnp.maximum(reward_PG, 0)  # `_group` has set rewards of invalid responses to 0.
  if select != "best":
    raise ValueError(f'select must be "best" or "reward", got {select!r}')
  chosen_PG = valid_PG & (reward_PG > 0)
  if right_from is not None:
    chosen_PG |= valid_PG & (reward_PG >= jnp.asarray(right_from, reward_PG.dtype))
  value_PG = jnp.where(chosen_PG, reward_PG, -jnp.inf)
  best_P1 = value_PG.max(axis=1, keepdims=True)
  best_PG = value_PG >= best_P1 - ROUNDING * abs(best_P1)
  place_1G = jnp.arange(value_PG.shape[1])[None]
  first_PG = place_1G == best_PG.argmax(axis=1, keepdims=True)
  return (first_PG & chosen_PG).astype(reward_PG.dtype)


def alike(reward_PG: ArrayLike, valid_PG: ArrayLike, size_PG: Array | None = None) -> Array:
  """Whether a group's valid rewards are equal up to rounding, [P, 1].

  Args:
    size_PG: values to which the rounding errors of rewards are relative. For a reward that is a
      sum, this value is the sum of the absolute terms. None means |reward|.
  """
  reward_PG = jnp.asarray(reward_PG)
  largest_P1 = jnp.where(valid_PG, reward_PG, -jnp.inf).max(axis=1, keepdims=True)
  smallest_P1 = jnp.where(valid_PG, reward_PG, jnp.inf).min(axis=1, keepdims=True)
  size_PG = abs(reward_PG) if size_PG is None else size_PG
  size_P1 = jnp.where(valid_PG, size_PG, 0).max(axis=1, keepdims=True)
  # If no reward is valid, the difference is -inf, and the result is True.
  return largest_P1 - smallest_P1 <= ROUNDING * size_P1


def _group(value_PG: ArrayLike, name: str, valid_PG: ArrayLike | None) -> tuple[Array, Array]:
  """Checks values [P, G] and their validity.

  Returns the values in float32 or wider, 0 where not valid, and the mask as bool.

  Args:
    name: name of the values in error messages.
    valid_PG: mask. None means that all values are valid.
  """
  array = jnp.asarray(value_PG)
  if array.ndim != 2 or 0 in array.shape:
    raise ValueError(f"{name} has shape {array.shape}, expected [P, G] with P, G > 0")
  valid_PG = checks.mask(
    jnp.ones(array.shape, bool) if valid_PG is None else valid_PG, "valid_PG", array.shape
  )
  dtype = jnp.promote_types(array.dtype, jnp.float32)
  array = jnp.where(valid_PG, stop_gradient(array).astype(dtype), 0)
  checks.require(jnp.isfinite(array), f"{name} is not finite where valid_PG is 1")
  return array, valid_PG
