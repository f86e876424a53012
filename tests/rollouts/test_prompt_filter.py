"""Which prompts stay in use."""

import dataclasses
import json

import numpy as np
import pytest

from gspo_jax.rollouts.groups import Group
from gspo_jax.rollouts.prompt_filter import PromptFilter
from gspo_jax.settings.data import QuerySetConfig
from gspo_jax.structs import Prompt

PROMPTS = [Prompt(name, name, "", (1,)) for name in "abcd"]
ALWAYS, NEVER, MIXED = [1, 1, 1], [0, 0, 0], [0, 1, 0]


def query_set(drop_after=2, readmit_after=0):
  return PromptFilter(QuerySetConfig(drop_after, readmit_after, 0))


def scored(prompts, correct_PG, known_PG=None):
  """Groups with these verdicts; unknown ones have none."""
  known_PG = np.ones_like(correct_PG) if known_PG is None else known_PG
  return [
    Group(
      prompt,
      [None] * len(correct_G),
      correct_G=np.array(correct_G),
      unknown={g: "crash" for g, valid in enumerate(known_G) if not valid},
    )
    for prompt, correct_G, known_G in zip(prompts, correct_PG, known_PG)
  ]


def in_use(queries):
  return "".join(p.id for p in PROMPTS if queries.wants(p))


def test_prompts_always_or_never_solved_are_dropped_after_n_groups():
  queries = query_set()
  queries.update(scored(PROMPTS, [ALWAYS, NEVER, MIXED, ALWAYS]), 1)
  assert in_use(queries) == "abcd"  # one group is no evidence yet
  queries.update(scored(PROMPTS, [ALWAYS, NEVER, ALWAYS, NEVER]), 2)
  assert in_use(queries) == "cd"  # d: always, then never
  assert queries.metrics() == {
    "query_set/tried": 4,
    "query_set/dropped": 2,
    "query_set/dropped/always_solved": 1,
    "query_set/dropped/never_solved": 1,
    "query_set/solve_rate": pytest.approx(13 / 24),
  }


def after(*groups, known=None):
  """The state of one prompt after these groups."""
  queries = query_set()
  for step, group in enumerate(groups, 1):
    queries.update(scored(PROMPTS[:1], [group], known and [known[step - 1]]), step)
  return queries


@pytest.mark.parametrize(
  "groups, dropped",
  [
    ([MIXED, ALWAYS, ALWAYS], True),  # it was mixed once, and has been learned since
    ([MIXED, MIXED, MIXED, NEVER, NEVER], True),
    ([ALWAYS, MIXED, ALWAYS], False),  # two groups, but not in a row
    ([NEVER, ALWAYS, NEVER, ALWAYS], False),  # each ends the row of the other kind
    ([NEVER, ALWAYS, ALWAYS], True),
    ([ALWAYS, ALWAYS, MIXED], False),  # sampled although it was out: it is of use again
  ],
)
def test_groups_in_a_row_count(groups, dropped):
  assert (after(*groups).metrics()["query_set/dropped"] == 1) == dropped


def test_partial_credit_that_differs_keeps_a_prompt_in_use():
  queries = query_set(drop_after=1)
  rest, dropped = scored(PROMPTS[:2], [NEVER, NEVER])
  rest.value_G, dropped.value_G = np.float32([0, 0.9, 0]), np.float32([0.9, 0.9, 0.9])
  queries.update([rest, dropped], 1)
  assert in_use(queries) == "acd"


def test_right_responses_with_different_scores_are_solved():
  """Their scores reach the threshold, and do not come to be equal."""
  queries = query_set(drop_after=1)
  (solved,) = scored(PROMPTS[:1], [ALWAYS])
  solved.value_G = np.float32([0.9, 0.95, 1.0])
  queries.update([solved], 1)
  assert in_use(queries) == "bcd" and queries.metrics()["query_set/dropped/always_solved"] == 1


def test_turns_with_different_rewards_keep_a_prompt_in_use():
  queries = query_set(drop_after=1)
  rest, dropped = scored(PROMPTS[:2], [NEVER, NEVER])
  rest.returns = [np.array([1.0, 0.0]), np.array([1.0, 1.0]), np.array([1.0])]
  dropped.returns = [np.array([1.0, 0.5]), np.array([1.0, 0.5]), np.array([1.0])]
  queries.update([rest, dropped], 1)
  assert in_use(queries) == "acd"


def test_the_reason_is_that_of_the_last_groups():
  row = after(NEVER, NEVER, NEVER, MIXED, ALWAYS, ALWAYS).metrics()
  assert row["query_set/dropped/always_solved"] == 1 and row["query_set/dropped/never_solved"] == 0
  assert row["query_set/solve_rate"] == pytest.approx(7 / 18)


