"""Ends of a response's steps (thoughts, tool calls) by delimiters: `</think>`, `</tool_call>`.

A delimiter may be one token or several, and a token may contain more than the delimiter's end. So
bytes are searched, not tokens. The cost is at most the bytes of the response times the bytes of the
delimiters.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Tags at the end of a thought or a tool call in the chat templates of Qwen, DeepSeek and Kimi.
TAGS = ("</think>", "</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")


@dataclasses.dataclass(frozen=True)
class Delimiters:
  """Delimiters of steps, and the bytes of every token."""

  texts: tuple[bytes, ...]
  bytes_of: Mapping[int, bytes]
  stop_ids: tuple[int, ...]  # Tokens that end a turn.


def choose(texts: Sequence[str] | None, tokenizer: Any) -> tuple[str, ...]:
  """Returns `texts`; for an empty or absent `texts`, the tags in the tokenizer's chat template.

  Raises:
    ValueError: there are neither texts nor tags.
  """
  if texts:
    return tuple(texts)
  template = getattr(tokenizer, "chat_template", "")
  if tags := tuple(tag for tag in TAGS if tag in template):
    return tags
  lack = "tokenizer's chat template has no such tag"
  if not template:
    lack = "tokenizer has no chat template that names them"
  raise ValueError(
    "objective.segment_unit='step' needs objective.segment_delimiters, the texts that end a step, "
    f"such as ('</think>', '</tool_call>'): the {lack}"
  )


def delimiters(texts: Sequence[str] | None, tokenizer: Any) -> Delimiters:
  """Returns the delimiters of `choose`, with the bytes of all tokens."""
  encoded = tuple(text.encode() for text in choose(texts, tokenizer))
  return Delimiters(encoded, dict(enumerate(tokenizer.token_bytes())), tuple(tokenizer.stop_ids))


def step_ends(
  delimiters: Delimiters,
  tokens_BT: np.ndarray,
  mask_BT: np.ndarray,
  turn_BT: np.ndarray | None = None,
) -> np.ndarray:
  """Marks sampled tokens that complete a delimiter, bool [B, T].

  A delimiter lies within one turn. Observations are ignored, and delimiters may overlap. A token
  directly before a stop token is not marked: the end of the turn ends the step.
  """
  ends_BT = np.zeros(mask_BT.shape, bool)
  for row, mask_T in enumerate(mask_BT):
    time_X = np.flatnonzero(mask_T > 0)
    turns = [] if turn_BT is None else np.flatnonzero(np.diff(turn_BT[row, time_X])) + 1
    for time_U in np.split(time_X, turns):
      tokens = tokens_BT[row, time_U].tolist()
      pieces = [delimiters.bytes_of.get(token, b"") for token in tokens]
      text, end_U = b"".join(pieces), np.cumsum(list(map(len, pieces)))
      for delimiter in delimiters.texts:
        ends, place = [], text.find(delimiter)
        while place >= 0:
          ends.append(place + len(delimiter))
          place = text.find(delimiter, place + 1)
        ends_BT[row, time_U[np.searchsorted(end_U, ends)]] = True
      ends_BT[row, time_U[:-1]] &= ~np.isin(tokens[1:], delimiters.stop_ids)
  return ends_BT
