"""Continuous batching: slots are never left idle, and nothing of it shows in what is sampled."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import sampling as support
from support.cases import long
from support.sampling import LONGER as PROMPTS
from support.sampling import by_sample, left_of, responses, run, same, sample
from support.small_models import HYBRID, MOE, SHALLOW_MOE, initial, logits

from gspo_jax import sharding
from gspo_jax.models import flops, transformer
from gspo_jax.sampling import Request, Usage
from gspo_jax.sampling.local import slots
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE, SamplingConfig

MODEL = SHALLOW_MOE  # One layer compiles faster than two.
PARAMS = initial(MODEL)
PLAIN = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=12)
STOP = (1, 2, 3, 4, 5, 6)
PAGED = dict(cache="paged", page_tokens=8)


def scheduler(params=PARAMS, sampling=PLAIN, model=MODEL, **changes):
  options = dict(slots=4, steps=3, stop_ids=STOP) | changes
  return support.scheduler(params, model, sampling, **options)


def requests(prompts=PROMPTS, **changes):
  options = dict(max_new_tokens=12, samples=3, seed=5, stop_ids=STOP) | changes
  return [Request(prompt, tag=i, **options) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected():
  return run(scheduler(slots=18), requests())


def test_responses_are_worth_comparing(expected):
  assert len(expected) == 18
  lengths = [len(r.tokens) for r in expected.values()]
  assert min(lengths) < 6 and max(lengths) == 12
  assert {r.stopped for r in expected.values()} == {True, False}


@pytest.mark.parametrize(
  "changes",
  [
    dict(slots=1, steps=1, prefill_tokens=16),  # The longest prompts in three pieces.
    pytest.param(dict(slots=5, steps=1), marks=pytest.mark.long),
    pytest.param(dict(slots=7, steps=64), marks=pytest.mark.long),
    pytest.param(dict(prefill_tokens=16), marks=pytest.mark.long),
    pytest.param(dict(prompt_length=188), marks=pytest.mark.long),
    dict(partial=True),
    pytest.param(dict(group_size=1), marks=pytest.mark.long),
  ],
  ids=str,
)
def test_slots_and_pieces_change_nothing(expected, changes):
  same(run(scheduler(**changes), requests()), expected)


@functools.cache
def hybrid(**changes):
  """Responses of a model with linear attention."""
  return run(scheduler(initial(HYBRID), model=HYBRID, **dict(slots=18) | changes), requests())


@pytest.mark.long
@pytest.mark.parametrize(
  "changes",
  [
    dict(slots=1, steps=1, prefill_tokens=16),
    dict(partial=True, cache_dtype="bfloat16"),
    dict(cache="paged", page_tokens=8, group_size=1),
    dict(slots=5, steps=64, cache_dtype="int8"),
  ],
  ids=str,
)
def test_neither_do_slots_and_pieces_with_linear_layers(changes):
  dtype = {key: x for key, x in changes.items() if key == "cache_dtype"}
  # Norms of small outputs round more. A value halfway between two integers may become either.
  same(hybrid(**changes), hybrid(**dtype), atol=1e-3 if "int8" in dtype.values() else 5e-5)


def test_neither_order_nor_company_matter(expected):
  same(run(scheduler(), requests()[::-1]), expected)
  alone = run(scheduler(), [requests()[3]])
  same(alone, {key: expected[key] for key in alone})
  second = run(scheduler(), requests(PROMPTS[:1], samples=1, first_sample=2))
  same(second, {(PROMPTS[0], 2): expected[PROMPTS[0], 2]})


OTHER_MESHES = (8, 1, 1, 1), (1, 1, 4, 2)
MESHES = [(1, 2, 2, 2), *long(OTHER_MESHES)]


@pytest.mark.parametrize("model", [MODEL, pytest.param(HYBRID, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_nor_does_the_mesh(expected, model, shape):
  expected = expected if model is MODEL else hybrid()
  mesh = sharding.make_mesh(MeshConfig(*shape))
  with jax.set_mesh(mesh):
    rules = sharding.rollout_rules(MeshConfig(*shape), mesh, model.num_experts)
    params = jax.device_put(initial(model), transformer.shardings(model, rules, mesh))
    result = run(scheduler(params, model=model, slots=5, prefill_tokens=16), requests())
  same(result, expected, atol=1e-5 if model is MODEL else 5e-5)


def test_nor_does_the_default_generator_of_jax(expected):
  with jax.default_prng_impl("rbg"):
    again = run(scheduler(slots=5), requests())
  assert all(again[i].tokens.tolist() == r.tokens.tolist() for i, r in expected.items())


def test_nor_do_types_of_64_bits(expected, x64):
  again = run(scheduler(slots=5), requests())
  assert all(again[i].tokens.tolist() == r.tokens.tolist() for i, r in expected.items())


def test_two_runs_are_the_same_to_the_bit():
  first, second = (run(scheduler(), requests()) for _ in range(2))
  for key in first:
    np.testing.assert_array_equal(first[key].logp, second[key].logp)
    np.testing.assert_array_equal(first[key].tokens, second[key].tokens)


def test_a_free_slot_is_taken_in_the_next_step(expected):
  """The number of steps is that of a machine that never waits."""
  s = scheduler(slots=4, steps=64, group_size=1)  # four contexts wait at most: enough for this
  queue = requests(PROMPTS[:4])
  run(s, queue)
  waiting = [[len(expected[p, g].tokens) for g in range(3)] for p in PROMPTS[:4]]
  # Prompts are prefilled by length, and lie in the queue in that order.
  waiting = [waiting[i] for i in (0, 2, 3, 1)] if s.usage.padded else waiting
  free_at = [0] * 4
  while any(waiting):
    longest = max(range(4), key=lambda i: len(waiting[i]))
    slot = free_at.index(min(free_at))
    free_at[slot] += waiting[longest].pop(0)
  assert s.usage.steps == max(free_at)
  assert s.usage.tokens == sum(len(expected[p, g].tokens) for p in PROMPTS[:4] for g in range(3))
  assert s.usage.metrics()["sampling/slot_utilisation"] == s.usage.tokens / (4 * s.usage.steps)


def test_nothing_is_compiled_after_the_first_batches():
  run(scheduler(), requests())
  before = slots.decode._cache_size(), slots.prefill._cache_size(), slots.new_state._cache_size()
  for seed in range(3):
    lengths = np.random.default_rng(seed).integers(1, 48, 9)
    prompts = [tuple(support.RNG.integers(8, 64, n).tolist()) for n in lengths]
    run(scheduler(), requests(prompts, seed=seed, samples=2, max_new_tokens=5))
  after = slots.decode._cache_size(), slots.prefill._cache_size(), slots.new_state._cache_size()
  assert after == before


def test_prompts_are_not_padded_to_the_longest():
  s = scheduler()
  run(s, requests())
  used = sum(len(p) - 1 for p in PROMPTS)
  assert s.usage.prefilled == used  # once per prompt, not once per response
  assert s.usage.padded <= 6 * 16 + 4 * 32 + 2 * 64


def test_every_request_has_limits_of_its_own(expected):
  limits = (2, 12, 5)
  queue = [
    Request(PROMPTS[i], limit, seed=5, stop_ids=stop)
    for i, (limit, stop) in enumerate(zip(limits, [STOP, STOP[:1], ()]))
  ]
  result = run(scheduler(), queue)
  for i, limit in enumerate(limits):
    response = result[PROMPTS[i], 0]
    assert len(response.tokens) <= limit
    assert response.stopped == (response.tokens[-1] in queue[i].stop_ids)
    total = min(len(response.tokens), len(expected[PROMPTS[i], 0].tokens))
    np.testing.assert_array_equal(response.tokens[:total], expected[PROMPTS[i], 0].tokens[:total])
  assert len(result[PROMPTS[2], 0].tokens) == 5  # nothing stops it


def text(tokens):
  return "".join(chr(ord("0") + t % 10) for t in tokens)


@pytest.mark.parametrize("steps", [*long((1, 3)), 64])
def test_a_stop_string_ends_a_response(steps):
  strings = ("13", "7", "04")
  free = run(scheduler(), requests(stop_ids=()))
  s = scheduler(
    steps=steps, group_size=1, text_bytes=[text([i]).encode() for i in range(MODEL.vocab_size)]
  )
  result = run(s, requests(stop_ids=(), stop_strings=strings))
  ends = set()
  for key, response in result.items():
    whole = text(free[key].tokens)
    first = [whole.find(x) + len(x) for x in strings if x in whole]
    end = min(first, default=len(whole))
    assert text(response.tokens) == whole[:end]
    assert response.stopped == bool(first)
    np.testing.assert_allclose(response.logp, free[key].logp[:end], atol=1e-5)
    ends.add(end)
  assert len(ends) > 4
  assert s.usage.tokens == sum(len(r.tokens) for r in result.values())


TRUNCATIONS = dict(temperature=0.7), dict(top_k=5), dict(top_p=0.8), dict(min_p=0.1)


def trainers(found, temperature=1.0, params=PARAMS, model=MODEL):
  """The log-probability of every sampled token in one pass of the trainer, and what was found."""
  tokens = np.zeros((len(found), 64), np.int32)
  for row, ((prompt, _), response) in enumerate(found.items()):
    tokens[row, : len(prompt) + len(response.tokens)] = [*prompt, *response.tokens]
  logp = np.asarray(jax.nn.log_softmax(logits(params, model, tokens) / temperature))
  for row, ((prompt, _), response) in enumerate(found.items()):
    position = np.arange(len(response.tokens)) + len(prompt) - 1
    yield logp[row, position, response.tokens], response


@pytest.mark.parametrize(
  "model, changes",
  [
    pytest.param(MODEL, dict(top_p=0.8), id="shallow-top_p"),
    # Two layers: each one has a cache.
    *(pytest.param(MOE, changes, marks=pytest.mark.long) for changes in TRUNCATIONS),
    (HYBRID, dict(temperature=0.7)),
  ],
  ids=lambda x: str(x) if isinstance(x, dict) else x.family,
)
def test_log_probs_are_the_trainers(model, changes):
  sampling = dataclasses.replace(PLAIN, **changes)
  layers = dict(params=initial(model), model=model)
  pieces = dict(prefill_tokens=16) if model is HYBRID else {}  # The next one has the state.
  result = run(scheduler(sampling=sampling, **layers, **pieces), requests())
  more = 0
  for expected, response in trainers(result, sampling.temperature, **layers):
    np.testing.assert_allclose(response.full_logp, expected, atol=1e-4)
    if sampling.untruncated:
      np.testing.assert_array_equal(response.logp, response.full_logp)
    assert (response.logp >= response.full_logp - 1e-6).all()
    more += (response.logp > response.full_logp + 1e-3).sum()
  assert (more > 0) != sampling.untruncated


def test_states_of_linear_layers_are_built_again():
  """Where pages run out, responses are put aside, and the states of linear layers with them."""
  layers = dict(params=initial(HYBRID), model=HYBRID)
  s = scheduler(**PAGED, **layers, cache_tokens=72)
  for expected, response in trainers(run(s, requests(stop_ids=())), **layers):
    np.testing.assert_allclose(response.logp, expected, atol=1e-4)
    assert response.finished
  assert s.usage.put_aside > 0


@pytest.fixture(scope="module")
def expected_int8():
  return run(scheduler(cache_dtype="int8"), requests())


@pytest.mark.parametrize(
  "changes",
  [
    {},
    pytest.param(dict(cache_dtype="int8"), marks=pytest.mark.long),
    pytest.param(PAGED | dict(cache_dtype="int8"), marks=pytest.mark.long),
    pytest.param(dict(model=HYBRID), marks=pytest.mark.long),
    pytest.param(PAGED | dict(model=HYBRID), marks=pytest.mark.long),
  ],
  ids=lambda changes: "-".join(str(getattr(x, "family", x)) for x in changes.values()),
)
def test_what_was_stopped_goes_on_as_if_nothing_had_happened(expected, expected_int8, changes):
  expected = expected_int8 if "cache_dtype" in changes else expected
  if "model" in changes:
    expected, changes = hybrid(), changes | dict(params=initial(HYBRID))
  s = scheduler(**changes)
  for request in requests():
    s.submit(request)
  done = {}
  while len(done) < 5:
    done |= by_sample(s.step())
  unfinished = by_sample(s.stop())
  done |= {key: response for key, response in unfinished.items() if response.finished}
  unfinished = {key: response for key, response in unfinished.items() if not response.finished}
  assert len(done) + len(unfinished) == 18
  assert any(len(response.tokens) for response in unfinished.values())
  rest = run(scheduler(partial=True, **changes), map(left_of, unfinished.values()))
  for key, response in rest.items():
    columns = {
      name: np.concatenate([getattr(unfinished[key], name), getattr(response, name)])
      for name in ("tokens", "logp", "full_logp")
    }
    done[key] = dataclasses.replace(response, **columns)
  same(done, expected, atol=5e-5 if "model" in changes else 1e-5)


def test_more_can_be_asked_for_while_it_runs(expected):
  s, queue, result = scheduler(), requests(), {}
  s.submit(queue.pop())
  for response in responses(s):
    result[response.request.prompt, response.sample] = response
    if queue:
      s.submit(queue.pop())
  same(result, expected)


def test_memory_is_slots_by_window():
  scale = 4 / MODEL.head_dim
  for dtype, width in (("float32", 4), ("bfloat16", 2), ("int8", 1 + scale)):
    sampling = dataclasses.replace(PLAIN, max_new_tokens=44)
    s = scheduler(sampling=sampling, slots=6, prompt_length=20, cache_dtype=dtype)
    caches = jax.tree.leaves((s._state.cache, s._state.staged))
    assert s.usage.cache_bytes == sum(x.nbytes for x in caches)
    slots = 6 * 64 * 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * width
    assert slots < s.usage.cache_bytes < 2 * slots


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "int8"])
def test_a_narrow_cache_is_near(dtype):
  result = run(scheduler(cache_dtype=dtype), requests())
  gaps = [np.abs(expected - response.logp).mean() for expected, response in trainers(result)]
  assert 0 < np.mean(gaps) < 0.05  # with a router between, some tokens are further off


@pytest.mark.long
def test_int8_needs_no_more_than_its_rounding():
  """Holds for long prompts in pieces, too: their later pieces read the cache."""
  exact = run(scheduler(cache_dtype="int8"), requests())
  same(run(scheduler(cache_dtype="int8", prefill_tokens=16), requests()), exact)


def test_usage_adds_up():
  usage = Usage()
  options = dict(group_size=2, max_new_tokens=4, prompt_length=17, usage=usage)
  prompts = [prompt for prompt in PROMPTS if len(prompt) < 18]
  first = sample(PARAMS, MODEL, prompts, **options)
  once = dataclasses.replace(usage)
  second = sample(PARAMS, MODEL, prompts, seed=1, **options)
  assert usage.tokens == first.lengths.sum() + second.lengths.sum()
  assert usage.prefilled == 2 * once.prefilled and usage.cache_bytes == once.cache_bytes
  row = usage.metrics()
  assert row["sampling/slot_utilisation"] == 1.0 and row["time/sample/decode"] > 0


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.long), 3])
def test_operations_are_those_of_the_responses_alone(group):
  """Each prompt once, whatever waits in between; logits of sampled tokens alone."""
  s = scheduler(group_size=group)
  responses = run(s, requests(samples=group)).values()
  expected = 0.0
  for prompt in PROMPTS:
    n = len(prompt) - 1
    shared = flops.work(MODEL, 1, n, n)
    expected += shared.forward() - shared.head
  for response in responses:
    n, new = len(response.request.prompt) - 1, len(response.tokens)
    whole, shared = flops.work(MODEL, 1, n + new, n + new, heads=new), flops.work(MODEL, 1, n, n)
    expected += whole.forward() - (shared.forward() - shared.head)
  assert s.usage.flops == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(prompt=()), "prompt is empty"),
    (
      dict(prompt=(7,) * 49),
      "prefix of 49 tokens .* limits are 48 tokens for the prefix and 60 with the response",
    ),
    (dict(max_new_tokens=62), "max_new_tokens=62 is too long: .* 60 with the response"),
    (dict(stop_ids=tuple(range(9))), "9 stop ids, and the workload allows 6"),
    (dict(stop_strings=("x",)), "need the engine's argument `text_bytes`"),
    (dict(samples=0), "samples=0 .* at least 1"),
    (dict(prompt=(7, 64)), "token ids from 7 to 64: the model has 0 to 63"),
    (dict(prior=(-1,)), "token ids from -1 to 9: the model has 0 to 63"),
  ],
)
def test_impossible_requests(changes, message):
  request = dataclasses.replace(Request((7, 8, 9), 4), **changes)
  with pytest.raises(ValueError, match=message):
    scheduler().submit(request)


def test_prefixes_are_padded_to_powers_of_two():
  with pytest.raises(ValueError, match=r"engine\.prefill_tokens=48 must be a power of two"):
    dataclasses.replace(LOCAL_ENGINE, prefill_tokens=48)


def test_there_are_no_more_slots_than_trajectories():
  for count, trajectories, used in ((0, 7, 7), (4, 7, 4), (9, 7, 7)):
    s = scheduler(slots=count, trajectories=trajectories)
    assert len(s._state.slots.id_B) == used


def test_the_longest_prefix_is_not_padded_beyond_itself():
  sampling = dataclasses.replace(PLAIN, max_new_tokens=5)
  s = scheduler(sampling=sampling, prompt_length=45)
  lengths = [c.positions.v_lBKSH.shape[3] for c in (s._state.cache, s._state.staged)]
  assert lengths == [50, 44]


def test_a_window_beyond_the_model():
  with pytest.raises(ValueError, match=r"4096 tokens, .*max_position_embeddings=2048"):
    scheduler(prompt_length=4084)
