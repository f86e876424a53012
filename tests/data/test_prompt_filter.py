"""Which prompts stay in use, and batches in which every group has spread."""

import collections
import json

import numpy as np
import pytest

from gspo_jax.data.prompt_filter import Groups, QuerySet, QuerySetConfig, fill, join
from gspo_jax.structs import Prompt, Rollout

PROMPTS = [Prompt(name, name, "", (1,)) for name in "abcd"]
ALWAYS, NEVER, MIXED = [1, 1, 1], [0, 0, 0], [0, 1, 0]


def query_set(drop_after=2, readmit_after=0):
  return QuerySet(QuerySetConfig(drop_after, readmit_after, 0))


def in_use(queries):
  return "".join(p.id for p in PROMPTS if queries.wants(p))


def test_prompts_always_or_never_solved_are_dropped_after_n_groups():
  queries = query_set()
  queries.update(PROMPTS, np.array([ALWAYS, NEVER, MIXED, ALWAYS]), 1)
  assert in_use(queries) == "abcd"  # one group is no evidence yet
  queries.update(PROMPTS, np.array([ALWAYS, NEVER, ALWAYS, NEVER]), 2)
  assert in_use(queries) == "cd"  # d: always, then never
  assert queries.metrics() == {
    "query_set/tried": 4,
    "query_set/dropped": 2,
    "query_set/dropped/always_solved": 1,
    "query_set/dropped/never_solved": 1,
    "query_set/solve_rate": pytest.approx(13 / 24),
  }


def test_dropped_prompts_come_back_with_a_clean_slate():
  queries = query_set(drop_after=1, readmit_after=3)
  queries.update(PROMPTS[:1], np.array([NEVER]), 5)
  assert queries.readmit(7) == 0 and in_use(queries) == "bcd"
  assert queries.readmit(8) == 1 and in_use(queries) == "abcd"
  queries.update(PROMPTS[:1], np.array([ALWAYS]), 8)  # the failures of before are forgotten
  assert queries.metrics()["query_set/dropped/always_solved"] == 1
  assert query_set(drop_after=1).readmit(10**9) == 0


def test_nothing_is_tracked_when_nothing_is_dropped():
  queries = query_set(drop_after=0)
  queries.update(PROMPTS, np.array([NEVER] * 4), 1)
  assert queries.get_state() == dict(tried={}, dropped={}) and queries.metrics() == {}


def test_state_survives_json():
  queries = query_set(drop_after=1, readmit_after=2)
  queries.update(PROMPTS, np.array([ALWAYS, NEVER, MIXED, MIXED]), 1)
  again = query_set(drop_after=1, readmit_after=2)
  again.set_state(json.loads(json.dumps(queries.get_state())))
  assert in_use(again) == in_use(queries) == "cd"
  for q in queries, again:
    q.readmit(3)
    q.update(PROMPTS[1:3], np.array([NEVER, NEVER]), 3)
  assert again.metrics() == queries.metrics()
  assert again.get_state() == queries.get_state()
  again.update(PROMPTS, np.array([MIXED] * 4), 4)
  assert again.get_state() != queries.get_state()  # nothing is shared


@pytest.mark.parametrize("values", [(-1, 0, 0), (0, 0, -1), (0, 5, 0)])
def test_impossible_settings(values):
  with pytest.raises(ValueError, match=r"data.query_set"):
    QuerySetConfig(*values)


def groups(spec, length):
  """A round: one letter and its rewards per prompt; the rows of a rollout carry serial numbers."""
  rows = 3 * len(spec)
  correct = np.array(list(spec.values()), np.float32)
  serial = 100 * length + np.arange(rows)
  return Groups(
    [Prompt(name, name, "", (1,)) for name in spec],
    Rollout(
      tokens=np.repeat(serial[:, None], length, 1).astype(np.int32),
      mask=np.ones((rows, length), np.float32),
      logp=np.zeros((rows, length), np.float32),
      full_logp=np.zeros((rows, length), np.float32),
      prompt_lengths=np.ones(rows, np.int32),
      lengths=serial.astype(np.int32),
      stopped=np.ones(rows, bool),
    ),
    [f"{name}{i}" for name in spec for i in range(3)],
    correct - 0.1 * np.arange(3),  # shaped: spread everywhere
    correct,
    collections.Counter(right=int(correct.sum())),
  )


ROUNDS = [
  groups(dict(a=ALWAYS, b=MIXED, c=NEVER), 4),
  groups(dict(d=NEVER, e=ALWAYS, f=MIXED), 6),
  groups(dict(g=MIXED, h=MIXED, i=NEVER), 5),
  groups(dict(j=MIXED, k=MIXED, l=MIXED), 5),
]


def test_rounds_until_every_group_has_spread():
  chosen, sampled, metrics = fill(ROUNDS.__getitem__, 5)
  assert [p.id for p in chosen.prompts] == ["b", "f", "g"]
  assert (np.ptp(chosen.correct_PG, axis=1) > 0).all()
  assert chosen.responses == [f"{name}{i}" for name in "bfg" for i in range(3)]
  # Rows stay with their prompts, also where the rounds had different lengths.
  assert chosen.rollout.lengths.tolist() == [403, 404, 405, 606, 607, 608, 500, 501, 502]
  assert chosen.rollout.tokens[:, 0].tolist() == chosen.rollout.lengths.tolist()
  assert chosen.rollout.mask.sum(1).tolist() == [4] * 3 + [6] * 3 + [5] * 3
  assert "".join(p.id for p in sampled.prompts) == "abcdefghi"
  assert sampled.outcomes["right"] == 10
  assert metrics == {
    "dynamic_sampling/rounds": 3,
    "dynamic_sampling/discarded_groups": 6,
    "dynamic_sampling/filled_groups": 0,
  }


def test_rounds_are_bounded_and_the_batch_is_filled_up():
  chosen, sampled, metrics = fill(ROUNDS.__getitem__, 1)
  assert [p.id for p in chosen.prompts] == ["a", "b", "f"]
  assert len(sampled.prompts) == 6
  assert metrics["dynamic_sampling/rounds"] == 2
  assert metrics["dynamic_sampling/filled_groups"] == 1
  assert metrics["dynamic_sampling/discarded_groups"] == 3


def test_a_batch_with_spread_needs_one_round():
  chosen, _, metrics = fill(lambda i: ROUNDS[3 + i], 5)
  assert [p.id for p in chosen.prompts] == ["j", "k", "l"]
  assert metrics["dynamic_sampling/rounds"] == 1


def test_off_takes_what_comes():
  chosen, sampled, metrics = fill(ROUNDS.__getitem__, 0)
  assert chosen is sampled is ROUNDS[0] and metrics == {}


def test_join_pads_time_only():
  joined = join(ROUNDS[:2])
  assert joined.rollout.tokens.shape == (18, 6) and joined.rollout.lengths.shape == (18,)
  assert (joined.rollout.mask[:9, 4:] == 0).all()
