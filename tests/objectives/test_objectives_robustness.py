"""Rubbish behind the mask, numbers no network would give, and mistakes of the caller."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compiled as programs
from support import objectives_reference as paper

from gspo_jax import objectives as O

CASE = paper.case(4, garbage=False)
B, T = CASE["mask"].shape
IDS = np.zeros((B, T), int)
ALL = {
  "gspo": O.gspo_loss,
  "gspo_raw": functools.partial(O.gspo_loss, length_exponent=0.0, dual_clip=3.0),
  "gspo_token": O.gspo_token_loss,
  "segment": lambda *args, **kw: O.segment_loss(*args, IDS, **kw),
  "luspo": O.luspo_loss,
  "grpo": O.grpo_loss,
  "dapo": O.dapo_loss,
  "dr_grpo": functools.partial(O.dr_grpo_loss, max_length=20),
  "cispo": O.cispo_loss,
  "gmpo": O.gmpo_loss,
  "sapo": O.sapo_loss,
  "dppo": functools.partial(O.dppo_loss, max_length=20),
  "dppo_kl": functools.partial(O.dppo_loss, aggregate="token", divergence="kl"),
  "vespo": O.vespo_loss,
  "opmd": O.opmd_loss,
  "spo": O.soft_loss,
  "rft": O.rft_loss,
}
# Other averages, thresholds and weights of losses in the list.
VARIANTS = "luspo", "dapo", "dr_grpo", "dppo"
EACH = [pytest.param(n, marks=pytest.mark.long) if n in VARIANTS else n for n in ALL]
PENALTIES = dict(kl="k3", kl_coef=0.1, entropy_coef=0.01)


@functools.cache
def compiled(name, kl):
  def loss(logp, old, ref, entropy, advantage, mask):
    penalties = PENALTIES | dict(kl=kl, ref_logp_BT=ref, entropy_BT=entropy)
    return ALL[name](logp, old, advantage, mask, **penalties)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def test_masks_of_bool_and_ids_of_narrow_integers():
  x = np.zeros((1, 200), np.float32)
  for dtype in (np.int8, np.uint8, np.int16):
    ids = np.full((1, 200), 100, dtype)
    loss, _ = O.segment_loss(x, x, np.ones(1, np.float32), np.ones((1, 200), bool), ids)
    assert loss == pytest.approx(-1)
    with pytest.raises(ValueError, match=r"segment_BT must be in \[0, T\)"):
      O.segment_loss(x[:, :50], x[:, :50], np.ones(1, np.float32), np.ones((1, 50)), ids[:, :50])
  with jax.numpy_dtype_promotion("strict"):
    np.testing.assert_allclose(O.group_advantages([[1.0, 0.0]]), [[0.70711, -0.70711]], rtol=1e-4)
    O.gspo_loss(x, x, np.ones(1, np.float32), np.ones((1, 200), bool))
    assert O.overlong_penalty(np.array([90]), 100, 20) == -0.5


@pytest.mark.parametrize("name", EACH)
def test_what_is_masked_reaches_nothing(name):
  """Bit for bit: NaN, infinities and the largest floats, also in an empty row's advantage."""
  f, mask, advantage = compiled(name, "k3"), CASE["mask"], CASE["advantage"]
  clean = [CASE["logp"], CASE["old"], CASE["ref"], -CASE["logp"]]
  (loss, metrics), grads = f(*clean, advantage, mask)
  assert np.isfinite(loss) and all(np.isfinite(x) for x in metrics.values())
  assert np.any(grads[0])
  assert not np.any(grads[1]) and not np.any(grads[2])  # old and reference are constants
  for grad in grads:
    assert not np.any(np.asarray(grad)[~mask])
  for rubbish in np.nan, np.inf, -np.inf, 3e38, -3e38:
    dirty = [np.where(mask, x, np.float32(rubbish)) for x in clean]
    dirty_advantage = np.where(mask.any(axis=1), advantage, np.float32(rubbish))
    (dirty_loss, dirty_metrics), dirty_grads = f(*dirty, dirty_advantage, mask)
    assert dirty_loss == loss
    assert dirty_metrics == metrics
    for grad, dirty_grad in zip(grads, dirty_grads):
      np.testing.assert_array_equal(grad, dirty_grad)


