"""Groups that are put aside: how many at most, how stale, and what the metrics say of them."""

import dataclasses

import numpy as np
import pytest
from support import rollouts
from support.rollouts import (
  ENGINE,
  NEW,
  PARAMS,
  Counting,
  G,
  P,
  collector,
  goes_on,
  iterate,
  went_on,
)

from gspo_jax.runs.metrics import Stopwatch


def sampled_at(step, groups):
  """Counts tokens of these groups sampled by an iteration's weights."""
  return sum(
    int((trajectory.version == step).sum()) for group in groups for trajectory in group.trajectories
  )


@pytest.mark.parametrize("extra_prompts", [P, pytest.param(2 * P + 1, marks=pytest.mark.long)])
def test_short_responses_are_trained_on_by_the_policy_that_sampled_them(extra_prompts, monkeypatch):
  """All are finished when the host looks for the first time, and none is put aside: with as many
  extra prompts as prompts, every second iteration would have nothing to sample."""
  whole = dataclasses.replace(ENGINE, slots=0, steps=NEW)
  monkeypatch.setattr(rollouts, "ENGINE", whole)
  out, (first_run, _) = iterate(4, extra_prompts=extra_prompts)
  for batch in out:
    assert len(batch.groups) == P and batch.usage.tokens == batch.rollout.lengths.sum()
    assert batch.metrics["partial/stale_tokens"] == batch.metrics["partial/oldest"] == 0
  assert not first_run.position()()["under_way"]


