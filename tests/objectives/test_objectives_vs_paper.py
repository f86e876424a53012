"""Every loss, its gradient and what it clips against the papers' equations in float64 NumPy."""

import functools
import inspect

import jax
import numpy as np
import pytest
from support import objectives_reference as paper
from support.cases import long
from support.compiled import compiled, value_and_grad

from gspo_jax import objectives as O


def soft(logp, ref, advantage, mask):
  return paper.spo(logp, ref, advantage, np.zeros(len(mask)), mask, 0.3)


# name: (ours, its options, the paper's, its options, whether advantages are per token)
LOSSES = {
  "gspo": (O.gspo_loss, {}, paper.gspo, {}, False),
  "gspo_dual": (O.gspo_loss, dict(dual_clip=1.001), paper.gspo, dict(dual=1.001), False),
  "gspo_half": (O.gspo_loss, dict(length_exponent=0.5), paper.gspo, dict(alpha=0.5), False),
  "gspo_raw": (
    O.gspo_loss,
    dict(length_exponent=0.0, clip_low=0.2, clip_high=0.3),
    paper.gspo,
    dict(alpha=0, low=0.2, high=0.3),
    False,
  ),
  "gspo_token": (O.gspo_token_loss, {}, paper.gspo_token, {}, True),
  "gspo_token_row": (O.gspo_token_loss, {}, paper.gspo_token, {}, False),
  "luspo": (O.luspo_loss, {}, paper.luspo, {}, False),
  "luspo_dual": (O.luspo_loss, dict(dual_clip=1.01), paper.luspo, dict(dual=1.01), False),
  "grpo": (O.grpo_loss, {}, paper.grpo, {}, False),
  "grpo_token": (
    O.grpo_loss,
    dict(aggregate="token", dual_clip=3.0),
    paper.grpo,
    dict(level="token", dual=3.0),
    True,
  ),
  "grpo_constant": (
    O.grpo_loss,
    dict(aggregate="constant", max_length=50),
    paper.grpo,
    dict(level="constant", max_length=50),
    True,
  ),
  "ppo": (O.ppo_loss, {}, paper.grpo, dict(low=0.2, high=0.2), True),
  "dapo": (O.dapo_loss, {}, paper.grpo, dict(low=0.2, high=0.28, level="token"), False),
  "dr_grpo": (
    O.dr_grpo_loss,
    dict(max_length=12),
    paper.grpo,
    dict(low=0.2, high=0.2, level="constant", max_length=12),
    False,
  ),
  "cispo": (O.cispo_loss, {}, paper.cispo, {}, True),
  "cispo_low": (O.cispo_loss, dict(clip_low=0.5), paper.cispo, dict(low=0.5), False),
  "gmpo": (
    O.gmpo_loss,
    dict(clip_low=0.05, clip_high=0.1),
    paper.gmpo,
    dict(low=0.05, high=0.1),
    False,
  ),
  "sapo": (O.sapo_loss, {}, paper.sapo, {}, True),
  "sapo_row": (O.sapo_loss, {}, paper.sapo, {}, False),
  "dppo": (
    O.dppo_loss,
    dict(max_length=12),
    paper.dppo,
    dict(level="constant", max_length=12),
    True,
  ),
  "dppo_kl": (
    O.dppo_loss,
    dict(clip_low=0.02, clip_high=0.05, divergence="kl", aggregate="token"),
    paper.dppo,
    dict(low=0.02, high=0.05, kind="kl"),
    False,
  ),
  "vespo": (O.vespo_loss, {}, paper.vespo, {}, False),
  "vespo_flat": (
    O.vespo_loss,
    dict(k_pos=1.0, lambda_pos=0.5, k_neg=0.5, lambda_neg=0.25),
    paper.vespo,
    dict(good=(1, 0.5), bad=(0.5, 0.25)),
    False,
  ),
  "opmd": (O.opmd_loss, {}, paper.opmd, {}, False),
  "opmd_far": (O.opmd_loss, dict(beta=0.1), paper.opmd, dict(tau=0.1), False),
  "spo": (O.soft_loss, dict(beta=0.3), soft, {}, False),
  "rft": (O.rft_loss, {}, paper.rft, {}, True),
  "rft_row": (O.rft_loss, {}, paper.rft, {}, False),
}


