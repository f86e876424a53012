"""Data: bad rows, file formats, and the iterator's order and resumption."""

import gzip
import itertools
import json
import re
import sys

import numpy as np
import pytest
from support.data_cases import BYTES, config, load, write

from gspo_jax.data import sources

GSM8K = [
  {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i:,}"}
  for i in range(700, 710)
]


# Rows.


def test_json_lines(tmp_path):
  source = load(write(tmp_path / "a.jsonl", GSM8K), answer_pattern=r"####\s*(.+)")
  assert (len(source), source.skipped) == (10, 0)
  prompt = source[3]
  assert prompt.id == "a.jsonl:4"
  assert prompt.question == "What is 703 + 703?"
  assert prompt.answer == "1,406"
  assert bytes(prompt.tokens).decode() == prompt.question
  assert prompt.demonstration == "703 + 703 = 1406\n#### 1,406"


def test_train_and_eval_are_told_apart(tmp_path):
  rows = dict(train=GSM8K[:3], eval=GSM8K[3:])
  data = config(**{split: write(tmp_path / f"{split}.jsonl", rows[split]) for split in rows})
  assert [len(sources.load(data, BYTES, split)) for split in rows] == [3, 7]


def test_fields(tmp_path):
  rows = [
    {"ID": 7, "Body": "Two cats.", "Q": "How many legs?", "info": {"answer": 8.0}, "messages":
     [{"content": "eight"}]}
  ]  # fmt: skip
  prompt = load(
    write(tmp_path / "a.jsonl", rows),
    question_field="{Body} {Q}",
    answer_field="info.answer",
    demonstration_field="messages.0.content",
    prompt_template="Q: {question} \\boxed{}",
  )[0]
  assert prompt.id == "7"
  assert prompt.question == "Two cats. How many legs?"
  assert prompt.answer == "8"
  assert prompt.demonstration == "eight"
  assert bytes(prompt.tokens).decode() == "Q: Two cats. How many legs? \\boxed{}"


