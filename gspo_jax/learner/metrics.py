"""Metrics of an update by age, length, segment and sampler version, and metrics of routers.

Several metrics are reported separately for classes of responses or segments:

- Age: the age of a token is the version of the weights before the updates, less the version that
  sampled it. The age of a response is the largest age of its tokens. The last class includes all
  larger ages.
- Length: the upper limits of the classes are powers of two. The last limit is at least the maximum
  response length. `.../le_64` is about responses of 33 to 64 tokens, or of 1 to 64 tokens if it is
  the first class.
- Segment: the first four segments of a response are in the classes "1" to "4". In addition, the
  segments of a response are divided into the classes "first", "middle" and "last", as equally as
  possible. A single segment is "middle".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import objectives as O
from gspo_jax.learner.layout import Rows
from gspo_jax.models import transformer
from gspo_jax.models.experts import moe, routing
from gspo_jax.objectives import ratios
from gspo_jax.objectives.aggregation import unit_sum
from gspo_jax.objectives.reductions import Max, Mean, Metrics, Std
from gspo_jax.settings.model import ModelConfig
from gspo_jax.structs import Rollout, TrainBatch

LENGTH_CLASSES = 6  # Maximum number of classes by length.
NUMBERED, THIRDS = 4, ("first", "middle", "last")  # Classes of segments, by number and by third.
VOLATILITY = "router/volatility"  # Name of the metric of changed experts (`volatility_metrics`).


def ages(rollout: Rollout, version: int) -> np.ndarray:
  """Computes ages of responses on the host, int32 [B].

  Ages are relative to `version`, the version of the weights before the updates.
  Responses of `offline.data`, and padding, have no version. Their age is -1, which is in no class.
  """
  oldest_B = np.where(rollout.version >= 0, rollout.version, version).min(axis=1)
  sampled_B = (rollout.version >= 0).any(axis=1)
  return np.where(sampled_B, version - oldest_B, -1).astype(np.int32)


def lag_metrics(
  rollout: Rollout, version: int, trained_B: np.ndarray | None = None
) -> dict[str, float]:
  """Returns mean and maximum age of trained tokens, on the host.

  Args:
    version: current version of the weights.
    trained_B: mask of trained responses. None means that all sampled tokens are trained, whatever
      the rollout's mask.
  """
  trained_BL = rollout.version >= 0
  if trained_B is not None:
    trained_BL &= (rollout.mask > 0) & trained_B[:, None]
  age_X = version - rollout.version[trained_BL]
  if not len(age_X):
    return {"lag/mean": 0.0, "lag/max": 0.0}
  return {"lag/mean": float(age_X.mean()), "lag/max": float(age_X.max())}


def age_metrics(
  logp_BT: jax.Array, batch: TrainBatch, clipped_BT: jax.Array, classes: int
) -> Metrics:
  """Returns metrics of the responses of each age.

  If no response has a certain age, all metrics of this age except `by_age/responses` are empty
  (`Mean.empty`). w_it is the importance ratio of token t of response i.

  - `by_age/responses`: number of responses with this age, divided by the number of trained
    responses with a version.
  - `by_age/ratio_deviation`: mean of |s_i - 1|. GSPO's ratio s_i = exp(1/|y_i| Σ_t log w_it) is
    used even if the loss has a different ratio.
  - `by_age/clip_fraction`: number of clipped tokens, divided by the number of tokens, of responses
    with this age.
  - `mismatch/by_age`: mean of |1/|y_i| Σ_t Δ_it|, where Δ_it is the trainer's log-prob of token t
    minus the sampler's.

  Args:
    clipped_BT: mask of tokens clipped by the loss.
    classes: number of classes. 0 means no metrics.
  """
  if not classes:
    return {}
  live_BT = batch.mask_BT > 0
  length_B = live_BT.sum(1)
  age_B = jnp.minimum(batch.metric_inputs.age_B, classes - 1)
  inside_BX = (age_B[:, None] == np.arange(classes)[None]) & (length_B > 0)[:, None]
  count_X = _by_class(jnp.ones_like(length_B), inside_BX)
  deviation_B = abs(ratios.bounded_expm1(_log_ratio(logp_BT, batch.old_logp_BT, live_BT)))
  mismatch_B = abs(_log_ratio(logp_BT, batch.sampler_logp_BT, live_BT))
  sums = {
    "by_age/responses": Mean(count_X, jnp.broadcast_to(count_X.sum(), count_X.shape)),
    "by_age/ratio_deviation": Mean(_by_class(deviation_B, inside_BX), count_X),
    "by_age/clip_fraction": _clipped(clipped_BT, live_BT, inside_BX),
    "mismatch/by_age": Mean(_by_class(mismatch_B, inside_BX), count_X),
  }
  return _by_name(sums, [str(age) for age in range(classes)])


def length_limits(longest: int) -> list[int]:
  """Returns the maximum length of each class, in ascending order.

  The limits are at most six consecutive powers of two. The first is at least 4, and the last is at
  least `longest`, the maximum response length.
  """
  last = max(2, (longest - 1).bit_length())
  return [2**n for n in range(max(2, last - LENGTH_CLASSES + 1), last + 1)]


def reward_metrics(
  reward_B: np.ndarray, known_B: np.ndarray, length_B: np.ndarray, longest: int
) -> dict[str, float]:
  """Computes metrics of each length class on the host.

  `by_length/responses` is the number of the class's responses, divided by the number of all
  trained responses. `by_length/reward` is the mean reward of those responses of the class that
  have a verdict. If there is no such response, the mean is 0.

  Args:
    known_B: bool: the reward function returned a verdict on the response.
    length_B: number of tokens of each trained response; 0 for other responses, in no class.
    longest: maximum response length.
  """
  row = {}
  for limit, inside_B in zip(length_limits(longest), _length_classes(length_B, longest).T):
    scored_B = inside_B & known_B
    row[f"by_length/responses/le_{limit}"] = float(inside_B.sum() / max(1, (length_B > 0).sum()))
    row[f"by_length/reward/le_{limit}"] = float(reward_B[scored_B].sum() / max(1, scored_B.sum()))
  return row


def length_metrics(
  logp_BT: jax.Array,
  old_logp_BT: jax.Array,
  mask_BT: jax.Array,
  clipped_BT: jax.Array,
  longest: int,
) -> Metrics:
  """Returns spread of ratios and share of clipped tokens by length class.

  The spread `by_length/log_ratio_std` is the standard deviation of log s_i = 1/|y_i| Σ_t log w_it,
  where w_it is the importance ratio of token t. GSPO's ratio s_i is used even if the loss has a
  different ratio. If a class has no responses, its metrics are 0.

  Args:
    clipped_BT: mask of tokens clipped by the loss.
    longest: maximum response length.
  """
  live_BT = mask_BT > 0
  length_B = live_BT.sum(1)
  log_ratio_B = _log_ratio(logp_BT, old_logp_BT, live_BT)
  inside_BX = _length_classes(length_B, longest)
  count_X = _by_class(jnp.ones_like(length_B), inside_BX)
  moments = (_by_class(x_B, inside_BX) for x_B in (log_ratio_B, log_ratio_B**2))
  sums = {
    "by_length/log_ratio_std": Std(count_X, *moments),
    "by_length/clip_fraction": _clipped(clipped_BT, live_BT, inside_BX),
  }
  return _by_name(sums, [f"le_{limit}" for limit in length_limits(longest)])


def _by_name(sums: Mapping[str, Mean | Std], names: Sequence[str]) -> Metrics:
  """Splits metrics [X] over classes into one metric per class."""
  return {
    f"{metric}/{name}": type(total)(*(x_X[i] for x_X in total))
    for metric, total in sums.items()
    for i, name in enumerate(names)
  }


def _clipped(clipped_BT: jax.Array, live_BT: jax.Array, inside_BX: jax.Array) -> Mean:
  """Returns the share of clipped tokens of each class."""
  clipped_X = _by_class((clipped_BT & live_BT).sum(1), inside_BX)
  return Mean(clipped_X, _by_class(live_BT.sum(1), inside_BX))


def _length_classes(length_B, longest: int):
  """Marks the length class of each response, bool [B, classes].

  A response without tokens is in no class.
  """
  upper = np.array(length_limits(longest))
  lower = np.array([0, *upper[:-1]])
  return (length_B[:, None] > lower[None]) & (length_B[:, None] <= upper[None])


def _by_class(x_B: jax.Array, inside_BX: jax.Array) -> jax.Array:
  """Sums `x_B` over the responses of each class: float32 [X]."""
  return jnp.where(inside_BX, x_B[:, None], 0).sum(0).astype(jnp.float32)


def _log_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, live_BT: jax.Array) -> jax.Array:
  """Returns the mean log-ratio of each response [B], without gradient."""
  log_ratio_BT = ratios.difference(jax.lax.stop_gradient(logp_BT), old_logp_BT)
  return jnp.where(live_BT, log_ratio_BT, 0).sum(1) / jnp.maximum(live_BT.sum(1), 1)


def token_gradient(loss: Callable[[jax.Array], Mean], logp_BT: jax.Array) -> jax.Array:
  """Returns the gradient of the loss's numerator with respect to log-probs, [B, T]."""
  logp_BT = jax.lax.stop_gradient(logp_BT)
  return jax.grad(lambda x_BT: loss(x_BT).numerator)(logp_BT)


