"""What a search tries, in which order, and what it leaves out: without a compiler."""

import dataclasses

import jax
import pytest

from configs import common, moe_aime
from gspo_jax import sharding
from gspo_jax.aot import estimate, iteration, search
from gspo_jax.aot.programs import make_case
from gspo_jax.models import transformer
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.reading import from_dict
from gspo_jax.system.accelerators import GIB


def tiny_case(sequences=16, length=64):
  config = from_dict(moe_aime.get_config("tiny").to_dict())
  return make_case(config, sequences, length)


def flagship():
  return make_case(from_dict(moe_aime.get_config().to_dict()))


def start(**compute):
  compute = dict(remat="full", expert_chunk=1024, logits_chunk=16, xla="none") | compute
  return search.changed(tiny_case(), mesh=dict(data=1, fsdp=2, expert=4, tensor=1), compute=compute)


def least(seconds=1.0, gib=1.0):
  return estimate.LowerBounds(gib * GIB, dict(compute=seconds, hbm=0.0, interconnect=0.0))


def row(seconds=1.0, fits=True):
  return dict(fits=fits, search_s=seconds, peak_gib=1.0, error="too large")


def chunks(*sizes):
  return [start(expert_chunk=size) for size in sizes]


def searched(bounds, rows, tries=10, lists=None, **options):
  """Searches candidates with bounds and rows by `expert_chunk`; returns the search and the compiled
  candidates in order."""
  compiled, candidates = [], search.Search("train", 10 * GIB)

  def measure(case):
    compiled.append(case.config.compute.expert_chunk)
    return rows[compiled[-1]]

  def bound(case):
    return bounds[case.config.compute.expert_chunk]

  lists = [chunks(*bounds)] if lists is None else lists
  search.compile_best(candidates, lists, bound, measure, tries, **options)
  return candidates, compiled


def reasons(candidates):
  return {
    candidates.cases[n].config.compute.expert_chunk: reason
    for n, reason in candidates.rejected.items()
  }


def best(candidates):
  return candidates.best.config.compute.expert_chunk


def test_the_fastest_by_their_bounds_are_compiled_first_and_the_slower_not_at_all():
  bounds = {1: least(3.0), 2: least(1.0), 3: least(2.0), 4: least(2.6)}
  candidates, compiled = searched(bounds, {2: row(2.5), 3: row(2.2)})
  assert compiled == [2, 3] and best(candidates) == 3
  assert reasons(candidates) == {
    1: "takes at least 3 s (compute); the best so far takes 2.2 s",
    4: "takes at least 2.6 s (compute); the best so far takes 2.2 s",
  }


def test_what_cannot_fit_or_did_not_fit_with_less_is_not_compiled():
  bounds = {1: least(1.0, gib=14.0), 2: least(1.1, gib=8.0), 3: least(1.2, gib=9.0), 4: least(1.3)}
  candidates, compiled = searched(bounds, {2: row(fits=False), 4: row(1.4)})
  assert compiled == [2, 4] and best(candidates) == 4
  assert reasons(candidates)[1] == "needs at least 14 GiB a chip, 4 GiB too much"
  assert reasons(candidates)[3].startswith(
    "needs at least 9.0 GiB, no less than 1x2x4x1, 1 micro, full 2/16, none"
  )


@pytest.mark.parametrize(
  "smaller",
  [
    dict(logits_chunk=8),
    dict(expert_chunk=256),
    dict(xla="sparsecore"),
    dict(remat="attention"),  # No remat has the bound of "both".
  ],
)
def test_settings_outside_the_bound_may_take_less_memory(smaller):
  first = dict(expert_chunk=0, logits_chunk=0, remat="none")
  cases = [start(**first), start(**first | smaller)]
  results = iter([row(fits=False), row(1.0)])
  candidates = search.Search("train", 10 * GIB)
  search.compile_best(candidates, [cases], lambda _: least(), lambda _: next(results), 2)
  assert candidates.best == cases[1]


