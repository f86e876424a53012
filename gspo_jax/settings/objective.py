"""Section `objective`: the loss, its options and the estimator of advantages."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from gspo_jax import objectives as O
from gspo_jax.settings import other_names, ranges
from gspo_jax.settings.losses import (
  DYNAMIC,
  ESTIMATOR_NAMES,
  LOSS_NAMES,
  SHARED_DYNAMIC,
  every_option,
  find_estimator,
  find_loss,
  option_kinds,
  options_of,
  with_options,
)
from gspo_jax.settings.ranges import (
  FractionBelowOne,
  NonNegativeFloat,
  PositiveFloat,
  key,
)
from gspo_jax.system.text import did_you_mean


@ranges.section("objective.adaptive_clip")
class AdaptiveClipConfig:
  """Adaptation of clip ranges to a target share of clipped tokens. docs/objectives.md"""

  target: FractionBelowOne = key(0.0, "target share of clipped tokens; 0: clip ranges are fixed")
  gain: PositiveFloat = key(
    1.0,
    "factor k. If an iteration clips a share f of the tokens, the clip ranges are multiplied by "
    "exp(k (f - target)).",
  )


FIXED = AdaptiveClipConfig()


LOSSES = O.POLICY_LOSSES


CORRECTIONS = dict(truncated=O.truncated_weight, masked=O.masked_weight)


@ranges.section("objective.correction")
class CorrectionConfig:
  """Importance weights π_old / π_sampler, against the mismatch of trainer and sampler. An unset
  `level` depends on the loss. Unset bounds are `cap` 2, `low` 0.5, `high` 5. docs/objectives.md"""

  name: Literal["none", "truncated", "masked"] = key(
    "none",
    "none: no weights | truncated: a weight above cap becomes cap (TIS) | masked: a weight below "
    "low or above high becomes 0 (MIS, IcePop). If old_logp=behaviour, all other weights become 1, "
    "because ratios already contain them.",
  )
  level: Literal["token", "sequence", "geometric"] | None = key(
    None,
    "token: a weight for each token | sequence: a weight for each response, the product of its "
    "tokens' ratios | geometric: a weight for each response, the geometric mean of these ratios",
  )
  cap: PositiveFloat | None = key(None, "largest weight, if name=truncated")
  low: NonNegativeFloat | None = key(None, "smallest weight that does not become 0, if name=masked")
  high: NonNegativeFloat | None = key(None, "largest weight that does not become 0, if name=masked")


@ranges.section("objective")
@with_options  # clip_low, clip_high, kl_coef, ...
class ObjectiveConfig:
  """The loss and its options. An unset option has its published value. Without a published value it
  has no effect, unless its line below describes one. A configuration file may have other values for
  unset options in `objective.tuned`, a dict {loss: {option: value}}. docs/objectives.md"""

  name: Annotated[str, LOSS_NAMES] = key("gspo", "the loss")
  old_logp: Literal["sampler", "recompute", "behaviour"] = key(
    "sampler",
    "source of the old log-probs in ratios. sampler: the sampler (§5.4 of the GSPO paper) | "
    "recompute: a pass of the trainer before the updates, so that ratios start at exactly 1 | "
    "behaviour: the sampler, while a pass of the trainer computes log-probs for the mismatch and "
    "for objective.correction",
  )
  load_balance_coef: NonNegativeFloat = key(
    0.0,
    "factor of the router's load-balancing loss. If all advantages of an update are 0, Adam still "
    "follows this loss.",
  )
  replay: Literal["none", "R2", "R3"] = key(
    "none",
    "Routing Replay, the use of recorded experts in updates. none: no replay | R2: experts of "
    "the pass for old log-probs | R3: experts of the sampler",
  )
  volatility: bool = key(
    False, "True: record the sampler's experts, for the metrics router/volatility/*"
  )
  advantage: Annotated[str, ESTIMATOR_NAMES] | None = key(
    None,
    "estimator of advantages. If it is unset, a critic, a teacher, constraints, turns, lines or "
    "reward_kl_coef determine the estimator. If the run has none of these, it is the estimator "
    "of the loss's publication.",
  )
  kl_groups: Literal["all", "mixed"] = key(
    "all",
    "groups with the KL penalty. all: all groups | mixed: groups in which an advantage is not 0, "
    "usually those whose responses have different scores. If there is a critic, a teacher or "
    "reward_kl_coef, mixed means all groups, too.",
  )
  reward_kl_coef: NonNegativeFloat = key(
    0.0, "factor β of a KL penalty: β Σ_t log π_old/π_ref is subtracted from a response's reward"
  )
  correction: CorrectionConfig = CorrectionConfig()
  off_policy_threshold: PositiveFloat | None = key(
    None,
    "tokens with Â < 0 are masked if log π_sampler/π, averaged over their response, exceeds this "
    "value in nats; unset: no mask",
  )
  adaptive_clip: AdaptiveClipConfig = FIXED

  def __post_init__(self):
    for option, value in self.options().items():
      if option in self.loss.choices:
        _require_one_of(option, value, self.loss.choices[option], f", which {self.name} takes")
    ends, by_tokens = self.segment_delimiters, self.segment_unit == "tokens"
    wrong = [
      (
        by_tokens != (self.segment_tokens is not None),
        "{segment_unit}, {segment_tokens}: segment_unit='tokens' needs segment_tokens, and other "
        "units have none; change one of them",
      ),
      (
        ends is not None and (self.segment_unit != "step" or not all(ends) or not ends),
        "{segment_delimiters}, {segment_unit}: delimiters need segment_unit='step', and none may "
        "be empty",
      ),
      (
        self.clip_exponent and self.clip_length is None,
        "{clip_exponent} needs objective.clip_length: the length in tokens at which a response's "
        "clip range is exactly objective.clip_low and clip_high",
      ),
      (
        self.adaptive_clip.target and not self.clip_range,
        f"{{adaptive_clip.target}} has no clip range to adapt: {self.name} has none, or "
        "clip_low and clip_high are 0; set the target to 0",
      ),
      (
        self.replay == "R2" and self.old_logp == "sampler",
        "{replay} replays the experts of the pass for old log-probs, and {old_logp} has no such "
        "pass: set old_logp to recompute, or replay to R3",
      ),
      (
        "weight" not in self.loss.arguments
        and (self.correction.name != "none" or self.off_policy_threshold is not None),
        "{correction.name}, {off_policy_threshold}: {name} has no argument weight, an array [B] or "
        "[B, T] that multiplies its objective; add this argument, or leave these keys unset",
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
        "{correction.name} weights tokens by the difference between old log-probs of trainer and "
        "sampler, and {old_logp} assumes that both are equal: set old_logp to recompute",
      ),
      (
        self.old_logp == "behaviour" and correction.name == "truncated",
        "with {old_logp}, ratios already contain the weight of {correction.name}: set "
        "correction.name to masked or none, or old_logp to recompute",
      ),
    ]
    ranges.refuse(self, "objective", wrong)

  @property
  def loss(self) -> Callable:
    return find_loss(self.name)

  @property
  def advantage_kind(self) -> str:
    """Name of the estimator of advantages from a group's rewards.

    This is `advantage` if the key names such an estimator, else that of the loss's publication.
    """
    named = find_estimator(self.advantage) if self.advantage else None
    return named.name if named is not None and named.of_group else self.loss.advantage

  @property
  def standardises(self) -> bool:
    """Whether rewards are standardised within groups, as sums with costs need."""
    if self.advantage in ("gdpo", "constraints"):
      return self.loss.advantage != "soft"  # Soft advantages are those of spo alone.
    return self.advantage_kind == "std"

  @property
  def needs_reference(self) -> bool:
    """Whether the run keeps the policy before RL, as the reference."""
    by_loss = self.loss.to_reference or "ref_logp_BT" in inspect.signature(self.loss).parameters
    return bool(self.kl_coef or self.reward_kl_coef) or by_loss

  def options(self) -> dict[str, Any]:
    """Returns the configured options; raises ValueError for options of other losses."""
    declared = options_of(self.name, self.advantage)
    names = dict.fromkeys((*every_option(), *declared))
    values = {key: getattr(self, key) for key in names if getattr(self, key) is not None}
    for option, value in values.items():
      _require_option(option, declared, f"{option}={value!r}: {self.name}")
    return values

  @property
  def clip_ranges(self) -> tuple[float | None, float | None]:
    """clip_low and clip_high. Each is None if the loss has no such bound."""
    options = options_of(self.name) | self.options()
    return options.get("clip_low"), options.get("clip_high")

  @property
  def clip_range(self) -> float:
    """The smaller nonzero value of clip_low and clip_high, else 0."""
    return min((side for side in self.clip_ranges if side), default=0.0)

  def hyperparameters(self) -> dict[str, Any]:
    """Returns numeric arguments of compiled programs.

    So configurations with equal `static` share compiled programs.
    """
    c, names = self.correction, DYNAMIC if self.name in LOSSES else SHARED_DYNAMIC
    values = {k: v for k, v in self.options().items() if v and k in names}
    values |= {k: v for k, v in vars(c).items() if k in ("cap", "low", "high") and v is not None}
    if self.off_policy_threshold is not None:
      values |= dict(off_policy_threshold=self.off_policy_threshold)
    return values | (dict(clip_range=self.clip_range) if self.clip_range else {})

  @property
  def static(self) -> "ObjectiveConfig":
    """The section with each of `hyperparameters` set to 1.

    It is a constant of compiled programs. `dual_clip` becomes 2, since it must be above 1.
    """
    ones = dict.fromkeys(self.hyperparameters(), 1.0)
    ones.pop("clip_range", None)
    if "dual_clip" in ones:
      ones["dual_clip"] = 2.0
    weights = {k: ones.pop(k) for k in ("cap", "low", "high") if k in ones}
    correction = dataclasses.replace(self.correction, **weights)
    # The update program takes adapted clip ranges and finished advantages. So `adaptive_clip` and
    # `reward_kl_coef` do not change the program.
    fixed = dict(adaptive_clip=FIXED, reward_kl_coef=0.0)
    return dataclasses.replace(self, **ones, correction=correction, **fixed)

  @property
  def needs_sampler_routing(self) -> bool:
    return self.replay == "R3" or self.volatility


def section_kind(values: Any) -> type[ObjectiveConfig]:
  """Returns ObjectiveConfig, or a subclass with options of a user's functions."""
  names = (
    [values.get(name) for name in ("name", "advantage")] if isinstance(values, Mapping) else []
  )
  if not all(name is None or isinstance(name, str) for name in names):
    return ObjectiveConfig  # Its check raises.
  return _section_kind(*names) if names else ObjectiveConfig