KINDS = ("k1", "k2", "k3", "k3_weighted")  # Penalties, which all losses add in the same way.
PENALISED = [
  pytest.param(name, ("k3",), marks=pytest.mark.long if name in VARIANTS else ()) for name in ALL
]
PENALISED += [
  pytest.param(name, KINDS, marks=() if name == "gspo" else pytest.mark.long) for name in ALL
]


@pytest.mark.parametrize("name, kinds", PENALISED)
def test_no_finite_input_gives_anything_else(name, kinds):
  """All pairs of new and old log-probabilities from 0 to the largest float, of either sign."""
  sizes = np.array([0, 20, 90, 1e4, 1e10, 1e30, 3e38], np.float32)
  pairs = np.array(list(itertools.product([*sizes, *-sizes], repeat=2)), np.float32)
  for n, kl in enumerate(kinds):
    logp, old = np.roll(np.resize(pairs, (4 * B * T, 2)), n, 0)[n * B * T :][: B * T].T
    logp, old = logp.reshape(B, T), old.reshape(B, T)
    for size in -1e3, 1e3, -3e38, 3e38:
      args = logp, old, logp[::-1], old[::-1], np.full(B, size, np.float32), np.ones((B, T), bool)
      (loss, metrics), grads = compiled(name, kl)(*args)
      assert np.isfinite(loss)
      assert all(np.isfinite(x) for x in metrics.values()), metrics
      assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("name", EACH)
def test_a_token_that_no_longer_has_a_probability_leaves_the_others_theirs(name):
  """Such as in an underflowed policy, or one with top-k sampling."""
  mask = CASE["mask"]
  row, t = np.argwhere(mask)[0]
  for nowhere in (["logp"], ["old"], ["logp", "old"]):
    case = {key: CASE[key].copy() for key in ("logp", "old")}
    for key in nowhere:
      case[key][row, t] = -np.inf
    arguments = case["logp"], case["old"], CASE["ref"], -CASE["ref"], CASE["advantage"], mask
    (loss, _), grads = compiled(name, "k3")(*arguments)
    assert np.isfinite(loss) and all(np.isfinite(grad).all() for grad in grads), nowhere
    assert np.any(grads[0])


def test_gspo_token_is_gspo_there_too():
  logp = CASE["logp"].copy()
  logp[tuple(np.argwhere(CASE["mask"])[0])] = -np.inf
  arguments = logp, CASE["old"], CASE["advantage"], CASE["mask"]
  losses = [float(jax.jit(loss)(*arguments)[0]) for loss in (O.gspo_token_loss, O.gspo_loss)]
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_log_ratios_of_a_real_size_are_not_cut():
  """A clamp of log-ratios at 10 or 20, as elsewhere, would show here."""
  f = jax.jit(jax.value_and_grad(O.grpo_loss, has_aux=True))
  for size in 15.0, 25.0, 60.0:
    logp, old = np.full((2, 1, 2), -1.0, np.float32) - np.float32([0, size]).reshape(2, 1, 1)
    (loss, _), grad = f(logp, old, np.array([-1.0]), np.ones((1, 2)))
    np.testing.assert_allclose([loss, *grad[0] * 2], np.exp(size), rtol=5e-6)


@pytest.mark.parametrize("name", EACH)
def test_a_batch_without_tokens_is_zero(name):
  case = CASE
  nothing = [np.full((B, T), np.nan, np.float32)] * 4
  (loss, metrics), grads = compiled(name, "k3")(*nothing, case["advantage"], np.zeros((B, T), bool))
  assert loss == 0 and not any(float(x) for x in metrics.values())
  assert not np.any(grads[0])


def test_bfloat16_is_computed_in_float32():
  args = [jnp.asarray(CASE[name], jnp.bfloat16) for name in ("logp", "old", "advantage")]
  wide = [x.astype(jnp.float32) for x in args]
  f = jax.jit(jax.value_and_grad(lambda *x: O.gspo_loss(*x, CASE["mask"])[0]))
  (loss, grad), (expected, _) = f(*args), f(*wide)
  assert loss.dtype == jnp.float32 and loss == expected
  assert grad.dtype == jnp.bfloat16


