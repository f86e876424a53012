"""Section `objective`: the loss, its options and the estimator of advantages."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from gspo_jax import objectives as O
from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import (
  FractionBelowOne,
  NonNegativeFloat,
  PositiveFloat,
  PositiveInt,
  Range,
  key,
)
from gspo_jax.system.text import did_you_mean


@dataclasses.dataclass(frozen=True)
class AdaptiveClipConfig:
  """Clip ranges adapted to a target share of clipped tokens. docs/objectives.md"""

  target: FractionBelowOne = key(0.0, "share of clipped tokens; 0: fixed ranges")
  gain: PositiveFloat = key(1.0, "change of log range, per iteration and distance to the target")


FIXED = AdaptiveClipConfig()


LOSSES = O.POLICY_LOSSES


CORRECTIONS = dict(truncated=O.truncated_weight, masked=O.masked_weight)


# Types of options; the others are words or non-negative numbers.
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

# Units and reasons of all options.
REASONS = dict(
  clip_low="distance of ratios below 1; gmpo: of log-ratios; dppo: of divergences",
  clip_high="distance above 1, as clip_low",
  dual_clip="for Â < 0: lower bound of the objective, as a multiple of Â",
  aggregate="mean of responses' means, mean of tokens, or sum over a constant",
  divergence="dppo: binary tv or kl of the sampled token against all others",
  entropy_coef="factor of an entropy bonus",
  kl="estimator of the divergence from the reference; k3_weighted: for older policies' responses",
  kl_coef="factor of the divergence from the policy before RL",
  tau_pos="sapo: temperature of its gate for Â > 0",
  tau_neg="sapo: temperature of its gate for Â < 0",
  k_pos="vespo: decay of a response's weight for ratios below 1 and Â ≥ 0",
  lambda_pos="vespo: decay for ratios above 1 and Â ≥ 0",
  k_neg="vespo: as k_pos, for Â < 0",
  lambda_neg="vespo: as lambda_pos, for Â < 0",
  beta="reward per log-ratio; spo: ratio to the reference; opmd: to the old policy",
  soft_value="spo: Q̂_0 of all prompts; unset: estimated per group",
  clip_length="tokens of a response with exactly clip_low and clip_high",
  clip_exponent="exponent of (clip_length / tokens), a factor of the ranges; 0: equal ranges",
  length_exponent="exponent of the length in the denominator of log-ratios; 1: the paper's mean",
  segment_unit="segment: unit with one ratio",
  segment_tokens="tokens of a segment, for segment_unit=tokens",
  segment_delimiters="ends of a step; unset: tags of the chat template",
)


# Arguments of compiled programs. An option of 0 is static: its term is left out.
DYNAMIC = (
  *("clip_low", "clip_high", "clip_length", "clip_exponent", "dual_clip", "kl_coef"),
  *("entropy_coef", "tau_pos", "tau_neg", "beta", "k_pos", "lambda_pos", "k_neg", "lambda_neg"),
)


@functools.cache
def options_of(name: str) -> Mapping[str, Any]:
  """Options of loss `name` in a configuration, with their published defaults.

  The option `max_length` is the key `sampling.max_new_tokens`, and is left out.
  """
  loss = LOSSES[name]
  options = {key: default for key, default in loss.options.items() if key != "max_length"}
  if "segment_BT" in inspect.signature(loss).parameters:
    options |= dict(segment_unit="turn", segment_tokens=None, segment_delimiters=None)
  if loss.advantage == "soft":
    options |= dict(soft_value=None)
  return types.MappingProxyType(options)


def with_options(cls: type) -> type:
  """Adds a field for every option of a loss, None by default."""
  for option in every_option():
    words = [word for loss in LOSSES.values() for word in loss.choices.get(option, ())]
    kind = Literal[*dict.fromkeys(words)] if words else KINDS.get(option, NonNegativeFloat)
    cls.__annotations__[option] = kind | None
    setattr(cls, option, key(None, REASONS.get(option, "an option of the loss")))
  return cls


@functools.cache
def every_option() -> tuple[str, ...]:
  """Names of the options of all losses, each once."""
  return tuple(dict.fromkeys(option for name in LOSSES for option in options_of(name)))


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
  """Importance weights against the mismatch of trainer and sampler: π_old over π of the sampler.
  Unset: `level` is the loss's own, the others as in `objectives`."""

  name: Literal["none", "truncated", "masked"] = key(
    "none", "truncated: TIS | masked: MIS, and IcePop at level token"
  )
  level: Literal["token", "sequence", "geometric"] | None = key(None, "unit with one weight")
  cap: PositiveFloat | None = key(None, "truncated: upper bound of weights")
  low: NonNegativeFloat | None = key(None, "masked: smaller weights become 0")
  high: NonNegativeFloat | None = key(None, "masked: larger weights become 0")


