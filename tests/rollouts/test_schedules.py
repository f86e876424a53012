"""What changes while a run goes on: length of responses, problems, sizes of groups."""

import dataclasses
import functools
import json
import logging

import jax
import numpy as np
import pytest
from support import rollouts
from support.configs import config_of
from support.rollouts import (
  ENVIRONMENTS,
  MODEL,
  NEW,
  PARAMS,
  PROMPTS,
  Counting,
  G,
  P,
  assert_same,
  dumped,
  score,
  settings,
  went_on,
)
from support.small_updates import learner, score_pass

from configs import tiny_schedules
from gspo_jax.data import growing
from gspo_jax.data.sources import Batches, Prompts
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.learner import batch as batches
from gspo_jax.learner import packing
from gspo_jax.learner.metrics import reward_metrics
from gspo_jax.rewards import Scores
from gspo_jax.rollouts import schedules
from gspo_jax.runs import paths
from gspo_jax.settings.data import DataError

LENGTHS = "1:6,3:12,5:24"
collector = functools.partial(rollouts.collector, extra_prompts=0)
goes_on = functools.partial(rollouts.goes_on, extra_prompts=0)
iterate = functools.partial(rollouts.iterate, extra_prompts=0)
on_each = pytest.mark.parametrize("make", ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())

# The length of responses.


@on_each
def test_no_response_is_longer_than_its_iteration_allows(make):
  plain, _ = iterate(6, environment=make)
  out, _ = iterate(6, environment=make, schedule__new_tokens=LENGTHS)
  for batch, same, limit in zip(out, plain, (6, 6, 12, 12, 24, 24), strict=True):
    rollout = batch.rollout
    after = rollout.ends - rollout.prompt_lengths  # observations count
    assert after.max() <= limit and batch.metrics["sampling/max_new_tokens"] == limit
    if limit < NEW:
      assert batch.usage.tokens < same.usage.tokens
    if make is None:
      assert ((after == limit) >= ~rollout.stopped).all() and (~rollout.stopped).any()
      for row in range(P * G):  # they are the first tokens of what they would have been
        assert rollout.response(row) == same.rollout.response(row)[:limit]
    assert rollout.tokens.shape == same.rollout.tokens.shape
    assert batch.metrics["truncated_fraction"] == pytest.approx(1 - rollout.stopped.mean())
  assert "sampling/max_new_tokens" not in plain[0].metrics


def test_a_longer_limit_compiles_nothing(caplog):
  collecting = collector(schedule__new_tokens=LENGTHS)
  iterate(2, collecting)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    (out, *_), _ = iterate(4, collecting, first=3)
  assert out.rollout.lengths.max() > 6
  assert not [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]


@on_each
def test_what_was_put_aside_goes_on_under_the_limit_of_its_last_iteration(make):
  limits = dict(extra_prompts=4, token_budget=40, schedule__new_tokens="1:8,4:24")
  expected = goes_on(2, 4, environment=make, **limits)
  longest = [(batch.rollout.ends - batch.rollout.prompt_lengths).max() for batch in expected]
  assert longest[0] <= 8 < max(longest) <= NEW
  carried = 0
  for batch in expected:
    for row, end in enumerate(batch.rollout.ends):
      versions = batch.rollout.version[row, :end]
      versions = versions[versions >= 0]
      carried += len(versions) > 8 and versions.min() < 4 <= versions.max()
  assert carried, "none was begun under one limit and went on under another"


def test_what_is_longer_than_a_new_limit_is_cut_off():
  """After resume=force with a shorter schedule."""
  options = dict(extra_prompts=4, token_budget=40)
  _, (collecting, _) = iterate(2, **options)
  longest = max(
    len(t.tokens) for g in collecting._in_flight for t in g.trajectories if not t.finished
  )
  assert longest > 3
  again = collector(schedule__new_tokens="1:3,9:24", **options)
  again[0].set_position(collecting.position()())
  out, _ = iterate(4, again, first=3)
  assert max(batch.rollout.lengths.max() for batch in out) >= longest


