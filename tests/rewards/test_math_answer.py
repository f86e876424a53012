"""The math verifier: extraction, equivalence, and answers that hang the library."""

from concurrent import futures

import pytest
from support.cost import assert_linear

from gspo_jax.rewards import math_answer
from gspo_jax.rewards.math_answer import Outcome
from gspo_jax.rewards.pool import Failure

RIGHT, WRONG, UNPARSABLE = Outcome.RIGHT, Outcome.WRONG, Outcome.UNPARSABLE


@pytest.fixture(scope="module")
def verifier():
  with math_answer.MathVerifier(workers=2, time_limit_s=20.0) as verifier:
    yield verifier


# Extraction.


@pytest.mark.parametrize(
  "response",
  [
    "",
    "I do not know.",
    r"\boxed{}, perhaps 5",
    r"cut off: \boxed{12",
    "<think>the answer is 5</think>",
    "\x00\ufffd}{",
  ],
)
def test_extract_finds_nothing(response):
  assert math_answer.extract(response) is None


@pytest.mark.parametrize("unit", [r"\boxed{", "$", r"\(", "#### ", "1,000", "{", "answer is "])
def test_extraction_is_fast_on_hostile_text(unit):
  def look(text):
    math_answer.quick_judge(math_answer.extract(text), "5")

  assert_linear(look, lambda n: (unit * (n // len(unit)),))


# Numbers in every form that they are written in.

FORMS = [
  r"\boxed{%s}",
  "%s",
  "so the answer is %s.",
  r"hence $x = %s$ metres",
  r"\boxed{%s\text{ apples}}",
  r"**Answer:** \$%s",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gold", ["7", "1080", "2,125", "-36", "0.25", "70000", "145.0"])
def test_gold_answers_verify_in_every_form_and_perturbed_ones_do_not(verifier, form, gold):
  value = float(gold.replace(",", ""))
  right = [gold, f"{value:,g}" if abs(value) < 1e5 else f"{value:,.0f}", f"{value:.2f}"]
  assert verifier.score([form % text for text in right], [gold] * 3) == [RIGHT] * 3
  wrong = [f"{w:.2f}" for w in (value + 1, value - 1, 10 * value + 3, -value, value + 0.5)]
  assert verifier.score([form % text for text in wrong], [gold] * 5) == [WRONG] * 5


CASES = [
  (r"\boxed{1/3}", "0.333333", RIGHT),
  (r"\boxed{0.33}", "1/3", WRONG),
  (r"\boxed{3.1416}", "3.14159", WRONG),
  (r"\boxed{0.0000002}", "0.0000001", WRONG),
  (r"\boxed{12345678.6}", "12345678.5", WRONG),
  (r"\boxed{70000001}", "70000000", WRONG),
  (r"\boxed{50\%}", "50", RIGHT),
  (r"\boxed{50\%}", "0.5", RIGHT),
  (r"\boxed{0.5}", r"50\%", RIGHT),
  (r"\boxed{0.5\%}", "0.5", WRONG),
  (r"\boxed{100\%}", r"1\%", WRONG),
  (r"\boxed{3 \cdot 6 = 18}", "18", RIGHT),
  (r"$x = 3$ or $x = 5$", "3", WRONG),
  (r"\boxed{x = 3 or x = 5}", "5", WRONG),
  (r"\boxed{18 thousand}", "18", WRONG),
  (r"\boxed{(1, 234)}", "(1,234)", RIGHT),
  (r"\boxed{(1, 2)}", "(2, 1)", WRONG),
  (r"\boxed{\{2, 1\}}", r"\{1,2\}", RIGHT),
  (r"\boxed{\text{Monday}}", "monday", RIGHT),
  (r"\boxed{dayMon}", "Monday", WRONG),
  (r"\boxed{\textbf{(C)}}", "C", RIGHT),
  (r"\boxed{B}", "C", WRONG),
  # Symbolic:
  (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", RIGHT),
  (r"\boxed{2\sqrt{3} meters}", r"2\sqrt{3}", RIGHT),
  (r"\boxed{\sqrt{13}}", r"2\sqrt{3}", WRONG),
  (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", RIGHT),
  (r"\boxed{5}", "x=5", RIGHT),
  (r"\boxed{(-\infty, 3]}", r"(-\infty,3]", RIGHT),
  (r"\boxed{(-\infty, 3)}", r"(-\infty,3]", WRONG),
  (r"\boxed{5 - 2}", "3", RIGHT),
  (r"\boxed{\frac{\pi}{4}}", r"\frac{1}{4}\pi", RIGHT),
  (r"\boxed{18 apples and 3 oranges}", "18", WRONG),
  # No answer, or none that is mathematics:
  ("I do not know.", "18", UNPARSABLE),
  (r"\boxed{\sqrt}", "18", UNPARSABLE),
  (rf"\boxed{{{'1+' * 600}1}}", "601", UNPARSABLE),
]


def test_outcomes(verifier):
  responses, golds, expected = zip(*CASES)
  outcomes = verifier.score(responses, golds)
  assert [*zip(responses, golds, outcomes)] == [*zip(responses, golds, expected)]


def test_score_rejects_bad_input(verifier):
  with pytest.raises(ValueError, match="shorter"):
    verifier.score(["1", "2"], ["1"])
  with pytest.raises(ValueError, match="empty"):
    verifier.score(["1"], [" "])
  assert verifier.score([], []) == []


def test_score_from_threads(verifier):
  def score(i):
    responses = [rf"\boxed{{{i}\sqrt{{{n}}}}}" for n in (2, 3, 5)] + [rf"\boxed{{{i}}}"]
    return verifier.score(responses, [rf"{i}\sqrt{{2}}"] * 3 + [str(i)])

  with futures.ThreadPoolExecutor(4) as threads:
    assert list(threads.map(score, range(10, 22))) == [[RIGHT, WRONG, WRONG, RIGHT]] * 12


def test_judge_sets_no_signal_handlers():
  # Off the main thread that raises.
  with futures.ThreadPoolExecutor(1) as thread:
    assert thread.submit(math_answer.judge, r"\sqrt{12}", r"2\sqrt{3}").result() is RIGHT


def test_equal_answers_are_compared_once_and_failures_again(verifier, monkeypatch):
  sent = []
  run = verifier._pool.map
  monkeypatch.setattr(verifier._pool, "map", lambda items: sent.extend(items) or run(items))
  pair = [r"\boxed{\sqrt{50}}"], [r"5\sqrt{2}"]
  assert verifier.score(pair[0] * 5, pair[1] * 5) == [RIGHT] * 5
  assert verifier.score(*pair) == [RIGHT]
  assert len(sent) == 1
  for outcome, failure in (Outcome.TIMEOUT, Failure.TIMEOUT), (Outcome.CRASH, Failure.CRASH):
    monkeypatch.setattr(verifier._pool, "map", lambda items, f=failure: [f] * len(items))
    assert verifier.score([r"\boxed{\sqrt{72}}"], [r"6\sqrt{2}"]) == [outcome]
  monkeypatch.setattr(verifier._pool, "map", run)
  assert verifier.score([r"\boxed{\sqrt{72}}"], [r"6\sqrt{2}"]) == [RIGHT]


def test_answers_that_hang_sympy_do_not_touch_the_others():
  hang, good = r"\boxed{e^{e^{e^{e^{e}}}}}", r"\boxed{\sqrt{8}}"
  responses = [hang, good, r"\boxed{5}", hang.replace("{e}", "{3}"), good.replace("8", "18")]
  with math_answer.MathVerifier(workers=2, time_limit_s=1.0) as verifier:
    before = set(verifier._pool.pids)
    assert verifier.score(responses, [r"2\sqrt{2}"] * 5) == [
      Outcome.TIMEOUT, RIGHT, WRONG, Outcome.TIMEOUT, WRONG
    ]  # fmt: skip
    assert not before & set(verifier._pool.pids)  # both had to be replaced
    assert verifier.score([r"\boxed{\sqrt{20}}"], [r"2\sqrt{5}"]) == [RIGHT]


@pytest.mark.parametrize("workers, time_limit_s", [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_bad_pool_settings(workers, time_limit_s):
  with pytest.raises(ValueError, match="workers"):
    math_answer.MathVerifier(workers, time_limit_s)
