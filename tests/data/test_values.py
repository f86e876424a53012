"""Values of rows: messages, numbers as they were written, and whether they are what they were."""

import decimal
import json
import re

import numpy as np
import pytest
from support.data_cases import BYTES, load, write
from support.sandboxes import LIMITS, needs_namespaces

from gspo_jax import rewards
from gspo_jax.data import formats, sources
from gspo_jax.verifiers.programs.verifier import CodeVerifier


def test_rows_of_messages(tmp_path):
  system, queue = dict(role="system", content="Be brief."), dict(role="user", content="1+1?")
  output = dict(role="assistant", content="2")
  before = [dict(role="user", content="0+0?"), dict(role="assistant", content="0")]
  for messages, text in (
    ([system, queue], "Be brief.\nQ: 1+1?"),
    ([queue], "Q: 1+1?"),
    ([system, *before, queue, output], "Be brief.\n0+0?\n0\nQ: 1+1?"),
  ):
    path = write(tmp_path / "a.jsonl", [dict(prompt=messages, answer="2")])
    (prompt,) = load(path, question_field="prompt", prompt_template="Q: {question}")
    assert prompt.question == "1+1?" and BYTES.decode(prompt.tokens) == text
  row = dict(prompt=[system, queue], reward_model=dict(ground_truth="2"))
  row["extra_info"] = dict(index="a")
  (prompt,) = load(f"dapo_math@{write(tmp_path / 'b.jsonl', [row])}")
  assert prompt.question == "1+1?"
  assert BYTES.decode(prompt.tokens) == f"Be brief.\n{prompt.question}"
  bad = write(tmp_path / "c.jsonl", [dict(prompt=[system, queue], answer="2")])
  with pytest.raises(
    sources.DataError, match=r"the system says\. Set data\.question_field=prompt,"
  ):
    load(bad, question_field="prompt.0.content")
  bad = write(tmp_path / "d.jsonl", [dict(prompt=[system], answer="2")])
  with pytest.raises(sources.DataError, match="no message of the role user"):
    load(bad, question_field="prompt")


@pytest.mark.parametrize(
  "kind", ["float16", "float32", "float64", "decimal128(9, 4)", "decimal256(40, 4)"]
)
def test_numbers_of_parquet_are_those_that_were_written(tmp_path, kind):
  import pyarrow as pa
  from pyarrow import parquet

  written = ["0.1", "0.3", "3.14", "-2.5", "145", "0.0001", "100"]
  numbers = [decimal.Decimal(x) if "decimal" in kind else np.float64(x) for x in written]
  if kind == "float16":
    numbers = [np.float16(x) for x in numbers]
  name, _, size = kind.partition("(")
  kind = getattr(pa, name)(*map(int, re.findall(r"\d+", size)))
  answers = pa.array(numbers, kind)
  deep = pa.StructArray.from_arrays(
    [answers, pa.array([[x] for x in numbers], pa.list_(kind))], ["x", "xs"]
  )
  questions = pa.array([f"q{i}" for i in range(len(written))])
  table = pa.table(dict(question=questions, answer=answers, deep=deep, none=pa.nulls(7, kind)))
  parquet.write_table(table, tmp_path / "a.parquet")
  path = f"{tmp_path}/a.parquet"
  assert [prompt.answer for prompt in load(path)] == written
  assert [prompt.answer for prompt in load(path, answer_field="deep.x")] == written
  (prompt, *_) = load(path, answer_field="json:x=answer,deep")
  assert json.loads(prompt.answer) == dict(x=0.1, deep=dict(x=0.1, xs=[0.1]))
  assert [prompt.question for prompt in load(f"{path} where answer==0.1")] == ["q0"]


def test_numbers_of_tfds_are_those_that_were_written():
  row = dict(question="q", answer=np.float32(0.1), all=np.float32([0.1, 0.3]), one=np.array(7))
  form = formats.Format("question", "answer")
  options = dict(max_tokens=100, default_id="1")
  assert formats.prompt(row, form, BYTES, **options).answer == "0.1"
  form = formats.Format("question", "json:answer,all,one")
  answer = json.loads(formats.prompt(row, form, BYTES, **options).answer)
  assert answer == dict(answer=0.1, all=[0.1, 0.3], one=7)


@needs_namespaces
def test_tests_with_long_integers(tmp_path):
  """They have 5,000 digits; Python's int() reads 4,300."""
  n = "7" * 5000
  cases = json.dumps([dict(input=n, output=f"-{n}", testtype="functional")])
  columns = dict(private_test_cases="", metadata='{"func_name": "f"}', question_content="q")
  rows = dict(
    apps=dict(
      question="q", input_output=f'{{"inputs": [[{n}]], "outputs": [-{n}], "fn_name": "f"}}'
    ),
    livecodebench=columns | dict(public_test_cases=cases),
  )
  code = [f"```python\ndef f(x):\n  return {value}\n```" for value in ("-x", "-x + 1")]
  with CodeVerifier(1, LIMITS) as verifier:
    for name, row in rows.items():
      path = write(tmp_path / "a.jsonl", [row])
      (prompt,) = load(f"{name}@{path}", rewards.answer_check("code"), max_prompt_tokens=1000)
      assert verifier.score(code, [prompt.answer] * 2) == ["right", "wrong"], name


@pytest.mark.parametrize("what", ["edited", "answered otherwise", "in another order", "the same"])
def test_rows_that_are_edited_are_other_data(tmp_path, what, caplog):
  """The file has as many rows, and they have the ids of their lines."""
  rows = [dict(question=f"{i}?", answer=str(i)) for i in range(10)]
  before = sources.Batches(load(write(tmp_path / "a.jsonl", rows)), 3, seed=1)
  next(before)
  if what == "edited":
    rows[4]["question"] = "five?"
  elif what == "answered otherwise":
    rows[4]["answer"] = "five"
  elif what == "in another order":
    rows[4], rows[5] = rows[5], rows[4]
  resumed = sources.Batches(load(write(tmp_path / "a.jsonl", rows)), 3, seed=1)
  resumed.set_state(before.get_state())
  assert ("training data has changed" in caplog.text) == (what != "the same")
