"""Losses, estimators of advantages and their options, by name."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import Array

from gspo_jax import objectives as O
from gspo_jax.objectives import checks
from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  INT32,
  Name,
  NonNegativeFloat,
  PositiveFloat,
  PositiveInt,
  Range,
  key,
)
from gspo_jax.system import user_code

LOSS_NAMES = Name((*O.POLICY_LOSSES,))
ESTIMATOR_NAMES = Name((*O.ESTIMATORS,))

# Types of options by name. Other options are words or non-negative numbers.
KINDS = dict(
  clip_low=ranges.Fraction,
  clip_high=Annotated[float, Range(0, 1000)],
  dual_clip=Annotated[float, Range(1, 1000, excluded=(1,))],
  entropy_coef=Annotated[float, Range(-1000, 1000)],
  tau_pos=PositiveFloat,
  tau_neg=PositiveFloat,
  k_pos=PositiveFloat,
  lambda_pos=PositiveFloat,
  k_neg=PositiveFloat,
  lambda_neg=PositiveFloat,
  beta=PositiveFloat,
  soft_value=Annotated[float, Range(-1e6, 1e6)],
  clip_length=PositiveFloat,
  clip_exponent=Annotated[float, Range(0, 10)],
  length_exponent=Annotated[float, Range(0, 10)],
  segment_unit=Literal["turn", "step", "line", "tokens"],
  segment_tokens=PositiveInt,
  segment_delimiters=tuple[str, ...],
)

# Meanings and units of all options.
MEANINGS = dict(
  clip_low="ratios below 1 - clip_low are clipped. Exceptions: gmpo clips log-ratios below "
  "-clip_low. dppo masks tokens with Â < 0, a ratio below 1 and a divergence above clip_low.",
  clip_high="ratios above 1 + clip_high are clipped. Exceptions: gmpo clips log-ratios above "
  "clip_high. dppo masks tokens with Â > 0, a ratio above 1 and a divergence above clip_high.",
  dual_clip="lower bound of the objective for Â < 0, as a multiple of Â; unset: no bound",
  aggregate="sequence: mean over responses of means over their tokens | segment: mean over all "
  "segments of means over their tokens | token: mean over all tokens | constant: sum over all "
  "tokens, divided by the number of responses times sampling.max_new_tokens",
  divergence="divergence of dppo, between the old and the current probabilities of two events, the "
  "sampled token and any other token. tv: total variation | kl: KL divergence",
  entropy_coef="factor of the entropy bonus",
  kl="estimator of the KL divergence from the reference policy, the policy before RL. k3_weighted "
  "is right for responses of older policies, too.",
  kl_coef="factor of the KL penalty in the loss; 0: no penalty",
  tau_pos="temperature of sapo's gate, for Â > 0",
  tau_neg="temperature of sapo's gate, for Â < 0",
  k_pos="k in vespo's weight W^k exp(λ (1 - W)) of a response with ratio W, for Â ≥ 0",
  lambda_pos="λ in vespo's weight W^k exp(λ (1 - W)) of a response with ratio W, for Â ≥ 0",
  k_neg="k in vespo's weight W^k exp(λ (1 - W)) of a response with ratio W, for Â < 0",
  lambda_neg="λ in vespo's weight W^k exp(λ (1 - W)) of a response with ratio W, for Â < 0",
  beta="β, reward that balances a log-ratio of 1. The ratio is to the reference policy in spo, and "
  "to the old policy in opmd.",
  soft_value="soft value Q̂_0 of every prompt, for spo; unset: estimated from each group",
  clip_length="length in tokens at which the clip range is exactly clip_low and clip_high",
  clip_exponent="exponent γ of the factor (clip_length / length)^γ on the clip range of a response "
  "(of a segment, for the loss segment); 0: no factor",
  length_exponent="exponent α. The sum of the log-ratios of a response or segment is divided by "
  "length^α. With 1, this is their mean, as in the GSPO paper.",
  segment_unit="part of a response with its own ratio, for the loss segment",
  segment_tokens="number of tokens of a segment, if segment_unit=tokens",
  segment_delimiters="texts that end a step, if segment_unit=step; unset: tags of the chat "
  "template",
)


# Options that compiled programs take as arguments. If an option is 0, it is a constant instead, and
# programs omit its term. For a user's loss, only the options in SHARED_DYNAMIC are arguments.
SHARED_DYNAMIC = ("clip_low", "clip_high", "kl_coef", "entropy_coef")
DYNAMIC = (
  *SHARED_DYNAMIC,
  *("clip_length", "clip_exponent", "dual_clip"),
  *("tau_pos", "tau_neg", "beta", "k_pos", "lambda_pos", "k_neg", "lambda_neg"),
)

# Arguments of a loss that the update computes, after the first four. All other arguments are
# options.
COMPUTED = ("max_length", "segment_BT", "ref_logp_BT", "sampler_logp_BT", "entropy_BT", "weight")
# Arguments of an estimator that are not options.
ESTIMATOR_INPUTS = ("valid_PG", "right_from")
# Types of user functions' options without an annotated range.
_USER_KINDS = {
  bool: bool,
  int: Annotated[int, Range(-INT32, INT32)],
  float: Annotated[float, Range(-1e9, 1e9)],
  str: str,
}


@functools.cache
def find_loss(name: str) -> O.PolicyLoss:
  """Returns a loss by its name.

  A user's loss has the name `package.module:function`. If the function lacks the
  decorator `objectives.policy_loss`, the decorator is applied to it.

  Raises:
    ValueError: the function cannot be imported, or its arguments are invalid.
  """
  if name in O.POLICY_LOSSES:
    return O.POLICY_LOSSES[name]
  label = f"objective.name={name!r}"
  function = user_code.load(name, label)
  parameters = [*_parameters(function, label).values()]
  if len(parameters) < 4 or any(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[:4]):
    raise ValueError(
      f"{label}: the first arguments of {name}{user_code.place(name)} must be "
      "logp_BT, old_logp_BT, advantage_B or advantage_BT, and mask_BT, in this order; its "
      f"arguments are {', '.join(p.name for p in parameters) or 'none'}"
    )
  loss = function if hasattr(function, "undivided") else O.policy_loss()(function)
  for p in parameters[4:]:
    missing = p.default is p.empty and p.name not in loss.options
    if (
      (missing or p.name.endswith("_BT")) and p.name not in COMPUTED and p.kind is not p.VAR_KEYWORD
    ):
      raise ValueError(
        f"{label}: argument {p.name} is neither computed by the update ({', '.join(COMPUTED)}) nor "
        "an option, which has a default and no suffix _BT; change or remove the argument"
      )
  return loss


@functools.cache
def find_estimator(name: str) -> O.Estimator:
  """Returns an estimator by its name.

  A user's estimator has the name `package.module:function`.

  Raises:
    ValueError: the function cannot be imported, or its arguments are invalid.
  """
  if name in O.ESTIMATORS:
    return O.ESTIMATORS[name]
  label = f"objective.advantage={name!r}"
  function = user_code.load(name, label)
  parameters = _parameters(function, label)
  if "valid_PG" not in [*parameters][1:]:
    raise ValueError(
      f"{label}: the arguments of {name}{user_code.place(name)} must be reward_PG and "
      "valid_PG, then options with defaults; its arguments are "
      f"{', '.join(parameters) or 'none'}"
    )
  options = tuple(option for option in [*parameters][1:] if option != "valid_PG")

  @functools.wraps(function)
  def valid_advantages(reward_PG: Array, *, valid_PG: Array, **values: Any) -> Array:
    advantage_PG = function(reward_PG, valid_PG=valid_PG, **values)
    if getattr(advantage_PG, "shape", None) != jnp.shape(reward_PG):
      raise TypeError(
        f"{name} returned {checks.describe(advantage_PG)}, expected an array [P, G] = "
        f"{list(jnp.shape(reward_PG))}"
      )
    return jnp.where(valid_PG > 0, advantage_PG, 0)

  return O.Estimator(name, valid_advantages, options, beside=O.ESTIMATORS["std"].beside)


def estimator_options(name: str | None) -> dict[str, Any]:
  """Returns options of a user's estimator, with defaults; {} for a built-in estimator."""
  if name is None or name in O.ESTIMATORS or name not in ESTIMATOR_NAMES:
    return {}
  parameters = inspect.signature(find_estimator(name).of_group).parameters
  return {
    option: parameters[option].default
    for option in find_estimator(name).options
    if option not in ESTIMATOR_INPUTS
  }