def segment_metrics(
  loss: Callable[[jax.Array], Mean],
  logp_BT: jax.Array,
  batch: TrainBatch,
  clipped_BT: jax.Array,
) -> Metrics:
  """Returns metrics of segments by their class.

  z_ik is segment k of the K_i segments of response i. `segment/count` is the mean number of
  segments per response, and `segment/length` the mean number of tokens per segment. Further metrics
  are over the segments of one class, for example `segment/gradient/first`:

  - `clip_fraction`: mean over segments of the share of a segment's tokens that are clipped.
  - `gradient`: mean over segments of Σ_t |∂L/∂ log π_θ(y_t)|. L is the loss before the division by
    its denominator. If `segment_loss` is aggregated by sequence, the sum is |s_ik Â_i| / K_i for an
    unclipped segment, and 0 for a clipped segment.
  - `ratio_std`: standard deviation of s_ik = exp( 1/|z_ik| Σ_t log w_it ), where w_it is the
    importance ratio of token t.

  Args:
    loss: function from log-probabilities [B, T] to the undivided loss of the update.
    batch: mini-batch with segment numbers, counted from 0, in `unit_BT`.
    clipped_BT: mask of tokens clipped by the loss.
  """
  live_BT = batch.mask_BT > 0

  def total(x_BT):
    return unit_sum(jnp.where(live_BT, x_BT, 0).astype(jnp.float32), batch.unit_BT)

  old_logp_BT = jax.lax.stop_gradient(batch.old_logp_BT)
  log_ratio_BT = ratios.difference(jax.lax.stop_gradient(logp_BT), old_logp_BT)
  length_BU = total(live_BT)
  tokens_BU = jnp.maximum(length_BU, 1)
  # The bound keeps squares finite, as in objectives/terms.py.
  deviation_BU = jnp.minimum(ratios.bounded_expm1(total(log_ratio_BT) / tokens_BU), 1e15)
  clipped_BU = total(clipped_BT) / tokens_BU
  gradient_BU = total(abs(token_gradient(loss, logp_BT)))
  live_BU = length_BU > 0
  number_B = live_BU.sum(1)
  metrics: Metrics = {
    "segment/count": Mean(_sum(number_B), _sum(number_B > 0)),
    "segment/length": Mean(_sum(length_BU), _sum(number_B)),
  }
  for place, inside_BU in _places(live_BU, number_B).items():

    def class_sum(x_BU, inside_BU=inside_BU):
      return _sum(jnp.where(inside_BU, x_BU, 0))

    number = _sum(inside_BU)
    metrics[f"segment/clip_fraction/{place}"] = Mean(class_sum(clipped_BU), number)
    metrics[f"segment/gradient/{place}"] = Mean(class_sum(gradient_BU), number)
    metrics[f"segment/ratio_std/{place}"] = Std(
      number, class_sum(deviation_BU), class_sum(deviation_BU**2)
    )
  return metrics


