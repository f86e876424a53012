"""Costs of conversations: who pays, where, once, and what goes on as it was without."""

import dataclasses
import functools
import itertools
import json
import re

import numpy as np
import pytest
from support.configs import config_of
from support.rollouts import ALWAYS, MIXED, NEVER, Counting, G, collector, goes_on, groups, iterate

from configs import tiny_agents, tiny_tools
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.rollouts import costs, scoring
from gspo_jax.rollouts.advantages import advantages
from gspo_jax.rollouts.groups import Group, filled
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.sampling import Response, Trajectory, conversations
from gspo_jax.sampling.conversations import Turn
from gspo_jax.structs import Prompt
from gspo_jax.tasks.calculator import NOT_UNDERSTOOD, Calculator

TOK = ByteTokenizer()
OFF = config_of(tiny_tools.get_config).environment


def priced(token_cost=0.0, call_cost=0.0):
  return dataclasses.replace(OFF, token_cost=token_cost, call_cost=call_cost)


def say(one, *turns, stopped=True):
  """A trajectory with its environment, as the host loop leads them."""
  for i, text in enumerate(turns):
    tokens = np.array([*TOK.encode(text), *TOK.stop_ids], np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    one.add(Response(None, 0, tokens, zeros, zeros, np.ones_like(tokens), True, True, None))
    last, calls = i == len(turns) - 1, sum(one.calls)
    turn = Turn(one.turn_tokens, last, remaining=99, vocab_size=TOK.vocab_size, calls=calls)
    answer = conversations.step(one.environment, turn)
    one.end_turn(answer.reward, answer.calls)
    if not last:
      one.observe(answer.observation)
  one.finish(stopped and answer.done, answer.figures)
  return one


def asked(*turns, **options):
  prompt = Prompt("37*58+46", "37*58+46=", "2192", tuple(TOK.encode("37*58+46=")))
  return say(Trajectory(prompt.tokens, 0, 0, Calculator(prompt, TOK)), *turns, **options)


SHORT = "[37*58]", "[2146+46]", "2192"
CHECKED = "[37*58]", "[37*58]", "[2146+46]", "2192"
CONFUSED = "[37**58", "[37*58]", "2146"


def by_turn(one):
  """Rewards of the turns, at their last tokens alone."""
  ends = [np.flatnonzero(one.turns == turn)[-1] for turn in range(one.turn)]
  elsewhere = np.delete(one.rewards, ends)
  assert not elsewhere.any()
  return one.rewards[ends].tolist()


def test_each_turn_pays_for_its_own_tokens_and_its_own_call():
  talks = [asked(*SHORT), asked(*CHECKED), asked(*CONFUSED)]
  assert [trajectory.calls for trajectory in talks] == [(1, 1, 0), (1, 1, 1, 0), (1, 1, 0)]
  rest, before = talks[0].copy(), talks[0].rewards.tolist()
  worth = costs.charge(talks, priced(0.01, 0.1))
  assert rest.rewards.tolist() == before  # a copy, of a checkpoint to be, has not yet paid
  # a turn's tokens are its characters and the stop token
  assert by_turn(talks[0]) == pytest.approx([-0.18, -0.20, 1 - 0.05])
  assert by_turn(talks[1]) == pytest.approx([-0.18, -0.18, -0.20, 0.95])
  assert by_turn(talks[2]) == pytest.approx([NOT_UNDERSTOOD - 0.18, -0.18, -0.05])
  np.testing.assert_allclose(worth, [1 - 0.43, 1 - 0.61, -0.51], rtol=1e-6)
  for trajectory, whole in zip(talks, worth):
    assert sum(by_turn(trajectory)) == pytest.approx(whole)
  figures = [(trajectory.figures["reward"], trajectory.figures["cost"]) for trajectory in talks]
  assert figures == [
    (1.0, pytest.approx(0.43)), (1.0, pytest.approx(0.61)),
    (pytest.approx(NOT_UNDERSTOOD), pytest.approx(0.41)),
  ]  # fmt: skip
  assert [trajectory.figures["correct"] for trajectory in talks] == [1, 1, 0]
  assert [trajectory.figures["tokens"] for trajectory in talks] == [23, 31, 21]
  assert [trajectory.figures["tool_calls"] for trajectory in talks] == [2, 3, 2]


def test_those_who_are_wrong_may_be_let_off():
  talks = [asked(*SHORT), asked(*CONFUSED), asked("7"), asked(*SHORT[:2], stopped=False)]
  only = dataclasses.replace(priced(0.01, 0.1), charge="right")
  worth = costs.charge(talks, only)
  np.testing.assert_allclose(worth, [1 - 0.43, NOT_UNDERSTOOD, 0, 0], rtol=1e-6)
  assert by_turn(talks[1]) == pytest.approx([NOT_UNDERSTOOD, 0, 0])
  assert by_turn(talks[0]) == pytest.approx([-0.18, -0.20, 0.95])
  assert [trajectory.figures["cost"] for trajectory in talks] == [pytest.approx(0.43), 0, 0, 0]
  assert [trajectory.figures["reward"] for trajectory in talks] == [
    1,
    pytest.approx(NOT_UNDERSTOOD),
    0,
    0,
  ]


@pytest.mark.parametrize("prices, first", [((0.01, 0), -0.08), ((0, 0.1), -0.1)])
def test_either_cost_alone(prices, first):
  trajectory = asked(*SHORT)
  (worth,) = costs.charge([trajectory], priced(*prices))
  assert by_turn(trajectory)[0] == pytest.approx(first)
  assert worth == pytest.approx(1 - (0.23 if prices[0] else 0.2))


def test_off_is_as_it_was():
  trajectory = asked(*CONFUSED)
  before, columns, figures = (
    trajectory.rewards.copy(),
    trajectory.columns["rewards"],
    dict(trajectory.figures),
  )
  (worth,) = costs.charge([trajectory], OFF)
  assert (
    trajectory.columns["rewards"] is columns
    and trajectory.figures == figures
    and "cost" not in figures
  )
  assert worth.dtype == np.float32 and worth == before.sum()


def test_what_costs_the_same_is_worth_the_same():
  """The same tokens and calls in other turns: nothing to prefer, to the last bit."""
  talks = [
    asked("[1*1]", "[22*22]", "[333*333]", "2192"),
    asked("[333*333]", "[22*22]", "[1*1]", "2192"),
  ]
  a, b = costs.charge(talks, priced(0.013, 0.07))
  assert a == b


def test_rewards_of_other_turns_add_up_to_the_same():
  """With all responses right, a difference in the last bit would be all there is to learn."""
  questions = "[1", "[22", "[333", "[5*5]"  # of which the calculator understands one
  talks = [asked(*order, "2192") for order in itertools.permutations(questions)]
  assert len({float(trajectory.rewards.sum()) for trajectory in talks}) > 1, (
    "else this shows nothing"
  )
  assert len(set(costs.charge(talks, OFF).tolist())) == 1  # without costs too
  assert len(set(costs.charge(talks, priced(0.013, 0.07)).tolist())) == 1


class Silent:
  """Does not say which of its turns are calls."""

  def __init__(self, prompt=None):
    self.prompt = prompt

  def reset(self):
    return self.prompt.tokens

  def step(self, response):
    return TOK.encode("so?"), 0.0, TOK.decode(response) == "done"


@pytest.mark.parametrize("last, stopped", [("done", True), ("more", False)])
def test_without_a_word_of_the_environment_every_answered_turn_is_a_call(last, stopped):
  trajectory = say(Trajectory((5,), 0, 0, Silent()), "a", "b", last)
  assert (
    trajectory.calls == (1, 1, 0)
    and trajectory.figures["tool_calls"] == 2
    and trajectory.stopped == stopped
  )
  costs.charge([trajectory], priced(call_cost=0.5))
  assert by_turn(trajectory) == [-0.5, -0.5, 0]


def test_an_environment_that_makes_several_calls_in_a_turn_or_none():
  class Searches(Silent):
    tool_calls = 0

    def step(self, response):
      self.tool_calls += TOK.decode(response).count("?")
      return super().step(response)

  trajectory = say(Trajectory((5,), 0, 0, Searches()), "a??", "b", "c?", "done")
  assert trajectory.calls == (2, 0, 1, 0)
  costs.charge([trajectory], priced(call_cost=0.25))
  assert by_turn(trajectory) == [-0.5, 0, -0.25, 0]


@pytest.mark.parametrize("charge, cost", [("all", 0.1), ("right", 0)])  # None is right.
def test_calls_that_cannot_be_charged_are_a_failure_of_their_conversation(charge, cost):
  class Reports(Silent):
    def figures(self):
      return dict(tool_calls=7)

  reports, plain = (say(Trajectory((5,), 0, 0, kind()), "a", "done") for kind in (Reports, Silent))
  costs.charge([reports], priced(token_cost=0.1))  # which does not ask for calls
  assert not reports.failure
  prices = dataclasses.replace(priced(call_cost=0.1), charge=charge)
  _, worth = costs.charge([reports, plain], prices)
  assert re.search(
    r"environment\.call_cost.*Reports.*tool_calls=7, but the driver counted 1:",
    reports.failure,
  )
  assert not plain.failure and worth == pytest.approx(-cost)


EXPENSIVE = dict(environment=Counting, environment__token_cost=0.01, environment__call_cost=0.25)


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param(dict(extra_prompts=0), marks=pytest.mark.long),
    dict(extra_prompts=9, token_budget=120),
  ],
)
def test_the_costs_are_the_only_difference_and_are_paid_once(changes):
  """Conversations that were put aside, in whichever turn, included."""
  free, _ = iterate(6, environment=Counting, **changes)
  paid, _ = iterate(6, **EXPENSIVE, **changes)
  carried = 0
  for a, b in zip(free, paid, strict=True):
    for field in ("tokens", "turns", "logp", "version", "stopped", "mask"):
      np.testing.assert_array_equal(getattr(a.rollout, field), getattr(b.rollout, field))
    for row, turns_L in enumerate(a.rollout.turns):
      last = turns_L.max()
      for turn in range(last + 1):
        selected = turns_L == turn
        cost = 0.01 * selected.sum() + 0.25 * (turn < last)
        result = b.rollout.rewards[row][selected].sum()
        assert result == pytest.approx(a.rollout.rewards[row][selected].sum() - cost, abs=1e-5)
    lengths_PG, last_PG = (x.reshape(-1, G) for x in (a.rollout.lengths, a.rollout.turns.max(1)))
    expected = a.reward_PG - 0.01 * lengths_PG - 0.25 * last_PG
    np.testing.assert_allclose(b.reward_PG, expected, atol=1e-5)
    for group, other in zip(a.groups, b.groups):
      np.testing.assert_array_equal(group.correct_G, other.correct_G)
    row = b.metrics
    assert row["reward/mean"] == pytest.approx(row["environment/reward"] - row["environment/cost"])
    assert row["environment/reward"] == pytest.approx(a.metrics["reward/mean"])
    for name in ("environment/correct", "environment/tokens", "environment/tool_calls"):
      assert row[name] == a.metrics[name]
    assert row["environment/tokens"] == row["response_length/mean"]
    assert row["environment/tool_calls"] == pytest.approx(row["environment/turns"] - 1)
    version, mask = b.rollout.version, b.rollout.mask > 0
    carried += sum(len(set(v[m].tolist())) > 1 for v, m in zip(version, mask))
  assert (carried > 3) == bool(changes["extra_prompts"])


