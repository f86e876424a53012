"""The tokens that each one was drawn from: on record where it is sampled, and carried along."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long
from support.environments import TALK, Teacher
from support.sampling import PROMPTS, run, sample, scheduler
from support.small_models import SMALLER_DENSE, initial, logits

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.sampling import Driver, Request, SingleTurn, Trajectory, Workload, assemble, sampler
from gspo_jax.sampling.requests import Response
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE, SamplingConfig

MODEL = SMALLER_DENSE
# Opinions, so that top-p leaves out different numbers of tokens.
PARAMS = initial(MODEL).replace(head=20 * initial(MODEL).head)
TRUNCATION = (7, 0.85, 0.02)  # top_k, top_p, min_p
OPTIONS = dict(group_size=3, max_new_tokens=8, truncation=TRUNCATION, support=7, temperature=0.8)


support_of = jax.jit(sampler.support, static_argnums=1)


def config(top_k, top_p=1.0, min_p=0.0):
  return SamplingConfig(0.8, top_k, top_p, min_p, 4)


@pytest.mark.parametrize(
  "truncation",
  [
    (9, 0.8, 0.1),
    *long(((50,), (3,), (12, 0.6), (12, 1.0, 0.2))),
  ],
  ids=str,
)
def test_a_support_is_what_truncation_keeps(truncation):
  logits_BV = jnp.asarray(np.random.default_rng(0).normal(0, 2, (64, 32)), jnp.float32)
  kept_BV = np.asarray(jax.jit(sampler.truncate, static_argnums=1)(logits_BV, config(*truncation)))
  support_BX = np.asarray(support_of(logits_BV, config(*truncation)))
  assert support_BX.shape == (64, min(truncation[0], 32)) and support_BX.dtype == np.int32
  sizes = set()
  for kept_V, support_X, logits_V in zip(kept_BV, support_BX, np.asarray(logits_BV)):
    ids = support_X[support_X != -1]
    assert sorted(ids) == np.flatnonzero(kept_V > -np.inf).tolist()
    assert (np.diff(logits_V[ids]) <= 0).all(), "the likeliest first"
    sizes.add(len(ids))
  assert len(sizes) > 1 or truncation in ((3,), (50,))
  np.testing.assert_array_equal(sampler.mask_outside(logits_BV, jnp.asarray(support_BX)), kept_BV)


def test_of_equal_tokens_only_so_many_are_drawn_from():
  """`truncate` keeps all five; what is put on record has room for two."""
  logits_BV = jnp.zeros((1000, 5))
  keys = jax.vmap(sampler.row_key, (None, 0, 0))(0, jnp.zeros(1000, jnp.uint32), jnp.arange(1000))
  support_BX = support_of(logits_BV, config(2))
  token_B, logp_B, full_B = jax.jit(sampler.sample, static_argnums=3)(
    logits_BV, keys, jnp.zeros(1000, jnp.int32), config(2), support_BX
  )
  np.testing.assert_array_equal(support_BX, np.tile([0, 1], (1000, 1)))
  assert set(np.asarray(token_B).tolist()) == {0, 1}
  np.testing.assert_allclose(logp_B, np.log(1 / 2), atol=1e-6)
  np.testing.assert_allclose(full_B, np.log(1 / 5), atol=1e-6)


@pytest.fixture(scope="module")
def rollout():
  return sample(PARAMS, MODEL, PROMPTS, **OPTIONS)


def test_what_is_on_record_is_what_was_drawn_from(rollout):
  """By the model's own logits; and asking for it changes no token and no likelihood."""
  plain = sample(PARAMS, MODEL, PROMPTS, **OPTIONS | dict(support=0))
  assert plain.support is None
  for name in ("tokens", "mask", "logp", "full_logp"):
    np.testing.assert_array_equal(getattr(plain, name), getattr(rollout, name))
  logits_BTV = np.asarray(logits(PARAMS, MODEL, rollout.tokens), np.float64) / 0.8
  sizes = []
  for b, t in zip(*np.nonzero(rollout.mask)):
    row = rollout.support[b, t]
    ids, z_V = row[row != -1], logits_BTV[b, t - 1]
    assert rollout.tokens[b, t] in ids
    assert rollout.logp[b, t] == pytest.approx(
      z_V[rollout.tokens[b, t]] - np.log(np.exp(z_V[ids]).sum()), abs=1e-4
    )
    sizes.append(len(ids))
  assert min(sizes) < max(sizes) <= 7
  assert (rollout.support[rollout.mask == 0] == -1).all()


