"""What a search tries, in which order, and what it leaves out: without a compiler."""

import dataclasses

import jax
import pytest

from configs import common, moe_aime
from gspo_jax import sharding
from gspo_jax.aot import chips, estimate, search, search_rollout, search_training
from gspo_jax.aot.programs import make_case
from gspo_jax.models import transformer
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.reading import from_dict
from gspo_jax.system.accelerators import GIB

START = search_training.Choice(MeshConfig(1, 2, 4, 1), 1, "full", 1024, 16)


def tiny_case(sequences=16, length=64):
  config = from_dict(moe_aime.get_config("tiny").to_dict())
  return make_case(config, sequences, length)


def flagship():
  return make_case(from_dict(moe_aime.get_config().to_dict()))


def least(seconds=1.0, gib=1.0):
  return estimate.Least(gib * GIB, seconds, 0.0, 0.0)


def row(seconds=1.0, fits=True):
  return dict(fits=fits, search_s=seconds, peak_gib=1.0)


def with_(bounds, rows, left=10):
  """A search of candidates whose bounds and rows are given by their `expert_chunk`."""
  asked = []

  def measure(choice):
    asked.append(choice.expert_chunk)
    return rows[choice.expert_chunk]

  found = search.Search(lambda choice: bounds[choice.expert_chunk], measure, 10 * GIB, left)
  return found, asked


def chunks(*sizes):
  return [dataclasses.replace(START, expert_chunk=size) for size in sizes]


def test_the_fastest_by_their_bounds_are_compiled_first_and_the_slower_not_at_all():
  bounds = {1: least(3.0), 2: least(1.0), 3: least(2.0), 4: least(2.6)}
  found, asked = with_(bounds, {2: row(2.5), 3: row(2.2)})
  found.stage(chunks(1, 2, 3, 4), most=4)
  assert asked == [2, 3] and found.best.expert_chunk == 3
  assert {c.expert_chunk: reason for c, reason in found.rejected.items()} == {
    1: "takes 3 s (compute) at least; 2.2 s was reached",
    4: "takes 2.6 s (compute) at least; 2.2 s was reached",
  }


def test_what_cannot_fit_or_did_not_fit_with_less_is_not_compiled():
  bounds = {1: least(1.0, gib=14.0), 2: least(1.1, gib=8.0), 3: least(1.2, gib=9.0), 4: least(1.3)}
  found, asked = with_(bounds, {2: row(fits=False), 4: row(1.4)})
  found.stage(chunks(1, 2, 3, 4), most=4)
  assert asked == [2, 4] and found.best.expert_chunk == 4
  reasons = {c.expert_chunk: reason for c, reason in found.rejected.items()}
  assert reasons[1] == "needs 14 GiB a chip at least, 4 too many"
  assert reasons[3].startswith("9.0 GiB at least, not fewer than 1x2x4x1, 1 micro, full 2/16")


def test_a_kernel_without_vector_memory_says_nothing_about_a_chips_memory():
  bounds = {1: least(1.0, gib=8.0), 2: least(1.1, gib=9.0)}
  found, asked = with_(bounds, {1: row(fits=False) | dict(of_kernel=True), 2: row(1.4)})
  found.stage(chunks(1, 2), most=4)
  assert asked == [1, 2] and found.best.expert_chunk == 2


def test_a_search_compiles_no_more_than_it_may():
  found, asked = with_({n: least(1.0) for n in range(4)}, {n: row(9.0 - n) for n in range(4)}, 3)
  found.stage(chunks(0, 1), most=1)
  found.stage(chunks(2, 3, 0, 1), most=3)
  assert asked == [0, 2, 3] and found.left == 0
  assert list(found.rejected) == chunks(1)
  found.stage(chunks(2, 3), most=3)  # known already
  assert len(asked) == 3


def test_more_micro_batches_than_fit_are_not_compiled():
  of = lambda choice: row(2.0)  # noqa: E731
  beside = search_training.more_microbatches
  found = search.Search(lambda choice: least(), of, 10 * GIB, 10, beside)
  several = [dataclasses.replace(START, microbatches=n) for n in (1, 2, 4)]
  found.stage(several, most=3)
  assert list(found.rows) == several[:1]


def test_nearly_equal_times_are_told_apart_by_memory():
  rows = {1: row(1.001), 2: row(1.0) | dict(peak_gib=2.0)}
  found, _ = with_({1: least(0.5), 2: least(0.5)}, rows)
  found.stage(chunks(1, 2), most=2)
  assert [choice.expert_chunk for choice in found.ranked()] == [1, 2]


def test_a_descent_changes_every_setting_and_ends():
  """Of times that are separable in the settings, it finds the least."""
  case = tiny_case()

  def seconds(choice):
    costs = dict(attention=1, full=3, auto=3).get(choice.remat, 2)
    costs += dict([(0, 3), (256, 1)]).get(choice.logits_chunk, 2)
    return 10.0 + costs + 4 * (choice.mesh.expert != 8) + choice.microbatches

  found = search.Search(lambda c: least(seconds(c) - 8), lambda c: row(seconds(c)), 10 * GIB, 40)
  search_training.descend(found, search_training.start_of(case, 8), case, 8)
  best = found.best
  assert best.mesh == MeshConfig(1, 1, 8, 1) and best.remat == "attention"
  assert best.microbatches == 1 and found.left > 0