GOOD = {"question": "1+1?", "answer": "#### 2"}
BAD_ROWS = [
  ({"question": "1+1?"}, r"'answer' is missing; there are 'question'"),
  ({"answer": "#### 2"}, r"'question' is missing"),
  ({"question": "", "answer": "#### 2"}, r"'question' is empty"),
  ({"question": " \n", "answer": "#### 2"}, r"'question' is empty"),
  ({"question": "1+1?", "answer": ""}, r"'answer' is empty"),
  ({"question": ["1+1?"], "answer": "#### 2"}, r"'question' is \['1\+1\?'\] \(list\)"),
  ({"question": 5, "answer": "#### 2"}, r"'question' is 5 \(int\), and text was expected"),
  ({"question": "1+1?", "answer": None}, r"'answer' is null"),
  ({"question": "1+1?", "answer": True}, r"'answer' is True \(bool\)"),
  ({"question": "1+1?", "answer": float("nan")}, r"'answer' is nan \(float\)"),
  ({"question": "1+1?", "answer": "2"}, r"answer_pattern=.* finds no answer .*'2'\. .*\(if empty,"),
  ({"question": "1+1?", "answer": "####  "}, r"finds no answer"),
  ({"question": "1" * 65, "answer": "#### 2"}, r"65 tokens, more than data.max_prompt_tokens=64"),
  ({"question": "\ud83d", "answer": "#### 2"}, r"'question' is not UTF-8"),
  ({"id": True, **GOOD}, r"'id' is True \(bool\)"),
  ({"question": "1\0", "answer": "#### 2"}, r"'question' has a NUL"),
  ({"question": "1+1?", "answer": 10**400}, r"finds no answer"),
  (b'{"question": "1?", "question": "2?", "answer": "#### 2"}', r"it has the key 'question' twice"),
  (b'{"question": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", r"it is nested too deeply"),
  (b'{"question": "1?", "answer": ' + b"9" * 5000 + b"}", r"Exceeds the limit"),
  ([1, 2], r"an object with fields, and this is \[1, 2\] \(list\)"),
  (b'{"question": "1+1?", ', r"line 4: it is not JSON: [^:]*: column 22\. Correct the row"),
  (b'{"question": "\xff", "answer": "#### 2"}', r"it is not UTF-8"),
]


@pytest.mark.parametrize("bad, message", BAD_ROWS)
def test_bad_row_is_reported_with_file_and_line_or_skipped(tmp_path, bad, message):
  # The blank line counts: the number is the one an editor shows.
  path = write(tmp_path / "rows.jsonl", [GOOD, b"", GOOD, bad, GOOD])
  with pytest.raises(sources.DataError, match=message) as error:
    load(path, answer_pattern=r"####\s*(\S+)")
  assert str(error.value).startswith(f"{path}, line 4: ")
  assert "data.on_error=skip" in str(error.value)
  source = load(path, answer_pattern=r"####\s*(\S+)", on_error="skip")
  assert (len(source), source.skipped) == (3, 1)


def test_duplicated_id_names_both_rows(tmp_path):
  path = write(tmp_path / "a.jsonl", [{"id": i, **GOOD} for i in (1, 2, 1)])
  with pytest.raises(
    sources.DataError, match=r"line 3: the id '1' is also that of .*a.jsonl, line 1"
  ):
    load(path)
  source = load(path, on_error="skip")
  assert [p.id for p in source] == ["1", "2"]
  assert source.skipped == 1


def test_duplicated_ids_in_two_parts_of_a_file_are_found_and_rows_in_both_parts_are_not(tmp_path):
  path = write(tmp_path / "a.jsonl", [{"id": 1, "level": level, **GOOD} for level in (1, 2)])
  with pytest.raises(sources.DataError, match=r"line 2: the id '1' is also that of .*, line 1"):
    load(f"{path} where level==1, {path} where level==2")
  assert len(load(f"{path} where level==1, {path} where level<2")) == 2


@pytest.mark.parametrize("rows", [[], [{"question": ""}]])
def test_empty_data_set_is_an_error_also_when_skipping(tmp_path, rows):
  with pytest.raises(sources.DataError, match=r"a.jsonl: the data set is empty"):
    load(write(tmp_path / "a.jsonl", rows), on_error="skip")


@pytest.mark.parametrize(
  "spec", ["", "nowhere.jsonl", "nowhere/*.jsonl", "tfds:no_such_set/train", "arithmetic:test"]
)
def test_missing_source_names_it_and_the_key(spec):
  for split in ("train", "eval"):
    with pytest.raises(sources.DataError, match=f"data.{split}") as error:
      sources.load(config(**{split: spec}), BYTES, split)
    assert spec.partition(":")[2] in str(error.value)


def test_unknown_kind_of_file(tmp_path):
  (tmp_path / "a.csv").write_text("question,answer\n")
  with pytest.raises(sources.DataError, match=r"a.csv ends in none of .jsonl"):
    load(tmp_path / "a.csv")


@pytest.mark.parametrize(
  "name, pattern",
  [("a.csv", "*.jsonl"), ("a.parquet", "*.parquet"), ("data/a.parquet", "*/*.parquet")],
)
def test_a_directory_is_answered_with_the_pattern_of_its_files(name, pattern, tmp_path):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).touch()
  files = re.escape(f"{tmp_path}/{pattern}")
  message = rf"is a directory: name its files, such as --config.data.train='{files}'$"
  with pytest.raises(sources.DataError, match=message):
    load(tmp_path)


def test_a_similar_file_is_suggested(tmp_path):
  (tmp_path / "sums.jsonl").write_text("")
  with pytest.raises(sources.DataError, match=r"sumz.jsonl; did you mean .*/sums.jsonl\? Set"):
    load(tmp_path / "sumz.jsonl")


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"answer_pattern": "(("}, "data.answer_pattern"),
    ({"answer_pattern": "####"}, "no group"),
    ({"prompt_template": "{q}"}, "data.prompt_template"),
  ],
)
def test_bad_config(changes, message):
  with pytest.raises(sources.DataError, match=message):
    config(**changes)