@functools.cache
def _section_kind(loss: str | None, advantage: str | None) -> type[ObjectiveConfig]:
  meaning = "an option of the user's function"
  kinds = option_kinds(loss or "", advantage)
  fields = [(name, kind | None, key(None, meaning)) for name, kind in kinds.items()]
  if not fields:
    return ObjectiveConfig
  return dataclasses.make_dataclass(
    "ObjectiveConfig", fields, bases=(ObjectiveConfig,), frozen=True
  )


def fill_unset(section: Mapping[str, Any]) -> dict[str, Any]:
  """Fills unset keys of the section `objective`, and removes `tuned`.

  `tuned` is a dict {loss: {option: value}}. An unset option takes the value of `tuned` for the
  configured loss, or else its published default. So a loss set by a flag has suitable clip ranges.
  """
  section = dict(section)
  tuned, name, correction = section.pop("tuned", {}), section.get("name"), section.get("correction")
  _check_tuned(tuned)
  if name not in LOSS_NAMES:
    return section  # ObjectiveConfig raises.
  estimator = section.get("advantage") or find_loss(name).advantage
  defaults, options = dict(advantage=estimator) | options_of(name, estimator), tuned.get(name, {})
  divergence = section.get("divergence") or options.get("divergence")
  if name == "dppo" and divergence == "kl":  # Thresholds of KL differ from those of TV.
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
  return dict(level=next(iter(find_loss(loss).levels), None)) | defaults


def _correction_options(config: ObjectiveConfig) -> dict[str, Any]:
  """Options of a configuration's correction, with their defaults."""
  defaults = _correction_defaults(config.name, config.correction.name)
  filled = _filled(vars(config.correction), defaults)
  return {key: filled[key] for key in defaults}


def _require_option(key: str, options: Mapping[str, Any], name: str) -> None:
  if key not in options:
    near = [x.removeprefix("objective.") for x in other_names.keys(key)]
    hint = "".join(f"; did you mean {x}?" for x in near if x in options)
    raise ValueError(
      f"objective.{name} has no such option; it has {', '.join(options) or 'none'}{hint}"
    )


def _require_one_of(key: str, value: Any, allowed: tuple[str, ...], note: str = "") -> None:
  if value not in allowed:
    hint = note or did_you_mean(value, allowed)
    raise ValueError(f"objective.{key}={value!r} is not one of {', '.join(allowed)}{hint}")
