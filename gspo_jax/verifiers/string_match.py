"""Verifier of texts: a response is right if its answer equals the gold answer.

Both texts are normalised first, so case, repeated spaces and outer quotes do not matter.
"""

import contextlib
import re
import unicodedata
from collections.abc import Callable, Iterator

from gspo_jax.verifiers import thought

OUTCOMES = ("right", "wrong", "unparsable")
# Maximum characters of an answer. `verify` accepts twice the gold answer's length if that is more.
MAX_ANSWER = 2000
_TAG = re.compile("</?answer>")
_LABEL = re.compile(r"(?:the\s+)?(?:final\s+)?answer[*_]{0,3}\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_QUOTES = " \"'“”‘’"
_EMPHASIS = re.compile(r"([*_`]{1,3})(.*[^*_`])\1")


@contextlib.contextmanager
def open_verifier() -> Iterator[Callable]:
  """Yields the verifying function for `gspo_jax.rewards.scorer`.

  It maps (responses, prompts, finished) to (outcomes, None).
  """

  def outcomes(responses, prompts, finished):
    answers = [prompt.answer for prompt in prompts]
    return list(map(verify, responses, answers, finished)), None

  yield outcomes


def verify(response: str, answer: str, finished: bool = True) -> str:
  """Returns "right" or "wrong"; "unparsable" for a response without an answer.

  Args:
    response: text of the response, thought included.
    answer: the gold answer.
    finished: False for a truncated response.

  Raises:
    ValueError: the gold answer is empty after `normalise`.
  """
  check_answer(answer)
  # The gold answer may have "the answer is", as a response may.
  gold = normalise(_without_label(answer)) or normalise(answer)
  candidate = extract(response, finished, max(MAX_ANSWER, 2 * len(answer)))
  if candidate is None:
    return "unparsable"
  return "right" if normalise(candidate) == gold else "wrong"


def check_answer(text: str) -> None:
  """Raises ValueError if a gold answer is empty after `normalise`."""
  if not normalise(text):
    raise ValueError(
      f"the gold answer {text!r:.80} has only white space and punctuation: give it a text"
    )


def extract(response: str, finished: bool = True, longest: int = MAX_ANSWER) -> str | None:
  """Returns the answer in a response. Returns None if there is none.

  The answer is the content of the last `<answer>...</answer>`, else the last line. If this text has
  a label such as "the answer is", the answer is the text after the last label. The thought does
  not count (`thought.after`). A text of more than `longest` characters is no answer, and neither is
  a text that `normalise` makes empty.

  Args:
    response: text of the response.
    finished: False for a truncated response; its last line is incomplete and no answer.
    longest: maximum characters of an answer.
  """
  text = thought.after(response)
  line = last_tagged(text)
  if line is None:
    line = text.strip().rpartition("\n")[2] if finished else ""
  line = _without_label(line)
  return line if len(line) <= longest and normalise(line) else None


def _without_label(line: str) -> str:
  """Returns the text after the last label, such as "the answer is", else the whole line."""
  return line[max((label.end() for label in _LABEL.finditer(line)), default=0) :]


def last_tagged(text: str) -> str | None:
  """Returns the content of the last `<answer>...</answer>`. Returns None if there is none.

  If such pairs of tags are nested, the content is that of the inner pair.
  """
  content = start = None
  for tag in _TAG.finditer(text):
    if tag[0] == "<answer>":
      start = tag.end()
    elif start is not None:
      content, start = text[start : tag.start()], None
  return content


def normalise(text: str) -> str:
  """Unifies compatible characters (Unicode's NFKC), case and spaces.

  Removes quotes and Markdown's emphasis around the text, and full stops after it. Other signs stay:
  -1.5 is neither 1.5 nor 15, and 5! is not 5.
  """
  text = " ".join(map(_compatible, text.split())).casefold().replace("−", "-")
  bare = text.lstrip(_QUOTES).rstrip(_QUOTES + ".")
  emphasis = _EMPHASIS.fullmatch(bare)
  bare = emphasis[2].lstrip(_QUOTES).rstrip(_QUOTES + ".") if emphasis else bare
  return " ".join(bare.split())


def _compatible(word: str) -> str:
  """Applies NFKC to a word in pieces of 256 characters.

  In a single piece, NFKC would take quadratic time to sort a long series of combining characters.
  """
  pieces = (word[start : start + 256] for start in range(0, len(word), 256))
  return "".join(unicodedata.normalize("NFKC", piece) for piece in pieces)
