"""Section `objective`: what a loss is told, what it is weighted by, and what is refused."""

import dataclasses
import functools
import inspect
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import objectives_reference as paper

from configs import common, dense_math, moe_aime, tiny, tiny_tools
from gspo_jax import objectives as O
from gspo_jax.learner.objective import configured_loss
from gspo_jax.learner.passes import learner_of
from gspo_jax.settings.losses import options_of
from gspo_jax.settings.objective import CorrectionConfig, ObjectiveConfig, fill_unset
from gspo_jax.settings.reading import from_dict
from gspo_jax.structs import ModelInputs, TrainBatch

LOSSES = O.POLICY_LOSSES
OPTIONS = sorted({option for name in LOSSES for option in options_of(name)})
WORDS = {option: words for loss in LOSSES.values() for option, words in loss.choices.items()}
OTHER = dict(segment_unit="line", segment_tokens=4, segment_delimiters=("]",), dual_clip=1.5)
BY_LENGTH = dict(clip_length=5.0, clip_exponent=0.7)  # neither does anything alone
OTHER |= BY_LENGTH
CASE = paper.case(4)
B, T = CASE["mask"].shape
SEGMENTS = np.broadcast_to(np.arange(T) // 3, (B, T))
MAX = 20
NOISE = np.sin(np.arange(B * T, dtype=np.float32)).reshape(B, T)
DRIFT = np.float32([-0.1, 0, -0.2, 0.1, -0.12, 0.15, 0.2, 0.05])[:, None]
SAMPLER = CASE["old"] + 0.3 * NOISE + DRIFT


# A loss takes a weight, whatever it is made from: one loss of each set of levels.
LEVELS_OF = {(loss.levels, loss.by_token): name for name, loss in reversed(LOSSES.items())}
BY_LEVELS = [
  name if name in LEVELS_OF.values() else pytest.param(name, marks=pytest.mark.long)
  for name in LOSSES
]


def objective(name, **changes):
  base = dict(advantage="std", old_logp="recompute", load_balance_coef=0.0, replay="none")
  return ObjectiveConfig(name=name, volatility=False, **base | changes)


def configured(config=common.base, **keys):
  """From a config file's values, as the command line changes them: `objective__name="grpo"`."""
  values = config()
  flat = {key.replace("__", "."): value for key, value in keys.items()}
  values.update_from_flattened_dict({f"objective.{key}": value for key, value in flat.items()})
  return from_dict(values.to_dict())


def batch(**changes):
  zero = np.zeros((B, T), np.int32)
  return TrainBatch(
    ModelInputs(tokens_BT=zero, segments_BT=zero + 1),
    mask_BT=CASE["mask"].astype(np.float32),
    advantage_B=CASE["advantage"],
    old_logp_BT=CASE["old"],
    sampler_logp_BT=SAMPLER,
    ref_logp_BT=CASE["ref"],
    unit_BT=SEGMENTS,
  ).replace(**changes)


ENTROPY = np.where(CASE["mask"], 0.5, np.nan).astype(np.float32)


def value_and_gradient(config, minibatch):
  def numerator(logp_BT):
    *sums, _ = configured_loss(config, logp_BT, ENTROPY, minibatch, MAX)
    return sums[0].numerator, sums

  grad, sums = jax.grad(numerator, has_aux=True)(CASE["logp"])
  return jax.device_get((*O.compute(sums), grad / sums[0].denominator))


def value_alone(config, minibatch):
  """Loss without the gradient, in half the time."""
  *sums, _ = configured_loss(config, CASE["logp"], ENTROPY, minibatch, MAX)
  return sums[0].compute()


def loss_by_hand(name, minibatch, weight=None, **options):
  """The loss itself with a batch's arrays, as a function of logp."""
  loss = LOSSES[name]
  takes = inspect.signature(loss).parameters
  if "max_length" in takes:
    options["max_length"] = MAX
  if "segment_BT" in takes:
    options["segment_BT"] = SEGMENTS
  if options.get("kl_coef"):
    options["ref_logp_BT"] = minibatch.ref_logp_BT
  advantage = minibatch.advantage_B
  if loss.by_token:
    advantage = np.repeat(advantage[:, None], T, axis=1)
  old_logp_BT = minibatch.ref_logp_BT if loss.to_reference else minibatch.old_logp_BT

  def value(logp_BT):
    return loss(
      logp_BT,
      old_logp_BT,
      advantage,
      minibatch.mask_BT,
      weight=weight,
      entropy_BT=ENTROPY,
      **options,
    )[0]

  return value


def by_hand(name, minibatch, weight=None, **options):
  """Loss and gradient of the loss itself."""
  value = loss_by_hand(name, minibatch, weight, **options)
  return jax.device_get(jax.value_and_grad(value)(CASE["logp"]))


@functools.cache
def as_published(name):
  return by_hand(name, batch())


# Others, such as DAPO's, differ from one of these in defaults and averages; all have them from
# the same code, and tests/objectives compares each with its paper.
VARIANTS = "luspo", "ppo_clip", "dapo", "dr_grpo"
EACH = [pytest.param(n, marks=pytest.mark.long) if n in VARIANTS else n for n in LOSSES]


@pytest.mark.parametrize("name", EACH)
def test_loss_without_options_is_the_published_one(name):
  config = configured(name=name).objective
  declared = {k: v for k, v in options_of(name).items() if v is not None}
  assert config.options() == declared
  for option in options_of(name):
    assert getattr(config, option) == options_of(name)[option]
  parameters = inspect.signature(LOSSES[name]).parameters.items()
  defaults = {k: p.default for k, p in parameters if p.default is not p.empty and k != "max_length"}
  assert defaults.items() <= options_of(name).items()
  unset = objective(name)  # not from a file: the loss fills in what is not there
  for section in config, unset:
    loss, _, grad = value_and_gradient(section, batch())
    expected, expected_grad = as_published(name)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-7)
    assert np.any(grad)


