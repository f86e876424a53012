r"""Verifier of mathematical answers. Imports no jax; works from any thread.

Three steps: `extract` finds the answer that a response gives (the last `\boxed{...}`, else what an
"answer is" announces, else the last formula or number); two plain numbers are compared here,
exactly and at once; everything else is compared symbolically by the math-verify library in
processes that can be killed. A verifier that hangs or dies must not look like a wrong answer, so
`Outcome` has five values.
"""

import contextlib
import enum
import fractions
import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gspo_jax.rewards import pool, thought

MAX_ANSWER = 1000  # characters; longer is a derivation, not an answer: UNPARSABLE
MAX_KNOWN = 1 << 16  # symbolic comparisons that are remembered
_UNREADABLE = "the gold answer is not mathematics"
TAIL = 2000  # characters at the end of a response that are searched where nothing is boxed


class Outcome(enum.StrEnum):
  RIGHT = "right"
  WRONG = "wrong"
  UNPARSABLE = "unparsable"  # no answer found, or one that is not mathematics
  TIMEOUT = "timeout"  # of the verifier
  CRASH = "crash"  # of the verifier, or the gold answer is not mathematics


OUTCOMES, UNKNOWN = tuple(Outcome), (Outcome.TIMEOUT, Outcome.CRASH)


@contextlib.contextmanager
def open_verifier(config: Any) -> Iterator[Callable]:
  """A `MathVerifier` that takes prompts; see `gspo_jax.rewards`."""
  with MathVerifier(config.workers, config.time_limit_s) as verifier:

    def verify(responses, prompts, finished):
      answers = [prompt.answer for prompt in prompts]
      outcomes = verifier.score(responses, answers, finished)
      # Without this, gold answers that nobody can read are not noticed while no response has one.
      broken = verifier.unreadable(answers)
      found = zip(outcomes, answers)
      return [o if o == Outcome.RIGHT else broken.get(a, o) for o, a in found], None

    yield verify


class MathVerifier:
  """Scores responses against gold answers in `workers` processes.

  Args:
    workers: processes. Starting them takes about a second, and the constructor waits for it.
    time_limit_s: wall-clock seconds that the comparison of one answer may run, without queueing.

  Raises:
    RuntimeError: if the processes cannot be started (math-verify is not installed, say).
  """

  def __init__(self, workers: int, time_limit_s: float):
    self._pool = pool.Pool(
      f"{__name__}:_judge_pair", workers, time_limit_s, warm_up=[r"\frac{1}{2}", r"\sqrt{2}"]
    )
    self._known: dict[tuple[str, str], Outcome] = {}  # (candidate, gold), compared symbolically
    self._readable: dict[str, bool] = {}  # gold answers that were looked at

  def score(
    self, responses: Sequence[str], answers: Sequence[str], finished: Sequence[bool] | None = None
  ) -> list[Outcome]:
    """Returns one outcome per response, in order; `finished` is False where one was cut off.

    Raises:
      ValueError: if the lengths differ or a gold answer is empty.
    """
    if any(not answer.strip() for answer in answers):
      raise ValueError("a gold answer is empty")
    finished = [True] * len(responses) if finished is None else finished
    triples = zip(responses, answers, finished, strict=True)
    pairs = [(extract(response, whole), answer) for response, answer, whole in triples]
    # Responses to one prompt often agree: each different answer is compared once.
    outcomes = {pair: self._known.get(pair) or quick_judge(*pair) for pair in pairs}
    slow = [pair for pair, outcome in outcomes.items() if outcome is None]
    if len(self._known) > MAX_KNOWN:
      self._known.clear()
    for pair, result in zip(slow, self._pool.map(slow)):
      if isinstance(result, pool.Failure):
        outcomes[pair] = result  # not remembered: the machine may have been busy
      else:
        outcomes[pair] = self._known[pair] = Outcome(result)
    return [outcomes[pair] for pair in pairs]

  def unreadable(self, answers: Sequence[str]) -> dict[str, pool.Failure]:
    """The gold answers that are not mathematics; each is looked at once."""
    new = [answer for answer in dict.fromkeys(answers) if answer not in self._readable]
    slow = [answer for answer in new if quick_judge("0", answer) is None]
    found = dict.fromkeys(new, True) | dict(zip(slow, self._pool.map([[None, a] for a in slow])))
    self._readable |= {a: one for a, one in found.items() if not isinstance(one, pool.Failure)}
    broken = [answer for answer in set(answers) if self._readable.get(answer) is False]
    return {a: pool.Failure("crash", f"{_UNREADABLE}: {a!r:.80}") for a in broken}

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._pool.close()


