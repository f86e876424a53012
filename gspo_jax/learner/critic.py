"""The critic: its values, its loss and its update. GAE from the values is in advantages.py.

The state before token t is the prompt and all tokens before t. V_t is the value of this state. The
critic computes V_t from the model's hidden state at position t − 1, which predicts token t. In an
array [B, T], V_t is at position t.

Values, advantages and returns are computed once before the updates of an iteration, and stay fixed
during the updates. Keys of section `critic`:

- `name`: the critic is a head on the policy's hidden states ("head"), or a model with a separate
  trunk of layers ("model").
- `bootstrap`: if it is True, the state after a truncated response has the critic's value. In all
  other cases, the state after a response has the value 0.
- `kl_coef` β: β log π_old/π_ref is subtracted from the reward of each token, as in InstructGPT
  (arXiv:2203.02155, Eq. 2).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner import optimizer, programs
from gspo_jax.learner.layout import Rows, by_sequence, forward
from gspo_jax.learner.optimizer import Optimizer
from gspo_jax.learner.passes import Learner, by_part, experts_to_replay, rows_of, shift_right
from gspo_jax.models import head, weights
from gspo_jax.objectives.reductions import Max, Metrics
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import CriticState, ModelInputs, TrainBatch, TrainState

LOSS = "value/loss"  # Name of the metric with the critic's loss.
GRAD_NORM = "value/grad_norm"


class Critic(NamedTuple):
  """Training settings of a critic."""

  config: CriticConfig  # Section `critic`.
  tx: Optimizer
  hyperparameters: Mapping[str, float]  # Hyperparameters of the optimizer are in `tx` instead.


def values_after(
  config: CriticConfig,
  critic: head.Critic,
  hidden_RTD: jax.Array,
  rows: Rows,
  learner: Learner,
  hyperparameters: Mapping[str, Any],
) -> jax.Array:
  """Returns the value of the state after each token, float32 [R, T].

  Args:
    hidden_RTD: the policy's hidden states. A critic with a separate trunk ignores them.
  """
  if critic.trunk is not None:
    hidden_RTD = forward(critic.trunk, rows, learner.model, learner.compute).hidden_BTD
  else:
    differentiable_RTD, hidden_RTD = hidden_RTD, jax.lax.stop_gradient(hidden_RTD)
    if config.trunk_coef:  # The added term is 0, but its gradient is not.
      hidden_RTD += hyperparameters["trunk_coef"] * (differentiable_RTD - hidden_RTD)
  return head.values(critic, hidden_RTD)


def new_critic(
  config: CriticConfig,
  model: ModelConfig,
  mesh: jax.sharding.Mesh,
  seed: int,
  policy: Callable[[], Any],
) -> head.Critic:
  """Initializes a critic in the training layout. The initial critic has the value 0 everywhere.

  Args:
    config: section `critic`.
    model: section `model`.
    mesh: the trainer's mesh.
    seed: seed of random weights.
    policy: returns a copy of the policy's initial parameters. If `critic.name` is "model", this
      copy becomes the trunk.
  """
  declared = head.critic_table(model)
  layout = weights.shardings(declared, sharding.TRAIN, mesh)
  init = jax.jit(lambda key: weights.init(declared, key, jnp.float32), out_shardings=layout)
  fresh = init(jax.random.key(seed))
  return fresh.replace(trunk=policy().replace(head=None)) if config.name == "model" else fresh


def make_values(
  learner: Learner, config: CriticConfig, replay: str
) -> Callable[[Any, head.Critic, ModelInputs], Any]:
  """Builds the jitted pass (policy, critic, inputs) -> values [B, T].

  If `bootstrap` is True, the pass also returns the value after each sequence's last token, [B].

  Args:
    config: section `critic`.
    replay: key `objective.replay`. If it is "R3" and the critic has no separate trunk, the policy's
      layers replay the sampler's experts, as in updates.
  """

  def values_of(policy: Any, critic: head.Critic, inputs: ModelInputs) -> Any:
    # The value after the last token is needed, but trees exclude the last token of the longest
    # responses. If `prompt_B` is None, rows are plain instead.
    if config.bootstrap and inputs.places is None:
      inputs = inputs.replace(prompt_B=None)
    rows, hidden_RTD = rows_of(inputs, learner), None
    if critic.trunk is None:
      replayed_experts_RTlk = experts_to_replay(rows, "R3" if replay == "R3" else "none")
      out = forward(policy, rows, learner.model, learner.compute, replayed_experts_RTlk)
      hidden_RTD = out.hidden_BTD
    # The coefficient changes only gradients, and this pass has none.
    after_RT = values_after(config, critic, hidden_RTD, rows, learner, dict(trunk_coef=1.0))
    value_BT = shift_right(after_RT, rows)
    if not config.bootstrap:
      return value_BT
    segments_BT = inputs.segments_BT
    last_BT = (segments_BT > 0) & (jnp.pad(segments_BT[:, 1:], ((0, 0), (0, 1))) == 0)
    return value_BT, jnp.where(last_BT, by_sequence(after_RT, rows), 0).sum(axis=1)

  return programs.jit(by_part(values_of, learner), learner.compute)


def loss(
  config: CriticConfig, value_BT: jax.Array, batch: TrainBatch, hyperparameters: Mapping[str, Any]
) -> Metrics:
  """Returns the critic's metrics, including the critic's loss.

  The metric `LOSS` is this loss: a mean over tokens, with numerator and denominator undivided.
  """
  clip = hyperparameters["clip"] if config.clip else None
  total, metrics = O.value_loss.sums(
    value_BT,
    batch.critic_targets.old_value_BT,
    batch.critic_targets.return_BT,
    batch.mask_BT,
    clip=clip,
  )
  if clip is None:
    del metrics["clip_fraction/value"]
  return metrics | {LOSS: total}


def update(
  new: TrainState,
  old: TrainState,
  grads: head.Critic,
  apply: Callable,
  hyperparameters: Mapping[str, Any],
  has_gradient: jax.Array,
) -> tuple[TrainState, Metrics]:
  """Updates the critic; returns the new state and metrics.

  During the critic's warmup, or if the policy's gradient is 0, the policy and its optimizer are
  reset to `old`. If the critic's gradient is 0, the critic is unchanged.

  Args:
    new: state with the policy updated.
    old: state before the update.
    grads: gradient of the critic.
    apply: `Optimizer.update` of the critic.
    hyperparameters: hyperparameters of the program (`step.make_rl_step`).
    has_gradient: whether the policy's gradient is not 0.
  """
  params, moments = old.critic.params, old.critic.opt_state
  updates, moments = apply(grads, moments, params, hyperparameters["critic_optimizer"])
  critic, norm = CriticState(optax.apply_updates(params, updates), moments), optax.tree.norm(grads)
  policy_moves = has_gradient & (old.step >= hyperparameters["critic"]["warmup"])
  params, opt_state = jax.tree.map(
    lambda x, y: jnp.where(policy_moves, x, y),
    (new.params, new.opt_state),
    (old.params, old.opt_state),
  )
  critic = jax.tree.map(lambda x, y: jnp.where(norm != 0, x, y), critic, old.critic)
  new = new.replace(params=params, opt_state=opt_state, critic=critic)
  return new, {GRAD_NORM: Max(norm)}


def optimizers(c: RunConfig, phase: str = "rl") -> tuple[Optimizer, Critic | None]:
  """Builds the policy's optimizer and the critic for a phase.

  In phase "sft", and in a configuration without a critic, the critic is None.
  """
  if phase == "sft":
    return optimizer.make(c.sft_optimizer, c.sft.steps), None
  updates, warmup = c.rl.iterations * c.rl.updates, c.critic.warmup * c.rl.updates
  policy = optimizer.make(c.rl_optimizer, updates - warmup)
  if c.critic.name == "none":
    return policy, None
  tx = optimizer.make(c.critic_optimizer, updates)
  return policy, Critic(c.critic, tx, c.critic.hyperparameters(c.rl.updates))
