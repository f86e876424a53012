r"""Verifier of mathematical answers. Imports no JAX, and works from any thread.

1. `extract` finds the candidate, which is the answer in a response: the last `\boxed{...}`, else
   the text after "answer is", else the last `<answer>`, else the value in the last sentence.
2. This process compares the texts, and the values of plain numbers.
3. If this comparison does not decide, `gspo_jax.verifiers.mathematics` parses both answers, and
   SymPy compares them. SymPy may hang, so it runs in worker processes that can be killed.

If the verifier hangs or crashes, the outcome is "timeout" or "crash" rather than "wrong".
"""

import contextlib
import enum
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from gspo_jax.verifiers import pool
from gspo_jax.verifiers.mathematics import golds, quantity
from gspo_jax.verifiers.mathematics.extract import BOX, extract
from gspo_jax.verifiers.mathematics.spelling import MAX_ANSWER, normalise, same_numbers

MAX_CACHED = 1 << 16  # Outcomes in the cache of symbolic comparisons; a larger cache is cleared.
UNREADABLE = "the gold answer {!r:.80} cannot be read as mathematics"
PLACEHOLDER = "the gold answer {!r:.80} is a placeholder, not an answer"


class Outcome(enum.StrEnum):
  """Result of verifying one response."""

  RIGHT = "right"
  WRONG = "wrong"
  UNPARSABLE = "unparsable"  # The response has no answer, or its answer cannot be parsed.
  TIMEOUT = "timeout"  # The comparison took too long.
  CRASH = "crash"  # The verifier failed, or the gold answer is a placeholder or cannot be parsed.


# UNKNOWN outcomes are no verdict on the response.
OUTCOMES, UNKNOWN = tuple(Outcome), (Outcome.TIMEOUT, Outcome.CRASH)


@contextlib.contextmanager
def open_verifier(workers: int, time_limit_s: float) -> Iterator[Callable]:
  """Yields the verifying function for `gspo_jax.rewards.scorer`.

  It maps (responses, prompts, finished) to (outcomes, None). None means that there are no scores
  between right and wrong.
  """
  with MathVerifier(workers, time_limit_s) as verifier:

    def check(responses, prompts, finished):
      return verifier.check(responses, [prompt.answer for prompt in prompts], finished), None

    yield check


def check_answer(text: str) -> None:
  """Raises ValueError for a gold answer such as "proof", "N/A" or "answers may vary"."""
  if golds.placeholder(_gold(text)):
    raise ValueError(PLACEHOLDER.format(text))


def word(text: str) -> str | None:
  """Returns the gold answer in lower case if it consists of words, else None."""
  return golds.word(_gold(text))


def verify(
  response: str, answer: str, finished: bool = True, time_limit_s: float = 5.0
) -> Outcome | pool.Failure:
  """Checks a response against a gold answer. Safe from any thread, and in forked processes.

  Plain numbers are compared in this process. SymPy may hang, so it runs in a child process. The
  first call with each time limit starts a child, which takes about a second. If a comparison takes
  longer than the limit, the child is killed and replaced. `MathVerifier` is faster for batches.

  Args:
    response: text of the response, thought included.
    answer: the gold answer.
    finished: False for a truncated response; its last sentence is incomplete and not read.
    time_limit_s: limit of one comparison, in seconds.

  Returns:
    The verdict "right", "wrong" or "unparsable". If the verifier failed, the value is a
    `pool.Failure`, which is "timeout" or "crash" and has a `reason`. If the gold answer is a
    placeholder, the value is "crash". If the gold answer cannot be read, a response with the same
    text is right, and for any other response the value is "crash".

  Raises:
    RuntimeError: SymPy is missing, or the child process cannot be started.
    ValueError: the gold answer is empty.
  """
  return shared(time_limit_s).check([response], [answer], [finished])[0]


def shared(time_limit_s: float) -> "MathVerifier":
  """Returns this process's verifier with a time limit, opened at first use."""
  with _lock:
    if time_limit_s not in _shared:
      _shared[time_limit_s] = MathVerifier(1, time_limit_s)
    return _shared[time_limit_s]


def _forget() -> None:
  """Drops lock and verifiers in a forked process, since their pipes belong to the parent."""
  global _lock
  _lock = threading.Lock()
  _shared.clear()


_lock = threading.Lock()
_shared: dict[float, "MathVerifier"] = {}  # Verifiers by time limit.
os.register_at_fork(after_in_child=_forget)