def test_tuned_ranges_of_a_file_are_per_loss():
  def clip_ranges(**keys):
    o = configured(**keys).objective
    return o.clip_low, o.clip_high

  assert clip_ranges() == (3e-4, 4e-4)
  assert clip_ranges(config=tiny.get_config) == (0.03, 0.04)
  assert clip_ranges(config=tiny.get_config, name="grpo") == (0.2, 0.27)
  assert clip_ranges(config=tiny.get_config, name="cispo") == (None, 0.27)
  assert clip_ranges(config=tiny.get_config, clip_low=0.1) == (0.1, 0.04)
  assert clip_ranges(config=tiny.get_config, name="grpo", clip_high=0.4) == (0.2, 0.4)
  assert clip_ranges(config=tiny_tools.get_config, name="segment") == (0.03, 0.04)
  for file in moe_aime, dense_math:
    assert clip_ranges(config=file.get_config) == (3e-4, 4e-4)


def other_value(name, option):
  """A value other than the option's default."""
  default = options_of(name).get(option)
  if option in WORDS:
    return next(word for word in LOSSES[name].choices.get(option, WORDS[option]) if word != default)
  if option == "clip_low" and default:
    return default / 1000  # a wider range may clip no more than the default does
  return OTHER[option] if option in OTHER else (default or 0.0) * 2 + 0.1


# The first loss that has an option; the next test has all options of each loss.
FIRST = {option: name for name in reversed(LOSSES) for option in options_of(name)}
NAMES_AND_OPTIONS = [
  pytest.param(
    *(name, option),
    marks=pytest.mark.long if option in options_of(name) and FIRST[option] != name else (),
  )
  for name in LOSSES
  for option in OPTIONS
]