@pytest.mark.parametrize("fixed", [0, 20])
def test_the_overlong_punishment_ends_where_responses_are_cut_off(fixed):
  calls = []

  def judge(responses, prompts, lengths, finished):
    calls.append(np.array(lengths))
    return score(responses, prompts, lengths, finished)

  out, _ = iterate(6, judge=judge, schedule__new_tokens=LENGTHS, reward__overlong_max=fixed)
  for batch, lengths, limit in zip(out, calls, (6, 6, 12, 12, 24, 24), strict=True):
    np.testing.assert_array_equal(lengths - batch.rollout.lengths, 0 if fixed else NEW - limit)


def test_what_was_cut_off_under_an_earlier_limit_is_punished_as_what_is_now():
  calls = []

  def judge(responses, prompts, lengths, finished):
    calls.extend(zip(lengths, map(len, responses), finished, strict=True))
    return score(responses, prompts, lengths, finished)

  options = dict(judge=judge, extra_prompts=2, token_budget=40, schedule__new_tokens="1:4,3:24")
  _, (collecting, _) = iterate(2, **options)
  calls.clear()  # what is judged under the second limit is left
  iterate(3, went_on(collecting.position(), **options), first=3)
  cut_off = [(observed, length) for observed, length, finished in calls if not finished]
  assert {4, NEW} <= {length for _, length in cut_off}
  assert {observed for observed, _ in cut_off} == {NEW}


# Sizes of groups.


def test_sizes_by_hand():
  def size(tried, right):
    return schedules.group_size(tried, right, 2, 8)

  assert size(0, 0) == 8, "nothing is known"
  assert size(8, 0) == 8, "1 - 0.9^8 is 0.57"
  assert size(8, 2) == 7, "1 - 0.7^7 is 0.92, and with 6 it is 0.88"
  assert size(8, 4) == 4, "1 - 0.5^4 is 0.94"
  assert size(8, 6) == 2
  assert size(80, 80) == 2, "one would do, but not for an advantage"
  assert schedules.group_size(8, 4, 1, 3) == 3
  assert schedules.group_size(8, 8, 1, 8) == 1, "0.9 is just enough"
  assert schedules.group_size(2, 0, 2, 16) == 9, "1 - 0.75^9 is 0.92, and with 8 it is 0.8999"
  sizes = [size(16, right) for right in range(17)]
  assert sizes == sorted(sizes, reverse=True)


FEW = Prompts(PROMPTS.rows[:6])


def by_prompt(responses, prompts, lengths, finished):
  """Right where the prompt is of the first two; else half of them, by the text."""
  easy = np.array([int(prompt.id) < 2 for prompt in prompts])
  correct = np.where(easy, 1, score(responses, prompts, lengths, finished).reward)
  correct = np.where([int(prompt.id) == 5 for prompt in prompts], 0, correct).astype(np.float32)
  return Scores(correct, dict(right=int(correct.sum())), correct)


WHOLE = dict(group_size=6, source=FEW, judge=by_prompt)
SIZES = WHOLE | dict(schedule__group_size_min=2)


@pytest.mark.parametrize(
  "more", [{}, pytest.param(dict(token_budget=120), marks=pytest.mark.long)], ids=str
)
def test_easy_prompts_get_few_responses_and_hard_ones_many(more):
  out = goes_on(3, 5, **SIZES, **more)
  valid = [(g.prompt.id, int(g.known_G.sum())) for batch in out for g in batch.groups]
  size = {name: {n for id_, n in valid if id_ == name} for name in "015"}
  assert size["0"] == size["1"] == {2} and size["5"] == {6}
  for batch in out:
    assert batch.reward_PG.shape == (len(batch.groups), 6)
    known_PG = np.stack([group.known_G for group in batch.groups])
    assert (batch.advantage_PG[~known_PG] == 0).all()
    sampled = batch.rollout.lengths.reshape(known_PG.shape) > 0
    np.testing.assert_array_equal(sampled, known_PG)
    assert (batch.rollout.ends.reshape(known_PG.shape)[~known_PG] == 0).all(), "rows of padding"
    assert batch.metrics["group_size/mean"] == pytest.approx(known_PG.sum() / len(batch.groups))
    assert batch.metrics["group_size/responses"] == known_PG.sum()
    assert more != {} or batch.usage.tokens == batch.rollout.lengths.sum(), "no others are sampled"
    for group, advantage_G, known_G in zip(batch.groups, batch.advantage_PG, known_PG, strict=True):
      reward_X = group.reward_G[known_G]
      deviation = reward_X.std(ddof=1)
      by_hand = (reward_X - reward_X.mean()) / (deviation + 1e-6) if deviation else 0 * reward_X
      np.testing.assert_allclose(advantage_G[known_G], by_hand, atol=1e-4)