class MathVerifier(contextlib.AbstractContextManager):
  """Verifies batches of responses, with SymPy in worker processes.

  Args:
    workers: number of processes. The constructor waits until they run, about a second.
    time_limit_s: limit of one comparison in wall-clock seconds, counted from its start in a worker.

  Raises:
    RuntimeError: SymPy is missing, or a process cannot be started.
  """

  def __init__(self, workers: int, time_limit_s: float):
    if importlib.util.find_spec("sympy") is None:
      raise RuntimeError("math_answer needs SymPy: pip install '.[verifiers]'")
    self._pool = pool.Pool(
      f"{__name__}:_judge_pair", workers, time_limit_s, warm_up=[r"\frac{x}{2}", r"\sqrt{2}x"]
    )
    # Outcomes of symbolic comparisons, by (candidate, gold answer).
    self._cache: dict[tuple[str, str], Outcome] = {}
    self._readable: dict[str, bool] = {}  # Whether each gold answer can be parsed.

  def score(
    self, responses: Sequence[str], answers: Sequence[str], finished: Sequence[bool] | None = None
  ) -> list[Outcome | pool.Failure]:
    """Returns one outcome per response.

    If a gold answer is a placeholder, each of its responses is a crash. If a gold answer cannot be
    parsed, a response whose answer is the same text is right, a response without an answer is
    unparsable, and any other response is a crash. In `check`, a response without an answer is a
    crash in this case, too.

    Args:
      responses: texts of the responses.
      answers: the gold answer of each response.
      finished: False for each truncated response. None means that none is truncated.

    Raises:
      ValueError: the lengths differ, or a gold answer is empty.
    """
    if any(not answer.strip() for answer in answers):
      raise ValueError("a gold answer is empty: each response needs one with a text")
    finished = [True] * len(responses) if finished is None else finished
    triples = zip(responses, answers, finished, strict=True)
    pairs = [(extract(response, whole), answer) for response, answer, whole in triples]
    # Responses to one prompt often have equal answers, so each distinct pair is compared once.
    outcomes = {pair: self._cache.get(pair) or _quick_outcome(*pair) for pair in pairs}
    slow = [pair for pair, outcome in outcomes.items() if outcome is None]
    if len(self._cache) > MAX_CACHED:
      self._cache.clear()
    for pair, result in zip(slow, self._pool.map(slow)):
      if isinstance(result, pool.Failure):
        outcomes[pair] = result  # Not cached, since the machine may have been busy.
      else:
        outcomes[pair] = self._cache[pair] = Outcome(result)
    return [outcomes[pair] for pair in pairs]

  def check(
    self, responses: Sequence[str], answers: Sequence[str], finished: Sequence[bool] | None = None
  ) -> list[Outcome | pool.Failure]:
    """Returns one outcome per response; arguments and errors as in `score`.

    If a gold answer cannot be parsed, each of its responses that is not right is a crash, since the
    gold answer is at fault.
    """
    outcomes, broken = self.score(responses, answers, finished), self.unreadable(answers)
    return [
      outcome if outcome == Outcome.RIGHT else broken.get(answer, outcome)
      for outcome, answer in zip(outcomes, answers)
    ]

  def unreadable(self, answers: Sequence[str]) -> dict[str, pool.Failure]:
    """Returns a dict from unparsable gold answers to failures.

    Whether a gold answer can be parsed is cached.
    """
    new = [answer for answer in dict.fromkeys(answers) if answer not in self._readable]
    # A gold answer that `quick_judge` can compare with "0" is a plain number, and readable.
    slow = [answer for answer in new if quick_judge("0", answer) is None]
    readable = dict.fromkeys(new, True) | dict(zip(slow, self._pool.map([[None, a] for a in slow])))
    self._readable |= {a: r for a, r in readable.items() if not isinstance(r, pool.Failure)}
    broken = [answer for answer in set(answers) if self._readable.get(answer) is False]
    return {a: pool.Failure("crash", UNREADABLE.format(a)) for a in broken}

  def __exit__(self, *_):
    self._pool.close()


def boxed(solution: str) -> str | None:
  """Returns the boxed answer of a solution. Returns None if no box has content."""
  return extract(solution) if BOX.search(solution) else None


@functools.lru_cache(maxsize=1 << 14)
def _gold(answer: str) -> str:
  r"""Returns the answer in a gold solution.

  If there is a box, the answer is its content, or the text after `\boxed{` if the brace is never
  closed. A text without a box is the answer as a whole. If longer than `MAX_ANSWER`, this text is
  read like a response.
  """
  if not BOX.search(answer):
    return (extract(answer) or answer) if len(answer) > MAX_ANSWER else answer
  return boxed(answer) or BOX.split(answer)[-1].removeprefix("{")


