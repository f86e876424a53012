"""Common parts of the policy losses: declaration, arguments, clipping, penalties and metrics."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypedDict, cast, get_args

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspo_jax.objectives import aggregation, checks, clip_ranges, ratios
from gspo_jax.objectives.aggregation import Tokens
from gspo_jax.objectives.checks import Number
from gspo_jax.objectives.kl import kl_k1, kl_k2, kl_k3, kl_k3_weighted
from gspo_jax.objectives.reductions import Max, Mean, Metrics, Min, Std, reduced

_ROUNDING = 256  # Largest rounding error of a log-ratio, in units of the machine epsilon.
# Functions (log π, log π_ref, log π_old) -> estimate of the KL divergence.
_KL: dict[str, Callable[[Array, Array, Array], Array]] = {
  "k1": lambda logp_BT, ref_logp_BT, _: kl_k1(logp_BT, ref_logp_BT),
  "k2": lambda logp_BT, ref_logp_BT, _: kl_k2(logp_BT, ref_logp_BT),
  "k3": lambda logp_BT, ref_logp_BT, _: kl_k3(logp_BT, ref_logp_BT),
  "k3_weighted": kl_k3_weighted,
}

# Levels of importance correction (corrections.py), the default first: `BY_RESPONSE` for losses with
# a ratio per response, `BY_TOKEN` for losses with a ratio per token.
BY_RESPONSE = ("geometric", "sequence")
BY_TOKEN = ("token", "sequence", "geometric")

Sums = tuple[Mean, Metrics, Array]  # Loss not yet divided, metrics, mask of clipped tokens [B, T].


class Options(TypedDict, total=False):
  """Keyword arguments of every policy loss."""

  weight: Array  # [B] or [B, T]: factor of the objective, for example `truncated_weight`.
  response_BT: Array  # Index of each token's response in a packed row, in [0, T).
  ref_logp_BT: Array  # Log-probs of a reference policy.
  sampler_logp_BT: Array  # Log-probs of the sampler for "k3_weighted", by default `old_logp_BT`.
  # Estimate of KL(π_θ‖π_ref) in the penalty (kl.py): "k1", "k2", "k3" (default) or "k3_weighted".
  kl: str
  kl_coef: float  # Factor of the KL penalty, by default 0.
  kl_mask_BT: Array  # 1 on tokens with a KL penalty, by default on all tokens.
  entropy_BT: Array  # Entropy of the distribution of each token.
  entropy_coef: float  # Factor of the entropy bonus, by default 0.


Arguments = ParamSpec("Arguments")


class PolicyLoss(Protocol[Arguments]):
  """A policy loss, (arguments) -> (scalar, dict of scalars), with attributes for trainers."""

  __name__: str
  sums: Callable[Arguments, tuple[Mean, Metrics]]  # Loss and metrics, undivided (reductions.py).
  # Returns the mask of clipped tokens, bool [B, T]. Only penalties have a gradient at these tokens.
  # In `cispo_loss`, the objective has one too, multiplied by the clipped ratio.
  clipped: Callable[Arguments, Array]
  undivided: Callable[Arguments, Sums]  # Returns the results of `sums` and `clipped`.
  arguments: tuple[str, ...]  # Names of all arguments.
  options: Mapping[str, Any]  # Defaults of numeric and string options, with KL and entropy.
  choices: Mapping[str, tuple[str, ...]]  # Allowed values of string options.
  by_token: bool  # Trainers pass an advantage for each token instead of each response.
  levels: tuple[str, ...]  # Allowed levels of importance correction; the first is the default.
  advantage: str  # Name of the estimator of advantages in the loss's publication.
  recorded: bool  # The loss may learn from responses of another policy.
  to_reference: bool  # Ratios are to a fixed reference policy, not to the old policy.

  def __call__(
    self, *args: Arguments.args, **kwargs: Arguments.kwargs
  ) -> tuple[Array, dict[str, Array]]:
    """Returns the loss and its metrics."""


def policy_loss(
  *,
  levels: tuple[str, ...] | None = None,
  by_token: bool | None = None,
  advantage: str = "std",
  recorded: bool = False,
  to_reference: bool = False,
) -> Callable[[Callable[Arguments, Sums]], PolicyLoss[Arguments]]:
  """Declares a function to be a policy loss, as a decorator.

  The function returns `Sums`. Its first arguments are logp_BT, old_logp_BT, advantage_B or
  advantage_BT, and mask_BT. Further arguments are numbers or strings with defaults, max_length,
  segment_BT and those of `Options`. A function with `**options` has all arguments of `Options`.

  Args:
    levels: allowed levels of importance correction, the default first. None means `BY_TOKEN` if
      `by_token` is true, else `BY_RESPONSE`. A loss without argument `weight` has no levels.
    by_token: whether trainers pass an advantage for each token instead of each response. None means
      yes if the argument is called `advantage_BT`, else no.
    advantage: name of the estimator of advantages.
    recorded: whether the loss may learn from responses of another policy.
    to_reference: whether ratios are to a fixed reference policy.

  Example:
    >>> @policy_loss()
    ... def reinforce_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT, scale=1.0):
    ...   total = -scale * (advantage_BT * logp_BT * mask_BT).sum()
    ...   return Mean(total, mask_BT.sum()), {}, jnp.zeros(mask_BT.shape, bool)
    >>> ones_BT = jnp.ones((2, 3))
    >>> float(reinforce_loss(-ones_BT, -ones_BT, ones_BT, ones_BT, scale=2.0)[0])
    2.0
    >>> dict(reinforce_loss.options), reinforce_loss.by_token
    ({'scale': 1.0}, True)
  """

  def declare(function: Callable[Arguments, Sums]) -> PolicyLoss[Arguments]:
    parameters = [*inspect.signature(function).parameters.values()]
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    shared = len(named) < len(parameters)  # Whether the function has **options.
    names = (*named, *(Options.__annotations__ if shared else ()))
    tokens = "advantage_BT" in named if by_token is None else by_token
    suitable = (BY_TOKEN if tokens else BY_RESPONSE) if "weight" in names else ()
    loss = _with_forms(function, names)
    parameters += inspect.signature(_penalty).parameters.values() if shared else ()
    options = [p for p in parameters if p.default is not p.empty]
    options = [p for p in options if "_BT" not in p.name and p.name != "weight"]  # No arrays.
    words = {p.name: get_args(p.annotation) for p in options if isinstance(p.default, str)}
    loss.arguments, loss.options = names, {p.name: p.default for p in options}
    loss.choices = {name: choices for name, choices in words.items() if choices}
    loss.by_token, loss.levels = tokens, suitable if levels is None else levels
    loss.advantage, loss.recorded, loss.to_reference = advantage, recorded, to_reference
    return loss

  return declare


def _with_forms(
  function: Callable[Arguments, Sums], names: tuple[str, ...]
) -> PolicyLoss[Arguments]:
  """Returns the scalar form of a loss, with the other forms as attributes."""

  @functools.wraps(function)
  def undivided(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Sums:
    for name in kwargs.keys() - names:
      raise TypeError(f"{function.__name__} has no argument {name!r}; it has {', '.join(names)}")
    results = function(*args, **kwargs)
    checks.sums(function.__name__, results)
    return results

  @functools.wraps(function)
  def sums(*args: Arguments.args, **kwargs: Arguments.kwargs) -> tuple[Mean, Metrics]:
    return undivided(*args, **kwargs)[:2]

  pair = inspect.signature(function).replace(return_annotation=tuple[Mean, Metrics])
  sums.__signature__ = pair  # type: ignore[attr-defined]

  @functools.wraps(function)
  def clipped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Array:
    return undivided(*args, **kwargs)[2]

  loss = cast(PolicyLoss[Arguments], reduced(sums))
  loss.clipped, loss.undivided = clipped, undivided
  return loss


class Batch(NamedTuple):
  """Checked arguments of a loss, in float32 or wider, and 0 at masked positions.

  Advantages and weights have no gradient. Their axis X is T, or 1 if a row has one value.
  """

  tokens: Tokens
  logp_BT: Array
  log_ratio_BT: Array
  advantage_BX: Array
  weight_BX: Array
  penalty_BT: Array | None  # KL penalty less entropy bonus of each token. None if neither is used.
  metrics: Metrics  # Metrics common to all losses.


class Clipped(NamedTuple):
  """Masks of tokens or responses clipped at the upper, lower or dual bound."""

  high: Array
  low: Array
  dual: Array | None = None  # None if there is no dual bound.


def batch(
  logp_BT: ArrayLike,
  old_logp_BT: ArrayLike,
  advantage: ArrayLike,
  mask_BT: ArrayLike,
  *,
  by_token: bool = True,
  weight: ArrayLike | None = None,
  response_BT: ArrayLike | None = None,
  **penalties: Any,
) -> Batch:
  """Checks a loss's arguments; computes log-ratio, penalty and metrics.

  Args:
    by_token: whether advantage and weight may differ between the tokens of a response. If not,
      their shape is [B]. Packed rows may have [B, T], constant over each response.
    penalties: keyword arguments of `_penalty`.
  """
  shapes = ("B", "BT") if by_token or response_BT is not None else ("B",)
  logp_BT, tokens = aggregation.tokens(logp_BT, "logp_BT", mask_BT, response_BT)
  mask_BT, dtype = tokens.mask_BT, logp_BT.dtype
  old_logp_BT = stop_gradient(checks.tokens(old_logp_BT, "old_logp_BT", mask_BT, dtype))
  advantage_BX = checks.constant(advantage, "advantage", mask_BT, dtype, shapes)
  weight_BX = jnp.ones((1, 1), dtype)
  if weight is not None:
    weight_BX = checks.constant(weight, "weight", mask_BT, dtype, shapes)
  log_ratio_BT = ratios.difference(logp_BT, old_logp_BT)
  penalty_BT, metrics = _penalty(logp_BT, old_logp_BT, tokens, **penalties)
  metrics |= _drift(stop_gradient(log_ratio_BT), tokens)
  return Batch(tokens, logp_BT, log_ratio_BT, advantage_BX, weight_BX, penalty_BT, metrics)


def token_loss(batch: Batch, objective_BT: Array) -> Array:
  """Computes the loss of each token: weighted negative objective plus penalty."""
  loss_BT = -batch.weight_BX * objective_BT
  return ratios.finite(loss_BT if batch.penalty_BT is None else loss_BT + batch.penalty_BT)


def token_sums(
  batch: Batch,
  objective_BT: Array,
  clipped_BX: Clipped,
  aggregate: str,
  max_length: Number | None = None,
) -> Sums:
  """Computes the results of a loss with a ratio for each token."""
  metrics = update_metrics(batch, batch.log_ratio_BT, batch.tokens.mask_BT, clipped_BX)
  loss_BT = token_loss(batch, objective_BT)
  total = aggregation.aggregate_tokens(loss_BT, batch.tokens, aggregate, max_length)
  return total, metrics, either(clipped_BX, batch.tokens)


def mean_of_responses(batch: Batch, loss_BU: Array, factor_BU: Number = 1.0) -> Mean:
  """Averages each response's loss and mean penalty, times its factor."""
  loss_BU = ratios.finite(factor_BU * loss_BU)
  loss = jnp.where(batch.tokens.length_BU > 0, loss_BU, 0).sum()
  if batch.penalty_BT is not None:
    loss += (factor_BU * batch.tokens.means(batch.penalty_BT)).sum()
  return Mean(loss, batch.tokens.responses())


