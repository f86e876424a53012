"""The update: log-probabilities, gradient over micro-batches, Optax, metrics."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspo_jax import objectives as O
from gspo_jax import sharding
from gspo_jax.learner import by_age, by_length, by_segment, by_version, packing
from gspo_jax.learner import critic as critics
from gspo_jax.learner.accumulate import accumulate
from gspo_jax.learner.adaptive_clip import in_force
from gspo_jax.learner.critic import Critic
from gspo_jax.learner.layout import Rows, by_sequence, forward, packed, plain, sampled, trees
from gspo_jax.learner.numbers import WithNumbers, with_numbers
from gspo_jax.learner.objective import policy_loss
from gspo_jax.learner.optimizer import Optimizer, numbered
from gspo_jax.learner.router_metrics import router_metrics, volatility_metrics
from gspo_jax.models import lora, transformer
from gspo_jax.models.experts import moe, routing
from gspo_jax.objectives.reductions import Last, Max, Mean, merge
from gspo_jax.settings.critic import CriticConfig
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import TrainBatch, TrainState


@dataclasses.dataclass(frozen=True)
class Learner:
  """Settings of an update: all that it needs besides its arrays."""

  model: ModelConfig
  compute: ComputeConfig
  temperature: float  # of the policy: the one that its responses are sampled at
  microbatches: int
  load_balance_coef: float
  # An update whose loss or gradient is NaN or infinite is left out. "skip": the next one is made as
  # usual. "stop": all later ones are left out too, so that the state stays as it was.
  on_nonfinite: str = "stop"
  group_size: int = 1  # sequences that share a prompt
  prompt_tokens: int = 0  # of a prompt, at most
  response_tokens: int = 0  # of a response, at most: some objectives divide by it
  ages: int = 0  # classes of `by_age`; 0: none


def learner_of(c: RunConfig, phase: str) -> Learner:
  """Settings of the updates of "sft" or "rl"."""
  common = dict(model=c.model, compute=c.compute, on_nonfinite=c.on_nonfinite)
  if phase == "sft":
    balance = c.sft.load_balance_coef
    return Learner(
      temperature=1.0, microbatches=c.sft.microbatches, load_balance_coef=balance, **common
    )
  return Learner(
    temperature=c.sampling.temperature,
    microbatches=c.rl.microbatches,
    load_balance_coef=c.objective.load_balance_coef,
    group_size=c.rl.group_size,
    prompt_tokens=c.data.max_prompt_tokens,
    response_tokens=c.sampling.max_new_tokens,
    ages=c.rl.ages,
    **common,
  )


def log_probs(
  params: Any, batch: TrainBatch, learner: Learner, replay: str = "none"
) -> tuple[jax.Array, jax.Array, transformer.Output, Rows]:
  """log π(token t | tokens before it) and the entropy there, [B, T] each, the forward pass and the
  rows that it read. Position 0 has no probability and holds 0. Of tokens with a support on record,
  π is renormalised over it (`head.token_logp`).

  With `replay`, π is the network that the experts on record make, with the gate weights of the
  router in `params`; ValueError if the batch has no such record.
  """
  rows = rows_of(batch, learner)
  experts_RTlk = experts_to_replay(rows, replay)
  out = forward(params, rows, learner.model, learner.compute, experts_RTlk)
  both = transformer.token_logp(
    params,
    learner.model,
    out.hidden_BTD,
    rows.targets_RT,
    temperature=learner.temperature,
    compute=learner.compute,
    support_BTX=rows.support_RTX,
  )
  of_next = (by_sequence(x_RT, rows) for x_RT in both)
  logp_BT, entropy_BT = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in of_next)
  return logp_BT, entropy_BT, out, rows


def rows_of(batch: TrainBatch, learner: Learner) -> Rows:
  """The rows that the model reads of a batch, or of one of its `parts`."""
  if batch.row_B is not None:
    return packed(batch, len(batch.tokens_BT) // learner.microbatches)
  if batch.prompt_B is not None:
    return trees(batch, learner.group_size, learner.prompt_tokens)
  return plain(batch)


def experts_to_replay(rows: Rows, replay: str) -> jax.Array | None:
  """The experts that mode `replay` forces upon the policy; ValueError if the batch has none."""
  if replay == "none":
    return None
  name = dict(R2="routing", R3="sampler_routing")[replay]
  experts_RTlk = getattr(rows, f"{name}_RTlk")
  if experts_RTlk is None:
    raise ValueError(f"objective.replay={replay!r}, but the batch has no {name}_BTlk")
  return experts_RTlk


def make_score(learner: Learner) -> Callable[[Any, TrainBatch], jax.Array]:
  """A jitted pass without gradient: the trainer's log-probabilities [B, T] of a batch."""

  def logp(params: Any, batch: TrainBatch) -> jax.Array:
    return log_probs(params, batch, learner)[0]

  return jax.jit(by_part(logp, learner))