@pytest.mark.parametrize("name, option", NAMES_AND_OPTIONS)
def test_option_reaches_its_loss_alone(name, option):
  if option not in options_of(name):
    with pytest.raises(ValueError, match=rf"objective\.{option}=.*: {name} has no such option; it"):
      configured(name=name, **{option: other_value(name, option)})
    return
  changes = {option: other_value(name, option)}
  if option == "kl":
    changes = dict(kl="k2", kl_coef=0.3)  # k1 is refused
  if option in BY_LENGTH:
    changes = BY_LENGTH
  if option.startswith("segment"):
    changes = dict(segment_unit="tokens", segment_tokens=4)
  config = configured(name=name, **changes).objective
  for key, value in changes.items():
    assert getattr(config, key) == value
  if option.startswith("segment") or option == "soft_value":
    return  # ids and advantages, which the host makes
  loss = value_alone(config, batch())
  expected = loss_by_hand(name, batch(), **changes)(CASE["logp"])
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  plain, _ = as_published(name)
  assert option == "dual_clip" or loss != pytest.approx(float(plain), rel=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_options_of_a_loss_reach_its_gradient(name):
  """All at once; test_option_reaches_its_loss_alone has the value of each."""
  made_by_host = ("segment_unit", "segment_tokens", "segment_delimiters", "soft_value")
  options = [option for option in options_of(name) if option not in made_by_host]
  changes = {option: other_value(name, option) for option in options} | dict(kl="k2")
  changes |= dict(segment_unit="tokens", segment_tokens=4) if name == "segment" else {}
  config = configured(name=name, **changes).objective
  loss, _, grad = value_and_gradient(config, batch())
  expected, expected_grad = by_hand(name, batch(), **{k: changes[k] for k in options})
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", BY_LEVELS)
def test_metric_of_the_loss_excludes_penalties(name):
  plain, _ = as_published(name)
  for penalties in {}, dict(kl_coef=0.3, kl="k3", entropy_coef=0.1):
    loss, metrics, _ = value_and_gradient(objective(name, **penalties), batch())
    assert metrics["loss/policy"] == pytest.approx(float(plain), rel=1e-6)
    assert (loss != metrics["loss/policy"]) == bool(penalties)


def test_kl_groups_mixed_excludes_groups_of_equal_rewards():
  config = objective("grpo", kl_coef=0.3)
  rows = np.arange(B) % 2 == 0
  losses = [
    float(value_and_gradient(config, batch(mixed_B=mixed_B))[0])
    for mixed_B in (rows, ~rows, rows & ~rows, rows | ~rows, None)
  ]
  assert losses[0] + losses[1] == pytest.approx(losses[2] + losses[3], rel=1e-6)
  assert losses[2] == pytest.approx(float(as_published("grpo")[0]), rel=1e-6)
  assert losses[3] == losses[4] != losses[0]


@pytest.mark.parametrize("old_logp", ["sampler", "recompute"])
def test_weighted_kl_is_of_the_policy_that_sampled(old_logp):
  """Recomputed log-probs may be of a later policy: exact, over 6 tokens."""
  random, soft = np.random.default_rng(1), jax.nn.log_softmax
  logits, lag, ref = (jnp.asarray(random.normal(size=6), jnp.float32) for _ in range(3))
  sampler, ref = soft(logits + 0.7 * lag), soft(ref)
  config = objective("grpo", old_logp=old_logp, kl="k3_weighted", kl_coef=1.0)
  zero = jnp.zeros((6, 1), jnp.int32)
  old = soft(logits) if old_logp == "recompute" else sampler
  minibatch = TrainBatch(
    ModelInputs(tokens_BT=zero, segments_BT=zero + 1),
    mask_BT=jnp.ones((6, 1)),
    advantage_B=jnp.zeros(6),
    old_logp_BT=old[:, None],
    sampler_logp_BT=sampler[:, None],
    ref_logp_BT=ref[:, None],
  )

  @jax.jit
  @jax.grad
  def penalty(logits):
    logp_BT = soft(logits)[:, None]
    entropy_BT, sampled = jnp.zeros((6, 1)), jnp.exp(sampler)

    def undivided(logp_BT):
      return configured_loss(config, logp_BT, entropy_BT, minibatch)[0].numerator

    slope = jax.lax.stop_gradient(jax.grad(undivided)(logp_BT)[:, 0])
    return (sampled * slope * logp_BT[:, 0]).sum()

  expected = jax.grad(lambda x: (jnp.exp(soft(x)) * (soft(x) - ref)).sum())(logits)
  np.testing.assert_allclose(penalty(logits), expected, rtol=1e-4, atol=1e-6)


def test_configuration_survives_json():
  for name in LOSSES:
    config = configured(name=name, old_logp="recompute", correction__name="masked")
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert from_dict(values) == config


@pytest.mark.parametrize("level", ["geometric", "sequence", "token"])
def test_ratio_to_the_sampler_is_masked_without_a_second_weight(level):
  """Unmasked responses count with their ratio alone."""
  name = "grpo" if level == "token" else "gspo"
  options = dict(correction__name="masked", correction__level=level)
  options |= dict(correction__low=0.9, correction__high=1.15)
  config = configured(name=name, old_logp="behaviour", **options).objective
  minibatch = batch(old_logp_BT=SAMPLER, own_logp_BT=CASE["old"])
  loss, metrics, grad = value_and_gradient(config, minibatch)
  weight = O.masked_weight(CASE["old"], SAMPLER, CASE["mask"], level, 0.9, 1.15)
  mask_BT = np.asarray(weight > 0, np.float32)
  assert 0 < mask_BT.sum() < (CASE["mask"] > 0).sum() and not np.allclose(weight, mask_BT)
  expected, expected_grad = by_hand(name, minibatch, weight=mask_BT)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-7)
  assert 0 < metrics["correction/masked"] < 1