def test_a_checkpoint_goes_on_with_what_was_not_yet_paid():
  collecting = collector(**EXPENSIVE)
  _, (first_run, _) = iterate(2, collecting)
  unfinished = [x for group in first_run.position()()["under_way"] for x in group["trajectories"]]
  assert any(sum(x["calls"]) for x in unfinished if not x["finished"])
  goes_on(2, 3, **EXPENSIVE)


def test_calls_are_known_again_after_a_checkpoint_in_the_middle_of_a_conversation():
  prompt = Prompt("37*58+46", "37*58+46=", "2192", tuple(TOK.encode("37*58+46=")))
  whole, first = asked(*CHECKED), Trajectory(prompt.tokens, 0, 0, Calculator(prompt, TOK))
  say(first, *CHECKED[:2])
  first.finished = False
  first.observe(TOK.encode("2146;"))
  rest = first.copy()
  state = json.loads(json.dumps(first.get_state()))
  resumed = Trajectory.from_state(state, None)
  failures = conversations.resume([(resumed, prompt)], lambda prompt: Calculator(prompt, TOK))
  assert failures == [""]
  say(resumed, *CHECKED[2:])
  assert resumed.calls == whole.calls == (1, 1, 1, 0)
  assert resumed.figures == whole.figures
  say(first, *CHECKED[2:])
  assert rest.calls == (1, 1)  # a copy stays as it was