@pytest.mark.parametrize("mean, clipped", [(-0.5, 0.16), (-1, 0.30), (-4, 0.46)])
def test_rounded_log_probs_beside_exact_old_ones_are_clipped(mean, clipped):
  """The figures of docs/objectives.md, for ten tokens of exponentially distributed -log π."""
  draws, coin = jax.random.split(jax.random.key(0))
  old_BT = mean * jax.random.exponential(draws, (4000, 10))
  sign_B = jnp.where(jax.random.bernoulli(coin, shape=(4000,)), 1.0, -1.0)
  rounded_BT = old_BT.astype(jnp.bfloat16)
  _, metrics = programs.compiled(O.gspo_loss, rounded_BT, old_BT, sign_B, jnp.ones((4000, 10)))
  assert abs(metrics["clip_fraction/sequence"] - clipped) < 0.01


def arguments(**changed):
  named = dict(logp_BT=CASE["logp"], old_logp_BT=CASE["old"], advantage=CASE["advantage"])
  return list((named | dict(mask_BT=CASE["mask"]) | changed).values())


class Attached:
  """Fails as a tensor of PyTorch with a gradient does."""

  def __array__(self, *_, **__):
    raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


NAN_HERE = np.where(CASE["mask"], np.float32(np.nan), 0)
MISTAKES = {
  "advantage of the wrong length": (dict(advantage=np.ones(B + 1)), "advantage"),
  "advantage per time": (dict(advantage=np.ones((T, B))), "advantage"),
  "advantage scalar": (dict(advantage=1.0), "advantage"),
  "advantage complex": (dict(advantage=np.ones(B) * 1j), "advantage"),
  "advantage NaN": (dict(advantage=np.full(B, np.nan)), "advantage"),
  "advantage missing": (dict(advantage=None), "advantage"),
  "old of another shape": (dict(old_logp_BT=CASE["old"][:, 1:]), "old_logp_BT"),
  "old of integers": (dict(old_logp_BT=np.ones((B, T), int)), "old_logp_BT"),
  "old NaN": (dict(old_logp_BT=NAN_HERE), "old_logp_BT"),
  "logp NaN": (dict(logp_BT=NAN_HERE), "logp_BT"),
  "logp of PyTorch": (dict(logp_BT=Attached()), "logp_BT is no array of JAX"),
  "logp flat": (dict(logp_BT=CASE["logp"][0]), "logp_BT"),
  "logp of integers": (dict(logp_BT=np.ones((B, T), int)), "logp_BT"),
  "mask of another shape": (dict(mask_BT=CASE["mask"][:, 1:]), "mask_BT"),
  "mask of weights": (dict(mask_BT=CASE["mask"] * 0.5), "mask_BT"),
  "mask of lengths": (dict(mask_BT=CASE["mask"] * 2), "mask_BT"),
  "mask NaN": (dict(mask_BT=np.where(CASE["mask"], 1, np.nan)), "mask_BT"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
  changed, argument = MISTAKES[mistake]
  for loss in O.gspo_loss, O.gspo_token_loss, O.grpo_loss, O.gmpo_loss:
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}"):
      loss(*arguments(**changed))


def test_no_time_and_no_rows_are_named():
  for shape in (B, 0), (0, T):
    empty = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"logp_BT.*T > 0"):
      O.gspo_loss(empty, empty, np.zeros(shape[0]), empty)


