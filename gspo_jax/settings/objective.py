"""Section `objective`: what is maximised, and by which advantages."""

import dataclasses
import inspect
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


@dataclasses.dataclass(frozen=True)
class AdaptiveClipConfig:
  """Ranges that move until so many tokens are clipped. docs/objectives.md"""

  target: FractionBelowOne = key(0.0, "share of tokens; 0: the ranges stay")
  gain: PositiveFloat = key(1.0, "of log range, by iteration and distance to the target")


FIXED = AdaptiveClipConfig()  # ranges that stay


LOSSES = O.POLICY_LOSSES


CORRECTIONS = dict(truncated=O.truncated_weight, masked=O.masked_weight)


# Types of the options that are neither words nor just numbers that are not negative.
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
  clip_low="how far a ratio may be below 1; gmpo: of log-ratios, dppo: of divergences",
  clip_high="how far above 1, in the same way",
  dual_clip="for Â < 0 the objective is at least so many times Â",
  aggregate="loss of a batch: mean of responses' means, of tokens, or a constant denominator",
  divergence="dppo: tv, or kl, of whether a token is this one or another",
  entropy_coef="of a reward for the policy's entropy",
  kl="estimator of the divergence from the reference; k3_weighted: for responses of older policies",
  kl_coef="of a penalty for leaving the policy before RL",
  tau_pos="sapo: temperature of its gate, where Â > 0",
  tau_neg="sapo: the same, where Â < 0",
  k_pos="vespo: how fast the weight of a response falls where its ratio is below 1 and Â ≥ 0",
  lambda_pos="vespo: how fast where its ratio is above 1 and Â ≥ 0",
  k_neg="vespo: as k_pos, where Â < 0",
  lambda_neg="vespo: as lambda_pos, where Â < 0",
  beta="reward that a log-ratio of 1 is worth; spo: to the reference, opmd: to the old policy",
  soft_value="spo: Q̂_0 of all prompts; unset: each group's own",
  clip_length="tokens of a response for which clip_low and clip_high hold",
  clip_exponent="ranges go with (clip_length / tokens) to this power; 0: one for all lengths",
  length_exponent="of the length that a log-ratio is divided by; 1: the paper's mean",
  segment_unit="segment: what has a ratio of its own",
  segment_tokens="of a segment, where that is the unit",
  segment_delimiters="texts that end a step; unset: tags of the chat template",
)


# Options that are arguments of compiled programs, unless they are 0: a term may be left out then.
NUMBERS = ("clip_low", "clip_high", "clip_length", "clip_exponent", "dual_clip", "kl_coef")


NUMBERS += ("entropy_coef", "tau_pos", "tau_neg", "beta")
NUMBERS += ("k_pos", "lambda_pos", "k_neg", "lambda_neg")


def options_of(name: str) -> dict[str, Any]:
  """Options of loss `name` in a configuration, with their published defaults.

  Not `max_length`, which is `sampling.max_new_tokens`.
  """
  loss = LOSSES[name]
  options = {key: default for key, default in loss.options.items() if key != "max_length"}
  if "segment_BT" in inspect.signature(loss).parameters:
    options |= dict(segment_unit="turn", segment_tokens=None, segment_delimiters=None)
  if loss.advantage == "soft":
    options |= dict(soft_value=None)
  return options


def with_options(cls: type) -> type:
  """Adds a field for every option that a loss declares, None where it is unset."""
  for option in every_option():
    words = [word for loss in LOSSES.values() for word in loss.choices.get(option, ())]
    kind = Literal[*dict.fromkeys(words)] if words else KINDS.get(option, NonNegativeFloat)
    cls.__annotations__[option] = kind | None
    setattr(cls, option, key(None, REASONS.get(option, "an option of the loss")))
  return cls


def every_option() -> list[str]:
  """Names of the options of all losses, each once."""
  return list(dict.fromkeys(option for name in LOSSES for option in options_of(name)))


@dataclasses.dataclass(frozen=True)
class CorrectionConfig:
  """Importance weights for a trainer whose probabilities are not the sampler's: π_old of the one
  over π of the other. Unset: `level` is the loss's own, the others as in `objectives`."""

  name: Literal["none", "truncated", "masked"] = key(
    "none", "truncated: TIS | masked: MIS, and IcePop at level token"
  )
  level: Literal["token", "sequence", "geometric"] | None = key(None, "what has a weight")
  cap: PositiveFloat | None = key(None, "truncated: weights are cut off there")
  low: NonNegativeFloat | None = key(None, "masked: weights below are 0")
  high: NonNegativeFloat | None = key(None, "masked: weights above are 0")


