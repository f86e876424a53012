"""Finds the answer in a response. Every pattern is linear: no nested repetitions."""

import re

from gspo_jax.rewards import string_match, thought
from gspo_jax.rewards.mathematics.formulas import (
  FORMULA,
  around,
  is_formula,
  is_hedged,
  sentence_before,
  signed,
  stated,
  trim,
)
from gspo_jax.rewards.mathematics.units import MULTIPLIERS

MAX_ANSWER = 1000  # characters; longer is a derivation, not an answer
TAIL = 2000  # characters at the end of a response that are searched where nothing is boxed
_LAST = 16  # boxes and markers at the end of a response that are looked at

SEPARATOR = r"(?:,| ?\{ ?, ?\} ?|\\,|,? ?\\! ?,?)"  # of thousands, as typed or as typeset
SPACE = "[ \\u00a0\\u202f\\u2009]"  # between thousands
_THOUSANDS = rf"(?:(?:{SEPARATOR}\d{{3}})+|(?:{SPACE}\d{{3}})+)(?!\d)"
_DIGITS = rf"(?:[1-9]\d{{0,2}}{_THOUSANDS}|\d+(?:,\d+)*)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
  r"(?<![\w.\\])(?:"
  r"-?\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
  rf"|[-+]?(?:\\?[$€£¥]\s?)?[-+]?(?:\d+\s(?=\d+/\d))?(?:{_DIGITS})(?:[eE][-+]?\d+)?!*"
  r"(?:\s?/\s?\d+)?(?:\s?\\?%)?"
  r")"
)
# "Answer: the largest n is 34": the value comes after the verb.
_MARKER = re.compile(
  r"####|\banswer\b[*_]{0,3}\s{0,3}(?::[^.\n]{0,150}?\bis\b|is|:|=)[*_:\s]{0,5}", re.IGNORECASE
)
_FINAL = re.compile(r"\bfinal answer is:?\s{0,3}", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FILLER = re.compile(r"\\(?:q?quad|[,;:!()\[\] ])|\\(?:text|mbox)(?=\{)|[\s${}]")


def extract(response: str, finished: bool = True) -> str | None:
  r"""Finds the answer that a response gives; None if there is none.

  Only what follows the thought counts (`thought.after`). The last complete `\boxed{}` is the
  answer, together with those before it that it is listed with (`\boxed{1}` and `\boxed{2}`); a
  response whose only box is empty or cut off gives none. Without a box: all that the last
  `<answer>` holds, else what follows the last "####" or "answer is/:/=", else the last formula or
  number of the text: no answer where the response was cut off (not `finished`), as it is where the
  tokens ran out.
  """
  text = thought.after(response).replace("−", "-")
  boxes = [match.span() for match in BOX.finditer(text)][-_LAST:]
  if boxes:
    return _boxed(text, boxes)
  tagged = string_match.last_tagged(text)
  tail = (text if tagged is None else tagged)[-TAIL:]
  line = _announced(tail, finished)
  if line is not None:
    none = _NO_SOLUTION.match(line)
    return none[0] if none else stated(line)[0]
  if tagged is not None:
    return trim(tagged) or None
  if not finished:
    return None
  whole = FORMULA.fullmatch(text.strip()) if len(text) <= MAX_ANSWER else None
  line = whole[0] if whole else tail.strip().rpartition("\n")[2]
  return trim(line) or None if whole or is_formula(line) else _last(tail)


def _announced(text: str, finished: bool) -> str | None:
  """The line that follows the last marker; None: there is none.

  "####" begins a heading of Markdown if its line is more than a value, and not the last one.
  """
  for match in [*_MARKER.finditer(text)][: -_LAST - 1 : -1]:
    lines = [line.strip() for line in text[match.end() :].split("\n") if re.search(r"\w", line)]
    line = lines[0] if lines else ""
    alone = finished and len(lines) < 2
    if match[0] != "####" or alone or _NO_SOLUTION.match(line) or _is_value(line):
      return line
  return None


def _is_value(line: str) -> bool:
  """Whether a line is a formula or number all through, but for a unit."""
  return stated(line)[1] and not re.search(r"[.;?]\s+\w", line)


def _boxed(text: str, boxes: list[tuple[int, int]]) -> str | None:
  """The content of the last complete box, and of the boxes that it is listed with."""
  found = [(start, *_argument(text, end)) for start, end in boxes]
  found = [(start, end, content) for start, end, content in found if content]
  found = [a for a, b in zip(found, [*found[1:], (len(text),)]) if a[1] <= b[0]]  # nested ones
  if not found:
    return None
  stated = _after_box(text[found[-1][1] :][-TAIL:])
  if stated:
    return stated
  answer = last = found[-1][2]
  for (_, end, content), (start, *_) in zip(found[-2::-1], found[:0:-1]):
    gap = text[end:start]
    if not _is_listing(gap):
      break
    if content != last:
      answer = content + (" or " if re.search(r"\bor\b", gap) else ", ") + answer
    last = content
  return answer


def _after_box(text: str) -> str | None:
  """What "the final answer is" announces after the last box, which it replaces.

  The box is the surer one where more is said than a value and its unit.
  """
  end = max((match.end() for match in _FINAL.finditer(text)), default=None)
  line = text[end:].partition("\n")[0] if end is not None else ""
  content, whole = stated(line)
  is_value = whole and (FORMULA.match(line) or re.search(r"[\d\\]", content))
  return content if is_value else None


def _is_listing(gap: str) -> bool:
  r"""Whether the text between two boxes lists them: `, \boxed` or `and \boxed`."""
  if len(gap) > 80 or re.search(r"[.!?:]\s|\n\s*\n|\\[a-zA-Z]*arrow|\\to", gap):
    return False
  bare = _FILLER.sub(" ", gap)
  if re.fullmatch(r"\s*[=<>≈]+\s*", bare):
    return False
  return not re.search(r"\w", bare) or bool(_JOINED.search(bare))


# Nothing but a name may follow the "and": "and the sum is 7" begins another answer.
_JOINED = re.compile(r"\b(?:and|or)\b\W*(?:\b[A-Za-z]\w*\s*=)?\W*$")


def _argument(text: str, start: int) -> tuple[int, str | None]:
  """The content of the braces at `start`, or the one word there, and its end; None: not closed."""
  if not text.startswith("{", start):
    word = re.match(r"[^\s{}$]+", text[start : start + MAX_ANSWER])
    return (start + word.end(), trim(word[0]) or None) if word else (start, None)
  depth = 0
  for match in _BRACE.finditer(text, start, start + MAX_ANSWER + 2):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if depth == 0:
      return match.end(), text[start + 1 : match.start()].strip() or None
  return start, None


_FOLLOWING = re.compile(r"\s([A-Za-z]{1,12})\b")
_NO_SOLUTION = re.compile(
  r"(?:that )?(?:there (?:is|are) )?no (?:real )?solutions?\b", re.IGNORECASE
)


def _last(text: str) -> str | None:
  """The last formula or number of a text; a formula ends behind its numbers. None: a hedge."""
  formulas = [match for match in FORMULA.finditer(text) if is_formula(_inside(match))]
  found = [*formulas, *_NUMBER.finditer(text)]
  last = max(found, key=lambda match: match.span()[::-1], default=None)
  if not last:
    return None
  typeset, before = last.re is FORMULA, sentence_before(text, last.start())
  content = _inside(last) if typeset else last[0]
  # An equation stands, and what it ends with: not 5, but x = 5.
  if "=" not in content and is_hedged(before.rpartition("=")[2]):
    return None
  whole = None if typeset else around(text, *last.span())
  content = signed(before, content) if whole is None else whole
  word = _FOLLOWING.match(text, last.end())
  if content and word and word[1].casefold() in MULTIPLIERS:
    content += word[0]  # 2 dozen are not 2
  return trim(content) or None


def _inside(formula: re.Match) -> str:
  """What stands between the delimiters of a formula."""
  return next(filter(None, formula.groups()))