def test_empty_field_name(tmp_path):
  with pytest.raises(sources.DataError, match=r"data.question_field is empty"):
    load(write(tmp_path / "a.jsonl", GSM8K), question_field="")


def test_long_prompt_of_the_embedded_task_is_found_before_training():
  with pytest.raises(sources.DataError, match=r"data.max_prompt_tokens=4"):
    load("arithmetic:train", max_prompt_tokens=4)


# Formats.


def test_compressed_and_patterns(tmp_path):
  (tmp_path / "deep").mkdir()
  (tmp_path / "deep" / "b.jsonl.gz").write_bytes(
    gzip.compress(b"\xef\xbb\xbf" + json.dumps(GSM8K[0]).encode())  # a byte order mark as well
  )
  write(tmp_path / "deep" / "a.jsonl", GSM8K[1:3])
  source = load(f"{tmp_path}/*/[ab].jsonl*")
  assert [p.question for p in source] == [GSM8K[i]["question"] for i in (1, 2, 0)]
  assert len({p.id for p in source}) == 3


def test_truncated_gzip_names_the_file(tmp_path):
  whole = gzip.compress(b"\n".join(json.dumps(row).encode() for row in GSM8K))
  (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
  with pytest.raises(sources.DataError, match=r"a.jsonl.gz cannot be read"):
    load(tmp_path / "a.jsonl.gz", on_error="skip")


def test_parquet(tmp_path):
  pa = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  rows = [{"question": f"{i}?", "info": {"answer": i}} for i in range(5)]
  parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
  source = load(tmp_path / "a.parquet", answer_field="info.answer")
  assert [p.answer for p in source] == ["0", "1", "2", "3", "4"]
  rows[3]["question"] = None
  parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
  with pytest.raises(sources.DataError, match=r"a.parquet, row 4: the field 'question' is null"):
    load(tmp_path / "a.parquet", answer_field="info.answer")


def test_parquet_that_is_not_utf8(tmp_path):
  pa = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  # Parquet keeps strings as bytes, and does not check them.
  broken = pa.array([b"ok?", b"\xff?"]).view(pa.string())
  table = pa.table({"question": broken, "answer": ["1", "2"]})
  parquet.write_table(table, tmp_path / "a.parquet")
  with pytest.raises(sources.DataError, match=r"a.parquet, row 2: it is not UTF-8"):
    load(tmp_path / "a.parquet")


def test_array_record(tmp_path):
  module = pytest.importorskip("array_record.python.array_record_module")

  def write_records(records):
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for record in records:
      writer.write(record)
    writer.close()

  many = [{"question": f"{i}?", "answer": i} for i in range(1500)]  # more than one read
  write_records([json.dumps(row).encode() for row in many])
  source = load(tmp_path / "a.array_record")
  assert [int(p.answer) for p in source] == list(range(1500))
  write_records([json.dumps(many[0]).encode(), b"\x0a\x0b"])
  with pytest.raises(sources.DataError, match=r"a.array_record, record 2: it is not JSON"):
    load(tmp_path / "a.array_record")


def test_tfds_without_tensorflow(tmp_path):
  tfds = pytest.importorskip("tensorflow_datasets")

  class Sums(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      text = tfds.features.Text()
      features = {"question": text, "info": {"answer": np.int64}}
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _):
      return {"train": self._generate_examples(5), "test": self._generate_examples(2)}

    def _generate_examples(self, count):
      for i in range(count):
        yield i, {"question": f"{i} + {i}, plutôt?", "info": {"answer": 2 * i}}

  Sums(data_dir=tmp_path, file_format="array_record").download_and_prepare()
  prepared = tmp_path / "sums" / "1.0.0"
  source = load(f"tfds:{prepared}/train", answer_field="info.answer")
  assert {(p.question, p.answer) for p in source} == {
    (f"{i} + {i}, plutôt?", str(2 * i)) for i in range(5)
  }
  assert len(load(f"tfds:{prepared}/test", answer_field="info.answer")) == 2
  with pytest.raises(sources.DataError, match=r"data.train=tfds:.*/nope: TFDS cannot"):
    load(f"tfds:{prepared}/nope")
  with pytest.raises(sources.DataError, match=r"example 1: the field 'answer' is missing"):
    load(f"tfds:{prepared}/train")
  assert "tensorflow" not in sys.modules


def test_embedded_task():
  train = load("arithmetic:train")
  assert train.skipped == 0
  prompt = train[17]
  remainder, right = prompt.question.rstrip("=").split("+")
  assert int(prompt.answer) == int(remainder) + int(right)
  assert bytes(prompt.tokens).decode() == prompt.question
  assert prompt.demonstration
  wrong, again = (load("arithmetic:train", carry_errors=0.5) for _ in range(2))
  assert all(wrong[i] == again[i] for i in range(0, len(train), 97))
  assert any(wrong[i].demonstration != train[i].demonstration for i in range(0, len(train), 97))
  half = load("arithmetic:train", skipped_work=0.5)
  short = [half[i].demonstration.startswith(":") for i in range(0, len(train), 97)]
  assert 0.4 < np.mean(short) < 0.6


# Order.


@pytest.fixture
def ten(tmp_path):
  return load(write(tmp_path / "a.jsonl", GSM8K))


def take(iterator, count):
  return [[p.id for p in batch] for batch in itertools.islice(iterator, count)]


def test_batches_are_lists_of_prompts_and_epochs_are_permutations(ten):
  iterator = sources.Batches(ten, 4, seed=0)
  first = next(iterator)
  assert isinstance(first, list) and first[0] in list(ten)
  batches = [[p.id for p in first], *take(iterator, 9)]
  assert all(len(batch) == 4 for batch in batches)
  stream = list(itertools.chain(*batches))
  epochs = [stream[i : i + 10] for i in range(0, 40, 10)]
  assert all(sorted(epoch) == sorted(p.id for p in ten) for epoch in epochs)
  assert len(set(map(tuple, epochs))) == 4  # each in an order of its own
  assert [p.id for p in ten] not in epochs


def test_order_depends_on_the_seed_only(ten):
  assert take(sources.Batches(ten, 3, seed=5), 10) == take(sources.Batches(ten, 3, seed=5), 10)
  assert take(sources.Batches(ten, 3, seed=5), 10) != take(sources.Batches(ten, 3, seed=6), 10)


@pytest.mark.parametrize("done", [0, 1, 7])
def test_resume_continues_where_it_stopped(ten, done):
  iterator = sources.Batches(ten, 3, seed=1)
  take(iterator, done)
  state = json.loads(json.dumps(iterator.get_state()))
  expected = take(iterator, 12)  # over several epochs
  resumed = sources.Batches(ten, 3, seed=1)
  take(resumed, 5)  # wherever it is
  resumed.set_state(state)
  assert take(resumed, 12) == expected


def test_batch_larger_than_the_source_repeats_it(ten):
  (batch,) = take(sources.Batches(ten, 25, seed=0), 1)
  assert len(batch) == 25 and set(batch) == {p.id for p in ten}


def test_a_batch_of_nothing_is_an_error(ten):
  with pytest.raises(ValueError, match="batch size of 0"):
    sources.Batches(ten, 0, seed=0)


# Demonstrations.


def test_pack_demonstrations(tmp_path):
  rows = [{"question": "a?", "answer": "bc"}, {"question": "def?", "answer": "g"}]
  source = load(write(tmp_path / "a.jsonl", rows))
  tokens, mask = sources.pack_demonstrations(list(source), BYTES, 7)
  stop, pad = BYTES.stop_ids[0], BYTES.pad_id
  assert (tokens.dtype, mask.dtype) == (np.int32, np.float32)
  np.testing.assert_array_equal(tokens, [[*b"a?bc", stop, pad, pad], [*b"def?", *b"g", stop, pad]])
  np.testing.assert_array_equal(mask, [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0]])


