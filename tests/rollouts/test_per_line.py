"""Lines with rewards of their own, from the verifier to the batch that is trained on."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from support.configs import config_of
from support.small_models import MOE, initial

from configs import common
from gspo_jax.data.sources import Prompts
from gspo_jax.learner.batch import segments_of
from gspo_jax.rewards import Scores
from gspo_jax.run import Run
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.sampling import LocalEngine
from gspo_jax.settings.sampling import DEFAULT
from gspo_jax.structs import Prompt

G, NEW, BREAK = 4, 24, 45  # tokens from there on are line breaks, those below a letter
PROMPTS = Prompts([Prompt(str(i), "q", "a", (8 + i % 50, 9, 10)) for i in range(200)])


def decode(tokens):
  return "".join("\n" if token >= BREAK else chr(64 + token) for token in tokens)


def line_reward(text):
  return sum(map(ord, text)) % 3 / 4


def score(responses, prompts, lengths, finished):
  """The third response is one that the verifier fails on."""
  lines = [np.array([line_reward(line) for line in text.split("\n")]) for text in responses]
  lines[2] *= 0
  reward = np.array([one.sum() for one in lines], np.float32)
  return Scores(reward, dict(right=0, wrong=len(reward)), reward * 0, {2: "crash"}, lines)


@functools.cache
def collected(discount, **changes):
  changes = dict(objective__name="gspo_token") | changes
  config = config_of(
    common.base,
    data__max_prompt_tokens=3,
    sampling__max_new_tokens=NEW,
    environment__discount=discount,
    rl__prompts=4,
    rl__group_size=G,
    rl__minibatches=2,
    reward__name="recurrence",
    reward__per_line=True,
    **changes,
  )
  run = open_run(dataclasses.replace(config, model=MOE))
  run.engine.load(initial(MOE), version=1)
  return run, run.collector().collect(1, Stopwatch())


def open_run(config):
  tok = SimpleNamespace(stop_ids=(1, 2, 3), pad_id=0, vocab_size=64, decode=decode)
  engine = LocalEngine(MOE, dataclasses.replace(DEFAULT, slots=16, steps=4))
  writer = SimpleNamespace(dump_rollouts=lambda *args, **options: None)
  return Run(config, None, None, tok, PROMPTS, score, None, engine, None, writer)


def lines_of(rollout, row):
  """Positions of each line of a response, its break included."""
  lines, begun = [], []
  for t in np.flatnonzero(rollout.mask[row]):
    begun.append(t)
    if rollout.tokens[row, t] >= BREAK:
      lines, begun = [*lines, begun], []
  return [*lines, begun] if begun else lines


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_line_is_compared_with_the_same_line_of_the_group(discount):
  _, out = collected(discount, reward__partial=1.0)
  rollout, compared = out.rollout, 0
  np.testing.assert_allclose(rollout.rewards.sum(1), out.reward_PG.reshape(-1), rtol=1e-6)
  for first in range(0, len(rollout.tokens), G):
    rows = {row: lines_of(rollout, row) for row in range(first, first + G)}
    if first == 0:  # the one without a verdict
      del rows[2]
      assert not out.advantage_BL[2].any()
    for u in range(max(map(len, rows.values()))):
      returns = {
        row: sum(
          discount ** (v - u) * rollout.rewards[row, lines[v]].sum() for v in range(u, len(lines))
        )
        for row, lines in rows.items()
        if u < len(lines)
      }
      values = np.array([*returns.values()])
      for row, value in returns.items():
        found = out.advantage_BL[row, rows[row][u]]
        assert np.ptp(found) == 0
        expected = (value - values.mean()) / (values.std(ddof=1) + 1e-6) if len(values) > 1 else 0
        assert found[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
        compared += len(values) > 1 and np.ptp(values) > 0
  assert compared > 40 and not out.advantage_BL[rollout.mask == 0].any()


def test_the_last_token_of_a_line_has_its_reward():
  _, out = collected(1.0, reward__partial=1.0)
  rollout = out.rollout
  for row in [0, 1, 3, 8]:
    texts = out.groups[row // G].responses[row % G].split("\n")
    lines = lines_of(rollout, row)
    for text, line in zip(texts, lines):
      assert rollout.rewards[row, line[-1]] == pytest.approx(line_reward(text))
      assert not rollout.rewards[row, line[:-1]].any()


def test_segments_of_lines_are_the_lines_that_are_rewarded():
  changes = dict(objective__name="segment", objective__segment_unit="line", reward__partial=1.0)
  run, out = collected(1.0, **changes)
  objective = run.config.objective
  ids_BL = segments_of(objective, out.rollout, run.line_breaks, delimiters=None)
  for row in range(len(ids_BL)):
    for u, line in enumerate(lines_of(out.rollout, row)):
      assert (ids_BL[row, line] == u).all()
