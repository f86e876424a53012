"""Groups of an iteration: put aside and gone on with, alone or with environments, and chosen."""

import copy
import dataclasses
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from support.cases import long
from support.rollouts import (
  ALWAYS,
  ENGINE,
  ENVIRONMENTS,
  MIXED,
  MODEL,
  NEVER,
  NEW,
  OTHER,
  PARAMS,
  PROMPTS,
  STOP,
  Counting,
  G,
  P,
  alternating,
  collector,
  dumped,
  goes_on,
  groups,
  iterate,
)
from support.sampling import sample
from support.small_models import forward, next_logp

from gspo_jax import rewards
from gspo_jax.data.sources import Prompts
from gspo_jax.rewards import NoVerdictError, Scores
from gspo_jax.rollouts import samples_log
from gspo_jax.rollouts.groups import Group
from gspo_jax.rollouts.metrics import environment_metrics
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.sampling import Driver, LocalEngine, Response, SingleTurn, Trajectory, Workload
from gspo_jax.settings.rewards import RewardConfig
from gspo_jax.settings.sampling import SamplingConfig
from gspo_jax.system import hosts


class Late(Counting):
  """The same on a host where a time limit strikes in every second turn."""

  def step(self, response):
    observed, reward, done = super().step(response)
    return observed, reward * (len(self.heard) % 2), done


CASES = [dict(), dict(extra_prompts=0, token_budget=70), dict(extra_prompts=9, token_budget=120)]


@pytest.mark.parametrize("kind", ["single", pytest.param("turns", marks=pytest.mark.long)])
@pytest.mark.parametrize("changes", [CASES[1], *long(CASES[::2])], ids=str)
def test_with_the_same_weights_they_are_those_of_one_go(changes, kind):
  make, carried, several = ENVIRONMENTS[kind], 0, 0
  out, _ = iterate(6, environment=make, routing=True, **changes)
  groups = [(group, c.rollout, 3 * i) for c in out for i, group in enumerate(c.groups)]
  for group, rollout, first in groups:
    prompt, seed = group.prompt, group.trajectories[0].seed
    turns = dict(environments=[make(prompt) for _ in range(G)], max_turns=4) if make else {}
    whole = sample(
      PARAMS, MODEL, [prompt.tokens], **turns, group_size=G, max_new_tokens=NEW, stop_ids=STOP,
      seed=seed, prompt_length=3, record_routing=True,
    )  # fmt: skip
    for g in range(G):
      row = first + g
      assert rollout.response(row) == whole.response(g)
      for field in ("turns", "rewards", "mask"):
        np.testing.assert_array_equal(getattr(rollout, field)[row], getattr(whole, field)[g])
      assert rollout.stopped[row] == whole.stopped[g]
      for field in ("logp", "full_logp"):
        result, expected = getattr(rollout, field)[row], getattr(whole, field)[g]
        np.testing.assert_allclose(result, expected, atol=1e-5)
      np.testing.assert_array_equal(rollout.routing[row], whole.routing[g])
      versions = rollout.version[row][rollout.mask[row] > 0]
      assert (np.diff(versions) >= 0).all()
      carried += versions.min() < versions.max()
      several += rollout.turns[row].max() > 0
    assert (rollout.version[rollout.mask == 0] == -1).all()
  assert carried > 3 and (several > 3) == (kind == "turns")
  ids = [group.prompt.id for group, *_ in groups]
  assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", ["single", pytest.param("turns", marks=pytest.mark.long)])
@pytest.mark.parametrize(
  "changes",
  [
    dict(token_budget=60),  # Put aside, when some of those that begin alike are finished.
    pytest.param(dict(extra_prompts=0), marks=pytest.mark.long),  # All at once.
    pytest.param(dict(extra_prompts=9), marks=pytest.mark.long),  # One after the other.
  ],
  ids=str,
)
def test_a_prompt_that_comes_again_in_a_batch_gets_other_responses(changes, kind):
  options = dict(source=Prompts(PROMPTS.rows[:2]), environment=ENVIRONMENTS[kind])
  result = []
  for batch in iterate(4, **options, **changes)[0]:
    groups = np.split(np.arange(len(batch.rollout.tokens)), len(batch.groups))
    result += [tuple(map(tuple, map(batch.rollout.response, rows))) for rows in groups]
  assert len(set(result)) == len(result) >= 8


