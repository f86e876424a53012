"""A verifier without a model or a parser: the response's answer is the gold text, normalised."""

import contextlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

OUTCOMES = ("right", "wrong", "unparsable")
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_LABEL = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_AROUND = " \t\n\r\"'`*_“”‘’.,;:!?"


@contextlib.contextmanager
def open_verifier(config: Any) -> Iterator[Callable]:
  """`verify` of many; there is nothing to configure."""
  yield lambda responses, prompts: ([verify(r, p.answer) for r, p in zip(responses, prompts)], None)


def verify(response: str, answer: str) -> str:
  """Compares both: "right", "wrong", or "unparsable" where the response gives no answer."""
  found = extract(response)
  if found is None:
    return "unparsable"
  return "right" if normalise(found) == normalise(answer) else "wrong"


def extract(response: str) -> str | None:
  """The content of the last `<answer>`, else the last line, without "the answer is"; None if empty.

  Only what follows the last `</think>` counts.
  """
  text = response.rpartition("</think>")[2]
  tagged = _ANSWER.findall(text)
  line = tagged[-1] if tagged else text.strip().rpartition("\n")[2]
  line = _LABEL.sub("\0", line).rpartition("\0")[2]
  return line if normalise(line) else None


def normalise(text: str) -> str:
  """Makes compatible characters one (NFKC), folds case, leaves single spaces, and takes away quotes
  and full stops around the text. Signs and points inside stay: -1.5 is neither 1.5 nor 15."""
  text = unicodedata.normalize("NFKC", text).casefold().replace("−", "-")
  start = text.strip().lstrip(_AROUND.replace(".", "")).rstrip(_AROUND)
  return " ".join(start.split())
