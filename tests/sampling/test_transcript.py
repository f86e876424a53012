"""Records say what the model saw, and who wrote what."""

from types import SimpleNamespace

import numpy as np
from support.rollouts import Counting, dumped, iterate

from gspo_jax.sampling.trajectory import recorded_turn
from gspo_jax.sampling.transcript import transcripts

TOK = SimpleNamespace(decode=lambda ids: "".join(chr(64 + i) for i in ids))


def test_a_conversation_is_split_by_who_wrote():
  (out,), _ = iterate(1, environment=Counting)
  records = dumped(out)
  talks = [record for record in records if "turns" in record]
  assert len(talks) > len(records) / 2  # Others are cut off in their first turn.
  for record in talks:
    turns = record["turns"]
    assert [turn["role"] for turn in turns] == (["policy", "environment"] * 3)[: len(turns)]
    assert "".join(turn["text"] for turn in turns) == record["response"]
    sampled = [turn for turn in turns if turn["role"] == "policy"]
    assert sum(turn["length"] for turn in sampled) == record["length"] == len(record["tokens"])
    assert {turn["text"] for turn in turns} - {x["text"] for x in sampled} <= {"T", "TT", "TTT"}


def test_a_prompt_is_in_the_first_record_and_where_it_differs():
  """Records of single turns have the prompt alone."""

  def trajectory(*prompt, tokens=(5,)):
    return recorded_turn(prompt, 0, np.array(tokens, np.int32), stopped=True)

  same, other, failed = trajectory(1, 2), trajectory(3), trajectory(tokens=())
  rows = transcripts([failed, same, same, other, same], TOK)
  prompts = [row.get("rendered_prompt") for row in rows]
  assert prompts == [None, "AB", None, "C", None]
  assert not any("turns" in row for row in rows)