def test_a_search_tries_meshes_that_divide_the_model():
  case = tiny_case()
  tried = lambda tensor: list(search_training.candidates(case, 8, tensor))  # noqa: E731
  assert tried(1) == [MeshConfig(1, 8 // expert, expert, 1) for expert in (1, 2, 4, 8)]
  assert tried(2) == [MeshConfig(1, 4 // expert, expert, 2) for expert in (1, 2, 4)]
  assert tried(4) == []  # of two key/value heads


def test_it_starts_from_the_configuration():
  case = tiny_case()
  compute = case.config.compute
  assert search_training.start_of(case, 8) == search_training.Choice(
    MeshConfig(1, 8, 1, 1), 1, compute.remat, compute.expert_chunk, compute.logits_chunk
  )


@pytest.mark.parametrize("most, chunks", [(1000, [0]), (1024, [0]), (4096, [1024, 2048, 0])])
def test_chunks_are_doubled_up_to_all_at_once(most, chunks):
  assert search_training.sizes(most, 1024) == chunks


def test_the_recommendation_can_be_pasted_into_a_configuration():
  choice = search_training.Choice(MeshConfig(1, 16, 4, 1), 2, "dots", 8192, 512)
  config = common.base()
  config.update(eval(f"dict({choice.lines()})"))
  read = from_dict(config.to_dict())
  assert read.mesh == choice.mesh and read.rl.microbatches == 2
  compute = read.compute
  assert (compute.remat, compute.expert_chunk, compute.logits_chunk) == ("dots", 8192, 512)


def test_memory_that_is_held_is_a_lower_bound():
  case = tiny_case()
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  parameters, model = transformer.count(case.model)[0], case.model
  of_experts = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size
  of_experts *= model.num_layers
  inputs = 16 // 8 * 64 * model.hidden_size * model.num_layers * 2
  weights = of_experts / 8 + (parameters - of_experts) / 2
  found = estimate.of_update(case, mesh, "v5p:2x2x2")
  assert found.memory == pytest.approx(16 * weights + inputs, rel=0.02)  # norms lie otherwise
  kept = dataclasses.replace(START, remat="attention").of(case)
  heads = 16 // 8 * 64 * model.num_heads * model.head_dim * model.num_layers * 2
  more = estimate.of_update(kept, mesh, "v5p:2x2x2").memory - found.memory
  assert more == pytest.approx(heads, rel=0.07)  # and a sum for each head


def test_bounds_follow_what_is_recomputed_and_sent():
  case = dataclasses.replace(tiny_case(), microbatches=2)
  narrow, wide = (
    sharding.make_mesh(MeshConfig(1, 8 // expert, expert, 1), jax.devices()[:8])
    for expert in (1, 8)
  )
  of = lambda mesh, **more: estimate.of_update(  # noqa: E731
    dataclasses.replace(START, microbatches=2, mesh=MeshConfig(1, 2, 4, 1), **more).of(case),
    mesh,
    "v5p:2x2x2",
  )
  assert of(narrow, remat="none").compute_s < of(narrow).compute_s
  assert of(narrow, expert_chunk=32).hbm_s > of(narrow, expert_chunk=0).hbm_s
  weights = estimate.weights_of(case, narrow)
  assert weights["experts"] == 8 * estimate.weights_of(case, wide)["experts"]
  whole = sum(weights.values()) + (weights["head"] if not case.model.tie_word_embeddings else 0)
  assert whole == pytest.approx(2 * transformer.count(case.model)[0], rel=0.01)  # bfloat16


def test_slots_have_caches_for_all_windows_and_for_the_lengths_that_are_assumed():
  case = flagship()
  tried = list(search_rollout.choices(case, 64, search_rollout.start_of(case)))
  assert [choice.slots for choice in tried[::4]] == [64, 128, 256, 512, 1024, 2048, 4096]
  window = case.workload.window
  for whole, some in zip(tried[::4], tried[2::4]):
    assert whole.cache_tokens == 0
    if some.cache_tokens:
      each = some.cache_tokens / some.slots
      assert case.filled < each < window and not some.cache_tokens % (64 * 128)
  # One response may be as long as the window; of many, the mean counts.
  assert tried[2].cache_tokens == 0 and tried[26].cache_tokens < 1.4 * 4096 * case.filled


def test_more_slots_need_more_memory_and_fewer_steps():
  case, mesh = flagship(), sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  chip, number = chips.parse("v5p:2x2x2")
  sampled = case.lengths.sample(case.workload.trajectories)
  near = search_rollout.start_of(case)
  with jax.set_mesh(mesh):
    few, many, paged = (
      search_rollout.least(choice.of(case), mesh, chip, number, sampled, 0.0)
      for choice in (
        dataclasses.replace(near, slots=64, cache_tokens=0),
        dataclasses.replace(near, slots=512, cache_tokens=0),
        dataclasses.replace(near, slots=512, cache_tokens=search_rollout.pool(case, 512, 8)),
      )
    )
  assert few.memory < paged.memory < many.memory
  assert few.bound_s > many.bound_s > paged.bound_s  # whose empty slots read nothing


def test_the_recommendation_of_a_rollout_can_be_pasted():
  choice = search_rollout.Choice(1024, 12_582_912, 8192, "expert")
  config = common.base()
  config.update(eval(f"dict({choice.lines()})"))
  read = from_dict(config.to_dict())
  assert search_rollout.start_of(make_case(read)) == dataclasses.replace(choice, slots=512)