@pytest.mark.parametrize("kind", ["turns", pytest.param("single", marks=pytest.mark.long)])
def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it(kind):
  out, _ = iterate(5, weights=alternating, environment=ENVIRONMENTS[kind])
  total = 0
  for rollout in (batch.rollout for batch in out):
    even, odd = (next_logp(params, MODEL, rollout.tokens) for params in (OTHER, PARAMS))
    version = rollout.version[:, 1:]
    expected = np.where(version % 2, odd, even)
    sampled = rollout.mask[:, 1:] > 0
    np.testing.assert_allclose(rollout.logp[:, 1:][sampled], expected[sampled], atol=1e-4)
    total += sum(len(set((v[v >= 0] % 2).tolist())) == 2 for v in version)
  assert total > 3


def test_routing_is_that_of_the_weights_that_fed_a_token_first():
  out, _ = iterate(4, weights=alternating, routing=True)
  carried = 0
  for rollout in (batch.rollout for batch in out):
    counts = [
      np.moveaxis(np.asarray(forward(p, MODEL, rollout.tokens).routing_lBTk), 0, 2)
      for p in (OTHER, PARAMS)
    ]
    for row, end in enumerate(rollout.ends):
      versions = rollout.version[row, rollout.prompt_lengths[row] : end]
      if versions.min() == versions.max():
        expected = counts[versions[0] % 2][row]
        np.testing.assert_array_equal(rollout.routing[row, : end - 1], expected[: end - 1])
      carried += versions.min() < versions.max()
      assert (rollout.routing[row, end - 1 :] == -1).all()
      assert (rollout.routing[row, : end - 1] >= 0).all()
  assert carried > 3


def test_an_iteration_ends_with_enough_groups_or_with_its_budget():
  out, (first_run, _) = iterate(4)
  assert [len(batch.groups) for batch in out] == [4] * 4
  assert 0 < len(first_run.position()()["under_way"]) <= 4
  free = np.mean([batch.usage.tokens for batch in out])
  out, _ = iterate(6, token_budget=60)
  assert {len(batch.groups) for batch in out} <= {2, 3, 4}  # one for every mini-batch at least
  assert min(len(batch.groups) for batch in out) < 4
  assert np.mean([batch.usage.tokens for batch in out]) < 0.8 * free


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_state_of_a_checkpoint_goes_on_in_the_same_way(kind):
  options = dict(environment=ENVIRONMENTS[kind], routing=True)
  goes_on(2, 3, **options)
  _, (first_run, _) = iterate(2, **options)
  unfinished = [
    trajectory
    for group in first_run.position()()["under_way"]
    for trajectory in group["trajectories"]
  ]
  assert any(item["turn"] for item in unfinished if not item["finished"]) == (kind == "turns")


def test_stop_strings_are_found_where_a_turn_was_put_aside():
  """One that begins before and ends afterwards counts."""

  def text(tokens):
    return "".join(chr(48 + token % 10) for token in tokens)

  sampling = SamplingConfig(1.0, 0, 1.0, 0.0, NEW)
  load = Workload(sampling, 3, 6, stop_strings=("12", "345", "07", "88"), partial=True)
  engine = LocalEngine(
    MODEL,
    dataclasses.replace(ENGINE, steps=1),
    text_bytes=[text([i]).encode() for i in range(MODEL.vocab_size)],
  )
  engine.load(PARAMS, version=0)
  trajectories = [Trajectory(PROMPTS[i].tokens, 0, 5, SingleTurn(())) for i in range(40)]
  whole = [Trajectory(PROMPTS[i].tokens, 0, 5, SingleTurn(())) for i in range(40)]
  driver = Driver(engine, load, vocab_size=64)
  for trajectory in whole:
    driver.begin([trajectory])
  assert len(list(driver.run())) == 40
  pauses = 0
  while not all(trajectory.finished for trajectory in trajectories):
    driver, calls = Driver(engine, load, vocab_size=64), itertools.count()
    for trajectory in trajectories:
      driver.begin([trajectory])
    for _ in driver.run(lambda calls=calls: next(calls) == 4):
      pass
    pauses += 1
  assert pauses > 10
  for trajectory, expected in zip(trajectories, whole):
    np.testing.assert_array_equal(trajectory.tokens, expected.tokens)
    assert trajectory.stopped == expected.stopped
  assert sum(trajectory.stopped for trajectory in whole) > 10