def make_old_policy(
  learner: Learner, objective: ObjectiveConfig
) -> Callable[[Any, TrainBatch], dict[str, jax.Array]]:
  """A jitted pass without gradient: the fields of a batch that say what its old policy is.

  `old_logp_BT` under its own routing, and that routing; with R3, under the sampler's routing. So
  the first mini-batch, replaying the same experts with the same weights, has a ratio of exactly 1.
  """
  keeps_routing = objective.replay == "R2" or (objective.replay == "none" and objective.volatility)

  def old_policy(params: Any, batch: TrainBatch) -> dict[str, jax.Array]:
    replay = "R3" if objective.replay == "R3" else "none"
    logp_BT, _, out, rows = log_probs(params, batch, learner, replay)
    fields = dict(old_logp_BT=logp_BT)
    if keeps_routing and out.routing_lBTk is not None:
      experts_RTlk = routing.by_row(out.routing_lBTk, rows.segments_RT, learner.model.num_experts)
      fields["routing_BTlk"] = by_sequence(experts_RTlk, rows, routing.NO_EXPERT)
    return fields

  return jax.jit(by_part(old_policy, learner))


def make_review(
  learner: Learner,
  objective: ObjectiveConfig,
  old_policy: Callable[[Any, TrainBatch], dict[str, jax.Array]],
) -> Callable[..., dict[str, jax.Array]]:
  """A pass without gradient, for dumps of rollouts, [B, T] each: `log_ratio_BT`, log π under these
  parameters less the old policy's; `clipped_BT`, the tokens that the loss of an update would clip
  there, with the ranges at a factor; where there are segments, `gradient_BT`, the derivative of the
  loss there (`by_segment.gradient`).

  `old_policy`, which has been compiled, gives the log-probabilities; under R2 an update replays
  other experts, and needs a pass of its own.
  """

  def replayed(params: Any, batch: TrainBatch) -> jax.Array:
    return log_probs(params, batch, learner, objective.replay)[0]

  replayed = jax.jit(by_part(replayed, learner))
  judged = _judged(objective.structure, learner.response_tokens)

  def review(
    params: Any, batch: TrainBatch, clip_factor: jax.Array | None = None
  ) -> dict[str, jax.Array]:
    if objective.replay == "R2":
      logp_BT = replayed(params, batch)
    else:
      logp_BT = old_policy(params, sampled(batch))["old_logp_BT"]
    numbers = in_force(objective.numbers(), clip_factor)
    return judged(logp_BT, batch, numbers)

  return review


@functools.cache
def _judged(objective: ObjectiveConfig, max_length: int) -> Callable:
  def judged(logp_BT: jax.Array, batch: TrainBatch, numbers: Mapping[str, Any]) -> dict[str, Any]:
    entropy_BT = jnp.zeros_like(logp_BT)  # clips nothing
    loss = lambda x: policy_loss(objective, x, entropy_BT, batch, max_length, numbers)  # noqa: E731
    found = dict(log_ratio_BT=logp_BT - batch.old_logp_BT, clipped_BT=loss(logp_BT)[2])
    if batch.unit_BT is not None:
      found |= dict(gradient_BT=by_segment.gradient(lambda x: loss(x)[0], logp_BT))
    return found

  return jax.jit(judged)


def by_part(function: Callable, learner: Learner) -> Callable:
  """`function(params, batch)`, which returns arrays [B, ...]; of a packed batch by micro-batch, so
  that it needs no more memory than an update."""

  def whole(params: Any, batch: TrainBatch) -> Any:
    if batch.row_B is None:
      return function(params, batch)
    number, part = parts(batch, learner)

    def one(i):
      some = part(i)
      return some.row_B >= 0, function(params, some)

    def put(total, new):
      (_, old), (inside_B, new) = total, new
      inside = lambda x: inside_B.reshape(-1, *(1,) * (x.ndim - 1))  # noqa: E731
      return inside_B, jax.tree.map(lambda a, b: jnp.where(inside(a), a, b), new, old)

    return accumulate(one, number, put, learner.microbatches)[1]

  return whole


def make_rl_step(
  learner: Learner,
  objective: ObjectiveConfig,
  tx: optax.GradientTransformation | Optimizer,
  critic: Critic | None = None,
) -> WithNumbers:
  """The jitted update of the policy, and of a critic if there is one, on one mini-batch, (state,
  batch) -> (state, metrics); the state is donated. Numbers of the configuration (clip ranges, rates
  and so on) are arguments: configurations that differ in nothing else are one program."""
  tx, with_critic = numbered(tx), ()
  numbers = dict(objective=objective.numbers(), optimizer=tx.numbers)
  numbers |= dict(load_balance_coef=learner.load_balance_coef)
  learner = dataclasses.replace(learner, load_balance_coef=0.0)
  if critic is not None:
    numbers |= dict(critic=critic.numbers, critic_optimizer=critic.tx.numbers)
    with_critic = critic.config.structure, critic.tx.update
  return with_numbers(_rl_step(learner, objective.structure, tx.update, *with_critic), numbers)