def clip(
  ratio: Array,
  log_ratio: Array,
  advantage: Array,
  clip_low: Number,
  clip_high: Number,
  dual_clip: Number | None = None,
  factor: Number | None = None,
) -> tuple[Array, Clipped]:
  """Returns clipped ratios, and masks of the ratios replaced by a bound.

  The clipped ratio is the factor of A in min(r A, clip(r, 1 − clip_low, 1 + clip_high) A). It is
  at most 1 + clip_high where A > 0, and at least 1 − clip_low where A < 0. If a dual clip c is set,
  it is also at most c where A < 0 (arXiv:1912.09729). The code compares log-ratios, which
  are more exact than ratios near 1.

  Args:
    ratio: r.
    log_ratio: log r, without gradient.
    advantage: A.
    dual_clip: c. None means no dual clip.
    factor: factor of both ranges, of the ratio's shape (`clip_ranges.length_factor`). None means 1.
  """
  clip_low = checks.bound(clip_low, "clip_low", ratio)
  clip_high = checks.bound(clip_high, "clip_high", ratio)
  if factor is not None:
    clip_low, clip_high = clip_low * factor, clip_high * factor
  high = (advantage > 0) & (log_ratio > jnp.log1p(clip_high))
  low = (advantage < 0) & (log_ratio < jnp.log1p(-jnp.minimum(clip_low, 1)))
  ratio = jnp.where(high, 1 + clip_high, jnp.where(low, 1 - clip_low, ratio))
  if dual_clip is None:
    return ratio, Clipped(high, low)
  dual_clip = checks.bound(dual_clip, "dual_clip", ratio, least=1)
  dual = (advantage < 0) & (log_ratio > jnp.log(dual_clip))
  return jnp.where(dual, dual_clip, ratio), Clipped(high, low, dual)


