"""Flipped experts: the router's next best, in a share of the tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.sampling import PROMPTS
from support.small_models import MOE, initial

from experiments import flips
from experiments.engines import ChangedEngine
from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.models.experts import moe
from gspo_jax.sampling import LocalEngine, Request, SamplingConfig, Workload
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE

# Experts of three layers, in two scans.
MODEL = dataclasses.replace(MOE, num_layers=4, mlp_only_layers=(1,), intermediate_size=32)
COUNT = 12


def sampled(probability):
  """Returns responses with recorded experts, by prompt and sample."""
  change = functools.partial(flips.flip_experts, probability=probability, model=MODEL)
  engine = ChangedEngine(LocalEngine(MODEL), change)
  workload = Workload(
    SamplingConfig(max_new_tokens=COUNT), 5, trajectories=8, group_size=2, record_routing=True
  )
  with jax.set_mesh(sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])):  # As in a run.
    engine.load(initial(MODEL), 0)
    engine.start(workload)
    for prompt in PROMPTS:
      engine.submit(Request(prompt, COUNT, samples=2))
    responses = []
    while engine.busy:
      responses += engine.step()
    return {(r.request.prompt, r.sample): r for r in responses + engine.stop()}


@functools.cache
def recorded():
  return sampled(0)


def test_each_token_after_the_prompt_has_one_expert_less_where_flips_are_certain():
  for key, response in sampled(1).items():
    old, start = recorded()[key], len(key[0])
    np.testing.assert_array_equal(response.tokens, old.tokens)
    np.testing.assert_array_equal(response.experts[:start], old.experts[:start])
    kept = (response.experts == old.experts)[start:]
    assert (kept.sum(-1) == MODEL.experts_per_token - 1).all()
    assert response.experts.dtype == old.experts.dtype and (response.experts >= 0).all()
    new = np.sort(response.experts, -1)
    assert (new[..., 1:] > new[..., :-1]).all(), "one expert twice"


def test_a_flip_follows_seed_prompt_sample_and_position_alone():
  response = next(iter(recorded().values()))
  flip = functools.partial(flips.flip_experts, initial(MODEL), probability=0.4, model=MODEL)
  whole = flip(response)
  changed_Tl = (whole.experts != response.experts).any(-1)
  assert 0.2 < changed_Tl[len(response.request.prompt) :].mean() < 0.6
  prior, rest = tuple(response.tokens[:5].tolist()), response.tokens[5:]
  request = dataclasses.replace(response.request, prior=prior)
  later = flip(dataclasses.replace(response, request=request, tokens=rest))
  np.testing.assert_array_equal(later.experts, whole.experts)
  other = flip(dataclasses.replace(response, sample=response.sample + 1))
  assert ((other.experts != response.experts).any(-1) != changed_Tl).any()


def test_responses_without_recorded_experts_are_unchanged():
  response = dataclasses.replace(next(iter(recorded().values())), experts=None)
  assert flips.flip_experts(initial(MODEL), response, 1.0, MODEL) is response


def test_ranks_are_those_of_the_scores_under_the_recorded_experts(monkeypatch):
  tokens = transformer.example_tokens(MODEL, 1, 9)
  params, other = initial(MODEL), initial(MODEL, seed=1)
  old = np.asarray(transformer.forward(other, MODEL, tokens).routing_lBTk)
  scores = []

  def choose(score_BTE, *arguments):
    jax.debug.callback(lambda x: scores.append(np.asarray(x)), score_BTE, ordered=True)
    return choose_experts(score_BTE, *arguments)

  choose_experts = moe.choose_experts
  with monkeypatch.context() as patch:
    patch.setattr(moe, "choose_experts", choose)
    transformer.forward(params, MODEL, tokens, routing=old)
    jax.effects_barrier()
  assert len(scores) == MODEL.num_moe_layers
  recorded = np.moveaxis(old[:, 0], 0, 1)
  ranked = flips.rank_experts(params, tokens[0], recorded, MODEL, REFERENCE)
  expected = np.argsort(-np.stack(scores)[:, 0], -1)[..., : MODEL.experts_per_token + 1]
  np.testing.assert_array_equal(np.moveaxis(ranked, 1, 0), expected)


@pytest.mark.parametrize(
  "experts, ranked, expected",
  [
    ((3, 5), (3, 5, 1), (3, 1)),
    ((5, 3), (3, 5, 1), (1, 3)),
    ((3, 1), (3, 5, 1), (3, 5)),
    ((3, 7), (3, 5, 1), (3, 5)),  # 7 is beyond the three best.
    ((7, 6), (3, 5, 1), (3, 6)),
  ],
)
def test_the_expert_of_the_lowest_score_gives_way_to_the_next_best(experts, ranked, expected):
  changed = flips.with_next_best(np.array([experts], np.int8), np.array([ranked]))
  np.testing.assert_array_equal(changed, [expected])
