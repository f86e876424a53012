"""Checks of problems from programming contests.

A program's output is compared with one expected output. Therefore interactive problems, and
problems with several right outputs, are bad rows.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gspo_jax.data.files import BadRow
from gspo_jax.data.filters import as_text

# Fields with the parts of a problem's statement.
_STATEMENT = ("description", "input_format", "output_format", "note", "question")
_INTERACTIVE = re.compile(
  r"\binteractive (?:problem|task)\b|\bflush(?:ing)? the (?:output|standard output|stdout)\b", re.I
)
_ANSWERS = r"(?:answers?|solutions?|ways?|variants?|options?|possibilities|outputs?|sequences?)"
# Phrases by which a statement accepts several answers.
_ANY = re.compile(
  rf"""(?<!\bnot\ )(?<!n't\ )\b(?:print|output|return|find)\ any\b
  | \b(?:several|multiple|(?<!how\ )many|more\ than\ one)\b
    [^.]{{0,40}}\b{_ANSWERS}\b[^.]{{0,80}}\bany\b
  | \bany\b[^.]{{0,60}}\b(?:accept(?:ed|able)|considered\ correct)\b
  | \b(?:several|multiple|many|more\ than\ one)\b[^.]{{0,60}},[^.]{{0,20}}
    \b(?:print|output|find|(?:can|may)\ choose)\ (?:any|one|either|whichever)\b
  | \b(?:print|output|find)\ (?:one|either)\ of\ (?:them|these|those)\b
  | \border\ of\ (?:the\ )?(?:output|lines|answers?)\ (?:does\ not|doesn't)\ matter\b
  | \bany\ of\ [^.]{{0,40}}\b(?:can|may)\ be\ (?:printed|output)\b
  | \b(?:print|output|return)\b[^.]{{0,80}}\bin\ (?:any|arbitrary)\ order\b""",
  re.IGNORECASE | re.VERBOSE,
)
_FILE = re.compile(r"\b[\w-]+\.(?:txt|in|inp|out|ans)\b")


def codeforces(row: Mapping[str, Any]) -> dict[str, Any]:
  """Checks a row of CodeForces.

  Returns:
    Dict of two further fields of the answer: `input_files` and `output_files` are lists of file
    names. The dict is empty if programs use stdin and stdout.

  Raises:
    BadRow: the problem is interactive, allows several outputs or has a checker; `executable` is
      false; or an official test is truncated.
  """
  statement = _require_single_answer(row)
  for name, reason in {
    "generated_checker": "its answers need a checker",
    "checker": "its answers need a checker",
    "interaction_format": "it is interactive",
  }.items():
    if _text(row.get(name)):
      raise _error(f"{name} is set: {reason}")
  if str(row.get("executable")).lower() == "false":
    raise _error("executable is false")
  tests = row.get("official_tests")
  for i, test in enumerate(tests if isinstance(tests, list | tuple) else (), start=1):
    if isinstance(test, Mapping) and any(_is_truncated(test.get(x)) for x in ("input", "output")):
      raise _error(f"test {i} is truncated (...)")
  mode = _text(row.get("input_mode")).lower()
  named = re.search(r"\b(?:input|output)\.txt\b", statement)
  if mode in ("stdio", "stdin", "standard") or not (mode or named):
    return {}
  names = dict.fromkeys(_FILE.findall(statement))
  outputs = [x for x in names if x.startswith("output") or x.endswith((".out", ".ans"))]
  inputs = [x for x in names if x not in outputs]
  return dict(input_files=inputs or ["input.txt"], output_files=outputs or ["output.txt"])


def apps(row: Mapping[str, Any]) -> dict[str, Any]:
  """Checks a row of APPS or TACO.

  Returns {}, since the answer needs no further field.

  Raises:
    BadRow: the problem is interactive, or allows several outputs.
  """
  _require_single_answer(row)
  return {}


def _require_single_answer(row: Mapping[str, Any]) -> str:
  """Returns a problem's statement.

  Raises:
    BadRow: the problem is interactive, or allows several outputs.
  """
  statement = " ".join(" ".join(_text(row.get(name)) for name in _STATEMENT).split())
  tags = row.get("tags")
  if _INTERACTIVE.search(statement) or (isinstance(tags, Iterable) and "interactive" in tags):
    raise _error("it is interactive")
  if match := _ANY.search(statement):
    raise _error(f"several answers are right ({match[0]!r:.80})")
  return statement


def _error(reason: str) -> BadRow:
  return BadRow(
    f"{reason}, so programs cannot be verified by one expected output. Exclude the row by a "
    "condition (`where`)"
  )


def _text(value: Any) -> str:
  return as_text(value).strip() if isinstance(value, str | bytes) else ""


def _is_truncated(value: Any) -> bool:
  """Whether a test's text ends with an ellipsis, a sign of truncation.

  A text with further dots is not truncated: it may be a grid of dots. Decimal points do not count
  as dots.
  """
  text = _text(value)
  return text.endswith("...") and "." not in re.sub(r"\d\.\d", "", text[:-3])