def test_without_a_schedule_every_group_is_whole_and_nothing_is_counted():
  out, (collecting, _) = iterate(3, **WHOLE)
  assert all(group.known_G.all() for batch in out for group in batch.groups)
  assert not collecting.position()()["prompt_filter"]["tried"]
  assert not [name for name in out[-1].metrics if name.startswith("group_size/")]


def test_prompts_are_dropped_as_without_it():
  keys = dict(data__query_set__drop_after=2) | SIZES
  out, (collecting, _) = iterate(6, **keys)
  state = collecting.position()()["prompt_filter"]
  assert {"0", "1", "5"} <= state["dropped"].keys()
  _, (collecting, _) = iterate(6, **SIZES)
  assert not collecting.position()()["prompt_filter"]["dropped"], "nothing was asked to be dropped"
  assert out[-1].metrics["query_set/dropped"] >= 3


@pytest.mark.long
def test_missing_rows_cost_a_packed_update_nothing():
  (*_, collected), _ = iterate(6, **SIZES, objective__volatility=True)
  B, empty = len(collected.rollout.tokens), collected.rollout.lengths == 0
  assert 0 < empty.sum() < B
  by_length = reward_metrics(
    collected.reward_PG.reshape(-1), collected.known_B, collected.rollout.lengths, NEW
  )
  assert sum(x for k, x in by_length.items() if "responses" in k) == pytest.approx(1)
  batch = batches.train_batch(collected.rollout, collected.advantage_PG, shared_prompts=True)
  plan = packing.plan(batch, 1)
  assert ((plan.inputs.places.row_B < 0) == empty[plan.order_B]).all()
  assert (batch.inputs.sampler_experts_BTlk[empty] == -1).all()
  (*_, whole), _ = iterate(6, **WHOLE, objective__volatility=True)
  whole_values = batches.train_batch(whole.rollout, whole.advantage_PG, shared_prompts=True)
  rows, more = (int(packing.count(packing.plan(b, 1).inputs, 4)) for b in (batch, whole_values))
  assert rows < more


def test_a_smaller_group_shares_its_prompt():
  (*_, collected), _ = iterate(6, **SIZES)
  batch = batches.train_batch(collected.rollout, collected.advantage_PG, shared_prompts=True)
  batch = batch.replace(old_logp_BT=batch.sampler_logp_BT)
  shared = learner(MODEL, group_size=6, response_tokens=NEW)
  result = score_pass(shared)(PARAMS, batch.inputs)
  plain = score_pass(learner(MODEL))(PARAMS, batch.inputs.replace(prompt_B=None))
  sampled = batch.mask_BT > 0
  assert 0 < sampled.any(axis=1).sum() < len(sampled)
  for logp_BT in (result, plain):
    np.testing.assert_allclose(
      np.asarray(logp_BT)[sampled], collected.rollout.logp[sampled], atol=1e-4
    )
  assert np.isfinite(np.asarray(result)).all()


