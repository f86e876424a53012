"""Formats of public data sets, filters, mixtures, and sources that grow."""

import datetime
import itertools
import json
import re
from pathlib import Path

import pytest
from support import data_cases
from support.data_cases import BYTES, write
from support.sandboxes import LIMITS, needs_namespaces

from gspo_jax import rewards
from gspo_jax.data import filters, formats, sources
from gspo_jax.data.formats import FORMATS
from gspo_jax.verifiers.programs.verifier import CodeVerifier

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
DOCUMENTED = {
  name: (json.loads(row), answer)
  for name, row, answer in re.findall(
    r"^### (\w+)\n.*?^```json\n(.*?)\n```\n\nAnswer: `(.*?)`$", DOCS, re.MULTILINE | re.DOTALL
  )
}


def numbered(start, count):
  rows = range(start, start + count)
  return [dict(question=f"{i}?", answer=str(i), level=i % 5) for i in rows]


def load(spec, check=None, **changes):
  return data_cases.load(
    spec, check, **dict(prompt_template="Q: {question}", max_prompt_tokens=900) | changes
  )


def take(batches, count):
  return [p.question for batch in itertools.islice(batches, count) for p in batch]


# Formats.


def test_every_format_is_documented():
  assert list(DOCUMENTED) == list(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_documented_rows_give_the_documented_answers(tmp_path, name):
  row, answer = DOCUMENTED[name]
  (prompt,) = load(f"{name}@{write(tmp_path / 'a.jsonl', [row])}")
  assert prompt.answer == answer
  text = BYTES.decode(prompt.tokens)
  assert prompt.question in text
  template = FORMATS[name].template or "Q: {question}"
  assert text == template.replace("{question}", prompt.question)
  ids = {"dapo_math": "9a9b6eb4", "humaneval": "HumanEval/0", "svamp": "chal-1", "apps": "4"}
  assert prompt.id == ids.get(name, prompt.id)
  further = dict(
    math="level",
    livecodebench="starter_code contest_date difficulty platform",
    apps="starter_code difficulty",
    humaneval="canonical_solution",
    codeforces="contest_id index rating",
    svamp="Equation",
  )
  expected = {key for key in further.get(name, "").split() if row[key]}
  assert dict(prompt.info) == {key: str(row[key]) for key in expected}


def test_further_fields_stay_with_a_prompt(tmp_path):
  row = dict(id=7, question="a", answer="1", tolerance=0.01, exact=False, none=None, empty="")
  row |= dict(tests=["1"], extra=dict(split="train", deep=dict(rating=1000), tests=[1]))
  row |= dict(long="x" * formats.MAX_INFO, too_long="x" * (formats.MAX_INFO + 1))
  (prompt,) = load(write(tmp_path / "a.jsonl", [row]))
  assert dict(prompt.info) == {
    "tolerance": "0.01",
    "exact": "False",
    "extra.split": "train",
    "extra.deep.rating": "1000",
    "long": "x" * formats.MAX_INFO,
  }
  (prompt,) = load(f"{tmp_path}/a.jsonl", answer_field="extra.split", question_field="{question}!")
  assert {"answer", "extra.deep.rating"} <= dict(prompt.info).keys()
  assert not {"question", "extra.split", "id"} & dict(prompt.info).keys()


def test_starter_code_changes_the_prompt(tmp_path):
  row, _ = DOCUMENTED["livecodebench"]
  row = row | {"starter_code": "class Solution:\n  def f(self, x): return {x}"}
  (prompt,) = load(f"livecodebench@{write(tmp_path / 'a.jsonl', [row])}")
  text = BYTES.decode(prompt.tokens)
  assert row["starter_code"] in text and "stdin" not in text and prompt.question in text


@pytest.mark.parametrize("box", [r"\boxed", r"\fbox"])
def test_answers_in_a_box(tmp_path, box):
  rows = [dict(question="a", answer=rf"First {box}{{1}}, then {box}{{\frac{{2}}{{3}}}}.")]
  (prompt,) = load(write(tmp_path / "a.jsonl", rows), answer_pattern="boxed")
  assert prompt.answer == r"\frac{2}{3}"
  bad = write(tmp_path / "b.jsonl", [dict(question="a", answer="it is 7")])
  with pytest.raises(sources.DataError, match=r"b.jsonl, line 1: .*finds no answer"):
    load(bad, answer_pattern="boxed")


def test_unknown_format_names_those_that_are():
  with pytest.raises(sources.DataError, match=r"unknown format 'gsm'; choose one of gsm8k"):
    load("gsm@a.jsonl")


@pytest.mark.parametrize("tests", ["none", [], None, ["1", "2"], [{"input": "1"}]])
def test_tests_of_another_form_are_a_bad_row(tmp_path, tests):
  row = DOCUMENTED["codeforces"][0] | dict(official_tests=tests)
  with pytest.raises(sources.DataError, match=r"line 1: the field '(official_tests|output)'"):
    load(f"codeforces@{write(tmp_path / 'a.jsonl', [row])}")


def test_a_row_of_another_format_is_told_what_to_set(tmp_path):
  path = write(tmp_path / "a.jsonl", [dict(problem="1+1?", solution="2")])
  unset = r"'question' is missing; .* or leave out gsm8k@ and set data\.question_field"
  for name, message in dict(gsm8k=unset, math=r"the pattern 'boxed' finds no answer").items():
    with pytest.raises(sources.DataError, match=message):
      load(f"{name}@{path}", question_field="problem")


# Filters.


@pytest.mark.parametrize(
  "where, kept",
  [
    ("level==3", [3, 8]), ("level!=3 and level>=3", [4, 9]), ("level<1", [0, 5]),
    ("question=~^[12]", [1, 2]), ("question!~^[0-7]", [8, 9]),
    ("answer>=9", [9]),  # as numbers, though the field holds text
    ("info.date>=2024-10-01", list(range(5, 10))), ("prompt_tokens<=5 and level<=1", [0, 1, 5, 6]),
    ("prompt_tokens<5", []),
  ],
)  # fmt: skip
def test_filters(tmp_path, where, kept):
  rows = numbered(0, 10)
  for i, row in enumerate(rows):
    row["info"] = dict(date=f"2024-{5 + i:02d}-30T12:00:00")
  path = write(tmp_path / "a.jsonl", rows)
  if not kept:
    with pytest.raises(sources.DataError, match=r"0 bad rows, 10 rows excluded by the filter"):
      load(f"{path} where {where}")
    return
  source = load(f"{path} where {where}")
  assert [int(p.answer) for p in source] == kept
  assert source.skipped == 0


@pytest.mark.parametrize(
  "values, kept",
  [
    (["8", "9", "10", "11"], {"x>=9 and x<11": "12"}),  # numbers, though they are texts
    ([1000, None, 900], {"x>0": "02", "x<=950": "2", "x!=1000": "12", "x!~^1": "12"}),
    ([True, False], {"x==true": "0", "x!=true": "1", "x==False": "1"}),  # JSON's or Python's
  ],
)
def test_null_is_neither_more_nor_less_and_texts_are_compared_as_what_they_say(
  tmp_path, values, kept
):
  rows = [row | dict(x=value) for row, value in zip(numbered(0, 9), values)]
  path = write(tmp_path / "a.jsonl", rows)
  for place, answers in kept.items():
    assert "".join(p.answer for p in load(f"{path} where {place}")) == answers


def test_the_window_of_the_paper(tmp_path):
  row, _ = DOCUMENTED["livecodebench"]
  dates = ["2024-09-30T23:59:59", "2024-10-01T00:00:00", "2025-02-28T23:59:59", "2025-03-01"]
  rows = [row | dict(question_id=date, contest_date=date) for date in dates]
  path = write(tmp_path / "a.jsonl", rows)
  windows = re.findall(r"where (contest_date>=[^`]*)`", DOCS)  # The page may break a line in it.
  (window,) = {" ".join(window.split()) for window in windows}
  source = load(f"livecodebench@{path} where {window}")
  assert [p.id for p in source] == dates[1:3]


def test_dates_of_parquet_are_compared_as_dates():
  (condition,) = filters.conditions("when<2025-03-01", "data.eval")
  assert condition.keeps(datetime.datetime(2025, 2, 28, 23))
  assert not condition.keeps(datetime.datetime(2025, 3, 1))


def test_prompts_too_long_can_be_filtered_out(tmp_path):
  rows = [dict(question="x" * n, answer="1") for n in (5, 50, 6)]
  path = write(tmp_path / "a.jsonl", rows)
  with pytest.raises(sources.DataError, match="line 2: the prompt takes 53 tokens"):
    load(path, max_prompt_tokens=10)
  assert len(load(f"{path} where prompt_tokens<=10", max_prompt_tokens=10)) == 2


@pytest.mark.parametrize(
  "where",
  ["level", "level=3", "q=~(("]
  + [f"level!=3 {word} level!=4" for word in ("or", "OR", "AND", "&&", "||")]
  + ["level!=hard:0.9", "level>=3:.5"],
)
def test_bad_filters(tmp_path, where):
  path = write(tmp_path / "a.jsonl", numbered(0, 3))
  with pytest.raises(sources.DataError, match=r"data.train: "):
    load(f"{path} where {where}")


def test_filter_on_a_field_that_is_not_there(tmp_path):
  with pytest.raises(sources.DataError, match=r"line 1: the field 'nope' is missing.*the filter"):
    load(f"{write(tmp_path / 'a.jsonl', numbered(0, 3))} where nope==1")


# Mixtures.


@pytest.fixture
def two(tmp_path):
  return write(tmp_path / "a.jsonl", numbered(0, 10)), write(
    tmp_path / "b.jsonl", numbered(100, 30)
  )


def test_weights_are_shares_in_the_long_run(two):
  source = load(f"{two[0]}:0.75, {two[1]}:0.25")
  assert len(source) == 40
  drawn = [int(q[:-1]) for q in take(sources.Batches(source, 4, seed=0), 100)]
  small = [i for i in drawn if i < 100]
  assert len(small) == 300
  # Epochs per source: the small one has been through 30 times, every row equally often.
  assert all(small.count(i) == 30 for i in range(10))
  assert all(3 <= drawn.count(i) <= 4 for i in range(100, 130))
  for start in range(0, 400, 40):  # evenly interleaved, not one after the other
    assert 25 <= sum(i < 100 for i in drawn[start : start + 40]) <= 35


def test_without_weights_sizes_decide(two):
  source = load(f"{two[0]}, {two[1]}")
  drawn = take(sources.Batches(source, 4, seed=0), 10)
  assert sum(int(q[:-1]) < 100 for q in drawn) == 10


def test_sources_of_one_size_are_shuffled_differently(tmp_path):
  files = [write(tmp_path / f"{n}.jsonl", numbered(n, 10)) for n in (0, 100)]
  drawn = [int(q[:-1]) for q in take(sources.Batches(load(",".join(files)), 20, seed=0), 1)]
  assert [i for i in drawn if i < 100] != [i - 100 for i in drawn if i >= 100]


def test_mixture_is_a_sequence_and_its_ids_are_unique(tmp_path):
  a = write(tmp_path / "a.jsonl", [*numbered(0, 3), dict(id=7, question="a", answer="1")])
  b = write(tmp_path / "b.jsonl", [dict(id=7, question="b", answer="1", level=9)])
  source = load(f"{a}, {b} where level==9")
  assert [p.question for p in source] == ["0?", "1?", "2?", "a", "b"]
  assert len({p.id for p in source}) == 5 and source[4].id == f"@{b}#7"


@pytest.mark.parametrize(
  "spec, message",
  [
    ("{a}:0.5, {b}", "either every source"),
    ("{a}:0, {b}:1", "weight above 0"),
    ("{a}, {a}", "twice"),
    ("{a},, {b}", "empty part"),
    ("arithmetic:train where level==1", "neither formats nor filters"),
  ],
)
def test_bad_mixtures(two, spec, message):
  with pytest.raises(sources.DataError, match=message):
    load(spec.format(a=two[0], b=two[1]))


def test_mixture_with_the_embedded_task(two):
  source = load(f"arithmetic:train:0.5,{two[0]}:0.5", max_prompt_tokens=20)
  drawn = take(sources.Batches(source, 10, seed=0), 2)
  assert sum(q.endswith("=") for q in drawn) == 10
  assert sources.fitting(source, BYTES, 40, "raise").weights == source.weights


def test_mixture_resumes(two):
  source = load(f"{two[0]}:2,{two[1]}:1")
  whole = sources.Batches(source, 6, seed=3)
  expected = take(whole, 10)
  half = sources.Batches(source, 6, seed=3)
  take(half, 4)
  resumed = sources.Batches(source, 6, seed=3)
  resumed.set_state(json.loads(json.dumps(half.get_state())))
  assert take(resumed, 6) == expected[24:]


# Sources that grow, prompts that are not wanted.


def test_new_file_starts_a_new_epoch(tmp_path, caplog):
  write(tmp_path / "a.jsonl", numbered(0, 10))
  before = load(f"{tmp_path}/*.jsonl")
  old = sources.Batches(before, 5, seed=0)
  take(old, 1)
  state = json.loads(json.dumps(old.get_state()))

  write(tmp_path / "b.jsonl", numbered(100, 10))
  after = load(f"{tmp_path}/*.jsonl")
  assert {p.id for p in before} < {p.id for p in after}  # ids stay, and with them solve rates
  grown = sources.Batches(after, 5, seed=0)
  grown.set_state(state)
  assert "training data has changed" in caplog.text
  epoch = take(grown, 4)
  assert sorted(epoch) == sorted(p.question for p in after)
  assert epoch != take(sources.Batches(after, 5, seed=0), 4)  # an order of its own

  # From here on the run resumes exactly, and over a further change as well.
  state = json.loads(json.dumps(grown.get_state()))
  expected = take(grown, 6)
  again = sources.Batches(after, 5, seed=0)
  again.set_state(state)
  assert take(again, 6) == expected
  shrunk = sources.Batches(before, 5, seed=0)
  shrunk.set_state(state)
  assert shrunk.get_state()["restarts"] == 2
  assert sorted(take(shrunk, 2)) == sorted(p.question for p in before)


def test_prompts_that_are_not_wanted_are_passed_over(two):
  source = load(two[0])
  batches = sources.Batches(source, 4, seed=0)

  def even(prompt):
    return int(prompt.answer) % 2 == 0

  drawn = [p.answer for _ in range(5) for p in batches.take(4, even)]
  assert sorted(drawn) == sorted("02468" * 4)
  queue = []
  assert len(batches.take(30, queue.append)) == 30  # none is wanted: it does not hang
  assert len(queue) == 2 * len(source) + 30  # nor look for each anew


def test_prompts_that_are_wanted_are_waited_for_where_their_source_has_little_weight(two):
  """Every row of every part has come twice before any other prompt is taken."""
  batches = sources.Batches(load(f"{two[0]}:0.99, {two[1]}:0.01"), 8, seed=0)
  assert all(int(p.answer) >= 100 for p in batches.take(8, lambda p: int(p.answer) >= 100))


@pytest.mark.parametrize(
  "template, thinks", [("{question}", False), ("{question}\n<think>\n", True)]
)
def test_prompts_know_whether_the_response_begins_with_a_thought(tmp_path, template, thinks):
  path = write(tmp_path / "rows.jsonl", [dict(question="<think> is a tag", answer="1")])
  assert load(path, prompt_template=template)[0].thinks is thinks
  assert load("arithmetic:train", prompt_template=template)[0].thinks is thinks


# Rows of programs, whose answers are tests.

CHECK = rewards.answer_check("code")
BROKEN = {
  "humaneval": dict(
    test=[
      "METADATA = {}",
      "def check(f):\n  pass\n",
      "def check(f)\n  assert f(1)\n",
      "",
      "def check(f):\n  f(1) == 1\n",
    ],
    entry_point=["", None],
    prompt=["Write a function."],
  ),
  "apps": dict(input_output=["{}", "no JSON", '{"inputs": [], "outputs": []}']),
  "codeforces": dict(official_tests=[[], [{"input": "1"}], "1"]),
  "livecodebench": dict(
    private_test_cases=["!!!", "AAAA"], public_test_cases=["[]", "[{}]", ""], metadata=["[1]", "{"]
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_whose_tests_cannot_judge_are_found_when_they_are_loaded(tmp_path, name):
  good = DOCUMENTED[name][0]
  broken = [good | {key: value} for key, values in BROKEN[name].items() for value in values]
  for row in broken:
    path = write(tmp_path / "a.jsonl", [good, row])
    with pytest.raises(sources.DataError, match=r"a\.jsonl, line 2: .*data\.on_error=skip"):
      load(f"{name}@{path}", CHECK)
  rows = [row | {"id": str(i), "task_id": str(i)} for i, row in enumerate([good, *broken])]
  for row in rows:
    row.update({key: row["id"] for key in ("question_id", "problem_id") if key in row})
  source = load(f"{name}@{write(tmp_path / 'b.jsonl', rows)}", CHECK, on_error="skip")
  assert len(source) == 1 and source.skipped == len(broken)


PROGRAMS = {
  "humaneval": ("def f(x):\n  return x", "def f(x):\n  return x + 1"),
  "apps": ("print(2 * int(input()))", "print(3)"),
  "codeforces": ("print(2 * int(input()))", "print(2)"),
  "livecodebench": ("print(2 * int(input()))", "print(1)"),
}


@needs_namespaces
def test_documented_rows_accept_right_programs_and_no_wrong_ones(tmp_path):
  with CodeVerifier(1, LIMITS) as verifier:
    for name, programs in PROGRAMS.items():
      path = write(tmp_path / f"{name}.jsonl", [DOCUMENTED[name][0]])
      (prompt,) = load(f"{name}@{path}", CHECK)
      responses = [f"```python\n{program}\n```" for program in programs]
      assert verifier.score(responses, [prompt.answer] * 2) == ["right", "wrong"], name