@functools.cache
def ours(name):
  loss, options, *_ = LOSSES[name]
  return jax.jit(jax.value_and_grad(lambda *args: loss(*args, **options)[0]))


def compare(name, spread, dtype, tolerance, seed=0):
  *_, reference, options, per_token = LOSSES[name]
  case = paper.case(seed, spread=spread, dtype=dtype)
  args = case["old"], case["advantage_bt" if per_token else "advantage"], case["mask"]
  loss, grad = ours(name)(case["logp"], *args)
  args64 = [np.asarray(x, np.float64) for x in args]

  def f(logp):
    return reference(logp, *args64, **options)

  expected = paper.gradient(f, case["logp"].astype(np.float64))
  scale = np.abs(expected).max()
  assert loss.dtype == grad.dtype == dtype
  assert scale > 0
  np.testing.assert_allclose(grad, expected, rtol=0, atol=tolerance * scale)
  value = f(case["logp"].astype(np.float64)).real
  np.testing.assert_allclose(loss, value, rtol=tolerance, atol=tolerance * scale)
  assert np.all(np.asarray(grad)[~case["mask"]] == 0)


FURTHER = "gspo_half gspo_token_row luspo_dual grpo_constant ppo cispo_low sapo_row vespo_flat"
FURTHER = (*FURTHER.split(), "opmd_far", "rft_row")
NAMES = [pytest.param(n, marks=pytest.mark.long) if n in FURTHER else n for n in LOSSES]


@pytest.mark.parametrize(
  "spread",
  ["mixed", *long(("near", "wide"))],
)
@pytest.mark.parametrize("name", NAMES)
def test_float32(name, spread):
  for seed in range(3):
    compare(name, spread, np.float32, 1e-6, seed)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long
def test_float64(name, x64):
  for spread in ("near", "mixed", "wide"):
    compare(name, spread, np.float64, 1e-12)


def test_sapo_keeps_its_digits_where_the_gate_is_closed():
  """The gradient of σ(x) as σ(1 − σ) is off by 1e-2 at w = 13 in float32."""
  log_ratio = np.array([[-20.0, 0.0, 1.0, 2.0, 2.5, 2.6]])
  args = log_ratio.astype(np.float32), np.zeros((1, 6), np.float32), np.ones(1), np.ones((1, 6))
  _, grad = compiled(value_and_grad(O.sapo_loss), *args)
  w = np.exp(log_ratio.astype(np.float32).astype(np.float64))
  expected = -w / np.cosh((w - 1) / 2) ** 2 / 6
  np.testing.assert_allclose(grad, expected, rtol=2e-5)


def test_dppo_lets_rare_tokens_grow_and_holds_likely_ones():
  """A hundredfold of next to nothing is little; a fifth of nearly everything is much."""
  old, new = np.log([[1e-5, 0.99]]), np.log([[1e-3, 0.75]])
  args = new.astype(np.float32), old.astype(np.float32), np.array([[1.0, -1.0]]), np.ones((1, 2))
  for divergence, threshold in ("tv", 0.15), ("kl", 0.05):
    options = dict(clip_low=threshold, clip_high=threshold, divergence=divergence)
    clipped = compiled(O.dppo_loss.clipped, *args, max_length=2, **options)
    np.testing.assert_array_equal(clipped, [[False, True]])
  np.testing.assert_array_equal(compiled(O.ppo_loss.clipped, *args), [[True, True]])