@dataclasses.dataclass(frozen=True)
@with_options  # clip_low, clip_high, kl_coef, ...
class ObjectiveConfig:
  """The loss and its options. Unset options have their published values, or no effect.
  `objective.tuned` replaces published values in a file, {loss: {option: value}}.
  docs/objectives.md"""

  name: Literal[*LOSSES] = key("gspo", "the loss")
  old_logp: Literal["sampler", "recompute", "behaviour"] = key(
    "sampler",
    "sampler: §5.4, saves a pass | recompute: ratios start at exactly 1 | behaviour: as sampler, "
    "and a pass measures the mismatch with the trainer, for external engines",
  )
  load_balance_coef: NonNegativeFloat = key(
    0.0, "router auxiliary loss; none in RL: without rewards Adam would follow it alone"
  )
  replay: Literal["none", "R2", "R3"] = key(
    "none", "Routing Replay: R2: experts of the recomputation | R3: experts of the sampler"
  )
  volatility: bool = key(False, "record the sampler's experts, for router/volatility/*")
  advantage: Literal[*O.ESTIMATORS] | None = key(
    None, "estimator of advantages; unset: by critic, teacher, ..., else the loss's published one"
  )
  kl_groups: Literal["all", "mixed"] = key("all", "mixed: no kl_coef for groups without advantages")
  reward_kl_coef: NonNegativeFloat = key(
    0.0, "factor of a response's Σ log π_old/π_ref, subtracted from its reward"
  )
  correction: CorrectionConfig = CorrectionConfig()
  off_policy_threshold: PositiveFloat | None = key(
    None,
    "largest divergence of responses with Â < 0, nats per token; others are masked; unset: no mask",
  )
  adaptive_clip: AdaptiveClipConfig = FIXED

  def __post_init__(self):
    ranges.check(self, "objective")
    ranges.check(self.correction, "objective.correction")
    ranges.check(self.adaptive_clip, "objective.adaptive_clip")
    for option, value in self.options().items():
      if option in self.loss.choices:
        _require_one_of(option, value, self.loss.choices[option], f", which {self.name} takes")
    ends, by_tokens = self.segment_delimiters, self.segment_unit == "tokens"
    wrong = [
      (
        by_tokens != (self.segment_tokens is not None),
        "{segment_unit}, {segment_tokens}: segments of so many tokens need both, with "
        "segment_unit='tokens'",
      ),
      (
        ends is not None and (self.segment_unit != "step" or not all(ends) or not ends),
        "{segment_delimiters}, {segment_unit}: delimiters, none of them empty, go with "
        "segment_unit='step'",
      ),
      (
        self.clip_exponent and self.clip_length is None,
        "{clip_exponent} needs objective.clip_length: the tokens of a response with the ranges "
        "objective.clip_low and clip_high",
      ),
      (
        self.adaptive_clip.target and not self.clip_range,
        f"{{adaptive_clip.target}}: there is no clip range to move; {self.name} has none, or "
        "clip_low and clip_high are 0",
      ),
      (
        self.replay == "R2" and self.old_logp == "sampler",
        "{replay} replays the experts of the recomputation pass, and {old_logp} makes none: set "
        "it to recompute, or replay to R3",
      ),
    ]
    ranges.refuse(self, "objective", wrong)
    self._check_correction()

  def _check_correction(self) -> None:
    correction, options = self.correction, _correction_options(self)
    for option, value in vars(correction).items():
      if option != "name" and value is not None:
        name = f"correction.{option}={value!r}: correction {correction.name!r}"
        _require_option(option, options, name)
    if not options:
      return
    levels = self.loss.levels
    _require_one_of("correction.level", options["level"], levels, f", which {self.name} takes")
    wrong = [
      (
        options.get("high", 0) < options.get("low", 0),
        f"objective.correction.high={options.get('high')} is smaller than "
        f"objective.correction.low={options.get('low')}",
      ),
      (
        self.old_logp == "sampler",
        "{correction.name} weighs by the trainer's old log-probs against the sampler's, and "
        "{old_logp} takes the two to be equal: set it to recompute",
      ),
      (
        self.old_logp == "behaviour" and correction.name == "truncated",
        "{correction.name} multiplies by a weight already in the ratio of {old_logp}: set "
        "correction.name to masked or none, or old_logp to recompute",
      ),
    ]
    ranges.refuse(self, "objective", wrong)

  @property
  def loss(self) -> Callable:
    return LOSSES[self.name]

  @property
  def advantage_kind(self) -> str:
    """Name of the estimator from a group's rewards, by default the loss's."""
    named = O.ESTIMATORS.get(self.advantage)
    return named.name if named is not None and named.of_group else self.loss.advantage

  @property
  def needs_reference(self) -> bool:
    """Whether the run keeps the policy before RL."""
    return bool(self.kl_coef or self.reward_kl_coef) or self.loss.to_reference

  def options(self) -> dict[str, Any]:
    """Set options of the loss; raises ValueError for options of other losses."""
    values = {key: getattr(self, key) for key in every_option() if getattr(self, key) is not None}
    for option, value in values.items():
      _require_option(option, options_of(self.name), f"{option}={value!r}: {self.name}")
    return values

  @property
  def clip_range(self) -> float:
    """The smaller of clip_low and clip_high; 0 if the loss has neither."""
    options = options_of(self.name) | self.options()
    sides = [options.get(key) for key in ("clip_low", "clip_high")]
    return min((side for side in sides if side), default=0.0)

  def hyperparameters(self) -> dict[str, Any]:
    """Arguments of compiled programs, for configurations of equal `static`."""
    c = self.correction
    values = {k: v for k, v in self.options().items() if v and k in DYNAMIC}
    values |= {k: v for k, v in vars(c).items() if k in ("cap", "low", "high") and v is not None}
    if self.off_policy_threshold is not None:
      values |= dict(off_policy_threshold=self.off_policy_threshold)
    return values | (dict(clip_range=self.clip_range) if self.clip_range else {})

  @property
  def static(self) -> "ObjectiveConfig":
    """Static part of compiled programs: each hyperparameter is 1, or 2 for a range without 1."""
    ones = dict.fromkeys(self.hyperparameters(), 1.0)
    ones.pop("clip_range", None)
    if "dual_clip" in ones:
      ones["dual_clip"] = 2.0
    weights = {k: ones.pop(k) for k in ("cap", "low", "high") if k in ones}
    correction = dataclasses.replace(self.correction, **weights)
    # Adaptive ranges move between updates; advantages are computed before them.
    fixed = dict(adaptive_clip=FIXED, reward_kl_coef=0.0)
    return dataclasses.replace(self, **ones, correction=correction, **fixed)

  @property
  def needs_sampler_routing(self) -> bool:
    return self.replay == "R3" or self.volatility