def test_constant_aggregation_divides_by_the_length_limit():
  assert learner_of(configured(name="dr_grpo"), "rl").response_tokens == 10
  values = common.base()
  values.update(sampling=dict(max_new_tokens=24), objective=dict(name="dr_grpo"))
  assert learner_of(from_dict(values.to_dict()), "rl").response_tokens == 24
  config = objective("dr_grpo")
  losses = [
    configured_loss(config, CASE["logp"], ENTROPY, batch(), n)[0].compute() for n in (10, 20)
  ]
  assert losses[0] == pytest.approx(2 * float(losses[1]), rel=1e-6)


RATIO = np.where(CASE["mask"], CASE["old"] - np.where(CASE["mask"], batch().sampler_logp_BT, 0), 0)
LENGTH = np.maximum(CASE["mask"].sum(1), 1)
LEVELS = {
  "token": np.exp(RATIO),
  "sequence": np.exp(RATIO.sum(1)),
  "geometric": np.exp(RATIO.sum(1) / LENGTH),
}


@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("name", BY_LEVELS)
def test_correction_weights_the_objective(name, kind):
  """Covers all levels of the loss."""
  by_level = {}  # None is the first level.
  for level in (None, *LOSSES[name].levels):
    options = dict(cap=1.05) if kind == "truncated" else dict(low=0.95, high=1.2)
    config = objective(name, correction=CorrectionConfig(kind, level, **options))
    loss, metrics, grad = value_and_gradient(config, batch())
    level = level or LOSSES[name].levels[0]
    ratio = LEVELS[level]
    inside = (ratio >= 0.95) & (ratio <= 1.2)
    weight = np.minimum(ratio, 1.05) if kind == "truncated" else np.where(inside, ratio, 0)
    if LOSSES[name].by_token and weight.ndim == 1:
      weight = np.repeat(weight[:, None], T, axis=1)
    if level not in by_level:
      by_level[level] = by_hand(name, batch(), weight=weight.astype(np.float32))
    expected, expected_grad = by_level[level]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-7)
    live = CASE["mask"] if ratio.ndim == 2 else CASE["mask"].any(1)
    cut = (ratio > 1.05 if kind == "truncated" else ~inside)[live]
    assert metrics[f"correction/{kind}"] == pytest.approx(cut.mean(), rel=1e-5)
    assert 0 < cut.mean() < 1
    bounded_ratio = np.minimum(ratio, 1.05) if kind == "truncated" else np.where(inside, ratio, 0)
    assert metrics["correction/weight"] == pytest.approx(bounded_ratio[live].mean(), rel=1e-5)


@pytest.mark.parametrize("name", BY_LEVELS)
def test_off_policy_responses_have_no_gradient(name):
  """DeepSeek-V3.2: responses with Â < 0 and log π_sampler/π_θ > threshold."""
  config = objective(name, off_policy_threshold=0.05)
  loss, metrics, grad = value_and_gradient(config, batch())
  mask = CASE["mask"]
  gap = np.where(mask, batch().sampler_logp_BT - np.where(mask, CASE["logp"], 0), 0).sum(1) / LENGTH
  dropped = (np.nan_to_num(CASE["advantage"]) < 0) & (gap > 0.05)
  assert 0 < dropped.sum() < B
  assert not np.any(np.asarray(grad)[dropped])
  weight = np.repeat(1.0 - dropped[:, None], T, axis=1) if LOSSES[name].by_token else 1.0 - dropped
  expected, expected_grad = by_hand(name, batch(), weight=weight)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-7)
  share = dropped[:, None] & mask if LOSSES[name].by_token else dropped
  live = mask if LOSSES[name].by_token else mask.any(1)
  assert metrics["off_policy/masked"] == pytest.approx(share.sum() / live.sum(), rel=1e-5)


