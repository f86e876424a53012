"""Conditions on fields of every kind, with every operator."""

import datetime
import decimal
import re

import numpy as np
import pytest
from support.data_cases import load, write

from gspo_jax.data import filters, sources
from gspo_jax.data.files import BadRow

LEVELS = ["Level 1", "Level 2", "Level 3", "Level 4", "Level 5", "Level 10"]
BAD = "bad"


def keeps(clause, field):
  """Whether a field is kept; BAD for a bad row."""
  (condition,) = filters.conditions(f"x{clause}", "data.train")
  try:
    return condition.keeps(field)
  except BadRow as error:
    assert "'x'" in str(error) and clause in str(error) and "Correct the row" in str(error)
    return BAD


@pytest.mark.parametrize(
  "clause, expected",
  [
    (">=3", LEVELS[2:]), (">3", LEVELS[3:]), ("<=3", LEVELS[:3]), ("<3", LEVELS[:2]),
    ("==3", [LEVELS[2]]), ("!=3", LEVELS[:2] + LEVELS[3:]), ("==3.0", [LEVELS[2]]),
    (">=Level 3", LEVELS[2:]), ("<Level 10", LEVELS[:5]), ("==Level 3", [LEVELS[2]]),
  ],
)  # fmt: skip
def test_a_text_counts_as_its_only_number(clause, expected):
  assert [x for x in LEVELS if keeps(clause, x)] == expected


NUMBERS = {
  "3": 3, "12 kyu": 12, "Level 3": 3, "level-3": 3, "Grade: 3": 3, "-3": -3, "Level -3": -3,
  "Level −3": -3, "3rd": 3, "1,200 points": 1200, "1,200": 1200, "3.5 stars": 3.5, ".5": 0.5,
  "50%": 50, "(4)": 4, "1e3": 1000, "rating 1500.": 1500, " 7 ": 7, "三 3": 3,
}  # fmt: skip
WITHOUT = ["Level ?", "hard", "", "3 of 5", "3-5", "1/2", "x=3", "nan", "NaN", r"\frac{1}{2}", "²"]
WITHOUT += ["2.5k", "1 M"]


@pytest.mark.parametrize("text, number", NUMBERS.items())
def test_numbers_in_texts(text, number):
  for op, outcome in {
    ">=": True,
    "<=": True,
    "==": True,
    ">": False,
    "<": False,
    "!=": False,
  }.items():
    assert keeps(f"{op}{number}", text) is outcome, op
  assert keeps(f">{number - 1}", text) and keeps(f"<{number + 1}", text)


@pytest.mark.parametrize("text", WITHOUT)
def test_there_is_no_order_between_a_number_and_a_text_without_one(text):
  assert [keeps(f"{op}3", text) for op in filters.ORDER] == [BAD] * 4
  assert (keeps("==3", text), keeps("!=3", text)) == (False, True)
  assert keeps("=~3", text) is bool(re.search("3", text))


@pytest.mark.parametrize(
  "clause, field, expected",
  [
    (">=hard", 3, BAD), ("==hard", 3, False), ("!=hard", 3, True), (">=Level 3", 5, True),
    (">=Level 3", "Level ?", BAD), (">=Level 3", "easy", BAD), (">=hard", "Level 3", BAD),
    ("<medium", "easy", True), (">=medium", "easy", False),  # two texts
    (">=3", None, False), ("<3", None, False), ("==3", None, False), ("!=3", None, True),
    (">=3", float("nan"), False), ("<3", np.float32("nan"), False), ("!=3", float("nan"), True),
    (">=1", True, BAD), ("<1", np.False_, BAD), ("==1", True, BAD), ("!=0", True, BAD),
    ("==true", True, True), ("!=true", np.True_, False), ("==False", False, True),
    (">=true", True, BAD),
    (">=1", [1, 2], BAD), ("<1", [], BAD), (">1", {"a": 2}, BAD), ("==[]", [], True),
    ("!=[]", [1], True), ("=~dp", ["dp", "math"], True), (">=1", np.array([1, 2]), BAD),
    (">=3", 3, True), (">=3", 3.5, True), (">3", np.int64(4), True),
    ("<=0.1", np.float64(0.1), True),
    (">=0.1", decimal.Decimal("0.1"), True), (">=3", b"Level 4", True),
    ("==9007199254740993", 9007199254740992, False),  # exact
    (">=2024-10-01", "2024-09-30T23:59:59", False), (">=2024", "2024-10-01", True),
    ("<2025", datetime.date(2024, 12, 31), True), (">=3", "2024-10-01", BAD),
    (">=2024-10-01", datetime.datetime(2024, 10, 1, 5), True), (">=2024-10-01", "Oct 2024", BAD),
    ("<2025-03-01", "2025/02/28", True), ("<=2025-02-28", "2025-02-28T00:00:00", True),
    ("==2025-02-28", "2025-02-28T00:00:00", True), (">2025-02-27", "2025-02-27T09:00:00", False),
    (">2024", "2024-10-01", False),
    ('!="a b"', "a b", False), ("=='a b'", "a b", True), ("==The 'A' team", "The 'A' team", True),
    ("==a or b", "a or b", True),
    ("==2024-10-05T00:00:00", "2024-10-05T00:00:00", True), ("==x:y", "x:y", True),
  ],
)  # fmt: skip
def test_kinds_of_fields(clause, field, expected):
  assert keeps(clause, field) == expected


def test_the_levels_of_math(tmp_path):
  """A level without a number is a bad row, with its line."""
  rows = [
    dict(problem=f"p{i}", solution=rf"\boxed{{{i}}}", level=f"Level {level}")
    for i, level in enumerate([1, 2, 3, 4, 5, "?"])
  ]
  path = write(tmp_path / "math.jsonl", rows)
  with pytest.raises(
    sources.DataError, match=r"math\.jsonl, line 6: the field 'level' is 'Level \?'"
  ):
    load(f"math@{path} where level>=3")
  source = load(f"math@{path} where level>=3", on_error="skip")
  assert [prompt.answer for prompt in source] == ["2", "3", "4"] and source.skipped == 1