def either(clipped_BX: Clipped, tokens: Tokens) -> Array:
  """Returns the mask of tokens clipped by any bound."""
  flags = [flag_BX for flag_BX in clipped_BX if flag_BX is not None]
  return functools.reduce(jnp.logical_or, flags) & tokens.mask_BT


def update_metrics(batch: Batch, log_ratio: Array, live: Array, clipped_BX: Clipped) -> Metrics:
  """Computes metrics of a clipped objective: ratios and clip fractions.

  `clip_fraction/token` is the number of tokens clipped by the upper or lower bound, divided by the
  number of all tokens. `clip_fraction/sequence` is the mean of the responses' own fractions.

  Args:
    log_ratio: log-ratios of the loss, by token, segment or response.
    live: mask of valid log-ratios.
  """
  tokens = batch.tokens
  metrics = batch.metrics | ratio_metrics(log_ratio, live)
  sides = {"": clipped_BX.high | clipped_BX.low}
  sides |= {f"/{side}": flag for side, flag in clipped_BX._asdict().items() if flag is not None}
  for side, flag_BX in sides.items():
    flag_BX = flag_BX.astype(tokens.length_BU.dtype)
    metrics[f"clip_fraction/token{side}"] = Mean(tokens.sums(flag_BX).sum(), tokens.number())
    metrics[f"clip_fraction/sequence{side}"] = Mean(tokens.means(flag_BX).sum(), tokens.responses())
  return metrics