def test_groups_that_are_all_right_teach_by_their_costs_and_those_all_wrong_do_not():
  """With dynamic sampling too, which goes on choosing by what is right."""
  shapes = dict(a=ALWAYS, b=MIXED, c=NEVER)

  def collect(price, extra_rounds):
    keys = dict(extra_rounds=extra_rounds, prompts=3, extra_prompts=0, minibatches=3)
    collecting, _ = collector(environment__name="calculator", environment__call_cost=price, **keys)
    collecting._sample = lambda step, attempt, usage: groups(**shapes)
    collecting._score_groups = lambda some: {}
    return collecting.collect(1, Stopwatch())

  out = collect(0.1, extra_rounds=1)
  assert "".join(group.prompt.id for group in out.groups) == "abb"
  assert out.advantage_PG.any(axis=1).tolist() == [True, True, True]
  shapes["b"] = NEVER
  assert collect(0.1, 1).advantage_PG.any(axis=1).tolist() == [True, False, False]
  assert not collect(0.0, 1).advantage_PG.any()
  assert collect(0.1, 0).advantage_PG.any(axis=1).all()


def test_a_group_of_right_conversations_prefers_the_cheaper():
  rounds = []
  for seed in range(2):
    talks = [asked(*SHORT), asked(*CHECKED), asked(*SHORT)]
    reward_G = costs.charge(talks, priced(call_cost=0.1 * seed))
    rounds.append(Group(None, talks, ["", "", ""], reward_G, np.ones(3, np.float32)))
  advantage = functools.partial(advantages, config_of(tiny_agents.get_config).objective)
  free, paid = (advantage(g.reward_G[None], g.known_G[None])[0] for g in rounds)
  assert not free.any() and not rounds[1].mixed
  assert paid[0] == paid[2] > 0 > paid[1]