def test_metrics_count_stale_tokens():
  out, _ = iterate(3)
  row, rollout = out[-1].metrics, out[-1].rollout
  stale = rollout.version[rollout.mask > 0] < 3
  assert 0 < row["partial/stale_tokens"] == stale.mean() < 1
  assert row["partial/oldest"] >= 1 and row["partial/tokens_in_flight"] > 0
  out, _ = iterate(3, rl__mask_truncated=True)
  row, rollout = out[-1].metrics, out[-1].rollout
  trained = (rollout.mask > 0) & rollout.stopped[:, None]
  assert not rollout.stopped.all()
  assert row["partial/stale_tokens"] == (rollout.version[trained] < 3).mean()
  whole, _ = iterate(1, extra_prompts=0)
  assert not any(name.startswith("partial/") for name in whole[0].metrics)
  assert whole[0].usage.tokens == whole[0].rollout.lengths.sum()


def test_metrics_count_conversations():
  def trajectory(turns, asked):
    prompt = Trajectory((5, 6), 0, 0, Counting(PROMPTS[0]))
    for turn in range(turns):
      response = Response(None, 0, *[np.zeros(4)] * 3, np.zeros(4, np.int32), True, True, None)
      prompt.add(response)
      prompt.end_turn(0.5)
      if turn < turns - 1:
        prompt.observe([20, 21, 22])
    rare = dict(steps=4.0) if asked else {}  # where it applies
    prompt.finish(True, dict(tool_use=asked) | rare)
    return prompt

  group = Group(None, [trajectory(1, 0), trajectory(3, 1)])
  row = environment_metrics([group])
  assert row["environment/tool_use"] == 0.5 and row["environment/correct"] == 1
  assert row["environment/turns"] == 2 and row["environment/steps"] == 4
  assert row["environment/observation_fraction"] == pytest.approx(6 / (6 + 16))
  for talk in group.trajectories:
    talk.figures["turns"] = 40.0  # The game's own count.
  assert environment_metrics([group])["environment/turns"] == 40


def test_an_environment_that_raises_costs_its_own_conversation_its_verdict():
  class Failing(Counting):
    def step(self, response):
      if response[0] % 3 == 0:
        raise OSError("no network")
      return super().step(response)

  collecting, engine = collector(environment=Failing, extra_prompts=0)
  dumped = []
  collecting._writer = SimpleNamespace(dump_rollouts=lambda *args, **_: dumped.extend(args[2]))
  (out,), _ = iterate(1, (collecting, engine))
  failed_B = np.array(
    [bool(trajectory.failure) for group in out.groups for trajectory in group.trajectories]
  )
  assert 0 < failed_B.sum() < len(failed_B)
  known_B = np.concatenate([group.known_G for group in out.groups])
  np.testing.assert_array_equal(known_B, ~failed_B)
  assert not out.advantage_BL[failed_B].any() and out.advantage_BL[~failed_B].any()
  share = failed_B.mean()
  assert out.metrics["verifier/unknown"] == pytest.approx(share)
  assert out.metrics["verifier/crash"] == pytest.approx(share)
  assert out.metrics["truncated_fraction"] == np.mean(~out.rollout.stopped & known_B)
  assert len(dumped) == failed_B.sum() and "OSError('no network')" in str(dumped[0])


ROUNDS = [
  groups(a=ALWAYS, b=MIXED, c=NEVER),
  groups(d=NEVER, e=ALWAYS, f=MIXED),
  groups(g=MIXED, h=MIXED, i=NEVER),
  groups(j=MIXED, k=MIXED, l=MIXED),
]


def fill(rounds, extra_rounds):
  collecting, _ = collector(extra_rounds=extra_rounds, prompts=3, extra_prompts=0, minibatches=3)
  collecting._sample = lambda step, attempt, usage: rounds[attempt]
  collecting._score_groups = lambda some: dict(right=int(sum(g.correct_G.sum() for g in some)))
  out = collecting.collect(1, Stopwatch())
  dynamic = {
    k.removeprefix("dynamic_sampling/"): v
    for k, v in out.metrics.items()
    if k.startswith("dynamic_sampling/")
  }
  return out, "".join(group.prompt.id for group in out.groups), dynamic


def test_rounds_until_every_group_has_right_and_wrong_responses():
  out, chosen, metrics = fill(ROUNDS, 5)
  assert chosen == "bfg"
  assert out.rollout.tokens[:, 2].tolist() == [ord(name) for name in "bfg" for _ in range(G)]
  assert out.rollout.logp[:, 2].tolist() == [0, -1, -2] * 3
  assert [text for group in out.groups for text in group.responses] == [
    f"{name}{i}" for name in "bfg" for i in range(3)
  ]
  assert out.metrics["verifier/right"] == 10 / 27
  assert metrics == dict(rounds=3, discarded_groups=6, filled_groups=0)


def test_rounds_are_bounded_and_the_batch_is_filled_up():
  out, chosen, metrics = fill(ROUNDS, 1)
  assert chosen == "abf"
  assert out.advantage_PG.any(axis=1).tolist() == [False, True, True]  # in spite of the shaping
  assert metrics == dict(rounds=2, discarded_groups=3, filled_groups=1)


