"""The math verifier: extraction, equivalence, and answers that hang the library."""

import os
from concurrent import futures
from pathlib import Path

import pytest
from support import tables
from support.cost import assert_linear

from gspo_jax.verifiers import math_answer
from gspo_jax.verifiers.math_answer import Outcome
from gspo_jax.verifiers.pool import Failure

RIGHT, WRONG = Outcome.RIGHT, Outcome.WRONG


@pytest.fixture(scope="module")
def verifier():
  with math_answer.MathVerifier(workers=2, time_limit_s=20.0) as verifier:
    yield verifier


@pytest.mark.parametrize("unit", [r"\boxed{", "$", r"\(", "#### ", "1,000", "{", "answer is "])
def test_extraction_is_fast_on_hostile_text(unit):
  def look(text):
    math_answer.quick_judge(math_answer.extract(text), "5")

  assert_linear(look, lambda n: (unit * (n // len(unit)),))


# Numbers in every form that they are written in.

FORMS = [
  r"\boxed{%s}", "%s", "so the answer is %s.", r"hence $x = %s$ metres",
  r"\boxed{%s\text{ apples}}", r"**Answer:** \$%s",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gold", ["7", "1080", "2,125", "-36", "0.25", "70000", "145.0"])
def test_gold_answers_verify_in_every_form_and_perturbed_ones_do_not(verifier, form, gold):
  value = float(gold.replace(",", ""))
  right = [gold, f"{value:,g}" if abs(value) < 1e5 else f"{value:,.0f}", f"{value:.2f}"]
  assert verifier.score([form % text for text in right], [gold] * 3) == [RIGHT] * 3
  wrong = [f"{w:.2f}" for w in (value + 1, value - 1, 10 * value + 3, -value, value + 0.5)]
  assert verifier.score([form % text for text in wrong], [gold] * 5) == [WRONG] * 5


def test_outcomes(verifier):
  rows = tables.read(Path(__file__).parent / "mathematics" / "outcomes.txt")
  rows.append((rf"\boxed{{{'1+' * 600}1}}", "601", "unparsable"))
  rows.append((rf"\boxed{{\{{{'1,' * 64}1\}}}}", r"\{1\}", "unparsable"))
  responses, golds, expected = zip(*rows)
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
  for name in ("timeout", "crash"):
    monkeypatch.setattr(verifier._pool, "map", lambda items, n=name: [Failure(n)] * len(items))
    assert verifier.score([r"\boxed{\sqrt{72}}"], [r"6\sqrt{2}"]) == [name]
  monkeypatch.setattr(verifier._pool, "map", run)
  assert verifier.score([r"\boxed{\sqrt{72}}"], [r"6\sqrt{2}"]) == [RIGHT]


@pytest.mark.long
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


# One call, for whoever has no pool.


def test_one_call_checks_one_response():
  assert math_answer.verify(r"so \boxed{\frac{1}{2}}", "0.5") == RIGHT
  assert math_answer.verify(r"\boxed{\sqrt{3}}", r"\sqrt{2}") == WRONG
  assert math_answer.verify("No idea.", "5") == Outcome.UNPARSABLE
  assert math_answer.verify("3 * 6 is 18", "18", finished=False) == Outcome.UNPARSABLE
  assert math_answer.verify(r"\boxed{e^{e^{e^{e^e}}}}", r"2\sqrt{2}", time_limit_s=1.0) == "timeout"
  assert math_answer.verify("No idea.", r"\frac{") == "crash"
  with pytest.raises(ValueError, match="empty"):
    math_answer.verify("5", " ")


def test_calls_share_a_process_and_a_forked_process_has_its_own():
  def call():
    return math_answer.verify(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")

  with futures.ThreadPoolExecutor(4) as threads:
    assert [x.result() for x in [threads.submit(call) for _ in range(8)]] == [RIGHT] * 8
  pids = math_answer.shared(5.0)._pool.pids
  assert len(pids) == 1
  reader, writer = os.pipe()
  if not (child := os.fork()):
    try:
      os.write(writer, f"{call()} {math_answer.shared(5.0)._pool.pids == pids}".encode())
    finally:
      os._exit(0)
  os.close(writer)
  assert os.read(reader, 100) == b"right False"
  os.waitpid(child, 0)
  assert call() == RIGHT and math_answer.shared(5.0)._pool.pids == pids