def test_a_kernel_without_vector_memory_says_nothing_about_a_chips_memory():
  bounds = {1: least(1.0, gib=8.0), 2: least(1.1, gib=9.0)}
  candidates, compiled = searched(bounds, {1: row(fits=False) | dict(of_kernel=True), 2: row(1.4)})
  assert compiled == [1, 2] and best(candidates) == 2


def test_a_search_compiles_no_more_than_it_may():
  lists = [chunks(0), chunks(1, 2), chunks(3, 0)]  # Lists take turns.
  rows = {n: row(9.0 - n) for n in range(4)}
  candidates, compiled = searched({n: least(1.0) for n in range(4)}, rows, 3, lists)
  assert compiled == [0, 1, 3] and best(candidates) == 3
  assert reasons(candidates) == {
    2: "takes at least 1 s (compute); enough other candidates were compiled"
  }
  _, compiled = searched({n: least(1.0) for n in range(4)}, rows, 3, lists, enough=1)
  assert compiled == [0]


def test_where_nothing_fits_it_says_what_is_lacking():
  candidates, compiled = searched({}, {}, lists=[[]])
  assert (
    compiled == []
    and candidates.best is None
    and candidates.needs() == "batch and weights do not divide over any mesh"
  )
  candidates, compiled = searched({1: least(gib=12.0), 2: least(gib=11.0)}, {})
  assert compiled == [] and candidates.needs() == "needs at least 11.0 of 10 GiB per chip"
  candidates, compiled = searched({1: least()}, {1: row(fits=False)})
  assert compiled == [1] and candidates.best is None and candidates.needs() == "too large"


def test_more_micro_batches_or_wider_tensors_than_fit_are_not_compiled():
  several = [search.changed(start(), microbatches=n) for n in (1, 2, 4)]
  wider = search.changed(start(), mesh=dict(fsdp=1, tensor=2))
  candidates, compiled = searched({1024: least()}, {1024: row(2.0)}, lists=[several, [wider]])
  assert compiled == [1024] and candidates.best == several[0]
  assert list(candidates.rejected.values()) == [
    "sends more over its tensor axis than 1x2x4x1, 1 micro, full 1024/16, none, which fits",
    *["gathers weights more often than 1x2x4x1, 1 micro, full 1024/16, none, which fits"] * 2,
  ]


def test_nearly_equal_times_are_told_apart_by_memory():
  rows = {1: row(1.001), 2: row(1.0) | dict(peak_gib=2.0)}
  candidates, _ = searched({1: least(0.5), 2: least(0.5)}, rows)
  assert [candidates.cases[name].config.compute.expert_chunk for name in candidates.ranked()] == [
    1,
    2,
  ]


def test_every_setting_of_updates_is_varied_from_the_configuration():
  """The best of each list by its bound is compiled, and the fastest of these comes first."""
  case, candidates = start(), search.Search("train", 10 * GIB)

  def seconds(case):
    mesh, compute = case.config.mesh, case.config.compute
    costs = dict(attention=1, full=3, auto=3).get(compute.remat, 2)
    costs += dict([(0, 1)]).get(compute.logits_chunk, 2) + (compute.xla != "sparsecore")
    return 10.0 + costs + 4 * (mesh.expert != 8) + case.microbatches

  def measure(case):
    return row(seconds(case))

  lists = search.updates(case, 8)
  search.compile_best(candidates, lists, lambda case: least(seconds(case) - 8), measure, 5)
  names = [
    "1x2x4x1, 1 micro, full 1024/16, none",
    "1x2x4x1, 1 micro, full 1024/16, sparsecore, prefetch",
  ]
  names += ["1x1x8x1, 1 micro, full 1024/16, none"]
  names += ["1x2x4x1, 1 micro, attention 1024/16, none", "1x2x4x1, 1 micro, full 1024/0, none"]
  assert list(candidates.rows) == names and candidates.ranked()[0] == names[2]