def effective(section: Mapping[str, Any]) -> dict[str, Any]:
  """Fills unset keys of an ObjectiveConfig.

  An option of the loss is the section's own key, else the value of this loss in `tuned` (a mapping
  from loss to options), else the published default. So a loss set by a flag has its own ranges.
  """
  section = dict(section)
  tuned, name, correction = section.pop("tuned", {}), section.get("name"), section.get("correction")
  _check_tuned(tuned)
  if name not in (*LOSSES,):
    return section  # ObjectiveConfig raises.
  defaults, options = dict(advantage=LOSSES[name].advantage) | options_of(name), tuned.get(name, {})
  divergence = section.get("divergence") or options.get("divergence")
  if name == "dppo" and divergence == "kl":  # KL has another threshold.
    defaults |= dict(clip_low=0.05, clip_high=0.05)
  section = _filled(section, defaults | dict(options))
  if isinstance(correction, Mapping):
    section["correction"] = _filled(correction, _correction_defaults(name, correction.get("name")))
  return section


def _check_tuned(tuned: Any) -> None:
  if not isinstance(tuned, Mapping) or not all(isinstance(o, Mapping) for o in tuned.values()):
    raise ValueError(f"config key objective.tuned={tuned!r} must be a section of sections")
  for loss, options in tuned.items():
    _require_one_of("tuned", loss, tuple(LOSSES))
    for option in options:
      _require_option(option, options_of(loss), f"tuned.{loss}.{option}: {loss}")


def _filled(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
  return dict(section) | {k: v for k, v in defaults.items() if section.get(k) is None}


def _correction_defaults(loss: str, correction: str) -> dict[str, Any]:
  """Options of a correction, with their defaults for a loss."""
  if correction not in (*CORRECTIONS,):
    return {}
  parameters = inspect.signature(CORRECTIONS[correction]).parameters
  defaults = {key: parameters[key].default for key in ("cap", "low", "high") if key in parameters}
  return dict(level=LOSSES[loss].levels[0]) | defaults


def _correction_options(config: ObjectiveConfig) -> dict[str, Any]:
  """Options of a configuration's correction, with their defaults."""
  defaults = _correction_defaults(config.name, config.correction.name)
  filled = _filled(vars(config.correction), defaults)
  return {key: filled[key] for key in defaults}


def _require_option(key: str, options: Mapping[str, Any], name: str) -> None:
  if key not in options:
    raise ValueError(f"objective.{name} has no such option; it has {', '.join(options) or 'none'}")


def _require_one_of(key: str, value: Any, allowed: tuple[str, ...], note: str = "") -> None:
  if value not in allowed:
    hint = note or did_you_mean(value, allowed)
    raise ValueError(f"objective.{key}={value!r} is not one of {', '.join(allowed)}{hint}")
