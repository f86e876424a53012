"""Before the updates of an iteration: values, from them advantages and returns. All of them stay as
they are during the updates.

The reward of a response is given at its last token (of a turn or a line, at theirs). With a
`kl_coef` β each token costs β log π_old/π_ref (arXiv:2203.02155, Eq. 2: per token there too).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner import critic as learning
from gspo_jax.learner.layout import forward
from gspo_jax.learner.step import Learner, by_part, experts_to_replay, rows_of
from gspo_jax.models import critic as models
from gspo_jax.models import weights
from gspo_jax.objectives.reductions import Mean, merge
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.structs import TrainBatch

EPSILON = 1e-6  # added to the standard deviation of advantages


def new_critic(
  config: CriticConfig,
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  seed: int,
  policy: Callable[[], Any],
) -> models.Critic:
  """A critic in the training layout; its head is 0.

  Args:
    policy: gives the parameters that a model of its own begins with, in arrays of their own.
  """
  declared = models.table(model, config.name == "model")
  layout = weights.shardings(declared, sharding.TRAIN, mesh)
  if config.name == "model" and config.init == "policy":
    trunk, layout = policy().replace(head=None), layout.replace(trunk=None)
    declared = declared.replace(trunk=None)
  else:
    trunk = None
  init = jax.jit(lambda key: weights.init(declared, key, jnp.float32), out_shardings=layout)
  fresh = init(jax.random.key(seed))
  return fresh if trunk is None else fresh.replace(trunk=trunk)


def make_values(
  learner: Learner, config: CriticConfig, replay: str
) -> Callable[[tuple[Any, models.Critic], TrainBatch], jax.Array]:
  """A jitted pass without gradient, of the policy's parameters and the critic: V [B, T] of a batch.
  On the policy's trunk it takes the experts that the sampler used, if an update replays those."""

  def one(both: tuple[Any, models.Critic], batch: TrainBatch) -> jax.Array:
    (policy, critic), rows, hidden_RTD = both, rows_of(batch, learner), None
    if critic.trunk is None:
      experts_RTlk = experts_to_replay(rows, "R3" if replay == "R3" else "none")
      out = forward(policy, rows, learner.model, learner.compute, experts_RTlk)
      hidden_RTD = out.hidden_BTD
    numbers = dict(trunk_coef=1.0)  # of gradients
    options = rows, learner.model, learner.compute, numbers
    return learning.values(config, critic, hidden_RTD, *options)

  return jax.jit(by_part(one, learner))


def make_advantages(
  config: CriticConfig, numbers: Mapping[str, float]
) -> Callable[[Sequence[TrainBatch]], tuple[list[TrainBatch], dict[str, jax.Array]]]:
  """A jitted function of all mini-batches of an iteration, which need `reward_BT` and
  `old_value_BT`, and with a `kl_coef` `ref_logp_BT`. It returns them with `advantage_BT` and
  `return_BT`, and metrics.

  `value/explained_variance` compares the values with what came of them, Σ γ^k r_{t+k}. (The returns
  of GAE have the values in them, and would flatter.)
  """
  number = {key: float(numbers.get(key, 0.0)) for key in ("discount", "trace", "kl_coef")}

  def of_batch(
    batch: TrainBatch, number: Mapping[str, Any]
  ) -> tuple[TrainBatch, jax.Array, dict[str, Any]]:
    mask_BT, reward_BT, metrics = batch.mask_BT, batch.reward_BT, {}
    if config.kl_coef:
      tokens_BT = jnp.where(mask_BT > 0, batch.old_logp_BT - batch.ref_logp_BT, 0)
      reward_BT = reward_BT - number["kl_coef"] * tokens_BT
      responses = (mask_BT > 0).any(axis=1).sum(dtype=jnp.float32)
      metrics["reward/kl_penalty"] = Mean(number["kl_coef"] * tokens_BT.sum(), responses)
    gamma = number["discount"]
    advantage_BT, return_BT = O.gae(reward_BT, batch.old_value_BT, mask_BT, gamma, number["trace"])
    outcome_BT, _ = O.gae(reward_BT, jnp.zeros_like(reward_BT), mask_BT, gamma, 1.0)
    made = batch.replace(reward_BT=None, advantage_BT=advantage_BT, return_BT=return_BT)
    return made, outcome_BT, metrics

  @jax.jit
  def advantages(batches: Sequence[TrainBatch], number: Mapping[str, Any]) -> Any:
    batches, outcomes, metrics = zip(*(of_batch(batch, number) for batch in batches))
    masks = [batch.mask_BT for batch in batches]
    mean, far = _about_mean([batch.advantage_BT for batch in batches], masks)
    std = jnp.sqrt(_mean([x**2 for x in far], masks))
    row = O.compute(functools.reduce(merge, metrics))
    row |= {"advantage/mean": mean, "advantage/std": std}
    # About their means: squares of values and returns far from 0 would cancel.
    about = [_about_mean(x, masks)[1] for x in ([b.old_value_BT for b in batches], outcomes)]
    explained = map(O.explained_variance.sums, *about, masks)
    row["value/explained_variance"] = functools.reduce(merge, explained).compute()
    if config.normalize:
      scaled = lambda b: (b.advantage_BT - mean) / (std + EPSILON) * b.mask_BT  # noqa: E731
      batches = [b.replace(advantage_BT=scaled(b)) for b in batches]
    return list(batches), row

  return lambda batches: advantages(list(batches), number)


def _about_mean(
  values: Sequence[jax.Array], masks: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
  """The mean over the tokens of all mini-batches, and by how much each [B, T] is above it."""
  mean = _mean(values, masks)
  return mean, [value_BT - mean for value_BT in values]


def _mean(values: Sequence[jax.Array], masks: Sequence[jax.Array]) -> jax.Array:
  inside = lambda x_BT, mask_BT: jnp.where(mask_BT > 0, x_BT, 0)  # noqa: E731
  each = [Mean(inside(*both).sum(), both[1].sum()) for both in zip(values, masks)]
  return functools.reduce(merge, each).compute()


def at_the_end(reward_B: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
  """float32 [B, L]: each reward at the last token that is trained on, 0 elsewhere."""
  L = mask_BL.shape[1]
  last_B = L - 1 - np.argmax(mask_BL[:, ::-1] > 0, axis=1)
  at_BL = (np.arange(L) == last_B[:, None]) & (mask_BL > 0)
  return np.where(at_BL, reward_B[:, None], 0).astype(np.float32)