def _sum(x: jax.Array) -> jax.Array:
  return x.sum(dtype=jnp.float32)


def _places(live_BU: jax.Array, number_B: jax.Array) -> dict[str, jax.Array]:
  """Returns masks of segments by class, a dict of bool [B, U]."""
  number_U = jnp.arange(live_BU.shape[1], dtype=jnp.int32)
  # Number of the third, 0 to 2: floor(3 (u + ½) / K) for segment u of K, in integer arithmetic.
  third_BU = 3 * (2 * number_U[None] + 1) // (2 * jnp.maximum(number_B, 1)[:, None])
  places = {str(n + 1): live_BU & (number_U == n)[None] for n in range(NUMBERED)}
  return places | {name: live_BU & (third_BU == i) for i, name in enumerate(THIRDS)}


def version_metrics(batch: TrainBatch, current_BT: jax.Array) -> Metrics:
  """Compares sampler and trainer by the version of the sampling weights.

  `mismatch/current/...` is about the trained tokens of `current_BT`, and `mismatch/older/...` about
  all other trained tokens. `mismatch/older/tokens` is the number of these other tokens, divided by
  the number of trained tokens.

  Args:
    current_BT: 1 on trained tokens sampled by the weights before the updates. If the sampler's
      experts are replayed, rows with an older token are excluded (`batch.current_tokens`).
  """
  older_BT, metrics = batch.mask_BT - current_BT, {}
  for name, mask_BT in (("current", current_BT), ("older", older_BT)):
    sums = O.mismatch.sums(batch.own_logp_BT, batch.sampler_logp_BT, mask_BT)
    metrics |= {key.replace("/", f"/{name}/", 1): value for key, value in sums.items()}
  return metrics | {"mismatch/older/tokens": Mean(older_BT.sum(), batch.mask_BT.sum())}


