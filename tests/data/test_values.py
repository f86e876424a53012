"""Values of rows: messages, numbers as they were written, and whether they are what they were."""

import datetime
import decimal
import json
import re

import numpy as np
import pytest
import tokenizers
from support.data_cases import BYTES, config, load, write
from support.sandboxes import LIMITS, needs_namespaces
from tokenizers import decoders, models, pre_tokenizers

from gspo_jax import rewards
from gspo_jax.data import formats, sources, tokenizer
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
    sources.DataError, match=r"a system message\. Set data\.question_field=prompt, the list"
  ):
    load(bad, question_field="prompt.0.content")
  bad = write(tmp_path / "d.jsonl", [dict(prompt=[system], answer="2")])
  with pytest.raises(sources.DataError, match="no message of the role user"):
    load(bad, question_field="prompt")


@pytest.mark.parametrize("role, text", [("role", "content"), ("from", "value")])
def test_fields_of_messages_are_those_of_the_right_role(role, text, tmp_path):
  names = ("human", "gpt") if role == "from" else ("user", "assistant")

  def message(name, words):
    return {role: name, text: words}

  short = [message(names[0], "1+1?"), message(names[1], "2")]
  path = write(tmp_path / "a.jsonl", [dict(m=short), dict(m=[message("system", "Brief."), *short])])
  fields = dict(question_field="m", answer_field=f"m.-1.{text}", demonstration_field=f"m.-1.{text}")
  assert [(p.question, p.answer, p.demonstration) for p in load(path, **fields)] == [
    ("1+1?", "2", "2")
  ] * 2
  for name in ("answer_field", "demonstration_field"):
    message = rf"line 2: 'm\.1\.{text}' is a {names[0]} message\. Set data.{name}=m\.-1"
    with pytest.raises(sources.DataError, match=message):
      load(path, **fields | {name: f"m.1.{text}"})
  with pytest.raises(sources.DataError, match=f"line 1: .* is a {names[1]} message"):
    load(path, **fields | dict(question_field=f"m.1.{text}"))


def test_rows_that_are_not_utf8_are_bad_rows(tmp_path):
  import pyarrow as pa
  from pyarrow import parquet

  image = pa.array([b"\xff", None], pa.binary())
  table = pa.table(dict(question=["1?", "2?"], answer=["1", "2"], image=image))
  parquet.write_table(table, tmp_path / "a.parquet")
  for spec, fields in ("where image!=x", {}), ("", dict(answer_field="json:answer,image")):
    with pytest.raises(sources.DataError, match=r"a.parquet, row 1: 'utf-8' codec"):
      load(f"{tmp_path}/a.parquet {spec}", **fields)
    assert len(load(f"{tmp_path}/a.parquet {spec}", on_error="skip", **fields)) == 1
  row = dict(
    question="1?", starter_code="\ud800", input_output='{"inputs": ["1"], "outputs": ["2"]}'
  )
  with pytest.raises(sources.DataError, match=r"a.jsonl, line 1: .* surrogates not allowed"):
    load(f"apps@{write(tmp_path / 'a.jsonl', [row])}")


def test_a_repeated_column_is_named(tmp_path):
  import pyarrow as pa
  from pyarrow import parquet

  table = pa.table([pa.array(["1?"])] * 2, names=["question", "question"])
  parquet.write_table(table, tmp_path / "a.parquet")
  with pytest.raises(sources.DataError, match=r"a.parquet .*two columns have the name 'question'"):
    load(f"{tmp_path}/a.parquet", on_error="skip")


def test_a_question_of_fields_takes_numbers_and_a_number_alone_is_refused(tmp_path):
  path = write(tmp_path / "a.jsonl", [dict(a=3, b=4.0, answer="7")])
  (prompt,) = load(path, question_field="{a} + {b}")
  assert prompt.question == "3 + 4"
  with pytest.raises(sources.DataError, match=r"'a' is 3 \(int\), and text was expected"):
    load(path, question_field="a")


def test_decimals_of_parquet_keep_all_their_digits(tmp_path):
  import pyarrow as pa
  from pyarrow import parquet

  answer = "12345678901234567890123456789012345678"
  answers = pa.array([decimal.Decimal(answer)], pa.decimal128(38, 0))
  parquet.write_table(pa.table(dict(question=["q"], answer=answers)), tmp_path / "a.parquet")
  assert [prompt.answer for prompt in load(f"{tmp_path}/a.parquet")] == [answer]


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


TEMPLATE = (
  "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{ m.content }}"
  "{{ eos_token }}{% endif %}{% endfor %}"
)
DATES = {
  "strftime_now": "{{ strftime_now('%d %B %Y') }}",
  "if defined": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}",
  "in a macro": "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}",
  "by the second": "{{ strftime_now('%c %H:%M:%S %j %A') }}",
  "as a number": "{{ strftime_now('%d') | int + 1 }}",
}