def surplus(count, **options):
  """A collector with surplus groups, finished at step 1."""
  groups = []
  for batch in iterate(-(-count // P), extra_prompts=0)[0]:
    groups += batch.groups
  for group in groups:
    for batch in group.trajectories:
      batch.columns["version"] = np.ones_like(batch.version)
  collecting = collector(**options)
  collecting[0]._in_flight = groups[:count]
  return collecting, [group.prompt.id for group in groups[:count]]


def newest(group):
  """Newest version of the weights in a group."""
  return max(int(trajectory.version.max(initial=-1)) for trajectory in group.trajectories)


@pytest.mark.parametrize("count, taken", [(1, [1, 0, 0]), (3, [2, 1, 0]), (6, [2, 2, 2])])
def test_a_surplus_is_half_of_a_batch_at_most(count, taken):
  collecting, old = surplus(count, extra_prompts=8)
  collecting[0]._batches.take(2 * P)  # their prompts
  out, (first_run, _) = iterate(3, running=collecting, first=2)
  result = [[g.prompt.id for g in batch.groups] for batch in out]
  assert [sum(name in old for name in names) for names in result] == taken
  assert [name for names in result for name in names if name in old] == old  # the oldest first
  for step, batch in enumerate(out, 2):
    assert (
      len(batch.groups) == P
      and batch.usage.tokens > 0
      and batch.metrics["partial/stale_tokens"] < 1
    )
    assert sum(newest(group) < step for group in batch.groups) <= P // 2
  assert out[0].metrics["partial/waiting_groups"] >= max(0, count - taken[0])
  assert not any(group.prompt.id in old for group in first_run._in_flight)


def test_surplus_of_more_extra_prompts_leaves_no_batch_short():
  collecting, _ = surplus(5, extra_prompts=0)
  collecting[0]._workload = dataclasses.replace(collecting[0]._workload, partial=True)
  out, _ = iterate(3, running=collecting, first=2)
  assert [len(batch.groups) for batch in out] == [P, P, P]


@pytest.mark.long
def test_a_run_with_one_prompt_uses_its_surplus_too():
  collecting, old = surplus(2, prompts=1, minibatches=1, extra_prompts=2)
  out, _ = iterate(3, running=collecting, first=2)
  assert [batch.groups[0].prompt.id for batch in out][:2] == old and out[2].usage.tokens > 0


def test_at_most_as_many_responses_are_under_way_as_are_trained_on(monkeypatch):
  collecting, engine = collector(extra_prompts=9)
  most, step = [], engine.step

  def look():
    scheduler = engine._scheduler
    queued = sum(request.samples for request, _ in scheduler._requests)
    most.append(len(scheduler._live) + queued)
    return step()

  monkeypatch.setattr(engine, "step", look)
  iterate(4, running=(collecting, engine))
  assert max(most) == P * G == collecting._workload.trajectories


@pytest.mark.parametrize("kind", [None, Counting], ids=["single", "turns"])
def test_tokens_are_those_that_the_iteration_has_sampled(kind):
  """Not those of what is trained on: some of them were sampled before, others are discarded."""
  collecting, engine = collector(environment=kind, extra_rounds=2, extra_prompts=6)
  handed_out, judge = [], collecting._score_groups
  collecting._score_groups = lambda groups: handed_out.extend(groups) or judge(groups)
  for step in range(1, 5):
    engine.load(PARAMS, version=step)
    handed_out.clear()
    out = collecting.collect(step, Stopwatch())
    assert out.version == step and len(handed_out) >= P
    observed = [*handed_out, *collecting._in_flight]
    assert out.usage.tokens == sampled_at(step, observed)
    row = out.metrics
    versions = [newest(group) for group in observed if group.finished]
    assert row["partial/finished_groups"] == versions.count(step)
    trained = out.rollout.version[out.rollout.mask > 0]
    assert row["partial/stale_tokens"] == pytest.approx((trained < step).mean())
    assert row["partial/oldest"] == step - trained.min()
  if kind:
    filled = [not group.mixed for group in out.groups]
    flat = ~out.advantage_BL.reshape(P, -1).any(axis=1)
    assert flat[filled].all()


def test_a_surplus_survives_a_checkpoint():
  collecting, _ = surplus(6, extra_prompts=8)
  goes_on(0, 3, collecting, extra_prompts=8)


def test_truncated_responses_count_in_their_groups_and_are_not_trained_on():
  free, _ = iterate(1, extra_prompts=0)
  out, _ = iterate(1, extra_prompts=0, mask_truncated=True)
  cut_PG = ~out[0].rollout.stopped.reshape(P, -1)
  assert 0 < cut_PG.sum() < cut_PG.size
  expected = np.where(cut_PG, 0, free[0].advantage_PG)
  np.testing.assert_array_equal(out[0].advantage_PG, expected)
  assert out[0].metrics["masked_responses"] == cut_PG.sum()
  assert out[0].metrics["reward/mean"] == free[0].metrics["reward/mean"]


@pytest.mark.parametrize("kind", [None, Counting], ids=["single", "turns"])
def test_what_is_too_old_is_begun_again(kind):
  """Responses that were put aside, finished ones too, of a group whose others stay."""
  _, collecting = iterate(2, environment=kind, extra_prompts=6, max_age=2)
  aside = [
    trajectory
    for group in collecting[0]._in_flight
    for trajectory in group.trajectories
    if trajectory.length
  ]
  old, rest = aside[::2], aside[1::2]
  assert old and rest
  for trajectory in old:
    trajectory.columns["version"] = np.where(trajectory.turns >= 0, 0, -1).astype(np.int32)
  for trajectory in rest:
    trajectory.columns["version"] = np.where(trajectory.turns >= 0, 1, -1).astype(np.int32)
  ids = [
    [(trajectory.sample, trajectory.seed) for trajectory in group.trajectories]
    for group in collecting[0]._in_flight
  ]
  groups = list(collecting[0]._in_flight)
  (out,), _ = iterate(1, running=collecting, first=3)
  assert out.metrics["partial/begun_again"] == len(old)
  assert [
    [(trajectory.sample, trajectory.seed) for trajectory in g.trajectories] for g in groups
  ] == ids
  current = [trajectory for group in groups for trajectory in group.trajectories]
  assert (
    all(any(trajectory is x for x in current) for trajectory in rest)
    and out.metrics["partial/oldest"] <= 2
  )
  assert all(trajectory.oldest_version in (None, 1, 3) for trajectory in current) and any(
    trajectory.oldest_version == 3 for trajectory in current
  )


@pytest.mark.parametrize(
  "kind", [Counting, pytest.param(None, marks=pytest.mark.long)], ids=["turns", "single"]
)
def test_longer_responses_are_cut_and_go_on_with_a_smaller_limit(kind):
  """As sampled with this limit; log-probs of later tokens would be 0 in the updates."""
  options, limit = dict(environment=kind, extra_prompts=6), 10
  out, (first_run, _) = iterate(2, **options)
  before = [x for group in first_run._in_flight for x in group.trajectories]
  longer = dict(options, sampling__max_new_tokens=limit)
  collecting = went_on(first_run.position(), **longer)
  after = [x for group in collecting[0]._in_flight for x in group.trajectories]
  number = 0
  for old, new in zip(before, after, strict=True):
    count = len(new.tokens)
    np.testing.assert_array_equal(new.tokens, old.tokens[:count])
    np.testing.assert_array_equal(
      new.rewards, np.where(new.turns < new.turn, old.rewards[:count], 0)
    )
    if len(old.tokens) + (not old.finished) <= limit:  # One more token is to be sampled.
      assert count == len(old.tokens) and new.finished == old.finished
      continue
    number += 1
    assert count < limit and not new.finished and old.turns[count] == new.turn
    assert new.turn_tokens == old.tokens[:count][old.turns[:count] == new.turn].tolist()
    if kind:
      assert len(new.environment.heard) == new.turn == len(new.calls)
  assert number
  (result,), _ = iterate(1, running=collecting, first=3)
  assert (result.rollout.ends - result.rollout.prompt_lengths).max() == limit
  assert not (result.rollout.logp[result.rollout.mask > 0] == 0).any()
  with pytest.raises(
    ValueError, match=r"a response has \d\d tokens, but sampling.max_new_tokens=10"
  ):
    collecting[0].rollout(out[0].groups)
  with pytest.raises(ValueError, match=r"a prompt has 3 tokens, but data.max_prompt_tokens=2: set"):
    went_on(first_run.position(), **options, data__max_prompt_tokens=2)


def test_what_was_carried_over_ends_after_the_key_is_off():
  _, (first_run, _) = iterate(2, extra_prompts=9)
  waiting = [group.prompt for group in first_run._in_flight]
  resumed = went_on(first_run.position(), extra_prompts=0)
  out, _ = iterate(-(-len(waiting) // P), resumed, first=3)
  assert waiting and not resumed[0]._in_flight
  assert {x.id for x in waiting} <= {group.prompt.id for batch in out for group in batch.groups}


def test_an_unfinished_response_as_long_as_a_new_limit_has_a_token_to_sample():
  _, (first_run, _) = iterate(2, extra_prompts=9)
  waiting = [x for group in first_run._in_flight for x in group.trajectories if len(x.tokens) > 1]
  lengths = {True: set(), False: set()}
  for trajectory in waiting:
    finished, count = trajectory.finished, len(trajectory.tokens)
    trajectory.cut(count)
    assert trajectory.finished == finished
    lengths[finished].add(count - len(trajectory.tokens))
  assert lengths[False] == {1} and lengths[True] <= {0}


def test_beginning_again_survives_a_checkpoint():
  result = goes_on(2, 4, extra_prompts=6, max_age=1)
  assert all("partial/begun_again" in batch.metrics for batch in result)