# Finding the answer. Every pattern is linear in the text: no nested or overlapping repetitions.

_SEPARATOR = r"(?:,|\{,\}|\\,|,\\!|\\!,)"  # of thousands, as typed or as typeset
_DIGITS = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
  r"(?<![\w.\\])(?:"
  r"-?\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
  rf"|[-+]?(?:\\?[$€£¥]\s?)?[-+]?(?:\d+\s(?=\d+/\d))?(?:{_DIGITS})(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?"
  r")"
)
_FORMULA = re.compile(
  r"\$\$(?P<a>[^$]+)\$\$|(?<!\\)\$(?P<b>(?:\\.|[^$\\])+)\$"
  r"|\\\((?P<c>.+?)\\\)|\\\[(?P<d>.+?)\\\]",
  re.DOTALL,
)
_MARKER = re.compile(r"####|\banswer\b[*_]{0,3}\s{0,3}(?:is|:|=)[*_:\s]{0,5}", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = re.compile("sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|min|max|or|and", re.IGNORECASE)


def extract(response: str, finished: bool = True) -> str | None:
  r"""Finds the answer that a response gives; None if there is none.

  Only what follows the thought counts (`thought.after`). The last complete `\boxed{}` is the
  answer; a response whose only box is empty or cut off gives none. Without a box: what follows the
  last "####" or "answer is/:/=", else the last formula or number of the text. That one is no answer
  where the response was cut off (not `finished`): it is where the tokens ran out.
  """
  text = thought.after(response).replace("−", "-")
  boxes = [match.end() for match in _BOX.finditer(text)][-8:]
  if boxes:
    return next(filter(None, (_argument(text, start) for start in reversed(boxes))), None)
  tail = text[-TAIL:]
  markers = [match.end() for match in _MARKER.finditer(tail)]
  if markers:
    lines = tail[markers[-1] :].split("\n")
    line = next((line for line in lines if re.search(r"\w", line)), "")
    return _trim(line) if _is_formula(line) else min(_items(line, first=True), default=_NONE)[2]
  if not finished:
    return None
  line = tail.strip().rpartition("\n")[2]
  return _trim(line) if _is_formula(line) else max(_items(tail), default=_NONE)[2]


def _argument(text: str, start: int) -> str | None:
  """The content of the braces at `start`, or the one word there; None if they do not close."""
  if not text.startswith("{", start):
    word = re.match(r"[^\s{}$]+", text[start : start + MAX_ANSWER])
    return _trim(word[0]) or None if word else None
  depth = 0
  for match in _BRACE.finditer(text, start, start + MAX_ANSWER + 2):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if depth == 0:
      return text[start + 1 : match.start()].strip() or None
  return None


_NONE = (0, 0, None)


def _items(text: str, first: bool = False) -> list[tuple[int, int, str]]:
  """Formulas and numbers of `text` with a key: the least comes first, the greatest last."""
  found = []
  for pattern in (_FORMULA, _NUMBER):
    for match in pattern.finditer(text):
      content = next(filter(None, match.groups()), match[0])
      if pattern is _NUMBER or _is_formula(content):
        # A formula contains its numbers: it starts before the first and ends after the last one.
        found.append((match.start() if first else match.end(), -len(content), _trim(content)))
  return found


def _is_formula(text: str) -> bool:
  """Whether `text` is mathematics all through: short, no words outside \\text and the like."""
  if len(text) > 200:
    return False
  bare = re.sub(r"\\[a-zA-Z]+", " ", _TEXT.sub(" ", text))
  return bool(re.search(r"\w", text)) and all(map(_FUNCTIONS.fullmatch, _WORD.findall(bare)))


def _trim(text: str) -> str:
  """Without the Markdown, math delimiters and punctuation around an answer."""
  text = text.strip().strip("*_` \t").rstrip(".,;:!*_` ").strip()
  match = _FORMULA.fullmatch(text)
  return next(filter(None, match.groups())).strip().rstrip(".,;") if match else text


# Comparing plain numbers.

_SHORT_UNITS = "cm|mm|km|kg|mg|ml|lb|lbs|ft|in|oz|hr|hrs|mi|yd|mph|kph"
_NOT_UNITS = "sqrt|sin|cos|tan|log|exp|and|percent|pct|factorial|squared|cubed|choose"
_UNIT = rf"(?:{_SHORT_UNITS}|(?!{_NOT_UNITS})[A-Za-z]{{3,}})(?:\s?\^\{{?[23]\}}?)?"
_UNITS = rf"{_UNIT}(?:[ /]+{_UNIT})*"
_VALUE = re.compile(
  r"(?P<sign>[-+]?)\s*(?:\\?[$€£¥])?\s*(?P<sign2>[-+]?)"
  r"(?:(?P<whole>\d+)\s*(?=\s\d+\s*/|\\frac))?\s*"  # mixed numbers
  r"(?:(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
  r"(?P<exponent>[eE][-+]?\d{1,2})?(?:\s*/\s*(?P<over>\d+))?"
  r"|\\frac\s*\{\s*(?P<top>\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}"
  r"|\\frac\s*(?P<top1>\d)\s*(?P<bottom1>\d))"
  rf"(?:\s*(?:\^\{{?\\circ\}}?|°)|\s*(?P<unit>{_UNITS}))?"
)
_MAGNITUDE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


@functools.lru_cache(maxsize=1 << 16)
def number(text: str) -> fractions.Fraction | None:
  r"""The value of a plain number: integer, decimal, a/b or \frac, with separators, currency, unit.

  None for anything else, percentages among them.
  """
  if len(text) > 80:
    return None
  match = _VALUE.fullmatch(_unwrap(_normalise(text)))
  if not match:
    return None
  part = match.groupdict()
  top = (part["top"] or part["top1"] or part["digits"]).replace(",", "")
  bottom = int(part["bottom"] or part["bottom1"] or part["over"] or 1)
  if bottom == 0 or (part["sign"] and part["sign2"]):
    return None
  value = fractions.Fraction(top + (part["exponent"] or "")) / bottom + int(part["whole"] or 0)
  for word in re.findall(r"[a-z]+", (part["unit"] or "").lower()):
    value *= 10 ** _MAGNITUDE.get(word, 0)
  return -value if "-" in (part["sign"], part["sign2"]) else value


def same_number(a: fractions.Fraction, b: fractions.Fraction) -> bool:
  """Equal, or equal as far as six decimals go (0.333333 is 1/3), which leaves integers exact."""
  off = abs(a - b)
  return off == 0 or (2_000_000 * off <= 1 and 10_000 * off <= max(abs(a), abs(b)))


@functools.lru_cache(maxsize=1 << 16)
def _normalise(text: str) -> str:
  """One spelling for what typesetting spells in several ways; the meaning stays."""
  text = _trim(text).replace("−", "-").replace(r"\left", "").replace(r"\right", "")
  text = re.sub(rf"(?<=\d)(?:{_SEPARATOR}|[ \u00a0\u202f])(?=\d{{3}}(?!\d))", ",", text)
  text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
  text = re.sub(r"\\[,;:!> ]|~|\\q?quad(?![a-zA-Z])", " ", text)
  return " ".join(text.split()).rstrip(".,;")


def _unwrap(text: str) -> str:
  r"""Without \text{} and the like around words and numbers."""
  return _TEXT.sub(r" \1", text).strip()


_PERCENT = re.compile(r"(.*?)\s*(?:\\?%|percent)")
_LIST = re.compile(r"(\\\{|[(\[])(.*,.*)(\\\}|[)\]])")


def _same_value(ours: str, gold: str) -> bool | None:
  r"""Whether two numbers, percentages, or bracketed lists of numbers agree; None: not such a pair.

  50\% agrees with 0.5 and, as questions for "how many percent" want it, with 50.
  """
  lists = _LIST.fullmatch(ours), _LIST.fullmatch(gold)
  if all(lists):
    a, b = ([number(x) for x in match[2].split(",")] for match in lists)
    if None in (*a, *b) or len(a) != len(b) or lists[0].group(1, 3) != lists[1].group(1, 3):
      return None  # intervals, nested lists, separators of thousands
    if lists[0][1] == r"\{":
      a, b = sorted(a), sorted(b)
    return all(map(same_number, a, b))
  percent = _PERCENT.fullmatch(ours), _PERCENT.fullmatch(gold)
  a, b = (number(match[1] if match else text) for match, text in zip(percent, (ours, gold)))
  if a is None or b is None:
    return None
  if bool(percent[0]) == bool(percent[1]):
    return same_number(a, b)
  part, whole = (a, b) if percent[0] else (b, a)
  return same_number(part / 100, whole) or (abs(part) >= 1 and same_number(part, whole))


def quick_judge(candidate: str | None, answer: str) -> Outcome | None:
  """The outcome where it needs no symbolic mathematics, else None. Never slow."""
  if candidate is None or len(candidate) > MAX_ANSWER:
    return Outcome.UNPARSABLE
  ours, gold = _unwrap(_normalise(candidate)), _unwrap(_normalise(answer))
  if ours == gold:
    return Outcome.RIGHT if ours else Outcome.UNPARSABLE
  if number(gold) is not None:
    # `x = 18` and `3 * 6 = 18` answer 18; `x = 3 or x = 18` does not.
    left, _, right = ours.rpartition("=")
    ours = ours if re.search(r"[<>!,;]|\bor\b|\band\b", left) else right
  same = _same_value(ours, gold)
  if same is not None:
    return Outcome.RIGHT if same else Outcome.WRONG
  if re.fullmatch(r"[A-Za-z]{3,}(?:[ '-]+[A-Za-z]+)*", gold) and not _is_formula(gold):
    # Words are compared as words: to math-verify they are products of letters, in any order.
    return Outcome.RIGHT if ours.casefold() == gold.casefold() else Outcome.WRONG
  return None


# The symbolic comparison, in the workers only.


def judge(candidate: str, answer: str) -> Outcome:
  """Compares through math-verify, with no time limit of its own.

  Raises:
    Exception: whatever the library raises on the way, unless some reading was equal before.
  """
  import math_verify  # half a second, which only the workers should spend

  logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of absent time limits
  ours, gold = _parse(candidate), _parse(answer)
  if not gold:
    raise ValueError(f"{_UNREADABLE}: {answer!r:.80}")
  if not ours:
    return Outcome.UNPARSABLE
  # timeout_seconds=None: with a number the library would set SIGALRM.
  equal = math_verify.verify(list(gold), list(ours), timeout_seconds=None, raise_on_error=True)
  return Outcome.RIGHT if equal else Outcome.WRONG


def _judge_pair(pair: list[str | None]) -> str | bool:
  """The outcome; without a candidate, whether the gold answer can be read at all."""
  candidate, answer = pair
  if candidate is not None:
    return judge(candidate, answer).value
  with contextlib.suppress(Exception):
    return bool(_parse(answer))
  return False


@functools.lru_cache(maxsize=1 << 12)
def _parse(text: str) -> tuple:
  """SymPy's reading of an answer; () if there is none."""
  import math_verify

  # Units in words are letters to be multiplied unless they stand in \text.
  text = re.sub(rf"(?<=[\d)}}\]])\s+({_UNITS})$", r" \\text{\1}", _normalise(text))
  for source in (rf"\boxed{{{text}}}", f"${text}$"):
    parsed = math_verify.parse(source, parsing_timeout=None, fallback_mode="no_fallback")
    if parsed:
      return tuple(parsed)
  return ()