YES, SOME, NO = [1, 1, 1], [1, 1, 0], [0, 0, 0]


@pytest.mark.parametrize(
  "groups, valid, dropped",
  [
    ([NEVER, NEVER], [YES, NO], False),  # nothing is known of the second one
    ([NEVER, NEVER], [YES, SOME], False),  # the third response may have been right
    ([NEVER, NEVER, NEVER], [YES, SOME, YES], True),  # which does not end the row either
    ([NEVER, NEVER, NEVER], [YES, NO, YES], True),
    ([NEVER, MIXED, NEVER], [YES, SOME, YES], False),  # it is mixed whatever the third one was
    ([NEVER, ALWAYS, NEVER], [YES, SOME, YES], False),  # it was not all wrong
    ([NEVER, ALWAYS, ALWAYS], [YES, SOME, YES], False),
  ],
)
def test_unknown_verdicts_neither_count_nor_end_a_row(groups, valid, dropped):
  queries = after(*groups, known=valid)
  assert (queries.metrics()["query_set/dropped"] == 1) == dropped
  existing = [c for group, v in zip(groups, valid) for c, item in zip(group, v) if item]
  assert queries.metrics()["query_set/solve_rate"] == pytest.approx(np.mean(existing))


def test_dropped_prompts_come_back_with_a_clean_slate():
  queries = query_set(drop_after=1, readmit_after=3)
  queries.update(scored(PROMPTS[:1], [NEVER]), 5)
  queries.readmit(7)
  assert in_use(queries) == "bcd"
  queries.readmit(8)
  assert in_use(queries) == "abcd"
  queries.update(scored(PROMPTS[:1], [ALWAYS]), 8)  # the failures of before are forgotten
  assert queries.metrics()["query_set/dropped/always_solved"] == 1
  queries = query_set(drop_after=1)  # nothing comes back
  queries.update(scored(PROMPTS[:1], [NEVER]), 5)
  queries.readmit(10**9)
  assert in_use(queries) == "bcd"


@pytest.mark.parametrize("change", [dict(question="another"), dict(answer="another")])
def test_an_edited_row_has_no_solve_rate(change):
  valid = PromptFilter(QuerySetConfig(drop_after=1))
  valid.update(scored(PROMPTS[:1], [ALWAYS]), 0)
  again = PromptFilter(QuerySetConfig(drop_after=1))
  again.set_state(valid.get_state())
  edited = dataclasses.replace(PROMPTS[0], **change)
  assert not again.wants(PROMPTS[0]) and again.tried(PROMPTS[0]) == (3, 3)
  assert again.wants(edited) and again.tried(edited) == (0, 0)


def test_nothing_is_tracked_when_nothing_is_dropped():
  queries = query_set(drop_after=0)
  queries.update(scored(PROMPTS, [NEVER] * 4), 1)
  assert queries.get_state() == dict(tried={}, dropped={}) and queries.metrics() == {}


def test_state_survives_json():
  queries = query_set(drop_after=1, readmit_after=2)
  queries.update(scored(PROMPTS, [ALWAYS, NEVER, MIXED, MIXED]), 1)
  again = query_set(drop_after=1, readmit_after=2)
  again.set_state(json.loads(json.dumps(queries.get_state())))
  assert in_use(again) == in_use(queries) == "cd"
  for q in queries, again:
    q.readmit(3)
    q.update(scored(PROMPTS[1:3], [NEVER, NEVER]), 3)
  assert again.metrics() == queries.metrics()
  assert again.get_state() == queries.get_state()
  again.update(scored(PROMPTS, [MIXED] * 4), 4)
  assert again.get_state() != queries.get_state()  # nothing is shared


@pytest.mark.parametrize("drop_after, names", [(0, "abcd"), (1, "cd"), (2, "bcd")])
def test_a_changed_number_holds_for_prompts_of_a_checkpoint(drop_after, names):
  queries = query_set(drop_after=1)
  queries.update(scored(PROMPTS, [ALWAYS, NEVER, MIXED, MIXED]), 1)
  queries.update(scored(PROMPTS[:1], [ALWAYS]), 2)
  again = query_set(drop_after=drop_after)
  again.set_state(queries.get_state())
  assert in_use(again) == names


@pytest.mark.parametrize("values", [(-1, 0, 0), (0, 0, -1), (0, 5, 0)])
def test_impossible_settings(values):
  with pytest.raises(ValueError, match=r"data.query_set"):
    QuerySetConfig(*values)