def test_dppo_of_certain_tokens_is_finite():
  """Probabilities of exactly 1 in float32: no divergence from itself, an infinite one to it."""
  logp = np.array([[0.0, 0.0, -1e-3, -50.0]], np.float32)
  old = np.array([[0.0, -1e-3, 0.0, -60.0]], np.float32)
  options = dict(max_length=4, divergence="kl", clip_low=0.05, clip_high=0.05)
  for sign in 1.0, -1.0:
    args = logp, old, np.array([sign]), np.ones((1, 4))
    (loss, metrics), grad = compiled(value_and_grad(O.dppo_loss), *args, **options)
    assert np.isfinite(loss) and np.isfinite(grad).all()
    assert all(np.isfinite(x) for x in metrics.values())
    # From 0.999 to 1 all other tokens vanish.
    assert metrics["clip_fraction/token"] == (0.25 if sign > 0 else 0.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_vespo_of_any_ratio_is_finite_and_of_one_far_out_nothing(advantage):
  """e^±1e4 is 0 or infinite in every type; on policy the weight is exactly 1."""
  old = np.full((1, 4), -2e4, np.float32)
  for log_ratio, weight in ((-1e4, 0), (-40, 0), (0, 1), (40, 0), (90, 0), (1e4, 0)):
    logp = old + np.float32(log_ratio / 4)
    args = logp, old, np.array([advantage]), np.ones((1, 4))
    (loss, metrics), grad = compiled(value_and_grad(O.vespo_loss), *args)
    np.testing.assert_allclose(metrics["vespo/weight"], weight, atol=1e-20)
    np.testing.assert_allclose(grad, np.full((1, 4), -advantage * weight / 4), atol=1e-20)
    np.testing.assert_allclose(loss, -advantage * weight * logp.mean(), atol=1e-15)
    assert all(np.isfinite(x) for x in metrics.values())


def test_opmd_comes_to_rest_where_the_log_ratio_of_the_response_is_the_advantage():
  """The log-ratio's distribution over the tokens does not matter."""
  old, step = np.full((2, 4), -3.0, np.float32), np.float32([[0.5, 0, 0, 0], [0.125] * 4])
  f, constants = value_and_grad(O.opmd_loss), (old, np.full(2, 0.2), np.ones((2, 4)))
  grad = compiled(f, old + step, *constants, beta=0.4)[1]
  np.testing.assert_allclose(grad, 0, atol=1e-7)
  np.testing.assert_allclose(compiled(f, old, *constants, beta=0.4)[1], -0.2 / 2, rtol=1e-6)


SEGMENTS = np.arange(12) // 3  # four to a response of `paper.case`


def beyond(ratio, advantage, low, high, dual=np.inf):
  """Where min(r Â, clip(r) Â), and the dual clip c Â for Â < 0, do not depend on r."""
  upper, lower = (advantage > 0) & (ratio > 1 + high), (advantage < 0) & (ratio < 1 - low)
  return upper | lower | (advantage < 0) & (ratio > dual)


def response_clipped(log_ratio, advantage, ids, low=3e-4, high=4e-4, dual=np.inf, alpha=1):
  """Eq. 5: one geometric mean for all tokens."""
  ratio = np.exp(log_ratio.sum() / len(log_ratio) ** alpha)
  return beyond(ratio, advantage, low, high, dual)


def segments_clipped(log_ratio, advantage, ids, **ranges):
  flags = np.zeros(len(ids), bool)
  for k in np.unique(ids):
    flags[ids == k] = response_clipped(
      log_ratio[ids == k], advantage[ids == k], ids[ids == k], **ranges
    )
  return flags


def tokens_clipped(log_ratio, advantage, ids, low=0.2, high=0.27, dual=np.inf):
  """Eq. 2 and 3."""
  return beyond(np.exp(log_ratio), advantage, low, high, dual)


def weights_clipped(log_ratio, advantage, ids, low=np.inf, high=0.27):
  """arXiv:2506.13585, Eq. 5: the weight is bounded whatever the advantage is."""
  ratio = np.exp(log_ratio)
  return (ratio > 1 + high) | (ratio < 1 - low)


def log_ratios_clipped(log_ratio, advantage, ids, low=0.4, high=0.4):
  """arXiv:2507.20673: the range is that of log w."""
  return (advantage > 0) & (log_ratio > high) | (advantage < 0) & (log_ratio < -low)


def divergence_clipped(log_ratio, advantage, ids, new, low=0.15, high=0.15, kind="tv"):
  """arXiv:2602.04879, Eq. 12: only what leaves, and is far enough away already."""
  far = paper.divergence(new, new - log_ratio, kind)
  up, down = (advantage > 0) & (log_ratio > 0), (advantage < 0) & (log_ratio < 0)
  return up & (far > high) | down & (far > low)


def none_clipped(log_ratio, advantage, ids):
  return np.zeros(len(ids), bool)


# name: (loss, its options, the rule, the rule's options)
CASES = {
  "gspo": ("gspo", {}, response_clipped, {}),
  "gspo_raw_dual": (
    "gspo",
    dict(length_exponent=0.0, clip_low=0.1, clip_high=0.2, dual_clip=1.5),
    response_clipped,
    dict(alpha=0, low=0.1, high=0.2, dual=1.5),
  ),
  "gspo_token": ("gspo_token", {}, response_clipped, {}),
  "segment": ("segment", {}, segments_clipped, {}),
  "segment_dual": ("segment", dict(dual_clip=1.2), segments_clipped, dict(dual=1.2)),
  "luspo": ("luspo", {}, response_clipped, dict(low=2e-3, high=2.5e-3)),
  "grpo": ("grpo", {}, tokens_clipped, {}),
  "grpo_dual": ("grpo", dict(dual_clip=1.5), tokens_clipped, dict(dual=1.5)),
  "ppo_clip": ("ppo_clip", {}, tokens_clipped, dict(high=0.2)),
  "dapo": ("dapo", {}, tokens_clipped, dict(high=0.28)),
  "dr_grpo": ("dr_grpo", dict(max_length=12), tokens_clipped, dict(high=0.2)),
  "cispo": ("cispo", {}, weights_clipped, {}),
  "cispo_low": ("cispo", dict(clip_low=0.3), weights_clipped, dict(low=0.3)),
  "gmpo": ("gmpo", {}, log_ratios_clipped, {}),
  "gmpo_narrow": (
    "gmpo",
    dict(clip_low=0.05, clip_high=0.1),
    log_ratios_clipped,
    dict(low=0.05, high=0.1),
  ),
  "sapo": ("sapo", {}, none_clipped, {}),
  "dppo": ("dppo", dict(max_length=12), divergence_clipped, {}),
  "dppo_kl": (
    "dppo",
    dict(aggregate="token", divergence="kl", clip_low=0.02, clip_high=0.05),
    divergence_clipped,
    dict(low=0.02, high=0.05, kind="kl"),
  ),
  "vespo": ("vespo", {}, none_clipped, {}),
  "opmd": ("opmd", {}, none_clipped, {}),
  "spo": ("spo", {}, none_clipped, {}),
  "rft": ("rft", {}, none_clipped, {}),
}


def arguments(name, case, per_token):
  loss = O.POLICY_LOSSES[name]
  args = [case["logp"], case["old"], case["advantage_bt" if per_token else "advantage"]]
  args.append(case["mask"])
  if "segment_BT" in inspect.signature(loss).parameters:
    args.append(np.broadcast_to(SEGMENTS, case["mask"].shape))
  return loss, args


def test_every_loss_has_a_case():
  assert {name for name, *_ in CASES.values()} == O.POLICY_LOSSES.keys()


@pytest.mark.parametrize("spread", ["mixed", pytest.param("near", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_what_is_clipped_against_the_papers_rules(name, spread):
  loss_name, options, rule, ranges = CASES[name]
  for seed in range(3):
    case = paper.case(seed, spread=spread)
    loss, args = arguments(loss_name, case, O.POLICY_LOSSES[loss_name].by_token)
    clipped = np.asarray(compiled(loss.clipped, *args, **options))
    wide = {k: np.asarray(case[k], np.float64) for k in ("logp", "old")}
    advantage = np.broadcast_to(args[2].T, case["mask"].T.shape).T
    expected = np.zeros(case["mask"].shape, bool)
    for i, live in enumerate(case["mask"]):
      if live.any():
        log_ratio = wide["logp"][i, live] - wide["old"][i, live]
        further = dict(new=wide["logp"][i, live]) if rule is divergence_clipped else {}
        expected[i, live] = rule(log_ratio, advantage[i, live], SEGMENTS[live], **ranges, **further)
    assert clipped.dtype == bool
    np.testing.assert_array_equal(clipped, expected)


# One case of each rule, with a dual bound where there is one.
RULES = {rule: name for name, (_, _, rule, _) in reversed(CASES.items())}
RULES |= {tokens_clipped: "grpo_dual", response_clipped: "gspo_raw_dual"}
BY_RULE = [
  name if name in RULES.values() else pytest.param(name, marks=pytest.mark.long) for name in CASES
]


@pytest.mark.parametrize("name", BY_RULE)
def test_what_is_clipped_has_no_gradient_and_is_what_the_metrics_count(name):
  loss_name, options, rule, _ = CASES[name]
  case = paper.case(4)
  loss, args = arguments(loss_name, case, False)
  (_, metrics), grad = compiled(value_and_grad(loss), *args, **options)
  clipped = np.asarray(compiled(loss.clipped, *args, **options))
  # CISPO bounds the weight of a gradient; VESPO's is 0 in float32 where it is far out.
  if loss_name not in ("cispo", "vespo"):
    sides = np.nan_to_num(case["advantage"])
    live = case["mask"] & ((sides > 0) if loss_name == "rft" else (sides != 0))[:, None]
    np.testing.assert_array_equal((np.asarray(grad) == 0) & live, clipped)
  counted = sum(metrics.get(f"clip_fraction/token{side}", 0.0) for side in ("", "/dual"))
  np.testing.assert_allclose(counted, clipped.sum() / case["mask"].sum(), rtol=1e-6)
  assert clipped.any() == (rule is not none_clipped)
  if rule is none_clipped:
    return
  side_BT = np.sign(np.nan_to_num(case["advantage"]))[:, None] * np.ones(case["mask"].shape)
  if loss_name == "cispo":  # bounds ratios whatever the advantage
    side_BT = np.where(case["mask"], np.where(case["logp"] > case["old"], 1, -1), 0)
  for sign, sides in ((1, ["/high"]), (-1, ["/low", "/dual"])):
    counted = sum(metrics.get(f"clip_fraction/token{side}", 0.0) for side in sides)
    share = (clipped & (side_BT == sign)).sum() / case["mask"].sum()
    np.testing.assert_allclose(counted, share, rtol=1e-6)


RULED = {CASES[name][0] for name in RULES.values()}
BY_KIND = [
  name if name in RULED else pytest.param(name, marks=pytest.mark.long) for name in O.POLICY_LOSSES
]


@pytest.mark.parametrize("name", BY_KIND)
def test_of_packed_responses_the_same_tokens_are_clipped(name):
  case = paper.case(4)
  loss, unpacked = arguments(name, case, False)
  *args, mask = unpacked[:4]
  B, T = mask.shape
  args[2] = np.broadcast_to(args[2][:, None], (B, T))
  ids = np.repeat([0, 1], T) * np.ones((B // 2, 1), int)
  further = () if name != "segment" else (np.tile(SEGMENTS, 2) + 4 * ids,)
  options = dict(max_length=T) if name in ("dr_grpo", "dppo") else {}
  packed = [x.reshape(B // 2, 2 * T) for x in (*args, mask)]
  clipped = compiled(loss.clipped, *packed, *further, response_BT=ids, **options)
  plain = compiled(loss.clipped, *unpacked, **options)
  np.testing.assert_array_equal(np.asarray(clipped).reshape(B, T), plain)


@pytest.mark.parametrize("name", O.POLICY_LOSSES)
def test_a_loss_declares_its_keyword_options(name):
  loss = O.POLICY_LOSSES[name]
  parameters = inspect.signature(loss).parameters
  defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
  shared = dict(kl="k3", kl_coef=0.0, entropy_coef=0.0)
  assert loss.options == defaults | shared
  for option, words in loss.choices.items():
    assert loss.options[option] in words
  assert loss.choices.keys() == {k for k, v in loss.options.items() if isinstance(v, str)}
  assert set(loss.levels) <= {"token", "sequence", "geometric"}


def value(loss, *args, **options):
  return loss(*args, **options)[0]


LEVELS_OF = {(loss.levels, loss.by_token): name for name, loss in O.POLICY_LOSSES.items()}
BY_LEVELS = [
  name if name in LEVELS_OF.values() else pytest.param(name, marks=pytest.mark.long)
  for name in O.POLICY_LOSSES
]


@pytest.mark.parametrize("name", BY_LEVELS)
def test_a_loss_takes_weights_of_the_levels_that_it_declares(name):
  case = paper.case(4)
  loss, args = arguments(name, case, O.POLICY_LOSSES[name].by_token)
  options = dict(max_length=12) if name in ("dr_grpo", "dppo") else {}
  for level in loss.levels:
    weight = compiled(O.truncated_weight, case["logp"], case["old"], case["mask"], level)
    assert np.isfinite(compiled(value, loss, *args, weight=weight, **options))