@pytest.mark.parametrize(
  "make", [Counting, pytest.param(None, marks=pytest.mark.long)], ids=["turns", "single"]
)
def test_every_part_of_an_iteration_takes_smaller_groups(make):
  """Advantages by turn, rounds of sampling, cut-off responses, dumps."""
  out, _ = iterate(6, **SIZES, environment=make, extra_rounds=1, mask_truncated=True)
  smaller = 0
  for batch in out:
    known_B = batch.known_B
    smaller += (~known_B).sum()
    cut = (~batch.rollout.stopped & known_B).sum()
    assert batch.metrics["masked_responses"] == cut
    if make:
      assert batch.advantage_BL.shape == batch.rollout.logp.shape
      assert not batch.advantage_BL[~known_B].any() and np.isfinite(batch.advantage_BL).all()
    assert len(dumped(batch)) == known_B.sum()
    assert not batches.with_verdict(batch.rollout, known_B).mask[~known_B].any()
  assert smaller


# Problems.


def lines(ids, **more):
  rows = [dict(id=f"r{i}", question=f"{i}+1=", answer=str(i + 1)) | more for i in ids]
  return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def path(tmp_path):
  return tmp_path / "rows.jsonl"


def source_of(path, on_error="raise"):
  c = settings(data__train=str(path), data__on_error=on_error, data__max_prompt_tokens=8)
  return growing.load(c.data, ByteTokenizer(), "train")


def append(path, text):
  with path.open("a") as file:
    file.write(text)


def ids(prompts):
  return [prompt.id for prompt in prompts]


def test_only_whole_lines_and_only_new_ones_are_read(path):
  path.write_text(lines(range(3)) + '{"id": "r3", "quest')
  source = source_of(path)
  assert ids(source) == ["r0", "r1", "r2"]
  assert source.look() == 0
  append(path, 'ion": "3+1=", "answer": "4"}\n' + lines(range(4, 400)) + '{"id"')
  assert source.look() == 397 and len(source) == 400
  assert ids(source) == [f"r{i}" for i in range(400)]
  append(path, ': "r400", "question": "400+1=", "answer": "401"}\n')
  assert source.look() == 1 and source[400].id == "r400"


def test_files_that_match_a_pattern_later_are_read_too(tmp_path):
  (tmp_path / "b.jsonl").write_text(lines(range(2)))
  source = source_of(tmp_path / "*.jsonl")
  (tmp_path / "a.jsonl").write_text(lines(range(10, 12)))
  append(tmp_path / "b.jsonl", lines(range(2, 4)))
  assert source.look() == 4
  assert ids(source) == ["r10", "r11", "r0", "r1", "r2", "r3"], "file by file"
  append(tmp_path / "b.jsonl", lines([4]))
  source.look()
  append(tmp_path / "a.jsonl", lines([12]))
  again = source_of(tmp_path / "*.jsonl")
  assert len(again) == len(source) + 1
  again.look(source.lengths)
  assert ids(again) == ids(source)
  assert again.look() == source.look() == 1


def test_rows_without_an_id_have_their_line(path):
  row = '{"question": "1+1=", "answer": "2"}\n'
  path.write_text(row + "\n" + row)
  source = source_of(path)
  append(path, row)
  source.look()
  assert ids(source) == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:4"]


def test_new_rows_are_checked_like_the_first_ones(path):
  path.write_text(lines(range(3)))
  source, lenient = source_of(path), source_of(path, on_error="skip")
  append(path, lines([3]) + "[1]\n" + lines([0]) + lines([4]))
  with pytest.raises(DataError, match=r"rows\.jsonl, line 5: a row is an object"):
    source.look()
  assert lenient.look() == 2 and lenient.skipped == 2
  assert ids(lenient) == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize("what", ["edited", "cut", "gone"])
def test_files_that_have_changed_are_an_error_that_names_them(what, path):
  path.write_text(lines(range(30)))
  source = source_of(path)
  if what == "edited":
    path.write_text(lines(range(29)) + lines([77]) + lines([30]))
  elif what == "cut":
    path.write_text(lines(range(20)))
  else:
    path.unlink()
  with pytest.raises(DataError, match=r"rows\.jsonl"):
    source.look()
  with pytest.raises(DataError, match=r"rows\.jsonl"):
    source.look(source.lengths)


