"""Requests with a distribution each: one program, and each response as if it had been alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import SMALLER_DENSE, initial

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.sampling import Request, Workload, sampler
from gspo_jax.sampling.local import own_sampling, slots
from gspo_jax.sampling.local.scheduler import Scheduler
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sampling import DEFAULT, SamplingConfig

PLAIN = SamplingConfig(1.0, 0, 1.0, 0.0, 10)
KINDS = [
  PLAIN,
  dataclasses.replace(PLAIN, temperature=0.0),
  dataclasses.replace(PLAIN, temperature=0.7, top_k=3),
  dataclasses.replace(PLAIN, top_p=0.6),
  dataclasses.replace(PLAIN, temperature=1.5, min_p=0.3),
  dataclasses.replace(PLAIN, top_k=12, top_p=0.8, min_p=0.05),
  dataclasses.replace(PLAIN, temperature=0.0, top_k=1),
]
PROMPTS = [tuple(np.random.default_rng(i).integers(0, 32, 3 + 2 * i).tolist()) for i in range(7)]


@pytest.fixture(scope="module")
def params():
  return initial(SMALLER_DENSE)


def scheduler(params, own, sampling=PLAIN, slots=3, group=2):
  workload = Workload(sampling, 16, trajectories=20, group_size=group, own_sampling=own)
  config = dataclasses.replace(DEFAULT, slots=slots, steps=2)
  return Scheduler(params, 0, SMALLER_DENSE, workload, config)


def run(s, asked):
  for request in asked:
    s.submit(request)
  return {(r.request.prompt, r.sample): r for r in s.run()}


def asked(own=True):
  return [
    Request(prompt, 10, samples=2, seed=i, sampling=kind if own else None)
    for i, (prompt, kind) in enumerate(zip(PROMPTS, KINDS))
  ]


@pytest.fixture(scope="module")
def alone(params):
  found = {}
  for request, kind in zip(asked(own=False), KINDS):
    found |= run(scheduler(params, False, kind), [request])
  return found


def same(found, expected):
  assert found.keys() == expected.keys()
  for key, one in found.items():
    np.testing.assert_array_equal(one.tokens, expected[key].tokens)
    np.testing.assert_allclose(one.logp, expected[key].logp, atol=2e-6)
    np.testing.assert_allclose(one.full_logp, expected[key].full_logp, atol=2e-6)


def test_each_response_is_as_if_alone(params, alone):
  same(run(scheduler(params, True), asked()), alone)
  truncated = [r for r in alone.values() if np.abs(r.logp - r.full_logp).max() > 0.1]
  assert len(truncated) >= 6


def test_on_a_mesh_too(params, alone):
  mesh = sharding.make_mesh(MeshConfig(2, 2, 1, 2))
  with jax.set_mesh(mesh):
    rules = sharding.rollout_rules(MeshConfig(2, 2, 1, 2), mesh, 0)
    split = jax.device_put(params, transformer.shardings(SMALLER_DENSE, rules, mesh))
    same(run(scheduler(split, True, slots=4), asked()), alone)


def test_kinds_of_requests_compile_nothing(params):
  s = scheduler(params, True)
  run(s, asked()[:1])
  before = slots.decode._cache_size()
  run(s, asked())
  assert slots.decode._cache_size() == before


def test_own_sampling_must_be_announced(params):
  with pytest.raises(ValueError, match="own_sampling"):
    scheduler(params, False).submit(asked()[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_tokens_are_left_out(kind):
  logits_BV = jax.random.normal(jax.random.key(3), (16, 100)) * 2
  logits_BV = logits_BV.at[:, 1].set(logits_BV[:, 0])  # ties
  rows = own_sampling.stacked([kind] * 16)
  found = own_sampling.truncate(logits_BV, jax.tree.map(jnp.asarray, rows))
  np.testing.assert_array_equal(found, sampler.truncate(logits_BV, kind))


def test_what_is_cancelled_never_comes_and_frees_its_slots(params, alone):
  s = scheduler(params, True)
  gone = [Request((i + 1, 2, 3), 13, samples=2, tag=object()) for i in range(4)]
  for request in gone:
    s.submit(request)
  found = [r for _ in range(4) for r in s.step()]  # some have slots, some wait in the queue
  assert not found and s.busy
  parts = [part for request in gone for part in s.cancel(request.tag)]
  assert not s.busy and not any(part.finished for part in parts)
  assert 0 < sum(len(part.tokens) for part in parts) < 104
  same(run(s, asked()), alone)
  # 8 responses of 13 tokens would have been 104; and slots are used by nothing else.
  wanted = sum(len(r.tokens) for r in alone.values())
  assert s.usage.slot_steps < wanted + 104
  assert not s._abandoned


def test_a_group_that_is_cancelled_gives_way_to_the_next(params, alone):
  s = scheduler(params, True)
  group = Request((1, 2, 3), 10, samples=40, tag=object())
  s.submit(group)
  for _ in range(3):
    s.step()
  assert len(s.cancel(group.tag)) == 40
  s.submit(asked()[0])
  found, calls = [], s._calls
  while s.busy:
    found += s.step()
  # 5 for its 10 tokens, 1 ahead, 2 until slots that others have are free; 40 on 3 slots take 27.
  assert s._calls - calls <= 8
  found = {(r.request.prompt, r.sample): r for r in found}
  same(found, {key: one for key, one in alone.items() if key[0] == PROMPTS[0]})
  assert not s._abandoned and not s._queued


def test_many_are_cancelled_at_once(params, alone):
  """More prefixes than there are slots, by one tag, before and after some have slots."""
  s, tag = scheduler(params, True), object()
  for steps in range(4):
    for i in range(9):
      s.submit(Request((i + 1, 2, 3), 10, samples=1 + i % 3, tag=tag))
    for _ in range(steps):
      s.step()
    s.cancel(tag)
  same(run(s, asked()), alone)
  assert not s._abandoned and not s._queued


def test_who_came_first_is_first(params):
  """A single request between groups waits for those before it, and for no others."""
  s = scheduler(params, True, group=1)
  groups = [Request((i + 1, 2, 3), 4, samples=1 if i == 1 else 8) for i in range(4)]
  for request in groups:
    s.submit(request)
  order = [response.request.samples for response in s.run()]
  assert order.index(1) <= 8 + 3 and len(order) == 25


def test_what_was_put_aside_comes_back_when_it_is_cancelled(params):
  """Of pages that are not enough for all: its tokens are with the request that waits again."""
  workload = Workload(PLAIN, 16, trajectories=20, group_size=1, partial=True, own_sampling=True)
  config = dataclasses.replace(
    DEFAULT, slots=4, steps=2, cache="paged", page_tokens=2, cache_tokens=36
  )
  s, tag = Scheduler(params, 0, SMALLER_DENSE, workload, config), object()
  for i in range(4):
    s.submit(Request((i + 1, 2, 3, 4, 5, 6, 7), 10, tag=tag))
  while not any(lives and lives[0].count for _, lives in s._requests):
    assert s.busy
    s.step()
  wanted = s.usage.tokens
  parts = s.cancel(tag)
  assert sum(len(part.tokens) for part in parts) == wanted and not s.busy


def test_nothing_is_sorted_for_a_request_that_is_over(params, monkeypatch):
  sorted_ = []

  def counted(logits_BV, own):
    jax.debug.callback(lambda: sorted_.append(1))
    return truncate(logits_BV, own)

  truncate = own_sampling.truncate
  monkeypatch.setattr(own_sampling, "truncate", counted)
  s = scheduler(params, True, slots=5)  # compiled by no other test
  run(s, [Request((1, 2), 3, samples=3, sampling=KINDS[2])])
  jax.effects_barrier()
  assert 3 <= len(sorted_) <= 4
  del sorted_[:]
  run(s, [Request((3, 4), 6, sampling=PLAIN)])  # takes one of the three slots
  jax.effects_barrier()
  assert not sorted_


def test_rounding_leaves_nothing_out():
  """Beside a token of probability 1 - 1e-11, which is 1 in float32, the others stay possible."""
  logits_BV = jnp.zeros((2, 100)).at[:, 7].set(30.0)
  rows = jax.tree.map(jnp.asarray, own_sampling.stacked([PLAIN] * 2))
  assert jnp.isfinite(own_sampling.truncate(logits_BV, rows)).all()