def test_a_search_tries_meshes_that_divide_the_model():
  tried = [
    dataclasses.replace(case.config.mesh, rollout_experts="auto")
    for case in search.meshes(tiny_case(), 8)
    if case.microbatches == 1
  ]
  narrow = [MeshConfig(1, 8 // expert, expert, 1) for expert in (1, 2, 4, 8)]
  assert tried == narrow + [MeshConfig(1, 4 // expert, expert, 2) for expert in (1, 2, 4)]
  # Two key/value heads; a packed update has several micro-batches.
  assert all(case.microbatches > 1 for case in search.meshes(flagship(), 64))


def test_of_several_slices_each_has_a_replica(monkeypatch):
  meshes = [case.config.mesh for case in search.meshes(tiny_case(), 16, slices=2)]
  assert {mesh.data for mesh in meshes} == {2}
  assert {mesh.fsdp * mesh.expert * mesh.tensor for mesh in meshes} == {8}
  mesh = sharding.make_mesh(MeshConfig(2, 1, 2, 2))
  assert estimate.update_bound(tiny_case(), mesh, "v5p:2x2x1").seconds["network"] == 0
  monkeypatch.setattr(sharding, "slice_of", lambda device: device.id // 4)
  sent = 4 * transformer.count(tiny_case().model)[0] / 4  # a chip's quarter, once
  assert estimate.update_bound(tiny_case(), mesh, "v5p:2x2x1").seconds["network"] == sent / 6.25e9


def test_it_starts_from_the_configuration():
  case = tiny_case()
  (first,), *_ = search.updates(case, 8)
  assert first == search.changed(case, mesh=dict(data=1, fsdp=8, expert=1, tensor=1))


def test_chunks_are_no_larger_than_all_at_once():
  *_, chunks = search.updates(tiny_case(sequences=16, length=4096), 8)
  compute = [case.config.compute for case in chunks]
  assert [each.logits_chunk for each in compute[:3]] == [0, 512, 2048]
  assert [each.expert_chunk for each in compute[3:]] == [0, 512, 2048]


def test_the_recommendation_can_be_pasted_into_a_configuration():
  compute = dict(expert_chunk=8192, remat="dots", logits_chunk=512)
  mesh = dict(data=1, fsdp=16, expert=4, tensor=1)
  case = search.changed(
    make_case(from_dict(common.base().to_dict())), 2, mesh=mesh, compute=compute
  )
  config = common.base()
  config.update(eval(f"dict({search.lines('train', case)})"))
  read = from_dict(config.to_dict())
  assert read.mesh == MeshConfig(**mesh) and read.rl.microbatches == 2
  assert {key: getattr(read.compute, key) for key in compute} == compute
  assert "microbatches" not in search.lines("train", tiny_case())  # Of another batch.


def test_memory_that_is_held_is_a_lower_bound():
  case = tiny_case()
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  parameters, model = transformer.count(case.model)[0], case.model
  expert_parameters = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size
  expert_parameters *= model.num_layers
  inputs = 16 // 8 * 64 * model.hidden_size * model.num_layers * 2
  weights = expert_parameters / 8 + (parameters - expert_parameters) / 2
  bound = estimate.update_bound(case, mesh, "v5p:2x2x2")
  assert bound.memory == pytest.approx(16 * weights + inputs, rel=0.02)  # norms lie otherwise
  with_remat = search.changed(case, compute=dict(remat="attention"))
  heads = 16 // 8 * 64 * model.num_heads * model.head_dim * model.num_layers * 2
  added = estimate.update_bound(with_remat, mesh, "v5p:2x2x2").memory - bound.memory
  assert added == pytest.approx(heads, rel=0.07)  # The sum for each head as well.


def test_bounds_follow_what_is_recomputed_and_sent():
  case = dataclasses.replace(tiny_case(), microbatches=2)
  narrow, wide = (
    sharding.make_mesh(MeshConfig(1, 8 // expert, expert, 1), jax.devices()[:8])
    for expert in (1, 8)
  )

  def bound(mesh, **compute):
    changed = search.changed(case, compute=dict(remat="full", expert_chunk=1024) | compute)
    return estimate.update_bound(changed, mesh, "v5p:2x2x2")

  assert bound(narrow, remat="none").seconds["compute"] < bound(narrow).seconds["compute"]
  assert (
    bound(narrow, expert_chunk=32).seconds["hbm"] > bound(narrow, expert_chunk=0).seconds["hbm"]
  )
  weights = estimate.weights_of(case, narrow)
  assert weights["experts"] == 8 * estimate.weights_of(case, wide)["experts"]
  whole = sum(weights.values()) + (weights["head"] if not case.model.tie_word_embeddings else 0)
  assert whole == pytest.approx(2 * transformer.count(case.model)[0], rel=0.01)  # bfloat16


def test_slots_have_caches_for_all_windows_and_for_the_lengths_that_are_assumed():
  case = flagship()
  (first,), tried, _ = search.sampling(case, 64)
  assert first.engine == case.engine and first.config == case.config
  window, by_slots = case.workload.window, {}
  for candidate in tried:
    by_slots.setdefault(candidate.config.engine.slots, set()).add(candidate.engine.cache_tokens)
  assert list(by_slots) == [64, 128, 256, 512, 1024, 2048, 4096]
  for slots, caches in by_slots.items():
    assert 0 in caches
    for cache in caches - {0}:
      assert case.filled < cache / slots < window and not cache % (64 * 128)
  # One response may be as long as the window; of many, the mean counts.
  assert by_slots[64] == {0} and max(by_slots[4096]) < 1.4 * 4096 * case.filled


def test_responses_shorter_than_a_page_take_one_each():
  case = search.changed(flagship(), engine=dict(page_tokens=4096))
  case = dataclasses.replace(case, mean_prompt=16, mean_response=16)
  assert case.pool(64 * 100, 64) == 64 * 100 * 4096


def test_more_slots_need_more_memory_and_fewer_steps():
  case, mesh = flagship(), sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  engines = dict(
    few=dict(slots=64, cache_tokens=0),
    many=dict(slots=512, cache_tokens=0),
    paged=dict(slots=512, cache_tokens=case.pool(512, 8)),
  )
  with jax.set_mesh(mesh):
    bounds = {
      name: iteration.sampling_bound(search.changed(case, engine=engine), mesh, "v5p:2x2x2")
      for name, engine in engines.items()
    }
  assert bounds["few"].memory < bounds["paged"].memory < bounds["many"].memory
  # whose empty slots read nothing
  assert bounds["few"].bound_s > bounds["many"].bound_s > bounds["paged"].bound_s


@pytest.mark.parametrize("split, devices", [("all", 8), ("fsdp", 2), ("expert", 4)])
def test_tokens_are_sent_to_the_chips_with_their_experts(split, devices):
  case, mesh = flagship(), sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  case, model = search.changed(case, mesh=dict(rollout_experts=split)), case.model
  sent = estimate.sent_to_experts(case, mesh, "v5p:2x2x2", 64)
  # A chip sends its eight tokens to each other chip, and gets as many sums back.
  numbers = (devices - 1) * 8 * 2 * (model.hidden_size + model.experts_per_token)
  assert sent == pytest.approx(model.num_layers * numbers * 2)
  # More tokens of an expert than `moe.FEW`: its weights travel.
  assert estimate.sent_to_experts(case, mesh, "v5p:2x2x2", 1 << 20) == 0


def test_the_recommendation_of_a_rollout_can_be_pasted():
  engine = dict(slots=1024, cache_tokens=12_582_912, prefill_tokens=8192)
  case = search.changed(flagship(), engine=engine, mesh=dict(rollout_experts="expert"))
  config = common.base()
  config.update(eval(f"dict({search.lines('decode', case)})"))
  read = from_dict(config.to_dict())
  assert {key: getattr(read.engine, key) for key in engine} == engine
  assert read.mesh.rollout_experts == "expert"