@dataclasses.dataclass(frozen=True)
@with_options  # clip_low, clip_high, kl_coef, ...
class ObjectiveConfig:
  """The loss, and its options: unset, each is what the loss was published with, or nothing.
  `objective.tuned` has options that suit the other settings of a file, {loss: {option: value}}, in
  the place of published ones. docs/objectives.md"""

  name: Literal[*LOSSES] = key("gspo", "the loss")
  old_logp: Literal["sampler", "recompute", "behaviour"] = key(
    "sampler",
    "sampler: §5.4, saves a pass | recompute: ratios start at exactly 1 | behaviour: as sampler, "
    "and a pass says by how much the trainer differs, for engines of others",
  )
  load_balance_coef: NonNegativeFloat = key(
    0.0, "router auxiliary loss: none in RL, since Adam would follow it where rewards are silent"
  )
  replay: Literal["none", "R2", "R3"] = key(
    "none", "Routing Replay: R2: of the experts that the recomputation chose, R3: the sampler"
  )
  volatility: bool = key(False, "record experts when the rollout is made, for router/volatility/*")
  advantage: Literal[*O.ESTIMATORS] | None = key(
    None, "what makes them; unset: a critic or a teacher, ..., else as the loss was published"
  )
  kl_groups: Literal["all", "mixed"] = key(
    "all", "mixed: kl_coef does not hold responses of groups of equal rewards"
  )
  reward_kl_coef: NonNegativeFloat = key(
    0.0, "of Σ log π_old/π_ref of a response, taken from its reward before groups are compared"
  )
  correction: CorrectionConfig = CorrectionConfig()
  off_policy_threshold: PositiveFloat | None = key(
    None, "nats per token, beyond which responses with Â < 0 are left out; unset: no such mask"
  )
  adaptive_clip: AdaptiveClipConfig = FIXED

  def __post_init__(self):
    ranges.check(self, "objective")
    ranges.check(self.correction, "objective.correction")
    ranges.check(self.adaptive_clip, "objective.adaptive_clip")
    for option, value in self.options().items():
      if option in self.loss.choices:
        _require_one_of(option, value, self.loss.choices[option], f", which {self.name} takes")
    ends, of_tokens = self.segment_delimiters, self.segment_unit == "tokens"
    wrong = [
      (
        of_tokens != (self.segment_tokens is not None),
        "{segment_unit}, {segment_tokens}: segments of so many tokens need both, with "
        "segment_unit='tokens'",
      ),
      (
        ends is not None and (self.segment_unit != "step" or not all(ends) or not ends),
        "{segment_delimiters}, {segment_unit}: texts that end a segment, none of them empty, go "
        "with segment_unit='step'",
      ),
      (
        self.clip_exponent and self.clip_length is None,
        "{clip_exponent} needs objective.clip_length: the tokens of a response for which "
        "objective.clip_low and clip_high hold",
      ),
      (
        self.adaptive_clip.target and not self.clip_range,
        f"{{adaptive_clip.target}}: there is no clip range to move; {self.name} has none, or "
        "clip_low and clip_high are 0",
      ),
      (
        self.replay == "R2" and self.old_logp == "sampler",
        "{replay} replays what the recomputation pass chose, which {old_logp} leaves out: set it "
        "to recompute, or replay to R3",
      ),
    ]
    ranges.refuse(self, "objective", wrong)
    self._check_correction()

  def _check_correction(self) -> None:
    given, had = self.correction, _correction_options(self)
    for option, value in vars(given).items():
      if option != "name" and value is not None:
        _require_option(option, had, f"correction.{option}={value!r}: correction {given.name!r}")
    if not had:
      return
    levels = self.loss.levels
    _require_one_of("correction.level", had["level"], levels, f", which {self.name} takes")
    wrong = [
      (
        had.get("high", 0) < had.get("low", 0),
        f"objective.correction.high={had.get('high')} is smaller than objective.correction.low="
        f"{had.get('low')}",
      ),
      (
        self.old_logp == "sampler",
        "{correction.name} weighs by the trainer's old log-probs against the sampler's, which "
        "{old_logp} takes for the same: set it to recompute",
      ),
      (
        self.old_logp == "behaviour" and given.name == "truncated",
        "{correction.name} multiplies by what {old_logp} has in its ratio already: set "
        "correction.name to masked or none, or old_logp to recompute",
      ),
    ]
    ranges.refuse(self, "objective", wrong)

  @property
  def loss(self) -> Callable:
    return LOSSES[self.name]

  @property
  def advantage_kind(self) -> str:
    """The estimator of a group's rewards: the one that is named, else the loss's own."""
    named = O.ESTIMATORS.get(self.advantage)
    return named.name if named is not None and named.of_group else self.loss.advantage

  @property
  def needs_reference(self) -> bool:
    """Whether the policy that the run began with has to be kept."""
    return bool(self.kl_coef or self.reward_kl_coef) or self.loss.to_reference

  def options(self) -> dict[str, Any]:
    """The loss's options that are set. ValueError for one that it does not have."""
    had = options_of(self.name)
    found = {key: getattr(self, key) for key in every_option() if getattr(self, key) is not None}
    for option, value in found.items():
      _require_option(option, had, f"{option}={value!r}: {self.name}")
    return found

  @property
  def clip_range(self) -> float:
    """The smaller of clip_low and clip_high, in the loss's own unit; 0: nothing clips."""
    options = options_of(self.name) | self.options()
    sides = [options.get(key) for key in ("clip_low", "clip_high")]
    return min((side for side in sides if side), default=0.0)

  def numbers(self) -> dict[str, Any]:
    """What is an argument of compiled programs: `policy_loss` takes it, with this or any other
    configuration of the same `structure`."""
    c = self.correction
    found = {k: v for k, v in self.options().items() if v and k in NUMBERS}
    found |= {k: v for k, v in vars(c).items() if k in ("cap", "low", "high") and v is not None}
    if self.off_policy_threshold is not None:
      found |= dict(off_policy_threshold=self.off_policy_threshold)
    return found | (dict(clip_range=self.clip_range) if self.clip_range else {})

  @property
  def structure(self) -> "ObjectiveConfig":
    """The configuration with 1 for each of its numbers."""
    ones = dict.fromkeys(self.numbers(), 1.0)
    ones.pop("clip_range", None)
    weights = {k: ones.pop(k) for k in ("cap", "low", "high") if k in ones}
    correction = dataclasses.replace(self.correction, **weights)
    # Adaptive ranges are numbers too, which move between updates; advantages are made before them.
    fixed = dict(adaptive_clip=FIXED, reward_kl_coef=0.0)
    return dataclasses.replace(self, **ones, correction=correction, **fixed)

  @property
  def needs_sampler_routing(self) -> bool:
    return self.replay == "R3" or self.volatility


