"""Lines with rewards of their own, from the verifier to the batch that is trained on."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from support import rollouts
from support.rollouts import iterate

from gspo_jax.data.tokenizer import line_breaks
from gspo_jax.learner.batch import segments_of
from gspo_jax.rewards import Scores

G, BREAK = 4, 45  # tokens from there on are line breaks, those below a letter


def decode(tokens):
  return "".join("\n" if token >= BREAK else chr(64 + token) for token in tokens)


def line_reward(text):
  return sum(map(ord, text)) % 3 / 4


def score(responses, prompts, lengths, finished):
  """The third response is one that the verifier fails on."""
  lines = [np.array([line_reward(line) for line in text.split("\n")]) for text in responses]
  lines[2] *= 0
  reward = np.array([line.sum() for line in lines], np.float32)
  return Scores(reward, dict(right=0, wrong=len(reward)), reward * 0, {2: "crash"}, lines)


@functools.cache
def collected(discount, **changes):
  """The first iteration, and its collector."""
  writer = SimpleNamespace(dump_rollouts=lambda *args, **options: None)
  keys = dict(group_size=G, extra_prompts=0, environment__discount=discount)
  keys |= dict(reward__name="recurrence", reward__per_line=True, objective__name="gspo_token")
  keys |= dict(data__train="recurrence:train", data__eval="recurrence:heldout")
  tok = rollouts.tokenizer(decode)
  (out,), (collecting, _) = iterate(1, judge=score, tok=tok, writer=writer, **keys | changes)
  return collecting, out


def lines_of(rollout, row):
  """Positions of each line of a response, its break included."""
  lines, unfinished = [], []
  for t in np.flatnonzero(rollout.mask[row]):
    unfinished.append(t)
    if rollout.tokens[row, t] >= BREAK:
      lines, unfinished = [*lines, unfinished], []
  return [*lines, unfinished] if unfinished else lines


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
        result = out.advantage_BL[row, rows[row][u]]
        assert np.ptp(result) == 0
        expected = (value - values.mean()) / (values.std(ddof=1) + 1e-6) if len(values) > 1 else 0
        assert result[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
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
  collecting, out = collected(1.0, **changes)
  breaks_V = line_breaks(collecting._tokenizer)
  ids_BL = segments_of(collecting.config.objective, out.rollout, breaks_V, None)
  for row in range(len(ids_BL)):
    for u, line in enumerate(lines_of(out.rollout, row)):
      assert (ids_BL[row, line] == u).all()