def chats(directory, template):
  """A tokenizer of bytes with a chat template."""
  vocab = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
  tok = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(vocab)}, []))
  tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tok.decoder = decoders.ByteLevel()
  tok.add_special_tokens(["<|endoftext|>"])
  tok.save(str(directory / "tokenizer.json"))
  config = dict(eos_token="<|endoftext|>", chat_template=template)
  (directory / "tokenizer_config.json").write_text(json.dumps(config))
  return str(directory)


@pytest.mark.parametrize("name", DATES)
def test_a_date_in_prompts_is_that_of_the_first_start(name, tmp_path):
  path = chats(tmp_path, DATES[name] + TEMPLATE)
  first, later = datetime.datetime(2024, 2, 28, 23, 59, 58), datetime.datetime(2025, 3, 1)
  texts = [
    tokenizer.load_for(path, 300, date=date).chat([tokenizer.user_turn("1+1?")])
    for date in (first, first, later)
  ]
  assert texts[0] == texts[1] != texts[2]
  assert ("28 February 2024" in texts[0]) == (name == "strftime_now")
  if name == "strftime_now":
    assert tokenizer.load_for(path, 300).chat([tokenizer.user_turn("1+1?")]) not in texts


def batches_of(directory, path, **changes):
  """Batches of the rows of a file, with the chat template of a directory."""
  tok = tokenizer.load(str(directory))
  values = dict(max_prompt_tokens=200, demonstration_field="solution") | changes
  return sources.Batches(sources.load_spec(config(**values), tok, path, "data.train"), 3, seed=1)


CHANGES = {
  "nothing": lambda directory, rows: None,
  "the template of prompts": lambda directory, rows: chats(directory, "Now." + TEMPLATE),
  "the template of turns": lambda directory, rows: chats(
    directory, TEMPLATE.replace("{{ eos", "!{{ eos")
  ),
  "a demonstration": lambda directory, rows: rows[4].update(solution="otherwise"),
  "a further field": lambda directory, rows: rows[4].update(tolerance="1000"),
  "a system message": lambda directory, rows: rows[4]["question"][0].update(content="Be long."),
  "vocabulary": lambda directory, rows: (directory / "tokenizer.json").write_text(
    (directory / "tokenizer.json").read_text().replace('"0"', '"?"').replace('"1"', '"0"')
    .replace('"?"', '"1"')
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_prompts_that_render_otherwise_are_other_data(name, tmp_path, caplog):
  """Questions, answers and ids are as before."""
  chats(tmp_path, TEMPLATE)
  system = dict(role="system", content="Be brief.")
  rows = [
    dict(question=[dict(system), dict(role="user", content=f"{i}?")], answer=str(i), solution="So.")
    for i in range(10)
  ]
  path = write(tmp_path / "a.jsonl", rows)
  before = batches_of(tmp_path, path)
  next(before)
  state = json.loads(json.dumps(before.get_state()))
  CHANGES[name](tmp_path, rows)
  write(tmp_path / "a.jsonl", rows)
  after = batches_of(tmp_path, path)
  after.set_state(state)
  assert ("tokens, demonstrations or fields of prompts have changed" in caplog.text) == (
    name != "nothing"
  )
  assert after.get_state()["restarts"] == (name != "nothing")
  without_fields, state_after = batches_of(tmp_path, path), after.get_state()
  without_fields.set_state(state_after | dict(rendered=state_after["rendered"].partition("+")[0]))
  assert without_fields.get_state()["restarts"] == state_after["restarts"]
  old = {key: value for key, value in state.items() if key != "rendered"}
  resumed = batches_of(tmp_path, path)
  resumed.set_state(old)  # of a checkpoint without the checksum
  assert "has no checksum" in caplog.text and resumed.get_state()["restarts"] == 0
  assert [x.id for x in next(resumed)] == [x.id for x in next(before)]


def test_hosts_compare_their_prompts(tmp_path, monkeypatch):
  prompts = load(write(tmp_path / "a.jsonl", [dict(question="1?", answer="1")]))
  gathered = []

  def gather(number):
    gathered.append(number)
    return [number, number, number + len(gathered) - 1]

  monkeypatch.setattr(sources.jax, "process_count", lambda: 3)
  monkeypatch.setattr(sources.hosts, "gather", gather)
  sources.require_same_on_hosts([prompts, ()])
  with pytest.raises(sources.DataError, match="host 2 has other prompts than host 0"):
    sources.require_same_on_hosts([prompts])
  other = load(write(tmp_path / "b.jsonl", [dict(question="2?", answer="1")]))
  assert sources.rendered(prompts) != sources.rendered(other) != sources.rendered(())
