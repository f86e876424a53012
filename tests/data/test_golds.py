"""Rows whose gold answer is none."""

import pytest
from support.data_cases import load, write

from gspo_jax import rewards
from gspo_jax.data import sources

NUMINA = ["proof", "notfound", "None", "N/A", r"\text{Unknown}", "Answers may vary."]
NUMINA += ["Q.E.D.", "idk"]


def test_a_gold_answer_that_is_none_is_a_bad_row(tmp_path):
  """NuminaMath has "proof" or "notfound" in a sixth of its rows."""
  check = rewards.answer_check("math")
  good = [dict(question="0?", answer="5"), dict(question="1?", answer="cannot be determined")]
  for number, gold in enumerate(NUMINA):
    path = write(tmp_path / f"{number}.jsonl", [*good, dict(question="p", answer=gold)])
    with pytest.raises(sources.DataError, match=r"line 3: .*is a placeholder.*Correct the row"):
      load(path, check)
  rows = [*good, *(dict(question=f"p{gold}", answer=gold) for gold in NUMINA)]
  source = load(write(tmp_path / "a.jsonl", rows), check, on_error="skip")
  assert (len(source), source.skipped) == (2, len(NUMINA))
  assert len(load(tmp_path / "a.jsonl", rewards.answer_check("string"))) == len(rows)
