"""Steps of a response, thoughts and acts, by the texts that end them: `</think>`, `</tool_call>`.

A text may be one token or several, and a token may have more than the end of one in it, so what is
looked at is the bytes that tokens stand for. A response is what a model wrote, and may be anything:
the work is the bytes of the response times those of the delimiters, whatever stands there.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# Tags that chat templates end a thought or a tool call with: Qwen, DeepSeek, Kimi.
TAGS = ("</think>", "</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")


@dataclasses.dataclass(frozen=True)
class Delimiters:
  """Texts that end a step, and the bytes of every token. The last token is one without any."""

  texts: tuple[bytes, ...]
  bytes_X: np.ndarray  # uint8, of all tokens, one token after another
  start_V: np.ndarray
  size_V: np.ndarray
  stop_V: np.ndarray  # bool: ends a turn


def choose(given: Sequence[str] | None, tokenizer: Any) -> tuple[str, ...]:
  """The delimiters that are given, or the tags that the tokenizer's chat template has.

  Raises:
    ValueError: there are neither.
  """
  if given:
    return tuple(given)
  template = getattr(tokenizer, "chat_template", "")
  found = tuple(tag for tag in TAGS if tag in template)
  if not found:
    raise ValueError(
      "objective.segment_unit='step' needs objective.segment_delimiters, the texts that end a "
      "step, such as ('</think>', '</tool_call>'): the tokenizer's chat template has no such tag"
      if template
      else "objective.segment_unit='step' needs objective.segment_delimiters, the texts that end "
      "a step, such as ('</think>', ']'): the tokenizer has no chat template that names them"
    )
  return found


def delimiters(given: Sequence[str] | None, tokenizer: Any) -> Delimiters:
  """`choose`, with what finding them takes."""
  texts = tuple(text.encode() for text in choose(given, tokenizer))
  bytes_of = [*tokenizer.token_bytes(), b""]
  size_V = np.array([len(one) for one in bytes_of])
  stop_V = np.zeros(len(bytes_of), bool)
  stop_V[list(tokenizer.stop_ids)] = True
  all_bytes = np.frombuffer(b"".join(bytes_of), np.uint8)
  return Delimiters(texts, all_bytes, np.cumsum(size_V) - size_V, size_V, stop_V)


def step_ends(
  given: Delimiters, tokens_BT: np.ndarray, mask_BT: np.ndarray, turn_BT: np.ndarray | None = None
) -> np.ndarray:
  """Sampled tokens that end a step: those that complete a delimiter. bool [B, T].

  A delimiter lies within one turn; observations in between count for nothing, and delimiters may
  overlap. A stop token behind one belongs to the step that it ends.
  """
  ends_BT = np.zeros(mask_BT.shape, bool)
  for row, mask_T in enumerate(mask_BT):
    time_X = np.flatnonzero(mask_T > 0)
    tokens_X = tokens_BT[row, time_X]
    tokens_X = np.where((tokens_X >= 0) & (tokens_X < len(given.size_V)), tokens_X, -1)
    turn_X = np.zeros_like(time_X) if turn_BT is None else turn_BT[row, time_X]
    ends_BT[row, time_X] = _ends(given, tokens_X, turn_X)
  return ends_BT


def _ends(given: Delimiters, tokens_X: np.ndarray, turn_X: np.ndarray) -> np.ndarray:
  """The same for the sampled tokens of one response; bool [X]."""
  ends_X, size_X = np.zeros(len(tokens_X), bool), given.size_V[tokens_X]
  # For each byte of the text: its token, and where it stands in the table.
  token_N = np.repeat(np.arange(len(tokens_X)), size_X)
  first_X = given.start_V[tokens_X] - (np.cumsum(size_X) - size_X)
  text_N = given.bytes_X[np.arange(len(token_N)) + first_X[token_N]]
  for wanted in given.texts:
    place = np.arange(max(0, len(text_N) - len(wanted) + 1))
    for i, byte in enumerate(wanted):
      place = place[text_N[place + i] == byte]
    begin, end = token_N[place], token_N[place + len(wanted) - 1]
    ends_X[end[turn_X[begin] == turn_X[end]]] = True
  ends_X[:-1] &= ~(given.stop_V[tokens_X[1:]] & (turn_X[1:] == turn_X[:-1]))
  return ends_X
