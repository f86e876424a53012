"""Gold answers that are none, such as "proof" or "N/A", and gold answers in words."""

from pathlib import Path

import pytest
from support import tables
from support.cost import assert_linear

from gspo_jax import rewards
from gspo_jax.verifiers import math_answer
from gspo_jax.verifiers.mathematics import golds

HERE = Path(__file__).parent
PLACEHOLDERS = [row[0] for row in tables.read(HERE / "placeholders.txt")]
GOLDS = tables.read(HERE / "golds.txt")


@pytest.mark.parametrize("text", PLACEHOLDERS)
def test_a_placeholder_is_no_gold_answer(text):
  with pytest.raises(ValueError, match="is a placeholder"):
    math_answer.check_answer(text)


@pytest.mark.parametrize("text, words", GOLDS)
def test_an_answer_in_words_is_a_gold_answer(text, words):
  math_answer.check_answer(text)
  assert (math_answer.word(text) or "-") == words


def test_no_response_to_a_placeholder_has_a_verdict():
  with math_answer.MathVerifier(workers=1, time_limit_s=20.0) as verifier:
    responses = [r"\boxed{proof}", r"\boxed{\text{no solution}}", "I do not know.", r"\boxed{5}"]
    outcomes = verifier.score(responses, ["proof", "None", "N/A", "5"])
    assert outcomes == ["crash", "crash", "crash", "right"]
    assert "'proof' is a placeholder" in outcomes[0].reason
    assert verifier.check(responses, ["proof", "None", "N/A", "5"]) == outcomes


@pytest.mark.parametrize(
  "answers, expected",
  [
    (["yes", "Yes", r"\text{no}", "5"], "yes: 50%"),
    (["yes", "5", "5"], None),
    (["yes", "5"], None),
    (["1", "2", "AB", "x"], None),
    (["even"], "even: 100%"),
    ([], None),
  ],
)
def test_a_most_frequent_gold_answer_in_words(answers, expected):
  assert rewards.frequent_word("math", answers) == expected
  assert rewards.frequent_word("string", answers) is None


@pytest.mark.parametrize("unit", ["see ", "a", "- ", r"\text{", "answers may vary ", "?"])
def test_reading_a_gold_answer_is_linear(unit):
  assert_linear(golds.placeholder, lambda n: (unit * (n // len(unit)),))
