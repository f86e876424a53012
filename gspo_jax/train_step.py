"""The update: log-probabilities, objective, gradient over micro-batches, Optax, metrics."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspo_jax import objectives as O
from gspo_jax.models import moe, transformer
from gspo_jax.models.sizes import ComputeConfig, ModelConfig
from gspo_jax.objectives.reductions import Max, Mean, collapse, compute, merge
from gspo_jax.structs import TrainBatch, TrainState

# name -> loss; all take (logp, old_logp, advantage, mask) and the options of objectives.terms.
OBJECTIVES = dict(
  gspo=O.gspo_loss,
  gspo_token=O.gspo_token_loss,
  grpo=O.grpo_loss,
  ppo_clip=O.ppo_loss,  # with group-relative advantages instead of a critic's
  dapo=O.dapo_loss,
  dr_grpo=O.dr_grpo_loss,
  cispo=O.cispo_loss,
  gmpo=O.gmpo_loss,
)


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  name: str  # one of OBJECTIVES
  clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
  clip_high: float
  dual_clip: float  # bound on the ratio for negative advantages, not cispo or gmpo; 0: none
  max_length: int  # dr_grpo divides every response by it: sampling.max_new_tokens
  advantage: str  # group_advantages: "std" | "none" | "leave_one_out"
  old_logp: str  # "sampler": as the sampler returned them; "recompute": one pass of the trainer
  kl_coef: float  # penalty on KL(policy || cold start); 0: no reference policy is kept
  kl: str  # its estimate: "k1" | "k2" | "k3"
  entropy_coef: float  # reward for entropy
  load_balance_coef: float  # router auxiliary loss

  def __post_init__(self):
    for key, allowed in dict(
      name=tuple(OBJECTIVES),
      advantage=("std", "none", "leave_one_out"),
      old_logp=("sampler", "recompute"),
      kl=("k1", "k2", "k3"),
    ).items():
      if getattr(self, key) not in allowed:
        raise ValueError(
          f"objective.{key}={getattr(self, key)!r} is not one of {', '.join(allowed)}"
        )
    for key in ("clip_low", "clip_high", "dual_clip", "kl_coef", "load_balance_coef"):
      if getattr(self, key) < 0:
        raise ValueError(f"objective.{key}={getattr(self, key)} must not be negative")


def policy_loss(
  config: ObjectiveConfig, logp_BT: jax.Array, entropy_BT: jax.Array, batch: TrainBatch
) -> tuple[Mean, dict[str, Any]]:
  """The configured objective as undivided sums."""
  options = dict(entropy_BT=entropy_BT, entropy_coef=config.entropy_coef)
  if config.kl_coef:
    options |= dict(ref_logp_BT=batch.ref_logp_BT, kl=config.kl, kl_coef=config.kl_coef)
  if config.dual_clip:
    options |= dict(dual_clip=config.dual_clip)
  if config.name == "dr_grpo":
    options |= dict(max_length=config.max_length)
  advantage = batch.advantage_B
  if config.name in ("gspo_token", "ppo_clip"):
    advantage = jnp.broadcast_to(advantage[:, None], batch.mask_BT.shape)
  return OBJECTIVES[config.name].sums(
    logp_BT,
    batch.old_logp_BT,
    advantage,
    batch.mask_BT,
    config.clip_low,
    config.clip_high,
    **options,
  )


@dataclasses.dataclass(frozen=True)
class Learner:
  """What an update needs besides its arrays."""

  model: ModelConfig
  compute: ComputeConfig
  temperature: float  # of the policy: the one that its responses are sampled at
  microbatches: int
  load_balance_coef: float


def log_probs(params: Any, batch: TrainBatch, learner: Learner) -> tuple[jax.Array, jax.Array, Any]:
  """log π(token t | tokens before it) and the entropy there, [B, T] each, and router statistics.

  Position 0 has no probability and holds 0.
  """
  out = transformer.forward(
    params, learner.model, batch.tokens_BT, segments=batch.segments_BT, compute=learner.compute
  )
  targets_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
  both = transformer.token_logp(
    params,
    out.hidden_BTD,
    targets_BT,
    temperature=learner.temperature,
    compute=learner.compute,
  )
  logp_BT, entropy_BT = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in both)
  return logp_BT, entropy_BT, out.stats


def make_score(learner: Learner) -> Callable[[Any, TrainBatch], jax.Array]:
  """A jitted pass without gradient: the trainer's log-probabilities [B, T] of a batch."""
  return jax.jit(lambda params, batch: log_probs(params, batch, learner)[0])