OPTION_MISTAKES = [
  (O.gspo_loss, dict(clip_low=-0.1), "clip_low"),
  (O.gspo_loss, dict(clip_high=-1e-4), "clip_high"),
  (O.gspo_loss, dict(clip_high=np.nan), "clip_high"),
  (O.gspo_loss, dict(clip_high=np.ones(B + 1)), "clip_high"),
  (O.gspo_loss, dict(dual_clip=0.5), "dual_clip"),
  (O.gspo_loss, dict(clip_exponent=0.5), "clip_length"),
  (O.gspo_loss, dict(clip_exponent=-0.5, clip_length=8), "clip_exponent"),
  (O.gspo_token_loss, dict(clip_exponent=0.5, clip_length=0), "clip_length"),
  (O.gspo_loss, dict(advantage_B=np.ones((B, T))), "advantage"),
  (O.gspo_loss, dict(weight=np.ones((B, T))), "weight"),
  (O.gspo_loss, dict(weight=np.full(B, np.nan)), "weight"),
  (O.gspo_loss, dict(response_BT=np.full((B, T), T)), "response_BT"),
  (O.gspo_loss, dict(response_BT=np.full((B, T), -1)), "response_BT"),
  (O.gspo_loss, dict(response_BT=np.zeros((B, T))), "response_BT"),
  (O.gspo_loss, dict(kl_coef=0.1), "ref_logp_BT"),
  (O.gspo_loss, dict(ref_logp_BT=CASE["ref"], kl="k4"), "kl"),
  (O.gspo_loss, dict(ref_logp_BT=CASE["ref"][:, 1:]), "ref_logp_BT"),
  (O.gspo_loss, dict(entropy_coef=0.1), "entropy_BT"),
  (O.gspo_loss, dict(epsilon=0.1), "epsilon"),
  (O.grpo_loss, dict(aggregate="mean"), "aggregate"),
  (O.grpo_loss, dict(aggregate="constant"), "max_length"),
  (O.grpo_loss, dict(aggregate="constant", max_length=0), "max_length"),
  (O.dr_grpo_loss, dict(), "max_length"),
  (O.segment_loss, dict(segment_BT=IDS[:, 1:]), "segment_BT"),
  (O.segment_loss, dict(segment_BT=IDS - 1), "segment_BT"),
  (O.cispo_loss, dict(clip_low=-0.1), "clip_low"),
  (O.gmpo_loss, dict(clip_low=-0.1), "clip_low"),
  (O.sapo_loss, dict(tau_neg=0.0), "tau_neg"),
  (O.dppo_loss, dict(), "max_length"),
  (O.dppo_loss, dict(max_length=20, divergence="js"), "divergence"),
  (O.luspo_loss, dict(advantage_B=np.ones((B, T))), "advantage"),
  (O.luspo_loss, dict(length_exponent=0.5), "luspo_loss has no argument 'length_exponent'"),
  (O.vespo_loss, dict(advantage_B=np.ones((B, T))), "advantage"),
  (O.vespo_loss, dict(lambda_neg=0.0), "lambda_neg"),
  (O.vespo_loss, dict(clip_low=0.1), "vespo_loss has no argument 'clip_low'"),
  (O.opmd_loss, dict(beta=0.0), "beta"),
  (O.gspo_loss, dict(clip=0.2), "gspo_loss has no argument 'clip'; it has .*clip_low"),
  (O.cispo_loss.sums, dict(dual_clip=3.0), "cispo_loss has no argument 'dual_clip'"),
  (O.truncated_weight, dict(cap=0.0), "cap"),
  (O.truncated_weight, dict(level="row"), "level"),
  (O.masked_weight, dict(low=2.0, high=1.0), "high"),
  (O.masked_weight, dict(low=-1.0), "low"),
  # One number, or it would count along whichever axis it fits.
  (O.gspo_loss, dict(length_exponent=np.ones(B)), "length_exponent"),
  (O.gspo_token_loss, dict(clip_exponent=0.5, clip_length=np.ones(B)), "clip_length"),
  (O.gspo_loss, dict(clip_exponent=np.ones(B), clip_length=8), "clip_exponent"),
  (O.gspo_loss, dict(ref_logp_BT=CASE["ref"], kl_coef=np.ones((B, 1))), "kl_coef"),
  (O.soft_loss, dict(beta=np.ones(B)), "beta"),
  (O.sapo_loss, dict(tau_pos=np.ones(B)), "tau_pos"),
  (O.vespo_loss, dict(k_pos=np.ones(B)), "k_pos"),
  (O.opmd_loss, dict(beta=np.ones(B)), "beta"),
  (O.grpo_loss, dict(aggregate="constant", max_length=np.ones(B)), "max_length"),
  (O.truncated_weight, dict(cap=np.ones(B)), "cap"),
  (O.masked_weight, dict(high=np.ones(B)), "high"),
]


@pytest.mark.parametrize("function, options, argument", OPTION_MISTAKES)
def test_mistaken_options_are_named(function, options, argument):
  args = arguments()
  if function in (O.truncated_weight, O.masked_weight):
    args = [args[0], args[1], args[3]]
  options = dict(options)
  args[2] = options.pop("advantage_B", args[2])
  with pytest.raises((ValueError, TypeError), match=rf"\b{argument}"):
    function(*args, **options)


def test_python_numbers_and_shapes_are_checked_inside_jit_too():
  f = jax.jit(functools.partial(O.gspo_loss, clip_low=-0.1))
  with pytest.raises(ValueError, match="clip_low"):
    f(*arguments())
  with pytest.raises(ValueError, match=re.escape("advantage has shape (9,), expected [B] = (8,)")):
    jax.jit(O.gspo_loss)(*arguments(advantage=np.ones(B + 1)))