def ratio_metrics(log_ratio: Array, live: Array) -> Metrics:
  """Computes moments and extremes of ratios, and the mean |r − 1|."""
  log_ratio = stop_gradient(jnp.where(live, log_ratio, 0))
  smallest = jnp.where(live, log_ratio, jnp.inf).min()
  largest = jnp.where(live, log_ratio, -jnp.inf).max()
  deviation = _deviation(log_ratio)
  total, number = deviation.sum(), live.sum(dtype=log_ratio.dtype)
  return {
    "ratio/mean": Mean(number + total, number),
    "ratio/min": Min(jnp.where(number > 0, ratios.bounded_exp(smallest), jnp.inf)),
    "ratio/max": Max(jnp.where(number > 0, ratios.bounded_exp(largest), -jnp.inf)),
    "ratio/std": Std(number, total, (deviation**2).sum()),
    "ratio/deviation": Mean(abs(deviation).sum(), number),
  }


def _deviation(log_ratio: Array) -> Array:
  """Returns r − 1, at most 1e15 to keep its square finite."""
  return jnp.minimum(ratios.bounded_expm1(log_ratio), 1e15)


def _drift(log_ratio_BT: Array, tokens: Tokens) -> Metrics:
  """Computes metrics of the distance from the old policy.

  `kl/k1` and `kl/k3` are estimates of KL(π_old‖π_θ) (kl.py). `ratio/tail` is the share of tokens
  with a ratio above 2 or below 1/2. `ratio/effective_length` is the mean over responses of
  the number of tokens that carry the log-ratio (`clip_ranges.effective_length`). This metric
  ignores log-ratios as small as rounding errors, and responses with only such log-ratios.
  """
  k3_BT = _deviation(log_ratio_BT) - log_ratio_BT
  rounding = _ROUNDING * jnp.finfo(log_ratio_BT.dtype).eps
  moved_BT = jnp.where(abs(log_ratio_BT) > rounding, log_ratio_BT, 0)
  size_BU = clip_ranges.effective_length(moved_BT, tokens.mask_BT, tokens.response_BT)
  return {
    "ratio/effective_length": Mean(size_BU.sum(), (size_BU > 0).sum(dtype=size_BU.dtype)),
    "ratio/tail": ratios.tail(log_ratio_BT, tokens.number()),
    "kl/k1": Mean(-log_ratio_BT.sum(), tokens.number()),
    "kl/k3": Mean(k3_BT.sum(), tokens.number()),
  }