def test_partial_credit_is_enough_to_teach():
  """Values of the verifier decide, and not which of them is 1."""
  differ, same = [0, 0.9, 0], [0.9, 0.9, 0.9]
  rounds = [groups(a=NEVER, b=NEVER, c=NEVER), groups(d=NEVER, e=NEVER, f=NEVER)]
  for some, values in zip(rounds, ([differ, same, NEVER], [differ, same, differ])):
    for group, value_G in zip(some, values):
      group.value_G = np.array(value_G, np.float32)
  out, chosen, metrics = fill(rounds, 5)
  assert chosen == "adf" and metrics == dict(rounds=2, discarded_groups=3, filled_groups=0)
  assert out.advantage_PG.any(axis=1).all()


def test_a_batch_of_mixed_groups_needs_one_round():
  _, chosen, metrics = fill(ROUNDS[3:], 5)
  assert chosen == "jkl" and metrics["rounds"] == 1


def test_off_takes_what_comes():
  out, chosen, metrics = fill(ROUNDS, 0)
  assert chosen == "abc" and metrics == {}
  assert (out.advantage_PG != 0).any(axis=1).all()  # what rewards are shaped for is learned


def test_partial_rollouts_and_dynamic_sampling_go_together():
  """Rounds go on with what is under way until P groups are mixed."""
  out, (first_run, _) = iterate(3, extra_rounds=4, extra_prompts=2)
  observed = [group.prompt.id for batch in out for group in batch.groups]
  assert len(observed) == len(set(observed)) == 12
  for batch in out:
    mixed = sum(group.mixed for group in batch.groups)
    assert mixed == 4 or batch.metrics["dynamic_sampling/rounds"] == 5
  assert any(batch.metrics["dynamic_sampling/rounds"] > 1 for batch in out)
  assert any(batch.metrics["partial/stale_tokens"] > 0 for batch in out)
  assert first_run.position()()["under_way"]


def test_a_reward_that_is_not_finite_names_its_prompt():
  collecting, engine = collector(extra_prompts=0)
  nan_B = np.full(4 * G, np.nan)
  collecting._score = lambda *_: Scores(nan_B, {}, nan_B)
  engine.load(PARAMS, version=1)
  with pytest.raises(ValueError, match=r"rewards of prompt \d+ are .*nan.*must be finite"):
    collecting.collect(1, Stopwatch())


class Dumps:
  """A writer that keeps what is dumped."""

  def __init__(self):
    self.files = {}

  def dump_rollouts(self, phase, step, records, folder="rollouts"):
    self.files[folder, phase, step] = list(records)


def judged(verdicts, **changes):
  """An iteration of groups of three: 1 right, 0 wrong, None no verdict. Of one round each."""
  rounds, writer = [verdicts] if isinstance(verdicts[0][0], str) else verdicts, Dumps()
  collecting, _ = collector(prompts=3, extra_prompts=0, minibatches=3, **changes)
  collecting._writer, collecting._sample = writer, lambda step, attempt, usage: names[attempt]
  names = [groups(**{name: [0] * G for name, _ in some}) for some in rounds]
  calls = iter([[v for _, mine in some for v in mine] for some in rounds])

  def score(responses, prompts, lengths, finished):
    verdict_B = next(calls)
    correct = np.array([v == 1 for v in verdict_B], np.float32)
    shaped = np.array([0 if v is None else v + 0.25 for v in verdict_B], np.float32)
    unknown = {i: f"crash: {prompts[i].id}" for i, v in enumerate(verdict_B) if v is None}
    return Scores(shaped, dict(right=int(correct.sum()), crash=len(unknown)), correct, unknown)

  collecting._score, updates = score, []
  collecting._filter.update = lambda *arguments: updates.append(arguments)
  return lambda: collecting.collect(1, Stopwatch()), writer.files, updates