def test_the_files_are_as_they_are_described():
  config = config_of(tiny_agents.get_config)
  assert config.environment.costs and config.objective.name == "gspo" and config.data.checks
  plain = config_of(tiny_tools.get_config)
  assert not plain.environment.costs and not plain.data.checks


@pytest.mark.parametrize("discount, mixed", [(1.0, False), (0.5, True)])
def test_turns_of_equal_conversations_make_a_group_mixed_before_costs(discount, mixed):
  """The same turns are compared, by their returns."""
  talks = [asked(*SHORT), asked(*CHECKED)]
  config = dataclasses.replace(priced(0.1), discount=discount)
  for compares_parts, expected in (True, mixed), (False, False):
    prompt = Prompt("0", "", "", talks[0].prompt)
    group = Group(prompt, [talk.copy() for talk in talks], ["", ""])
    verdicts = scoring.score_conversations([group], config, compares_parts=compares_parts)
    scoring.assign_verdicts([group], verdicts)
    assert group.mixed == filled(group, 3).mixed == expected
    assert group.correct_G.tolist() == [1, 1]


@pytest.mark.parametrize("right_from, charged", [(None, [True, False]), (-0.5, [True, True])])
def test_who_is_right_pays(right_from, charged):
  talks = [asked(*SHORT), asked("7")]
  costs.charge(talks, dataclasses.replace(priced(0.1), charge="right"), right_from)
  assert [talk.figures["cost"] > 0 for talk in talks] == charged
