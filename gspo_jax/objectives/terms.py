"""Parts that the policy losses share: how they are declared, their arguments, the clip gate, the
penalties and the metrics."""

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

_ROUNDING = 256  # Units in the last place of 1: difference of two computations of a log-prob.
_KL: dict[str, Callable[[Array, Array, Array], Array]] = {  # (log π, log π_ref, log π_old) -> KL
  "k1": lambda logp_BT, ref_logp_BT, _: kl_k1(logp_BT, ref_logp_BT),
  "k2": lambda logp_BT, ref_logp_BT, _: kl_k2(logp_BT, ref_logp_BT),
  "k3": lambda logp_BT, ref_logp_BT, _: kl_k3(logp_BT, ref_logp_BT),
  "k3_weighted": kl_k3_weighted,
}

# Levels of importance correction (corrections.py). The first two need a ratio or weight per
# response, all three a ratio per token.
BY_RESPONSE = ("geometric", "sequence")
BY_TOKEN = ("token", "sequence", "geometric")

Sums = tuple[Mean, Metrics, Array]  # The loss undivided, its metrics, and clipped [B, T].


class Options(TypedDict, total=False):
  """The keyword arguments that every policy loss takes."""

  weight: Array  # [B] or [B, T], multiplies the objective: truncated_weight and its like
  response_BT: Array  # ids in [0, T): the response of a packed row that a token belongs to
  ref_logp_BT: Array  # log-probabilities of a reference policy
  # Log-probabilities of the policy that sampled, for "k3_weighted" (default: `old_logp_BT`).
  sampler_logp_BT: Array
  # The estimate of KL(π_θ‖π_ref) to penalise: "k1", "k2", "k3" (default) or "k3_weighted" (kl.py).
  kl: str
  kl_coef: float  # its factor (default 0)
  kl_mask_BT: Array  # 1 on the tokens that are penalised (default: all); means stay over all
  entropy_BT: Array  # the policy's entropy at each token
  entropy_coef: float  # the factor of the reward for it (default 0)


Arguments = ParamSpec("Arguments")