def _penalty(
  logp_BT: Array,
  old_logp_BT: Array,
  tokens: Tokens,
  *,
  ref_logp_BT: ArrayLike | None = None,
  sampler_logp_BT: ArrayLike | None = None,
  kl: Literal["k1", "k2", "k3", "k3_weighted"] = "k3",
  kl_coef: Number = 0.0,
  kl_mask_BT: ArrayLike | None = None,
  entropy_BT: ArrayLike | None = None,
  entropy_coef: Number = 0.0,
) -> tuple[Array | None, Metrics]:
  """Computes kl_coef · KL − entropy_coef · entropy of each token, and metrics.

  The penalty is None if neither `ref_logp_BT` nor `entropy_BT` is set (`Options`).
  """
  checks.numbers(kl_coef=kl_coef, entropy_coef=entropy_coef)
  penalty_BT: Array | None = None
  metrics: Metrics = {}
  dtype = logp_BT.dtype
  if ref_logp_BT is None:
    checks.require(kl_coef == 0, "kl_coef needs ref_logp_BT")
  else:
    if kl not in _KL:
      raise ValueError(f"kl must be one of {', '.join(_KL)}, got {kl!r}")
    ref_logp_BT = checks.tokens(ref_logp_BT, "ref_logp_BT", tokens.mask_BT, dtype)
    if sampler_logp_BT is not None:
      sampler_logp_BT = checks.tokens(sampler_logp_BT, "sampler_logp_BT", tokens.mask_BT, dtype)
      old_logp_BT = stop_gradient(sampler_logp_BT)
    kl_BT = _KL[kl](logp_BT, ref_logp_BT, old_logp_BT)
    penalty_BT = jnp.asarray(kl_coef, dtype) * kl_BT
    if kl_mask_BT is not None:
      kl_mask_BT = checks.mask(kl_mask_BT, "kl_mask_BT", tokens.mask_BT.shape)
      penalty_BT = jnp.where(kl_mask_BT, penalty_BT, 0)
    metrics[f"kl_ref/{kl}"] = Mean(stop_gradient(kl_BT).sum(), tokens.number())
  if entropy_BT is None:
    checks.require(entropy_coef == 0, "entropy_coef needs entropy_BT")
  else:
    entropy_BT = checks.tokens(entropy_BT, "entropy_BT", tokens.mask_BT, dtype)
    entropy_BT = ratios.difference(entropy_BT, 0)
    bonus_BT = jnp.asarray(entropy_coef, dtype) * entropy_BT
    penalty_BT = -bonus_BT if penalty_BT is None else penalty_BT - bonus_BT
    metrics["entropy"] = Mean(stop_gradient(entropy_BT).sum(), tokens.number())
  return penalty_BT, metrics
