r"""Verifier of mathematical answers. Imports no jax; works from any thread.

Three steps: `extract` finds the answer that a response gives (the last `\boxed{...}`, else what an
"answer is" announces, else the last formula or number); two plain numbers are compared here,
exactly and at once; everything else is read and compared by `gspo_jax.verifiers.mathematics` and
SymPy in processes that can be killed. A verifier that hangs or dies must not look like a wrong
answer, so `Outcome` has five values.
"""

import contextlib
import enum
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from gspo_jax.verifiers import pool
from gspo_jax.verifiers.mathematics import golds, quantity
from gspo_jax.verifiers.mathematics.extract import BOX, extract
from gspo_jax.verifiers.mathematics.spelling import MAX_ANSWER, normalise

MAX_KNOWN = 1 << 16  # symbolic comparisons that are remembered
UNREADABLE = "the gold answer {!r:.80} cannot be read as mathematics"
PLACEHOLDER = "the gold answer {!r:.80} says that the problem has none"


class Outcome(enum.StrEnum):
  RIGHT = "right"
  WRONG = "wrong"
  UNPARSABLE = "unparsable"  # no answer found, or one that is not mathematics
  TIMEOUT = "timeout"  # The verifier's.
  CRASH = "crash"  # The verifier's; an unreadable gold answer is one.


OUTCOMES, UNKNOWN = tuple(Outcome), (Outcome.TIMEOUT, Outcome.CRASH)


@contextlib.contextmanager
def open_verifier(workers: int, time_limit_s: float) -> Iterator[Callable]:
  """Opens a `MathVerifier` of responses and their prompts; see `gspo_jax.rewards`."""
  with MathVerifier(workers, time_limit_s) as verifier:

    def check(responses, prompts, finished):
      return verifier.check(responses, [prompt.answer for prompt in prompts], finished), None

    yield check


def check_answer(text: str) -> None:
  """Raises ValueError for a gold answer such as "proof", "N/A" or "answers may vary"."""
  if golds.placeholder(_gold(text)):
    raise ValueError(PLACEHOLDER.format(text))


def word(text: str) -> str | None:
  """Returns the words of a gold answer; None for others."""
  return golds.word(_gold(text))


def verify(response: str, answer: str, finished: bool = True, time_limit_s: float = 5.0) -> Outcome:
  """Checks a response against a gold answer. Safe from any thread, and in forked processes.

  Plain numbers are compared here and at once. SymPy, which may hang, runs in one child process: the
  first call starts it in about a second, it is killed and replaced when a comparison takes longer
  than `time_limit_s`, and it ends with this process. `MathVerifier` is faster for batches.

  Args:
    finished: False for a response that was cut off; its last number or line is then no answer.

  Returns:
    An outcome, which is its name as text: "right", "wrong" or "unparsable" of the response;
    "timeout" or "crash" where the verifier failed, which says nothing of the response.

  Raises:
    RuntimeError: if the child process cannot be started: SymPy is not installed, say.
    ValueError: if the gold answer is empty.
  """
  return shared(time_limit_s).check([response], [answer], [finished])[0]


def shared(time_limit_s: float) -> "MathVerifier":
  """Returns this process's verifier of `verify`; the first call starts it."""
  with _lock:
    if time_limit_s not in _shared:
      _shared[time_limit_s] = MathVerifier(1, time_limit_s)
    return _shared[time_limit_s]


def _forget() -> None:
  """Gives a forked process its own lock and verifiers. The pipes are the parent's."""
  global _lock
  _lock = threading.Lock()
  _shared.clear()


_lock = threading.Lock()
_shared: dict[float, "MathVerifier"] = {}  # Keys are time limits.
os.register_at_fork(after_in_child=_forget)


class MathVerifier(contextlib.AbstractContextManager):
  """Scores responses against gold answers in `workers` processes.

  Args:
    workers: processes. Starting them takes about a second, and the constructor waits for it.
    time_limit_s: wall-clock seconds that the comparison of one answer may run, without queueing.

  Raises:
    RuntimeError: if the processes cannot be started (SymPy is not installed, say).
  """

  def __init__(self, workers: int, time_limit_s: float):
    self._pool = pool.Pool(
      f"{__name__}:_judge_pair", workers, time_limit_s, warm_up=[r"\frac{x}{2}", r"\sqrt{2}x"]
    )
    self._known: dict[tuple[str, str], Outcome] = {}  # (candidate, gold), compared symbolically
    self._readable: dict[str, bool] = {}  # gold answers that were looked at

  def score(
    self, responses: Sequence[str], answers: Sequence[str], finished: Sequence[bool] | None = None
  ) -> list[Outcome]:
    """Returns one outcome per response, in order. `finished` is False where one was cut off.

    Raises:
      ValueError: if the lengths differ or a gold answer is empty.
    """
    if any(not answer.strip() for answer in answers):
      raise ValueError("a gold answer is empty")
    finished = [True] * len(responses) if finished is None else finished
    triples = zip(responses, answers, finished, strict=True)
    pairs = [(extract(response, whole), answer) for response, answer, whole in triples]
    # Responses to one prompt often agree: each different answer is compared once.
    outcomes = {pair: self._known.get(pair) or _quick_outcome(*pair) for pair in pairs}
    slow = [pair for pair, outcome in outcomes.items() if outcome is None]
    if len(self._known) > MAX_KNOWN:
      self._known.clear()
    for pair, result in zip(slow, self._pool.map(slow)):
      if isinstance(result, pool.Failure):
        outcomes[pair] = result  # not remembered: the machine may have been busy
      else:
        outcomes[pair] = self._known[pair] = Outcome(result)
    return [outcomes[pair] for pair in pairs]

  def check(
    self, responses: Sequence[str], answers: Sequence[str], finished: Sequence[bool] | None = None
  ) -> list[Outcome]:
    """Scores; an unreadable gold answer makes all but "right" a crash."""
    outcomes, broken = self.score(responses, answers, finished), self.unreadable(answers)
    return [
      outcome if outcome == Outcome.RIGHT else broken.get(answer, outcome)
      for outcome, answer in zip(outcomes, answers)
    ]

  def unreadable(self, answers: Sequence[str]) -> dict[str, pool.Failure]:
    """Returns the gold answers without mathematical meaning; reads each once."""
    new = [answer for answer in dict.fromkeys(answers) if answer not in self._readable]
    slow = [answer for answer in new if quick_judge("0", answer) is None]
    readable = dict.fromkeys(new, True) | dict(zip(slow, self._pool.map([[None, a] for a in slow])))
    self._readable |= {a: r for a, r in readable.items() if not isinstance(r, pool.Failure)}
    broken = [answer for answer in set(answers) if self._readable.get(answer) is False]
    return {a: pool.Failure("crash", UNREADABLE.format(a)) for a in broken}

  def __exit__(self, *_):
    self._pool.close()