def test_what_is_unknown_has_no_advantage_and_is_in_no_statistic():
  collect, files, updates = judged([("a", [1, None, 0]), ("b", [0, None, 0]), ("c", [1, 1, 1])])
  out = collect()
  np.testing.assert_allclose(out.advantage_PG[0], [0.70711, 0, -0.70711], atol=1e-3)
  assert not out.advantage_PG[1:].any()
  row = out.metrics
  assert row["reward/mean"] == pytest.approx((4 * 1.25 + 3 * 0.25) / 7)
  assert row["groups_without_spread"] == pytest.approx(2 / 3)
  assert row["verifier/crash"] == row["verifier/unknown"] == pytest.approx(2 / 9)
  ((calls, step),) = updates  # the query set is told (test_prompt_filter.py)
  assert ([group.prompt.id for group in calls], step) == (["a", "b", "c"], 1)
  assert [group.known_G.tolist() for group in calls] == [[True, False, True]] * 2 + [[True] * 3]
  (rows,) = files.values()
  assert list(files) == [("unknown", "rl", 1)]
  assert [(r["prompt_id"], r["response"], r["unknown"]) for r in rows] == [
    (group.prompt.id, group.responses[1], f"crash: {group.prompt.id}") for group in out.groups[:2]
  ]


def test_what_is_unknown_is_no_spread_for_dynamic_sampling():
  first = [("a", [1, None, 1]), ("b", [0, None, None]), ("c", [1, 0, 1])]
  more = [("d", [None] * 3), ("e", [1, 0, 0]), ("f", [0, 1, None])]
  out = judged([first, more], extra_rounds=3)[0]()
  assert [group.prompt.id for group in out.groups] == ["c", "e", "f"]
  assert out.metrics["dynamic_sampling/rounds"] == 2


@pytest.mark.parametrize("replay", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_response_that_could_not_be_sampled_is_unknown(replay):
  """Its group is trained on without it, with recorded experts too."""
  with rewards.open_scorer(RewardConfig(name="string")) as judge:
    few = Prompts(PROMPTS.rows[:P])
    running, engine = collector(few, judge, writer=Dumps(), routing=replay, extra_prompts=0)
    engine.load(PARAMS, version=1)
    respond = engine.step

    def fails(response):
      if response.sample or response.request.prompt != PROMPTS[0].tokens:
        return response
      names = ("tokens", "logp", "full_logp", "version")
      nothing = {name: getattr(response, name)[:0] for name in names} | dict(experts=None)
      return dataclasses.replace(response, **nothing, stopped=False, failure="6 calls failed")

    engine.step = lambda: [fails(response) for response in respond()]
    out = running.collect(1, Stopwatch())
  (group,) = [group for group in out.groups if group.prompt == PROMPTS[0]]
  assert group.unknown == {0: "crash: 6 calls failed"} and group.known_G.sum() == G - 1
  row = out.groups.index(group) * G
  assert out.rollout.lengths[row] == 0 and (np.delete(out.rollout.lengths, row) > 0).all()
  share = pytest.approx(1 / len(out.known_B))
  assert out.metrics["verifier/crash"] == share == out.metrics["verifier/unknown"]
  assert (out.rollout.routing is not None) == replay
  assert not out.advantage_PG[out.groups.index(group), 0]


def test_a_batch_without_any_verdict_ends_the_run():
  collect, files, _ = judged([(name, [None] * 3) for name in "abc"], extra_rounds=3)
  message = r"any of 9 responses\. Main reason, 3 times: crash: a\..*rl_000001"
  with pytest.raises(NoVerdictError, match=message):
    collect()
  assert len(files["unknown", "rl", 1]) == 9


def test_every_response_of_a_dump_has_its_token_ids(monkeypatch):
  (batch,), _ = iterate(1, extra_prompts=0)
  half = int(batch.rollout.lengths.sum()) // 2  # Later records have no tokens.
  monkeypatch.setattr(samples_log, "TOKENS", half)
  records = dumped(batch)
  assert {"tokens" in record for record in records} == {True, False}
  for row, record in enumerate(records):
    assert record["response_ids"] == batch.rollout.response(row)


def test_the_dump_of_a_rollout_says_what_is_unknown():
  out = judged([(name, [1, None, 0]) for name in "abc"])[0]()
  collecting = dumped(out)
  assert [record["reward"] for record in collecting[:3]] == [1.25, None, 0.25]
  assert collecting[1]["unknown"] == "crash: a" and "unknown" not in collecting[0]


def test_rewards_of_turns_are_those_of_the_first_host(monkeypatch):
  output, others = [], []
  monkeypatch.setattr(hosts, "broadcast", lambda value: output.append(value) or value)
  (first,), _ = iterate(1, environment=Counting)
  replies = iter(copy.deepcopy(output))
  monkeypatch.setattr(hosts, "broadcast", lambda value: others.append(value) or next(replies))
  (second,), _ = iterate(1, environment=Late)
  assert len(output) == len(others) and pickle.dumps(output) != pickle.dumps(others)
  np.testing.assert_array_equal(first.rollout.rewards, second.rollout.rewards)
  np.testing.assert_array_equal(first.advantage_BL, second.advantage_BL)