@pytest.mark.long
def test_a_mesh_and_few_slots_have_the_same(rollout):
  few = sample(
    PARAMS, MODEL, PROMPTS, engine=dataclasses.replace(LOCAL_ENGINE, slots=2, steps=3), **OPTIONS
  )
  np.testing.assert_array_equal(few.support, rollout.support)
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
  with jax.set_mesh(mesh):
    params = jax.device_put(PARAMS, transformer.shardings(MODEL, sharding.ROLLOUT, mesh))
    files = sample(params, MODEL, PROMPTS, **OPTIONS)
  np.testing.assert_array_equal(files.tokens, rollout.tokens)
  np.testing.assert_array_equal(np.sort(files.support), np.sort(rollout.support))


def test_conversations_keep_it_for_what_the_policy_said():
  environments = [Teacher([25 + p]) for p in range(4)]
  options = OPTIONS | dict(group_size=1, max_new_tokens=20, prompt_length=3)
  out = sample(
    PARAMS,
    MODEL,
    environments=environments,
    max_turns=TALK.max_turns,
    stop_ids=tuple(range(12)),
    **options,
  )
  output = out.mask > 0
  assert out.turns.max() > 0
  assert ((out.support != -1).any(-1) == output).all()
  hit = (out.support == out.tokens[..., None]).any(-1)
  assert hit[output].all()


@pytest.mark.long
def test_what_is_put_aside_keeps_it():
  """Pages run out, and responses are begun again with the tokens that they have."""
  sampling = SamplingConfig(0.8, *TRUNCATION, 24)
  options = dict(prompt_length=8, trajectories=12, support=7, slots=6, steps=5)
  few = scheduler(PARAMS, MODEL, sampling, cache="paged", page_tokens=8, cache_tokens=48, **options)
  requests = [Request(prompt, 24, samples=3, seed=5) for prompt in PROMPTS]
  again = run(few, requests)
  whole = run(scheduler(PARAMS, MODEL, sampling, cache="dense", **options), requests)
  assert few.usage.put_aside > 0
  for key, response in again.items():
    np.testing.assert_array_equal(response.tokens, whole[key].tokens)
    assert response.support.shape == (24, 7)
    np.testing.assert_array_equal(np.sort(response.support), np.sort(whole[key].support))


def response(tokens, support, finished=False):
  tokens, logp = np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32)
  support = None if support is None else np.array(support, np.int32)
  return Response(None, 0, tokens, logp, logp, tokens, False, finished, None, support)


def test_a_trajectory_keeps_it_through_a_checkpoint():
  """Its first tokens were sampled before there was any, its last ones of fewer."""
  trajectory = Trajectory((5, 6), 0, 0, SingleTurn((5, 6)))
  trajectory.add(response([1, 2], None))
  assert trajectory.support is None
  trajectory.add(response([3], [[3, 4, 8]]))
  earlier = trajectory.copy()
  trajectory.add(response([4], [[4, 2]]))
  trajectory = Trajectory.from_state(
    json.loads(json.dumps(trajectory.get_state())), SingleTurn((5, 6))
  )
  expected = [[-1, -1, -1], [-1, -1, -1], [3, 4, 8], [4, 2, -1]]
  np.testing.assert_array_equal(trajectory.support, expected)
  np.testing.assert_array_equal(earlier.support, expected[:3])
  trajectory.finish(True)
  rollout = assemble([trajectory], 7, 0, support=4)
  assert rollout.support.shape == (1, 7, 4) and rollout.support.dtype == np.int32
  np.testing.assert_array_equal(rollout.support[0, 2:6, :3], expected)
  assert (rollout.support[0, [0, 1, 6]] == -1).all() and (rollout.support[..., 3] == -1).all()
  with pytest.raises(ValueError, match=r"sampling\.top_k=2, .* sampled with top_k=3: set"):
    assemble([trajectory], 7, 0, support=2)
  plain = Trajectory((5,), 0, 0, SingleTurn((5,)))
  plain.add(response([1], None))
  plain.finish(True)
  assert "support" not in plain.get_state() and assemble([plain], 3, 0).support is None
  assert (assemble([plain], 3, 0, support=2).support == -1).all()


class Silent:
  """An engine that samples and does not say from which tokens."""

  busy = True

  def start(self, workload): ...

  def submit(self, request):
    self.request = request

  def step(self):
    self.busy = False
    return [dataclasses.replace(response([1], None, finished=True), request=self.request)]

  def stop(self):
    return []


def test_an_engine_that_keeps_none_is_refused():
  load = Workload(config(4), prompt_length=2, trajectories=1, support=4)
  driver = Driver(Silent(), load)
  driver.begin([Trajectory((5,), 0, 0, SingleTurn((5,)))])
  with pytest.raises(
    ValueError, match=r"Silent does not record the tokens inside top-k, .*: set sampling\.top_k"
  ):
    list(driver.run())