def test_demonstrations_that_do_not_fit(tmp_path):
  rows = [{"id": "short", "question": "a", "answer": "b"},
          {"id": "long", "question": "a", "answer": "bcd"}]  # fmt: skip
  source = load(write(tmp_path / "a.jsonl", [*rows, b"broken"]), on_error="skip")
  assert source.skipped == 1
  assert len(sources.fitting(source, BYTES, 5, "raise")) == 2  # 1 + 3 + the stop token: just fits
  with pytest.raises(
    sources.DataError, match=r"long: .* take 5 tokens, more than sft\.max_tokens=4"
  ):
    sources.pack_demonstrations(list(source), BYTES, 4)
  with pytest.raises(sources.DataError, match=r"long: .* take 5 tokens"):
    sources.fitting(source, BYTES, 4, "raise")
  rest = sources.fitting(source, BYTES, 4, "skip")
  assert ([p.id for p in rest], rest.skipped) == (["short"], 2)
  with pytest.raises(sources.DataError, match=r"demonstration within sft\.max_tokens=2"):
    sources.fitting(source, BYTES, 2, "skip")


@pytest.mark.parametrize("weights, expected", [(("", ""), (2.0, 4.0)), ((":3", ":1"), (3.0, 1.0))])
def test_rows_that_do_not_fit_take_no_part_in_the_weights(tmp_path, weights, expected):
  """Sources without weights are drawn in proportion to the rows that are left."""
  sizes = dict(long=(2, 3), short=(4, 0))
  for name, (fitting, too_long) in sizes.items():
    rows = [{"question": f"{name[0]}{i}", "answer": "b"} for i in range(fitting)]
    rows += [{"question": f"{name}{i}", "answer": "b" * 9} for i in range(too_long)]
    write(tmp_path / f"{name}.jsonl", rows)
  spec = ", ".join(f"{tmp_path}/{name}.jsonl{weight}" for name, weight in zip(sizes, weights))
  source = sources.fitting(load(spec, on_error="skip"), BYTES, 6, "skip")
  assert source.weights == expected and len(source) == 6