def make_rl_step(
  learner: Learner, objective: ObjectiveConfig, tx: optax.GradientTransformation
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Any]]]:
  """The jitted policy update on one mini-batch; the state is donated."""

  def loss(params, batch):
    logp_BT, entropy_BT, stats = log_probs(params, batch, learner)
    total, metrics = policy_loss(objective, logp_BT, entropy_BT, batch)
    mismatch = O.mismatch.sums(logp_BT, batch.sampler_logp_BT, batch.mask_BT)
    return total, metrics | mismatch, stats

  return make_step(learner, loss, tx)


def make_sft_step(
  learner: Learner, tx: optax.GradientTransformation
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Any]]]:
  """The jitted supervised update: mean over tokens of -log π(token); the state is donated."""

  def loss(params, batch):
    logp_BT, entropy_BT, stats = log_probs(params, batch, learner)
    tokens = batch.mask_BT.sum()
    total = Mean(-(logp_BT * batch.mask_BT).sum(), tokens)
    return total, {"entropy": Mean((entropy_BT * batch.mask_BT).sum(), tokens)}, stats

  return make_step(learner, loss, tx)


def make_step(learner: Learner, loss: Callable, tx: optax.GradientTransformation) -> Callable:
  """Gradient of `loss(params, batch) -> (Mean, metrics, router stats)` and one Optax update.

  Numerators are differentiated and summed over micro-batches, denominators are summed, and they
  are divided once: the number of micro-batches changes memory and nothing else. (The load-balance
  loss is the exception: it is a product of two means, taken per micro-batch.)
  """

  def numerator(params, batch):
    total, metrics, stats = loss(params, batch)
    metrics |= {"loss": total}
    value = total.numerator
    if stats is not None:
      metrics |= router_metrics(stats, learner.model)
      balance = moe.load_balance(stats, learner.model)
      value = value + learner.load_balance_coef * balance * total.denominator
    return value, (total.denominator, metrics)

  gradient = jax.grad(numerator, has_aux=True)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: TrainState, batch: TrainBatch):
    if learner.microbatches == 1:
      grads, (denominator, metrics) = gradient(state.params, batch)
    else:
      zeros = jax.tree.map(jnp.zeros_like, state.params)
      add = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731

      def body(total, batch):
        grads, aux = gradient(state.params, batch)
        return add(total, grads), aux

      parts = split(batch, learner.microbatches)
      grads, (denominators, metrics) = jax.lax.scan(body, zeros, parts)
      denominator, metrics = denominators.sum(), collapse(metrics)
    grads = jax.tree.map(lambda g: g / jnp.maximum(denominator, 1), grads)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics |= {"grad_norm": Max(optax.tree.norm(grads))}
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

  return step


def split(batch: TrainBatch, parts: int) -> TrainBatch:
  """[B, ...] -> [parts, B/parts, ...], every part with rows of every device."""

  def one(x):
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)

  return jax.tree.map(one, batch)


def router_metrics(stats: moe.RouterStats, config: ModelConfig) -> dict[str, Any]:
  """Router statistics over layers: balance (1 is even), entropy in nats, busiest expert, drops."""
  tokens = stats.tokens.sum()
  share = stats.load_E.max(-1) / jnp.maximum(stats.tokens * config.experts_per_token, 1)
  return {
    "router/load_balance": Mean(moe.load_balance(stats, config) * tokens, tokens),
    "router/entropy": Mean(stats.entropy.sum(), tokens),
    "router/z": Mean(stats.z.sum(), tokens),
    "router/busiest_expert": Max(share.max()),
    "router/dropped_tokens": Max(stats.dropped.sum()),
  }


@jax.jit
def summarize(minibatches: tuple[dict[str, Any], ...]) -> dict[str, jax.Array]:
  """Scalars of one rollout's updates: all mini-batches merged, and what differs between them.

  `minibatch/i/...` shows the policy moving away from the one that sampled: on mini-batch 0 the
  ratio is 1. The sampler's log-probs are compared with the trainer's there too, before any update.
  """
  merged = functools.reduce(merge, minibatches)
  row = compute(merged)
  for i, one in enumerate(minibatches):
    for name in ("ratio/deviation", "clip_fraction/sequence", "clip_fraction/token", "loss"):
      if name in one:
        row[f"minibatch/{i}/{name}"] = one[name].compute()
  first = {k: v for k, v in minibatches[0].items() if k.startswith("mismatch/")}
  return row | compute(first)