def router_metrics(stats: moe.RouterStats, config: ModelConfig) -> dict[str, Any]:
  """Returns metrics of the routers, over all layers.

  `router/load_balance` is 1 if the load is even (`moe.load_balance`). `router/busiest_expert` is
  the largest share that one expert has in the assignments of its layer in a micro-batch.
  """
  tokens = stats.tokens.sum()
  share = stats.load_E.max(-1) / jnp.maximum(stats.tokens * config.experts_per_token, 1)
  return {
    "router/load_balance": Mean(moe.load_balance(stats, config) * tokens, tokens),
    "router/entropy": Mean(stats.entropy.sum(), tokens),
    "router/z": Mean(stats.z.sum(), tokens),
    "router/busiest_expert": Max(share.max()),
    "router/dropped_tokens": Max(stats.dropped.sum()),
  }


def volatility_metrics(out: transformer.Output, rows: Rows, replay: str) -> dict[str, Mean]:
  """Measures the share of changed experts of a token, by layer.

  - If there is no replay, the experts of this forward pass are compared with those of the pass of
    the old policy (`passes.make_old_policy`). If that pass recorded no experts, the comparison is
    with the sampler's experts.
  - If there is replay, the router's choice is compared with the replayed experts. The router's
    inputs depend on experts replayed in earlier layers. A further pass without replay would avoid
    this dependence, but would cost time.
  - If no experts are recorded, there is no metric.

  If the sampler's experts are recorded, `router/volatility/sampler` is the comparison with them,
  over all layers.
  """
  if out.routing_lBTk is None:
    return {}
  metrics, sampler_experts_RTlk = {}, rows.sampler_experts_RTlk
  experts_RTlk = sampler_experts_RTlk if rows.old_experts_RTlk is None else rows.old_experts_RTlk
  if replay != "none":
    metrics[VOLATILITY] = Mean(out.stats.overridden, out.stats.replayed_tokens)
  elif experts_RTlk is not None:
    metrics[VOLATILITY] = _volatility(out, experts_RTlk)
  if sampler_experts_RTlk is not None:
    layers = metrics[VOLATILITY] if replay == "R3" else _volatility(out, sampler_experts_RTlk)
    metrics[f"{VOLATILITY}/sampler"] = Mean(layers.numerator.sum(), layers.denominator.sum())
  return metrics


def _volatility(out: transformer.Output, experts_RTlk: jax.Array) -> Mean:
  experts_lRTk = routing.by_layer(experts_RTlk)
  return Mean(*routing.volatility_sums(out.routing_lBTk, experts_lRTk))