def test_one_of_several_files_that_is_gone_is_missed(tmp_path):
  for i in range(2):
    (tmp_path / f"{i}.jsonl").write_text(lines([i]))
  source = source_of(tmp_path / "*.jsonl")
  (tmp_path / "0.jsonl").unlink()
  with pytest.raises(DataError, match=r"0\.jsonl no longer exists"):
    source.look()


def test_new_rows_begin_an_epoch_that_has_every_row_once(path):
  path.write_text(lines(range(20)))

  def open_batches(seed=3):
    source = source_of(path)
    return source, Batches(source, 1, seed=seed)

  source, batches = open_batches()
  drawn = ids(batches.take(8))
  append(path, lines(range(20, 30)))
  assert source.look() == 10
  states = [json.loads(json.dumps(batches.get_state()))]
  drawn += ids(batches.take(10))
  append(path, lines(range(30, 33)))
  assert source.look() == 3 and source.look() == 0
  drawn += ids(batches.take(33))
  assert sorted(drawn[-33:]) == sorted(f"r{i}" for i in range(33)), "once each"
  assert source.look() == 0
  after = ids(batches.take(33))
  assert sorted(after) == sorted(drawn[-33:]) and after != drawn[-33:]
  states.append(json.loads(json.dumps(batches.get_state())))
  source, again = open_batches()
  again.set_state(states[0])
  assert len(source) == 30
  assert ids(again.take(10)) == drawn[8:18]
  assert source.look() == 3 and source.look() == 0
  assert ids(again.take(33)) == drawn[18:]
  source, again = open_batches()
  again.set_state(states[1])
  assert ids(again.take(50)) == ids(batches.take(50))
  source, other = open_batches(seed=4)
  assert ids(other.take(33)) != drawn[-33:]
  assert ids(other.take(3, lambda prompt: prompt.id == "r5")) == ["r5"] * 3


GROWS = dict(schedule__refresh_every=2, data__max_prompt_tokens=8)


def test_a_resumed_run_has_the_rows_of_its_checkpoint(path):
  path.write_text(lines(range(6)))

  def fresh():
    return collector(source_of(path), **GROWS)

  first = fresh()
  out, _ = iterate(2, first)
  append(path, lines(range(6, 9)))
  out += iterate(2, first, first=3)[0]
  rows, added = ([batch.metrics[f"data/{n}"] for batch in out] for n in ("rows", "added"))
  assert (rows, added) == ([6, 6, 9, 9], [0, 0, 3, 0])
  state = json.loads(json.dumps(first[0].position()()))
  append(path, lines(range(9, 14)))
  second = fresh()
  second[0].set_position(state)
  for batch, same in zip(iterate(2, second, first=5)[0], iterate(2, first, first=5)[0]):
    assert batch.metrics["data/rows"] == 14
    assert_same(batch, same)


def test_rows_of_a_checkpoint_that_have_changed_are_an_error(path):
  path.write_text(lines(range(500)))
  collecting = collector(source_of(path), **GROWS)
  iterate(2, collecting)
  state = collecting[0].position()()
  path.write_text(lines([700]) + lines(range(1, 600)))
  again = collector(source_of(path, on_error="skip"), **GROWS)
  with pytest.raises(DataError, match=r"rows\.jsonl has changed"):
    again[0].set_position(state)


def test_another_source_begins_a_pass_of_its_own(tmp_path, caplog):
  """With resume=force."""
  for i in range(2):
    (tmp_path / f"{i}.jsonl").write_text(lines(range(10 * i, 10 * i + 4)))
  sources = [source_of(tmp_path / f"{i}.jsonl") for i in range(2)]
  old, new = (Batches(source, 1, seed=3) for source in sources)
  old.take(2)
  new.set_state(json.loads(json.dumps(old.get_state())))
  assert "changed since the checkpoint: a new epoch starts" in caplog.text
  assert sorted(ids(new.take(4))) == [f"r{i}" for i in range(10, 14)] and sources[1].look() == 0