def option_kinds(loss: str, estimator: str | None) -> dict[str, Any]:
  """Returns types of options of a user's loss and estimator, by name."""
  kinds: dict[str, Any] = {}
  if loss in LOSS_NAMES and loss not in O.POLICY_LOSSES:
    function = find_loss(loss)
    names = inspect.signature(function).parameters.keys() - {*COMPUTED}
    options = {name: value for name, value in function.options.items() if name in names}
    kinds |= _option_kinds(function, options, f"objective.name={loss!r}")
  if options := estimator_options(estimator):
    function, label = find_estimator(estimator).of_group, f"objective.advantage={estimator!r}"
    kinds |= _option_kinds(function, options, label)
  return kinds


def _option_kinds(function: Callable, options: Mapping[str, Any], label: str) -> dict[str, Any]:
  """Types of options by their annotations, else by their defaults."""
  try:
    hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
  except (NameError, TypeError):  # An annotation of names unknown at run time.
    hints = {}
  kinds = {name: _kind(hints.get(name), value) for name, value in options.items()}
  for name in [name for name, kind in kinds.items() if kind is None]:
    raise ValueError(
      f"{label}: {name}={options[name]!r} cannot be an option: a default must be a number, a text, "
      "True or False, a tuple of these, or None with an annotation like float | None"
    )
  return kinds