@functools.lru_cache(maxsize=8)
def _rl_step(
  learner: Learner,
  objective: ObjectiveConfig,
  apply: Callable,
  critic_config: CriticConfig | None = None,
  apply_to_critic: Callable | None = None,
) -> Callable:
  def loss(params, critic, batch, all_numbers):
    numbers = all_numbers["objective"]
    logp_BT, entropy_BT, out, rows = log_probs(params, batch, learner, objective.replay)
    batch, of_old = with_own_logp(objective, logp_BT, batch)
    longest = learner.response_tokens
    total, metrics, clipped_BT = policy_loss(
      objective, logp_BT, entropy_BT, batch, longest, numbers
    )
    if longest:
      tokens = logp_BT, batch.old_logp_BT, batch.mask_BT, clipped_BT
      metrics |= by_length.ratio_metrics(*tokens, longest)
    metrics |= by_age.metrics(logp_BT, batch, clipped_BT, learner.ages)
    if batch.unit_BT is not None:
      rest = entropy_BT, batch, longest, numbers
      of_logp = lambda x_BT: policy_loss(objective, x_BT, *rest)[0]  # noqa: E731
      metrics |= by_segment.metrics(of_logp, logp_BT, batch, clipped_BT)
    mask_BT = batch.mask_BT  # older weights are another policy, whatever the sampler does
    if batch.current_BT is not None:
      mask_BT = mask_BT * batch.current_BT
    metrics |= O.mismatch.sums(logp_BT, batch.sampler_logp_BT, mask_BT) | of_old
    if objective.old_logp == "behaviour":
      metrics |= by_version.metrics(batch, mask_BT)
    metrics |= volatility_metrics(out, rows, objective.replay)
    empty_RT = (rows.segments_RT == 0).astype(jnp.float32)
    metrics |= {"padding": Mean(empty_RT.sum(), jnp.ones_like(empty_RT).sum())}
    if "clip_range" in numbers:
      metrics |= {"clip_range": Last(jnp.float32(numbers["clip_range"]))}
    if critic is not None:
      of_critic = all_numbers["critic"]
      read = out.hidden_BTD, rows, learner.model, learner.compute
      value_BT = critics.values(critic_config, critic, *read, of_critic)
      metrics |= critics.loss(critic_config, value_BT, batch, of_critic)
    return total, metrics, out.stats

  def share(batch, numbers):  # of a critic, see `_step`; a denominator depends on masks alone
    nothing_BT = jnp.zeros_like(batch.sampler_logp_BT)
    arguments = objective, nothing_BT, nothing_BT, batch, learner.response_tokens
    return critics.share(policy_loss(*arguments, numbers["objective"])[0], batch.mask_BT)

  return _step(learner, loss, apply, apply_to_critic, share)


def with_own_logp(
  objective: ObjectiveConfig, logp_BT: jax.Array, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, Any]]:
  """The batch whose old log-probabilities are, in a first mini-batch, those of this very pass: with
  `recompute` it is the same policy, and the ratio exactly 1.

  Another program that computes them, without a gradient, rounds otherwise. By how much is the
  metric `mismatch/recomputed`: |mean Δ| of a sequence, in the mean. It is in the ratios of all
  later mini-batches.
  """
  if objective.old_logp != "recompute" or batch.first_B is None:
    return batch, {}
  sums = O.mismatch.sums(logp_BT, batch.old_logp_BT, batch.mask_BT)
  own_BT = jnp.where(batch.first_B[:, None], jax.lax.stop_gradient(logp_BT), batch.old_logp_BT)
  metrics = {"mismatch/recomputed": sums["mismatch/sequence/abs/mean"]}
  return batch.replace(old_logp_BT=own_BT), metrics


def make_sft_step(learner: Learner, tx: optax.GradientTransformation | Optimizer) -> WithNumbers:
  """The jitted supervised update: mean over tokens of -log π(token); the state is donated."""
  tx = numbered(tx)
  numbers = dict(optimizer=tx.numbers, load_balance_coef=learner.load_balance_coef)
  learner = dataclasses.replace(learner, load_balance_coef=0.0)
  return with_numbers(_sft_step(learner, tx.update), numbers)