def test_held_out_problems_among_new_rows_are_counted(path, caplog):
  path.write_text(lines(range(4)))
  source = source_of(path)
  held_out = source_of(path)
  source.watch([held_out[1], *PROMPTS.rows[:3]])
  assert source.shared == 1
  source.watch([dataclasses.replace(held_out[1], question="6+1= "), PROMPTS.rows[0]])
  assert source.shared == 0
  collecting = collector(source, **GROWS)
  assert "data/shared_prompts" not in iterate(1, collecting)[0][0].metrics
  append(path, lines(range(5, 8)))
  (_, out), _ = iterate(2, collecting, first=2)
  assert out.metrics["data/shared_prompts"] == 1 and "held-out" in caplog.text


def test_a_run_may_begin_or_end_to_grow(path):
  """With resume=force: the position means nothing, and a new pass starts."""
  path.write_text(lines(range(6)))
  plain = dict(source=Prompts(source_of(path)._rows), data__max_prompt_tokens=8)
  grows = [dict(source=source_of(path), **GROWS) for _ in range(2)]
  for before, after in ((plain, grows[0]), (grows[1], plain)):
    _, (collecting, _) = iterate(1, **before)
    again = rollouts.went_on(collecting.position(), extra_prompts=0, **after)
    assert len(iterate(2, again, first=2)[0]) == 2


REFUSED_SOURCE = r"reads one \.jsonl file, or a pattern of them"
UNREADABLE = {
  "arithmetic:train": REFUSED_SOURCE,
  "tfds:gsm8k/train": REFUSED_SOURCE,
  "rows.jsonl.gz": REFUSED_SOURCE,
  "rows.parquet": REFUSED_SOURCE,
  "a.jsonl:1,b.jsonl:2": REFUSED_SOURCE,
  "{}/empty.jsonl": "the data set is empty",
  "{}/none.jsonl": "there is no file",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_nobody_can_append_to_is_refused_by_name(name, tmp_path):
  (tmp_path / "empty.jsonl").write_text('{"id": "r')
  with pytest.raises(DataError, match=rf"data\.train.*{UNREADABLE[name]}"):
    source_of(name.format(tmp_path))


# Configurations.


def test_groups_of_one_are_for_those_who_need_no_others():
  keys = dict(schedule__group_size_min=1, objective__name="ppo_clip")
  settings(critic__name="model", **keys)
  settings(objective__name="rft", objective__advantage="reward", schedule__group_size_min=1)
  with pytest.raises(ValueError, match="at least 2"):
    settings(**keys)


def test_a_buffer_that_the_schedule_does_not_move_is_as_long_as_it_likes():
  keys = dict(reward__overlong_weight=1.0, reward__overlong_buffer=9, reward__overlong_max=20)
  settings(schedule__new_tokens="1:6,2:24", **keys)


def test_the_configurations_choose_what_they_say():
  length, grows, groups = (
    config_of(lambda arg=arg: tiny_schedules.get_config(arg))
    for arg in ("length", "growing", "groups")
  )
  assert length.schedule.limit(1, 192) < length.schedule.limit(40, 192) == 192
  assert grows.schedule.refresh_every and groups.schedule.group_size_min == 2
  for group in (length, grows, groups):
    enabled = [
      group.schedule.new_tokens != "",
      group.schedule.refresh_every,
      group.schedule.group_size_min,
    ]
    assert sum(map(bool, enabled)) == 1
  for group in (grows, groups):  # their files have no demonstrations
    with pytest.raises(ValueError, match=r"needs paths: set --config\.weights=.*data\.train="):
      paths.check_paths(group)
  paths.check_paths(length)
  # The first host alone needs growing files.
  data = dataclasses.replace(grows.data, train="elsewhere.jsonl", eval="arithmetic:heldout")
  paths.check_paths(dataclasses.replace(grows, data=data, weights="random"))
