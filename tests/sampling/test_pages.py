"""A cache in pages samples what a dense one does, and no response is lost when pages run out."""

import dataclasses

import jax
import numpy as np
import pytest
from support.small_models import GEMMA, MOE, initial

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.sampling import Request, Workload
from gspo_jax.sampling.local import under_way
from gspo_jax.sampling.local.scheduler import Scheduler
from gspo_jax.sampling.requests import sizes
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sampling import DEFAULT, SamplingConfig

STOP = (1, 2, 3)
RNG = np.random.default_rng(0)
PROMPTS = [tuple(RNG.integers(8, 64, n).tolist()) for n in (3, 40, 1, 17, 9, 24)]
NEW = 24
WINDOW = 48 + NEW
PAGES = dict(cache="paged", page_tokens=8)
LEAST = 8 * (WINDOW // 8 + 1)  # positions: one window, and a page


def workload(**changes):
  sampling = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=NEW)
  options = dict(prompt_length=48, trajectories=100, group_size=3, stop_ids=STOP) | changes
  return Workload(sampling, **options)


def scheduler(model=MOE, params=None, asked=None, **engine):
  config = dataclasses.replace(DEFAULT, **dict(slots=6, steps=5) | engine)
  return Scheduler(params or initial(model), 0, model, asked or workload(), config)


def run(s, prompts=PROMPTS, **changes):
  for i, prompt in enumerate(prompts):
    s.submit(Request(prompt, NEW, samples=3, seed=5, stop_ids=STOP, tag=i, **changes))
  return {(r.request.tag, r.sample): r for r in s.run()}


def same(found, expected):
  assert found.keys() == expected.keys()
  for key, response in found.items():
    np.testing.assert_array_equal(response.tokens, expected[key].tokens)
    for name in ("logp", "full_logp"):
      np.testing.assert_allclose(getattr(response, name), getattr(expected[key], name), atol=1e-5)
    assert response.stopped == expected[key].stopped and response.finished
    if expected[key].routing is not None:
      np.testing.assert_array_equal(response.routing, expected[key].routing)


RECORDED = workload(record_routing=True)


@pytest.fixture(scope="module")
def expected():
  return run(scheduler(cache="dense", asked=RECORDED))


def test_pages_change_nothing(expected):
  s = scheduler(asked=RECORDED, **PAGES)
  same(run(s), expected)
  assert s.usage.put_aside == 0


def test_nor_do_windows_and_bounds():
  same(run(scheduler(GEMMA, **PAGES)), run(scheduler(GEMMA, cache="dense")))


OTHER_ENGINES = dict(slots=3, steps=1), dict(steps=64), dict(prefill_tokens=16)


@pytest.mark.parametrize(
  "engine",
  [dict(), *(pytest.param(c, marks=pytest.mark.long) for c in OTHER_ENGINES)],
  ids=str,
)
def test_responses_that_are_put_aside_go_on(expected, engine):
  """Pages for one window: of the longest prefix hardly two responses are there at once."""
  s = scheduler(asked=RECORDED, **PAGES | dict(cache_tokens=LEAST) | engine)
  same(run(s), expected)
  assert s.usage.put_aside > 0
  assert s.usage.metrics()["sampling/put_aside"] == s.usage.put_aside
  assert s.usage.tokens == sum(len(r.tokens) for r in expected.values())


def test_the_first_response_of_a_group_keeps_what_it_has_to_itself():
  """It is put aside in the same call as the prefix that its siblings, not begun, wait for."""
  group = Request(PROMPTS[0], NEW, samples=3)
  lives = under_way.lives_of(group)
  columns = (np.array([9, 8], np.int32), *np.zeros((2, 2), np.float32), None, None)
  lives[0].parts, lives[0].count = [columns], 2
  found = [
    (request.first_sample, request.samples, request.begun, request.max_new_tokens)
    for request, _ in under_way.to_go_on(lives)
  ]
  assert found == [(0, 1, (9, 8), NEW - 2), (1, 2, (), NEW)]


@pytest.mark.long
def test_every_device_has_pages_of_its_own(expected):
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
  shards = sharding.batch_shards(mesh)
  with jax.set_mesh(mesh):
    layout = transformer.shardings(MOE, sharding.ROLLOUT, mesh)
    params = jax.device_put(initial(MOE), layout)
    engine = PAGES | dict(slots=16, cache_tokens=LEAST * shards)
    s = scheduler(params=params, asked=RECORDED, **engine)
    same(run(s), expected)


def test_a_run_that_is_stopped_keeps_what_was_put_aside(expected):
  s = scheduler(asked=RECORDED, **PAGES | dict(cache_tokens=LEAST, steps=2))
  for i, prompt in enumerate(PROMPTS):
    s.submit(Request(prompt, NEW, samples=3, seed=5, stop_ids=STOP, tag=i))
  begun = []
  while s.usage.put_aside < 3:
    begun += s.step()
  begun += s.stop()
  assert sorted((r.request.tag, r.sample) for r in begun) == sorted(expected)
  for response in begun:
    whole = expected[response.request.tag, response.sample].tokens
    np.testing.assert_array_equal(response.tokens, whole[: len(response.tokens)])
  rest = scheduler(asked=workload(partial=True), **PAGES)
  for response in begun:
    if not response.finished:
      request = response.request
      tokens = tuple(response.tokens.tolist())
      left = NEW - len(tokens)
      again = dict(samples=1, first_sample=response.sample, begun=tokens, max_new_tokens=left)
      rest.submit(dataclasses.replace(request, **again))
  for response in rest.run():
    whole = expected[response.request.tag, response.sample].tokens
    np.testing.assert_array_equal(response.tokens, whole[-len(response.tokens) :])


def test_a_prefix_lies_in_the_pool_once():
  """There is no room for the five whole pages of a prompt once for each of its group."""
  sampling = dataclasses.replace(workload().sampling, max_new_tokens=8)
  asked = dataclasses.replace(workload(trajectories=3), sampling=sampling)
  s = scheduler(asked=asked, **PAGES | dict(slots=3, steps=8, cache_tokens=8 * (5 + 1 + 3 * 2)))
  s.submit(Request(PROMPTS[1] + (9,), 8, samples=3, seed=5))  # five whole pages
  assert len(list(s.run())) == 3 and s.usage.put_aside == 0


def test_pages_for_less_than_one_response():
  message = f"cache_tokens={2 * LEAST - 8} .* one response of {WINDOW} positions takes up to 10"
  config = dataclasses.replace(DEFAULT, **PAGES, cache_tokens=2 * LEAST - 8)
  with pytest.raises(ValueError, match=message):
    sizes(workload(), config, shards=2)
  with pytest.raises(ValueError, match="cache='dense' has none"):
    dataclasses.replace(DEFAULT, cache="dense", cache_tokens=64)


def test_pages_are_chosen_where_they_are_few():
  assert not DEFAULT.paged and dataclasses.replace(DEFAULT, cache_tokens=999).paged