def test_correction_and_mask_multiply():
  weight = CorrectionConfig("truncated", "token", cap=1.05)
  config = objective("grpo", correction=weight, off_policy_threshold=0.05)
  corrected, masked = (
    value_and_gradient(dataclasses.replace(config, **without), batch())[2]
    for without in (
      dict(off_policy_threshold=None),
      dict(correction=CorrectionConfig("none")),
    )
  )
  product = value_and_gradient(config, batch())[2]
  mask_BT = np.any(np.asarray(masked), axis=1)[:, None]
  np.testing.assert_allclose(product, np.where(mask_BT, corrected, 0), rtol=1e-6)


def test_keys_of_minirl_give_its_gradient():
  """The recipe of docs/objectives.md, as it stands there."""
  page = (pathlib.Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
  recipe = page[page.index("### MiniRL") :].split("```")[3]
  keys = dict(re.findall(r"--config\.objective\.(\S+)=(\S+)", recipe))
  typed = {key: float(value) if value[0].isdigit() else value for key, value in keys.items()}
  section = configured(**typed)
  assert section.objective.advantage_kind == "none"
  sampler = CASE["old"] - np.where(NOISE > 0.8, 2.0, 0.3 * NOISE)  # Includes ratios above 5.
  minibatch = batch(sampler_logp_BT=np.float32(sampler))
  _, metrics, grad = value_and_gradient(section.objective, minibatch)
  arrays = [CASE["old"], sampler, CASE["advantage"], CASE["mask"]]
  arrays = [np.asarray(x, np.float64) for x in arrays]
  expected = paper.gradient(lambda x: paper.minirl(x, *arrays), CASE["logp"].astype(np.float64))
  scale = np.abs(expected).max() / MAX
  np.testing.assert_allclose(grad, expected / MAX, rtol=0, atol=1e-5 * scale)
  assert 0 < metrics["clip_fraction/token"] < 1 and 0 < metrics["correction/truncated"] < 1


@pytest.mark.parametrize("name", ["gspo", "spo"])
def test_a_distance_to_the_reference_is_no_tail_of_an_update(name):
  _, metrics, _ = configured_loss(objective(name), jnp.asarray(CASE["logp"]), ENTROPY, batch(), MAX)
  assert ("ratio/tail" in metrics) == (name == "gspo")


def test_clipped_tokens_are_those_of_the_loss():
  for name, loss in LOSSES.items():
    config = objective(name, correction=CorrectionConfig("truncated"))
    *_, actual = configured_loss(config, jnp.asarray(CASE["logp"]), ENTROPY, batch(), MAX)
    args = CASE["logp"], CASE["old"], CASE["advantage"], CASE["mask"]
    options = dict(segment_BT=SEGMENTS) if name == "segment" else {}
    options |= dict(max_length=MAX) if name in ("dr_grpo", "dppo") else {}
    np.testing.assert_array_equal(actual, loss.clipped(*args, **options))
    assert np.any(actual) == ("clip_high" in loss.options)


@pytest.mark.parametrize(
  "name, changes, expected",
  [
    ("gspo", {}, 3e-4),
    ("gspo", dict(clip_low=0.03, clip_high=0.04), 0.03),
    ("grpo", dict(clip_high=0.1), 0.1),
    ("cispo", dict(clip_high=0.3), 0.3),  # without a lower bound
    ("luspo", {}, 2e-3),
    ("sapo", {}, 0.0),
    ("vespo", {}, 0.0),
    ("dppo", {}, 0.15),  # Probabilities.
  ],
)
def test_clip_range_is_the_smaller_side(name, changes, expected):
  options = dict(advantage="std", old_logp="sampler", load_balance_coef=0.0, replay="none")
  objective = ObjectiveConfig(name=name, volatility=False, **options, **changes)
  assert objective.clip_range == expected


@pytest.mark.parametrize(
  "section, expected",
  [
    (dict(name="dppo"), (0.15, 0.15)),
    (dict(name="dppo", divergence="kl"), (0.05, 0.05)),  # nats
    (dict(name="dppo", divergence="kl", clip_high=0.1), (0.05, 0.1)),
    (dict(name="dppo", tuned=dict(dppo=dict(divergence="kl"))), (0.05, 0.05)),
    (dict(name="dppo", divergence="tv", tuned=dict(dppo=dict(divergence="kl"))), (0.15, 0.15)),
  ],
)
def test_each_divergence_has_its_threshold(section, expected):
  actual = fill_unset(section)
  assert (actual["clip_low"], actual["clip_high"]) == expected
