"""What must be equal: GSPO and GSPO-token, segments and their special cases, packed and unpacked,
any number of micro-batches, every transformation and every placement on devices."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import objectives_reference as paper
from support.compiled import compiled

from gspo_jax import objectives as O

# jax 0.7, the oldest that the losses run with, has explicit shardings under other names.
EXPLICIT = pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs jax.set_mesh")
SET_MESH = getattr(jax, "set_mesh", contextlib.nullcontext)
SUMS = {
  "gspo": O.gspo_loss.sums,
  "gspo_token": O.gspo_token_loss.sums,
  "segment": lambda *args: O.segment_loss.sums(*args, jnp.zeros(args[0].shape, int)),
  "luspo": O.luspo_loss.sums,
  "grpo": O.grpo_loss.sums,
  "dapo": O.dapo_loss.sums,
  "dr_grpo": functools.partial(O.dr_grpo_loss.sums, max_length=20),
  "cispo": O.cispo_loss.sums,
  "gmpo": O.gmpo_loss.sums,
  "sapo": O.sapo_loss.sums,
  "dppo": functools.partial(O.dppo_loss.sums, max_length=20),
  "vespo": O.vespo_loss.sums,
  "opmd": O.opmd_loss.sums,
}


def some(*names, cases=SUMS):
  """Marks all cases but these as long."""
  return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in cases]


# A ratio by response, by segment and by token, a mean of logarithms, and a weight.
KINDS = some("gspo", "segment", "grpo", "gmpo", "vespo")
ALPHAS = some(0.5, cases=[1.0, 0.5, 0.0])
PLAIN = paper.case(4)  # this one clips on both sides, tokens as well as responses


def tree_close(a, b, rtol=2e-6, atol=2e-7):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def arguments(case, advantage="advantage"):
  return case["logp"], case["old"], case[advantage], case["mask"]


def undivided(sums, logp, *constants):
  """Gradient of the numerator, and the sums."""

  def numerator(logp):
    total = sums(logp, *constants)
    return total[0].numerator, total

  return jax.grad(numerator, has_aux=True)(logp)


def divided(sums, *args):
  """Loss, metrics and gradient."""
  grad, total = undivided(sums, *args)
  return *O.compute(total), grad / total[0].denominator


@functools.cache
def plain_and_denominators(name):
  """Returns what `divided` does of a batch, and denominators at two points."""

  def questions(logp, *constants):
    points = logp, logp * 3 + 1
    return divided(SUMS[name], logp, *constants), [
      SUMS[name](x, *constants)[0].denominator for x in points
    ]

  return jax.jit(questions)(*arguments(PLAIN))


def plain(name):
  return plain_and_denominators(name)[0]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gspo_token_is_gspo_when_the_advantage_is_constant(alpha):
  """Eq. 17, clipping included: value, metrics and gradient."""
  args = arguments(paper.case(0, spread="near"))
  options = dict(length_exponent=alpha, dual_clip=1.0005)
  ours, token = (
    jax.jit(functools.partial(divided, functools.partial(loss.sums, **options)))(*args)
    for loss in (O.gspo_loss, O.gspo_token_loss)
  )
  assert float(ours[1]["clip_fraction/sequence"]) > 0
  tree_close(ours, token)


def test_segments_contain_gspo_and_grpo():
  logp, old, advantage, mask = arguments(PLAIN)
  B, T = mask.shape
  whole = jax.jit(functools.partial(divided, SUMS["segment"]))(logp, old, advantage, mask)
  tree_close(whole, plain("gspo"))
  tokens = np.tile(np.arange(T), (B, 1))
  sums = functools.partial(O.segment_loss.sums, segment_BT=tokens, clip_low=0.2, clip_high=0.27)
  tree_close(jax.jit(functools.partial(divided, sums))(*arguments(PLAIN)), plain("grpo"))
  sums = functools.partial(sums, clip_high=0.28, aggregate="token")
  tree_close(jax.jit(functools.partial(divided, sums))(*arguments(PLAIN)), plain("dapo"))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_turns_against_the_equation(alpha, x64):
  case = paper.case(1, dtype=np.float64)
  logp, old, advantage, mask = arguments(case)
  turns = np.sort(case["rng"].integers(0, 4, mask.shape), axis=1) * 3
  sums = functools.partial(O.segment_loss.sums, segment_BT=turns, length_exponent=alpha)
  value, _, grad = jax.jit(functools.partial(divided, sums))(logp, old, advantage, mask)

  def reference(x):
    return paper.segment(x, old, advantage, mask, turns, alpha=alpha)

  expected = paper.gradient(reference, logp)
  np.testing.assert_allclose(value, reference(logp).real, rtol=1e-12)
  np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-12 * abs(expected).max())


def test_segment_aggregates_by_hand():
  """Segments of 1 and 3 tokens, and one of 2 in the next row: all ratios are 1, the loss is −Â."""
  logp = np.zeros((2, 4))
  mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
  advantage = np.array([[1.0, 4, 4, 4], [2, 2, 9, 9]])
  ids = np.array([[3, 0, 0, 0], [1, 1, 1, 1]])

  def loss(**options):
    return float(compiled(O.segment_loss, logp, logp, advantage, mask, ids, **options)[0])

  assert loss() == pytest.approx(-(2.5 + 2) / 2)
  assert loss(aggregate="segment") == pytest.approx(-(1 + 4 + 2) / 3)
  assert loss(aggregate="token") == pytest.approx(-(1 + 12 + 4) / 6)
  assert loss(aggregate="constant", max_length=10) == pytest.approx(-(1 + 12 + 4) / 20)


def pack(case):
  """Rows laid end to end in pairs, with ids; masked positions have rubbish for advantage and id."""
  B, T = case["mask"].shape
  packed = {k: case[k].reshape(B // 2, 2 * T) for k in ("logp", "old", "ref", "mask")}
  advantage_BT = np.where(case["mask"], case["advantage"][:, None], np.nan)
  packed["advantage"] = advantage_BT.reshape(B // 2, 2 * T)
  packed["ids"] = np.where(packed["mask"], np.repeat([0, 5], T), -7)
  return packed


@pytest.mark.parametrize("name", KINDS)
def test_packed_rows_equal_unpacked_rows(name):
  packed = pack(PLAIN)
  if name == "segment":
    ids = np.maximum(packed["ids"], 0)
    sums = functools.partial(O.segment_loss.sums, segment_BT=ids, response_BT=packed["ids"])
  else:
    sums = functools.partial(SUMS[name], response_BT=packed["ids"])
  loss, metrics, grad = jax.jit(functools.partial(divided, sums))(*arguments(packed))
  tree_close((loss, metrics, grad.reshape(PLAIN["logp"].shape)), plain(name), 1e-5, 1e-6)


def test_packed_turns_and_penalties_equal_unpacked_ones():
  packed = pack(PLAIN)
  B, T = PLAIN["mask"].shape
  turns = np.sort(PLAIN["rng"].integers(0, 4, (B, T)), axis=1)
  distinct = (turns.reshape(B // 2, 2, T) + np.array([[0], [4]])).reshape(B // 2, 2 * T)
  for level in "sequence", "segment":
    options = dict(aggregate=level, kl_coef=0.1)
    sums = functools.partial(
      O.segment_loss.sums, segment_BT=turns, ref_logp_BT=PLAIN["ref"], **options
    )
    unpacked = jax.jit(functools.partial(divided, sums))(*arguments(PLAIN))
    sums = functools.partial(
      O.segment_loss.sums,
      segment_BT=distinct,
      ref_logp_BT=packed["ref"],
      response_BT=packed["ids"],
      **options,
    )
    loss, metrics, grad = jax.jit(functools.partial(divided, sums))(*arguments(packed))
    tree_close((loss, metrics, grad.reshape(B, T)), unpacked, 1e-5, 1e-6)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("name", some("gspo", "grpo"))
def test_any_number_of_micro_batches_is_the_same(name, parts):
  """Means of means would differ by several per cent."""

  @jax.jit
  def accumulated(*args):
    split = [x.reshape(parts, -1, *x.shape[1:]) for x in args]
    grad, total = jax.lax.map(lambda x: undivided(SUMS[name], *x), split)
    total = O.collapse(total)
    return *O.compute(total), grad.reshape(args[0].shape) / total[0].denominator

  tree_close(accumulated(*arguments(PLAIN)), plain(name))


@pytest.mark.parametrize("name", KINDS)
def test_denominators_do_not_depend_on_parameters(name):
  here, elsewhere = plain_and_denominators(name)[1]
  assert here == elsewhere > 0


@pytest.mark.parametrize("name", some("gspo"))
def test_vmap_agrees_with_plain(name):
  stacked = [np.stack([x, x[::-1]]) for x in arguments(PLAIN)]
  loss, metrics, grad = jax.jit(jax.vmap(functools.partial(divided, SUMS[name])))(*stacked)
  first = jax.tree.map(lambda x: x[0], (loss, metrics, grad))
  tree_close(first, plain(name))
  tree_close((loss[1], grad[1][::-1]), (plain(name)[0], plain(name)[2]))


@pytest.mark.long
def test_without_jit_it_is_the_same():
  f = jax.value_and_grad(lambda x: O.gspo_loss(x, *arguments(PLAIN)[1:]), has_aux=True)
  (loss, metrics), grad = f(PLAIN["logp"])
  tree_close((loss, metrics, grad), plain("gspo"))


@pytest.mark.parametrize("name", some("gspo"))
def test_shard_map_over_eight_devices(name):
  """Each device has a row (one of them has an empty row); sums are added across devices."""
  mesh = jax.make_mesh((8,), ("data",))

  def local(*args):
    grad, total = undivided(SUMS[name], *args)
    total = O.psum(total, "data")
    return *O.compute(total), grad / total[0].denominator

  f = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=(P(), P(), P("data")))
  with SET_MESH(mesh):
    inputs = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arguments(PLAIN)]
    sharded = jax.device_get(jax.jit(f)(*inputs))
  tree_close(sharded, plain(name))


@EXPLICIT
@pytest.mark.parametrize(
  "spec", [pytest.param(P("data"), marks=pytest.mark.long), P("data", "time")]
)
@pytest.mark.parametrize("name", some("gspo", cases=[name for name in SUMS if name != "segment"]))
def test_explicit_sharding_agrees_and_leaves_the_gradient_sharded_as_the_input(name, spec):
  mesh = jax.make_mesh((4, 2), ("data", "time"))
  with jax.set_mesh(mesh):
    inputs = [
      jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P("data")))
      for x in arguments(PLAIN)
    ]
    sharded = jax.jit(functools.partial(divided, SUMS[name]))(*inputs)
    assert jax.typeof(sharded[2]) == jax.typeof(inputs[0])
    sharded = jax.device_get(sharded)
  tree_close(sharded, plain(name))


@pytest.mark.long
@EXPLICIT
def test_explicit_sharding_of_packed_rows_and_segments():
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  packed = pack(PLAIN)
  f = jax.jit(lambda *x: divided(O.segment_loss.sums, *x))
  g = jax.jit(lambda *x: divided(functools.partial(O.gmpo_loss.sums, response_BT=x[4]), *x[:4]))
  with jax.set_mesh(mesh):
    args = *arguments(packed), np.maximum(packed["ids"], 0)
    sharded = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in args]
    for h, name in (g, "gmpo"), (f, None):
      loss, _, grad = h(*sharded)
      assert jax.typeof(grad) == jax.typeof(sharded[0])
      if name:
        np.testing.assert_allclose(jax.device_get(loss), plain(name)[0], rtol=1e-6)


@EXPLICIT
def test_the_rest_of_the_package_on_eight_devices():
  """Advantages, gae, weights and measures: explicit sharding, and sums over shard_map."""
  mesh = jax.make_mesh((8,), ("data",))

  def everything(logp, old, advantage, mask):
    weight = O.truncated_weight(logp, old, mask, "sequence")
    return (
      O.gae(logp, old, mask),
      O.group_advantages(jnp.where(mask, logp, 0), valid_PG=mask),
      O.masked_weight(logp, old, mask),
      O.off_policy_mask(logp, old, advantage, mask, 0.1),
      divided(functools.partial(O.gspo_loss.sums, weight=weight), logp, old, advantage, mask),
      divided(O.value_loss.sums, logp, old, jnp.where(mask, old, 0), mask),
    )

  alone = (
    jax.jit(everything)(*arguments(PLAIN)),
    compiled(O.mismatch, *args_of_mismatch(arguments(PLAIN))),
  )
  local = jax.shard_map(
    lambda *x: O.compute(O.psum(O.mismatch.sums(*args_of_mismatch(x)), "data")),
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P(),
  )
  with jax.set_mesh(mesh):
    inputs = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arguments(PLAIN)]
    sharded = jax.device_get((jax.jit(everything)(*inputs), jax.jit(local)(*inputs)))
  tree_close(sharded, alone, 1e-5, 1e-6)


def args_of_mismatch(args):
  return args[0], args[1], args[3]


def test_luspo_is_the_sum_over_tokens_of_gspo_token():
  """Penalties included: a token counts the same in a long response and in a short one."""
  case = paper.case(0, spread="near")
  args, ranges = arguments(case), dict(clip_low=2e-3, clip_high=2.5e-3)
  options = ranges | dict(ref_logp_BT=case["ref"], kl_coef=0.1)
  luspo = compiled(divided, functools.partial(O.luspo_loss.sums, **options), *args)
  sums = functools.partial(O.gspo_token_loss.sums, **options)
  _, metrics, grad = compiled(divided, sums, *args)
  length = case["mask"].sum(axis=1, keepdims=True)
  tree_close(luspo[1], metrics)
  tree_close(luspo[2], grad * length)
  on_policy = case["logp"], case["logp"], *args[2:]  # All ratios are 1.
  luspo = compiled(O.luspo_loss, *on_policy, **options)[0]
  grpo = compiled(O.grpo_loss, *on_policy, aggregate="constant", max_length=1, **options)[0]
  np.testing.assert_allclose(luspo, grpo, rtol=1e-6)


def test_opmd_is_soft_policy_optimization_with_the_old_policy_for_the_reference():
  args, beta = arguments(PLAIN), 0.3
  opmd = compiled(divided, functools.partial(O.opmd_loss.sums, beta=beta), *args)[2]
  soft = compiled(divided, functools.partial(O.soft_loss.sums, beta=beta), *args)[2]
  np.testing.assert_allclose(2 * beta * opmd, soft, rtol=2e-5, atol=1e-6)


def test_ranges_may_be_given_per_row():
  args = arguments(paper.case(11, spread="near"))
  ranges = np.linspace(1e-4, 1e-2, len(args[2]), dtype=np.float32)
  f = jax.jit(lambda *x: O.gspo_loss.sums(*x[:4], clip_low=x[4], clip_high=2 * x[4])[0])
  whole = f(*args, ranges)
  rows = [f(*(x[i : i + 1] for x in args), ranges[i : i + 1]) for i in range(len(ranges))]
  tree_close(whole, functools.reduce(O.merge, rows), 1e-6)