def boxed(solution: str) -> str | None:
  """Returns the boxed answer of a solution; None if it boxes nothing."""
  return extract(solution) if BOX.search(solution) else None


@functools.lru_cache(maxsize=1 << 14)
def _gold(answer: str) -> str:
  """Returns the answer within a gold solution: the boxed one, if any."""
  if not BOX.search(answer):
    return (extract(answer) or answer) if len(answer) > MAX_ANSWER else answer
  return boxed(answer) or BOX.split(answer)[-1].removeprefix("{")


def _quick_outcome(candidate: str | None, answer: str) -> Outcome | None:
  """Returns a crash for a placeholder, else as `quick_judge`."""
  if golds.placeholder(_gold(answer)):
    return pool.Failure(Outcome.CRASH, PLACEHOLDER.format(answer))
  return quick_judge(candidate, answer)


def quick_judge(candidate: str | None, answer: str) -> Outcome | None:
  """Compares without symbolic mathematics; None if that is not enough. Never slow."""
  if candidate is None or len(candidate) > MAX_ANSWER:
    return Outcome.UNPARSABLE
  answer = _gold(answer)
  ours, gold = normalise(candidate), normalise(answer)
  if ours == gold:
    return Outcome.RIGHT if ours else Outcome.UNPARSABLE
  value = quantity.read(gold)
  if value:
    mine = quantity.read(ours, letters=True)
    # A decimal comma, where the gold answer is a decimal: 2,74 is 2.74.
    if mine is None and value.places and re.match(r"-?\d+,\d+(?![\d,.])", ours):
      mine = quantity.read(ours.replace(",", "."))
    if mine:
      same = quantity.same(value, mine)
      return None if same is None else Outcome.RIGHT if same else Outcome.WRONG
  return None


# The symbolic comparison, in the workers only.


def judge(candidate: str, answer: str) -> Outcome:
  """Reads and compares both answers, without a time limit.

  Raises:
    ValueError: if the gold answer cannot be read, and is not what the candidate says.
  """
  # Half a second, which only workers should spend.
  from gspo_jax.verifiers.mathematics import equal, nodes
  from gspo_jax.verifiers.mathematics.tokens import Unreadable

  answer = _gold(answer)
  if equal.same_text(answer, candidate):
    return Outcome.RIGHT
  number = quantity.read(answer) is not None
  readings = _gold_readings(answer)
  if not readings:
    raise ValueError(UNREADABLE.format(answer))
  if number:  # 1,234 is a number here and no list; a set is none. 2mg may be a product.
    products = [r for r in readings[1:] if isinstance(r, nodes.Scalar) and r.value.free_symbols]
    readings = [readings[0], *products]
  ours = [_readings(candidate, letters, solve=not number) for letters in ("units", "variables")]
  ours = dict.fromkeys(ours[0] + ours[1])
  for gold in readings:
    for mine in ours:
      with contextlib.suppress(Unreadable):
        if equal.same_answer(gold, mine):
          return Outcome.RIGHT
  return Outcome.WRONG if ours else Outcome.UNPARSABLE


def _judge_pair(pair: list[str | None]) -> str | bool:
  """Returns the outcome; without a candidate, whether the gold answer is readable."""
  candidate, answer = pair
  if candidate is not None:
    return judge(candidate, answer).value
  with contextlib.suppress(Exception):
    return bool(_gold_readings(_gold(answer)))
  return False


def _gold_readings(answer: str) -> list:
  r"""Returns the readings of a gold answer: \text{m} is metres, or a variable."""
  return [*dict.fromkeys(_readings(answer, "text") + _readings(answer, "variables"))]


@functools.lru_cache(maxsize=1 << 12)
def _readings(text: str, letters: str, solve: bool = True) -> tuple:
  """Returns the readings of an answer: 1,234 is a number, or a list."""
  from gspo_jax.verifiers.mathematics import structure
  from gspo_jax.verifiers.mathematics.tokens import Unreadable

  text = text if len(text) <= MAX_ANSWER else ""
  nodes = []
  for tight in (True, False):
    if tight or re.search(r"\d,\d{3}(?!\d)", text):
      with contextlib.suppress(Unreadable):
        nodes.append(structure.read(text, tight, letters, solve))
  if re.fullmatch(r"\s*\$?-?(?:0,\d+|\d+,\d\d)\$?\s*", text):  # a decimal comma
    nodes.append(structure.read(text.replace(",", "."), True, letters, solve))
  return tuple(nodes)