def _kind(annotation: Any, default: Any) -> Any:
  """Type of an option; None if annotation and default are unsupported."""
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):  # An optional value.
    annotation = typing.get_args(annotation)[0]
  if typing.get_origin(annotation) in (Literal, Annotated):
    return annotation
  if isinstance(default, tuple):
    entry = _USER_KINDS.get(type(default[0]) if default else float)
    return entry and tuple[entry, ...]
  return _USER_KINDS.get(annotation if default is None else type(default))


def _parameters(function: Callable, label: str) -> Mapping[str, inspect.Parameter]:
  try:
    return inspect.signature(function).parameters
  except (TypeError, ValueError) as error:
    raise ValueError(f"{label}: {error}") from error


@functools.cache
def options_of(name: str, advantage: str | None = None) -> Mapping[str, Any]:
  """Options of loss `name` in a configuration, with their published defaults.

  `max_length` is excluded, since the key `sampling.max_new_tokens` sets its value.

  Args:
    name: name of the loss.
    advantage: name of the estimator. A user's estimator adds its options, and None adds none.
  """
  loss = find_loss(name)
  options = {key: default for key, default in loss.options.items() if key != "max_length"}
  if "segment_BT" in inspect.signature(loss).parameters:
    options |= dict(segment_unit="turn", segment_tokens=None, segment_delimiters=None)
  if loss.advantage == "soft":
    options |= dict(soft_value=None)
  return types.MappingProxyType(options | estimator_options(advantage))


def with_options(cls: type) -> type:
  """Adds a field for every option of every loss. Its default is None."""
  for option in every_option():
    words = [word for loss in O.POLICY_LOSSES.values() for word in loss.choices.get(option, ())]
    kind = Literal[*dict.fromkeys(words)] if words else KINDS.get(option, NonNegativeFloat)
    cls.__annotations__[option] = kind | None
    setattr(cls, option, key(None, MEANINGS.get(option, "an option of the loss")))
  return cls


@functools.cache
def every_option() -> tuple[str, ...]:
  """Names of the options of all losses, each once."""
  return tuple(dict.fromkeys(option for name in O.POLICY_LOSSES for option in options_of(name)))
