"""A verifier without a model or a parser: the response's answer is the gold text, normalised."""

import contextlib
import re
import unicodedata
from collections.abc import Callable, Iterator

from gspo_jax.verifiers import thought

OUTCOMES = ("right", "wrong", "unparsable")
MAX_ANSWER = 2000  # characters, or twice the gold answer; longer is no answer
_TAG = re.compile("</?answer>")
_LABEL = re.compile(r"(?:the\s+)?(?:final\s+)?answer[*_]{0,3}\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_QUOTES = " \"'“”‘’"
_EMPHASIS = re.compile(r"([*_`]{1,3})(.*[^*_`])\1")


@contextlib.contextmanager
def open_verifier() -> Iterator[Callable]:
  """`verify` of many; there is nothing to configure."""

  def outcomes(responses, prompts, finished):
    answers = [prompt.answer for prompt in prompts]
    return list(map(verify, responses, answers, finished)), None

  yield outcomes


def verify(response: str, answer: str, finished: bool = True) -> str:
  """Compares both: "right", "wrong", or "unparsable" for a response without an answer.

  Raises:
    ValueError: if nothing of the gold answer is left by `normalise`.
  """
  check_answer(answer)
  gold = normalise(_unlabelled(answer)) or normalise(answer)  # responses lose theirs too
  candidate = extract(response, finished, max(MAX_ANSWER, 2 * len(answer)))
  if candidate is None:
    return "unparsable"
  return "right" if normalise(candidate) == gold else "wrong"


def check_answer(text: str) -> None:
  """Raises ValueError for a gold answer without any content after `normalise`."""
  if not normalise(text):
    raise ValueError(f"the gold answer {text!r:.80} is nothing but white space and punctuation")


def extract(response: str, finished: bool = True, longest: int = MAX_ANSWER) -> str | None:
  """Returns the content of the last `<answer>`, else the last line, without "the answer is".

  Only what follows the thought counts (`thought.after`), and the last line of a response that was
  cut off (not `finished`) does not. None where there is nothing, or more than `longest` characters.
  """
  text = thought.after(response)
  line = last_tagged(text)
  if line is None:
    line = text.strip().rpartition("\n")[2] if finished else ""
  line = _unlabelled(line)
  return line if len(line) <= longest and normalise(line) else None


def _unlabelled(line: str) -> str:
  """Returns the text after the last "the answer is", or the line without one."""
  return line[max((label.end() for label in _LABEL.finditer(line)), default=0) :]


def last_tagged(text: str) -> str | None:
  """Returns the content of the last `<answer>` pair without another one inside."""
  content = start = None
  for tag in _TAG.finditer(text):
    if tag[0] == "<answer>":
      start = tag.end()
    elif start is not None:
      content, start = text[start : tag.start()], None
  return content


def normalise(text: str) -> str:
  """Folds compatible characters (NFKC), case and spaces. Quotes, full stops and Markdown's emphasis
  around the text go.

  Other signs stay: -1.5 is neither 1.5 nor 15, and 5! is not 5.
  """
  text = " ".join(map(_compatible, text.split())).casefold().replace("−", "-")
  bare = text.lstrip(_QUOTES).rstrip(_QUOTES + ".")
  emphasis = _EMPHASIS.fullmatch(bare)
  bare = emphasis[2].lstrip(_QUOTES).rstrip(_QUOTES + ".") if emphasis else bare
  return " ".join(bare.split())


def _compatible(word: str) -> str:
  """Applies NFKC in pieces: the order of many combining characters takes quadratic time."""
  pieces = (word[start : start + 256] for start in range(0, len(word), 256))
  return "".join(unicodedata.normalize("NFKC", piece) for piece in pieces)
