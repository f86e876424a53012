"""A cache in pages samples what a dense one does, and no response is lost when pages run out."""

import dataclasses

import jax
import numpy as np
import pytest
from support import sampling as support
from support.cases import long
from support.sampling import LONGER as PROMPTS
from support.sampling import by_sample, left_of, responses, same
from support.small_models import GEMMA, HYBRID, MOE, SHALLOW_MOE, initial

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.sampling import Request, Workload
from gspo_jax.sampling.local.responses import new_responses, restart_requests
from gspo_jax.sampling.requests import paged, sizes
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE, SamplingConfig

MODEL = SHALLOW_MOE  # One layer compiles faster than two.
STOP = (1, 2, 3)
NEW = 24
WINDOW = 48 + NEW
PAGES = dict(cache="paged", page_tokens=8)
LEAST = 8 * (WINDOW // 8 + 1)  # positions: one window, and a page


SAMPLING = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=NEW)
REQUESTS = [Request(prompt, NEW, samples=3, seed=5, stop_ids=STOP) for prompt in PROMPTS]


def scheduler(model=MODEL, params=None, sampling=SAMPLING, **changes):
  options = dict(slots=6, steps=5, stop_ids=STOP, record_routing=True) | changes
  return support.scheduler(params or initial(model), model, sampling, **options)


def run(s):
  return support.run(s, REQUESTS)


@pytest.fixture(scope="module")
def expected():
  return run(scheduler(cache="dense"))


@pytest.mark.long
def test_pages_change_nothing():
  """Each of several layers has its own."""
  s = scheduler(MOE, **PAGES)
  same(run(s), run(scheduler(MOE, cache="dense")))
  assert s.usage.put_aside == 0


@pytest.mark.long
def test_nor_do_windows_and_bounds():
  same(run(scheduler(GEMMA, **PAGES)), run(scheduler(GEMMA, cache="dense")))


@pytest.mark.long  # test_scheduler.py has one that is compared with the trainer
@pytest.mark.parametrize(
  "engine", [dict(), dict(prefill_tokens=16, steps=1, cache_dtype="int8")], ids=str
)
def test_states_of_linear_layers_are_put_aside_and_built_again(engine):
  """Each prompt's state is copied to each of its responses."""
  dense = dict(cache="dense") | {key: x for key, x in engine.items() if key == "cache_dtype"}
  s = scheduler(HYBRID, **PAGES | dict(cache_tokens=LEAST) | engine)
  same(run(s), run(scheduler(HYBRID, slots=18, **dense)), atol=2e-4)
  assert s.usage.put_aside > 0


OTHER_ENGINES = dict(slots=3, steps=1), dict(steps=64), dict(prefill_tokens=16)


@pytest.mark.parametrize(
  "engine",
  [dict(), *long(OTHER_ENGINES)],
  ids=str,
)
def test_responses_that_are_put_aside_go_on(expected, engine):
  """Pages for one window: of the longest prefix hardly two responses are there at once."""
  s = scheduler(**PAGES | dict(cache_tokens=LEAST) | engine)
  same(run(s), expected)
  assert s.usage.put_aside > 0
  assert s.usage.metrics()["sampling/put_aside"] == s.usage.put_aside
  assert s.usage.tokens == sum(len(r.tokens) for r in expected.values())


def test_the_first_response_of_a_group_keeps_what_it_has_to_itself():
  """It is put aside in the same call as the prefix that its siblings, not begun, wait for."""
  group = Request(PROMPTS[0], NEW, samples=3)
  lives = new_responses(group)
  columns = (np.array([9, 8], np.int32), *np.zeros((2, 2), np.float32), None, None)
  lives[0].parts, lives[0].count = [columns], 2
  result = [
    (request.first_sample, request.samples, request.prior, request.max_new_tokens)
    for request, _ in restart_requests(lives)
  ]
  assert result == [(0, 1, (9, 8), NEW - 2), (1, 2, (), NEW)]


@pytest.mark.long
def test_every_device_has_pages_of_its_own(expected):
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 2))
  shards = sharding.batch_shards(mesh)
  with jax.set_mesh(mesh):
    layout = transformer.shardings(MODEL, sharding.ROLLOUT, mesh)
    params = jax.device_put(initial(MODEL), layout)
    engine = PAGES | dict(slots=16, cache_tokens=LEAST * shards)
    s = scheduler(params=params, **engine)
    same(run(s), expected)


def test_a_run_that_is_stopped_keeps_what_was_put_aside(expected):
  s = scheduler(**PAGES | dict(cache_tokens=LEAST))
  for request in REQUESTS:
    s.submit(request)
  unfinished = []
  while s.usage.put_aside < 3:
    unfinished += s.step()
  unfinished += s.stop()
  assert len(unfinished) == len(expected)
  unfinished = by_sample(unfinished)
  assert unfinished.keys() == expected.keys()
  for key, response in unfinished.items():
    np.testing.assert_array_equal(response.tokens, expected[key].tokens[: len(response.tokens)])
  requests = [left_of(response) for response in unfinished.values() if not response.finished]
  for key, response in support.run(scheduler(partial=True, **PAGES), requests).items():
    np.testing.assert_array_equal(response.tokens, expected[key].tokens[-len(response.tokens) :])


def test_a_prefix_lies_in_the_pool_once():
  """There is no room for the five whole pages of a prompt once for each of its group."""
  options = PAGES | dict(slots=3, steps=8, cache_tokens=8 * (5 + 1 + 3 * 2), trajectories=3)
  s = scheduler(sampling=dataclasses.replace(SAMPLING, max_new_tokens=8), **options)
  s.submit(Request(PROMPTS[1] + (9,), 8, samples=3, seed=5))  # five whole pages
  assert len(list(responses(s))) == 3 and s.usage.put_aside == 0


def test_pages_for_less_than_one_response():
  message = f"cache_tokens={2 * LEAST - 8} .* one response of {WINDOW} positions takes up to 10"
  config = dataclasses.replace(LOCAL_ENGINE, **PAGES, cache_tokens=2 * LEAST - 8)
  with pytest.raises(ValueError, match=message):
    sizes(Workload(SAMPLING, 48, 100, group_size=3), config, shards=2)
  with pytest.raises(ValueError, match="cache='dense' has none"):
    dataclasses.replace(LOCAL_ENGINE, cache="dense", cache_tokens=64)


def test_pages_are_chosen_where_they_are_few():
  assert not paged(LOCAL_ENGINE) and paged(dataclasses.replace(LOCAL_ENGINE, cache_tokens=999))