def _quick_outcome(candidate: str | None, answer: str) -> Outcome | pool.Failure | None:
  """Returns a crash if the gold answer is a placeholder, else the value of `quick_judge`."""
  if golds.placeholder(_gold(answer)):
    return pool.Failure(Outcome.CRASH, PLACEHOLDER.format(answer))
  return quick_judge(candidate, answer)


def quick_judge(candidate: str | None, answer: str) -> Outcome | None:
  """Compares texts and plain numbers. Returns None if SymPy must decide.

  candidate: None for a response without answer.
  """
  if candidate is None or len(candidate) > MAX_ANSWER:
    return Outcome.UNPARSABLE
  answer = _gold(answer)
  ours, gold = normalise(candidate), normalise(answer)
  if ours == gold:
    return Outcome.RIGHT if ours else Outcome.UNPARSABLE
  value = quantity.read(gold)
  if value:
    candidate_value = quantity.read(ours, letters=True)
    # If the gold answer is a decimal, the candidate 2,74 is read as 2.74.
    if candidate_value is None and value.places and re.match(r"-?\d+,\d+(?![\d,.])", ours):
      candidate_value = quantity.read(ours.replace(",", "."))
    if candidate_value:
      same = quantity.same(value, candidate_value)
      return None if same is None else Outcome.RIGHT if same else Outcome.WRONG
  return None


# Symbolic comparison, in worker processes only.


def judge(candidate: str, answer: str) -> Outcome:
  """Compares two answers by SymPy, without a time limit.

  An answer may have several readings, for example 1,234 as a number or as a list. The outcome is
  right if a reading of the candidate equals a reading of the gold answer.

  Raises:
    ValueError: the gold answer cannot be parsed and differs from the candidate as text.
  """
  # SymPy takes half a second to import, so only workers import it.
  from gspo_jax.verifiers.mathematics import equal, nodes
  from gspo_jax.verifiers.mathematics.tokens import Unreadable

  answer = _gold(answer)
  if equal.same_text(answer, candidate):
    return Outcome.RIGHT
  is_number = quantity.read(answer) is not None
  readings = _gold_readings(answer)
  if not readings:
    raise ValueError(UNREADABLE.format(answer))
  if not (equal.same_half_days(answer, candidate) and same_numbers(answer, candidate)):
    return Outcome.WRONG
  # A gold answer that is a number, such as 1,234, is not read as a list. The number 2mg, with a
  # unit, may also be the product 2·m·g.
  if is_number:
    products = [r for r in readings[1:] if isinstance(r, nodes.Scalar) and r.value.free_symbols]
    readings = [readings[0], *products]
  parsed = [
    _readings(candidate, unit_letters, solve_inequalities=not is_number)
    for unit_letters in ("units", "variables")
  ]
  candidate_readings = dict.fromkeys(parsed[0] + parsed[1])
  for gold in readings:
    for reading in candidate_readings:
      with contextlib.suppress(Unreadable):
        if equal.same_answer(gold, reading):
          return Outcome.RIGHT
  return Outcome.WRONG if candidate_readings else Outcome.UNPARSABLE


def _judge_pair(pair: list[str | None]) -> str | bool:
  """Runs in a worker: returns the outcome of [candidate, gold answer].

  For the candidate None, returns whether the gold answer can be parsed.
  """
  candidate, answer = pair
  if candidate is not None:
    return judge(candidate, answer).value
  with contextlib.suppress(Exception):
    return bool(_gold_readings(_gold(answer)))
  return False


def _gold_readings(answer: str) -> list:
  r"""Returns the readings of a gold answer.

  For example, \text{m} may be metres or a variable.
  """
  return [*dict.fromkeys(_readings(answer, "text") + _readings(answer, "variables"))]


@functools.lru_cache(maxsize=1 << 12)
def _readings(text: str, unit_letters: str, solve_inequalities: bool = True) -> tuple:
  """Returns the readings of an answer. For example, 1,234 may be a number or a list.

  The arguments are those of `structure.read`.
  """
  from gspo_jax.verifiers.mathematics import structure
  from gspo_jax.verifiers.mathematics.tokens import Unreadable

  text = text if len(text) <= MAX_ANSWER else ""
  nodes = []
  for tight in (True, False):  # Whether 1,234 is one number.
    if tight or re.search(r"\d,\d{3}(?!\d)", text):
      with contextlib.suppress(Unreadable):
        nodes.append(structure.read(text, tight, unit_letters, solve_inequalities))
  if re.fullmatch(r"\s*\$?-?(?:0,\d+|\d+,\d\d)\$?\s*", text):  # A decimal comma.
    nodes.append(structure.read(text.replace(",", "."), True, unit_letters, solve_inequalities))
  return tuple(nodes)