def test_embedded_demonstrations_are_checked_in_samples():
  source = load("arithmetic:train")
  assert sources.fitting(source, BYTES, 32, "raise") is source
  with pytest.raises(sources.DataError, match=r"sft\.max_tokens=8"):
    sources.fitting(source, BYTES, 8, "raise")


@pytest.mark.parametrize(
  "spec",
  ["http://x/y.jsonl", "**", "nosuch@a.jsonl", "arithmetic:tran", "~nobody/a.jsonl", "\0.jsonl"],
)
def test_a_source_that_cannot_be_one_is_named_with_its_key(spec):
  with pytest.raises(sources.DataError, match=r"^data\.train"):
    load(spec)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".array_record"])
@pytest.mark.parametrize("content", [b"", b"\0" * 4096, bytes(range(256)) * 8, b"PAR1\x1f\x8b"])
def test_a_damaged_file_is_named(suffix, content, tmp_path):
  path = tmp_path / f"a{suffix}"
  path.write_bytes(content)
  with pytest.raises(sources.DataError, match=re.escape(str(path))):
    load(path)


LATEX = r"{question} Answer within \boxed{answer}, x^{n} or \frac{a}{b}, and not { so }"


def test_a_template_with_a_field_that_nothing_fills_is_refused():
  assert config(prompt_template=LATEX).prompt_template == LATEX
  assert config(prompt_template='{question} as {"answer": 1}')
  for template in ("{question} {other}", "{other}: {question}", "({level}) {question}"):
    with pytest.raises(sources.DataError, match=r"data\.prompt_template=.*not \{(oth|lev)"):
      config(prompt_template=template)
  with pytest.raises(sources.DataError, match=r"data\.question_field='\{' has braces"):
    config(question_field="{")