def effective(section: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of an ObjectiveConfig, with what will hold where the section leaves something unset.

  An option of the loss is the section's own key, else what `tuned` has for this loss (a mapping
  from loss to options: what suits the other settings of this configuration), else the published
  default. So another loss than the configuration's comes with its own ranges.
  """
  section = dict(section)
  tuned, name, correction = section.pop("tuned", {}), section.get("name"), section.get("correction")
  _check_tuned(tuned)
  if name not in (*LOSSES,):
    return section  # as ObjectiveConfig will say
  defaults, own = dict(advantage=LOSSES[name].advantage) | options_of(name), tuned.get(name, {})
  divergence = section.get("divergence") or own.get("divergence")
  if name == "dppo" and divergence == "kl":  # whose threshold is another number
    defaults |= dict(clip_low=0.05, clip_high=0.05)
  section = _filled(section, defaults | dict(own))
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
  """Options of a correction, with the values that they have for a loss if they are not set."""
  if correction not in (*CORRECTIONS,):
    return {}
  parameters = inspect.signature(CORRECTIONS[correction]).parameters
  defaults = {key: parameters[key].default for key in ("cap", "low", "high") if key in parameters}
  return dict(level=LOSSES[loss].levels[0]) | defaults


def _correction_options(config: ObjectiveConfig) -> dict[str, Any]:
  """The same for a configuration, with those that are set."""
  defaults = _correction_defaults(config.name, config.correction.name)
  filled = _filled(vars(config.correction), defaults)
  return {key: filled[key] for key in defaults}


def _require_option(key: str, had: Mapping[str, Any], what: str) -> None:
  if key not in had:
    options = ", ".join(had) or "none"
    raise ValueError(f"objective.{what} has no such option; it has {options}")


def _require_one_of(key: str, value: Any, allowed: tuple[str, ...], note: str = "") -> None:
  if value not in allowed:
    raise ValueError(f"objective.{key}={value!r} is not one of {', '.join(allowed)}{note}")