@functools.lru_cache(maxsize=8)
def _sft_step(learner: Learner, apply: Callable) -> Callable:
  def loss(params, _, batch, __):
    logp_BT, entropy_BT, out, _ = log_probs(params, batch, learner)
    tokens = batch.mask_BT.sum()
    total = Mean(-(logp_BT * batch.mask_BT).sum(), tokens)
    return total, {"entropy": Mean((entropy_BT * batch.mask_BT).sum(), tokens)}, out.stats

  return _step(learner, loss, apply)


def make_sft_loss(learner: Learner) -> Callable[[Any, TrainBatch], Mean]:
  """The jitted loss of `make_sft_step`, without its update."""

  def loss(params, batch):
    logp_BT = log_probs(params, batch, learner)[0]
    return Mean(-(logp_BT * batch.mask_BT).sum(), batch.mask_BT.sum())

  return jax.jit(loss)


def _step(
  learner: Learner,
  loss: Callable,
  apply: Callable,
  apply_to_critic: Callable | None = None,
  share: Callable | None = None,
) -> Callable:
  """Gradient of `loss(params, critic, batch, numbers) -> (Mean, metrics, router stats)` and one
  Optax update, by `Optimizer.update`; (state, batch, numbers) -> (state, metrics).

  Numerators are differentiated and summed over micro-batches, denominators are summed, and they
  are divided once: the number of micro-batches changes memory and nothing else. (The load-balance
  loss is the exception: it is a product of two means, taken per micro-batch.) A batch of nothing to
  train on changes nothing. The metric `updates_skipped` counts, since the start of the run, the
  updates that were left out.

  A critic learns in the same pass, from the metric `critic.LOSS`, with an optimizer of its own. Its
  numerators count `share(batch, numbers)` times, so that one division is right for both.
  """

  def numerator(both, frozen, batch, numbers, weight):
    trained, critic = both
    total, metrics, stats = loss(lora.join(trained, frozen), critic, batch, numbers)
    metrics |= {"loss": total}
    value = total.numerator
    if critic is not None:
      value = value + weight * metrics[critics.LOSS].numerator
    if stats is not None:
      metrics |= router_metrics(stats, learner.model)
      balance = moe.load_balance(stats, learner.model)
      value = value + numbers["load_balance_coef"] * balance * total.denominator
    return value, metrics

  gradient = jax.grad(numerator, has_aux=True)

  def add(total, new):
    (grads, metrics), (more, others) = total, new
    return jax.tree.map(jnp.add, grads, more), merge(metrics, others)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: TrainState, batch: TrainBatch, numbers: Mapping[str, Any]):
    number, part = parts(batch, learner)
    trained, frozen = lora.split(state.params)
    if "objective" in numbers:
      objective = in_force(numbers["objective"], state.clip_factor)
      numbers = {**numbers, "objective": objective}
    critic, weight = state.critic, None
    if critic is not None:
      weight = share(batch, numbers)
    both = trained, None if critic is None else critic.params
    one = lambda i: gradient(both, frozen, part(i), numbers, weight)  # noqa: E731
    grads, metrics = accumulate(one, number, add, learner.microbatches)
    denominator = metrics["loss"].denominator
    some = denominator > 0  # without a token, Adam would still follow its momentum
    grads, critic_grads = jax.tree.map(lambda g: g / jnp.where(some, denominator, 1), grads)
    updates, opt_state = apply(grads, state.opt_state, trained, numbers["optimizer"])
    params = lora.join(optax.apply_updates(trained, updates), frozen)
    grad_norm = optax.tree.norm(grads)
    sound = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"].numerator)
    if learner.on_nonfinite == "stop":
      sound &= state.skipped == 0
    new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    if critic is not None:
      new, of_critic = critics.update(new, state, critic_grads, apply_to_critic, numbers)
      metrics |= of_critic
      sound &= jnp.isfinite(of_critic[critics.GRAD_NORM].value)
    state = jax.tree.map(lambda new, old: jnp.where(sound & some, new, old), new, state)
    state = state.replace(skipped=state.skipped + ~sound)
    metrics |= {"grad_norm": Max(grad_norm), "updates_skipped": Last(state.skipped)}
    return state, metrics

  return step


def parts(
  batch: TrainBatch, learner: Learner
) -> tuple[int | jax.Array, Callable[[Any], TrainBatch]]:
  """Returns the number of micro-batches, and a function to the i-th of them; of a packed batch,
  those with tokens in their rows: at most `learner.microbatches`."""
  number = learner.microbatches
  if batch.row_B is not None:
    R = len(batch.tokens_BT) // number
    return packing.count(batch, R), lambda i: packing.part(batch, i, R)

  def on_each_device(batch):  # every part has rows of every device: those of a group stay together
    return jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)

  stacked = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(None, BATCH))(batch)
  return number, lambda i: jax.tree.map(lambda x: x[i], stacked)