class PolicyLoss(Protocol[Arguments]):
  """A declared loss. Called, it returns (scalar, dict of scalars); a trainer reads of it these."""

  __name__: str
  sums: Callable[Arguments, tuple[Mean, Metrics]]  # undivided (reductions.py)
  # bool [B, T]: tokens whose ratio a bound has replaced, so that they have no gradient (in
  # `cispo_loss`: a bounded one).
  clipped: Callable[Arguments, Array]
  undivided: Callable[Arguments, Sums]  # both of them
  arguments: tuple[str, ...]  # names of all its arguments
  options: Mapping[str, Any]  # published defaults of its numbers and words, KL's and entropy's too
  choices: Mapping[str, tuple[str, ...]]  # words allowed for those that are words
  by_token: bool  # Advantages may differ between tokens of a response.
  levels: tuple[str, ...]  # Allowed levels of importance correction, its own first.
  advantage: str  # Kind of advantages in its publication, named as in a configuration.
  recorded: bool  # May learn from responses of another policy.
  to_reference: bool  # Ratios are to a fixed reference policy, not to the old one.

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
  """Declares a `PolicyLoss`.

  Decorates a function to `Sums`. It takes logp_BT, old_logp_BT, advantage_B or advantage_BT, and
  mask_BT, then arrays of `Options` by name, `**options` for all of them, and numbers or words with
  defaults: its options.

  Args:
    levels: levels of importance correction, its own first. None means all that suit its advantages,
      or none if it takes no `weight`.
    by_token: whether advantages may differ between tokens of a response. None means that the third
      argument is called `advantage_BT`.
    advantage: name of its estimator of advantages.
    recorded: whether it may learn from responses of another policy.
    to_reference: whether its ratios are to a fixed reference policy.

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
    shared = len(named) < len(parameters)  # It takes **options.
    names = (*named, *(Options.__annotations__ if shared else ()))
    tokens = "advantage_BT" in named if by_token is None else by_token
    suitable = (BY_TOKEN if tokens else BY_RESPONSE) if "weight" in names else ()
    loss = _with_forms(function, names)
    parameters += inspect.signature(_penalty).parameters.values() if shared else ()
    options = [p for p in parameters if p.default is not p.empty and _is_option(p.name)]
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
  """Adds the forms `sums`, `clipped` and `undivided`."""

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


def _is_option(name: str) -> bool:
  return "_BT" not in name and name != "weight"


class Batch(NamedTuple):
  """A loss's arguments as it uses them: float32 or wider, 0 where masked, constants detached.

  X is T, or 1 for what a whole row has in common.
  """

  tokens: Tokens
  logp_BT: Array
  log_ratio_BT: Array
  advantage_BX: Array
  weight_BX: Array
  penalty_BT: Array | None  # KL and entropy, added to each token's loss
  metrics: Metrics  # those that do not depend on the objective


class Clipped(NamedTuple):
  """Flags where the upper, lower or dual bound took the ratio's place."""

  high: Array
  low: Array
  dual: Array | None = None


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
  """Checks a loss's arguments.

  by_token: whether advantage and weight may differ between the tokens of a response; if not, they
    are [B], and [B,T] in packed rows alone.
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
  """−objective + penalty at each token."""
  loss_BT = -batch.weight_BX * objective_BT
  return ratios.finite(loss_BT if batch.penalty_BT is None else loss_BT + batch.penalty_BT)


def token_sums(
  batch: Batch,
  objective_BT: Array,
  clipped_BX: Clipped,
  aggregate: str,
  max_length: Number | None = None,
) -> Sums:
  """Sums of a loss with a ratio for each token."""
  metrics = update_metrics(batch, batch.log_ratio_BT, batch.tokens.mask_BT, clipped_BX)
  loss_BT = token_loss(batch, objective_BT)
  total = aggregation.aggregate_tokens(loss_BT, batch.tokens, aggregate, max_length)
  return total, metrics, either(clipped_BX, batch.tokens)


def mean_of_responses(batch: Batch, loss_BU: Array, factor_BU: Number = 1.0) -> Mean:
  """The mean of responses' losses with penalties, times `factor_BU`."""
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
  """Clipped ratio of A in min(r A, clip(r, 1 − clip_low, 1 + clip_high) A).

  It is 1 + clip_high where A > 0 and r is above that, 1 − clip_low where A < 0 and r is below that,
  and r elsewhere. A dual clip c takes max(·, c A) of it for A < 0: c where r is above c
  (arXiv:1912.09729). Compared in log space, where a range of 3e-4 keeps its digits. `factor`, of
  the ratio's shape, multiplies both ranges (`clip_ranges.length_factor`); None: 1.
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
  """Tokens clipped by any of the bounds, bool [B, T]."""
  flags = [flag_BX for flag_BX in clipped_BX if flag_BX is not None]
  return functools.reduce(jnp.logical_or, flags) & tokens.mask_BT


def update_metrics(batch: Batch, log_ratio: Array, live: Array, clipped_BX: Clipped) -> Metrics:
  """Metrics of a clipped objective: `live` ratios, and clip fractions of tokens and responses.

  A response counts by the share of its clipped tokens.
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
  """Moments and extremes of an objective's ratios (sequences, segments or tokens)."""
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
  """r − 1, at most 1e15 for a finite square. No trust region is that wide."""
  return jnp.minimum(ratios.bounded_expm1(log_ratio), 1e15)


def _drift(log_ratio_BT: Array, tokens: Tokens) -> Metrics:
  """Distance of the policy from the old one, by tokens.

  k1 and k3 (kl.py) of KL(π_old‖π_θ), and the share of tokens with a ratio above 2 or below 1/2. And
  over how many tokens of a response its log-ratio is spread, in the mean over responses that moved
  by more than rounding: the spread of that is another with every layout of a batch.
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
  """kl_coef · KL − entropy_coef · entropy per token, None if both are 0, and metrics."""
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
