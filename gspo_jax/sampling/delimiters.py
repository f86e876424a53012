"""Search for the ends of a response's steps.

A step, such as a thought or a tool call, ends with a delimiter, such as `</think>`. A delimiter may
be one token or several, and a token may contain more than a delimiter. So the response's bytes are
searched, not its tokens.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Tags that end a thought or a tool call in the chat templates of Qwen, DeepSeek and Kimi.
TAGS = ("</think>", "</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")


@dataclasses.dataclass(frozen=True)
class Delimiters:
  """Delimiters of steps, with the bytes and stop ids of a tokenizer."""

  texts: tuple[bytes, ...]  # The delimiters.
  token_bytes: Mapping[int, bytes]  # Bytes of each token id's text.
  stop_ids: tuple[int, ...]  # Token ids that end a turn.


def choose(texts: Sequence[str] | None, tokenizer: Any) -> tuple[str, ...]:
  """Returns the delimiters' texts.

  Args:
    texts: configured delimiters. None or an empty list means those of TAGS that occur in the chat
      template.
    tokenizer: tokenizer with the chat template.

  Raises:
    ValueError: there are no `texts`, and none of TAGS occurs in the chat template.
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
  """Returns the delimiters chosen by `choose`, with the tokenizer's bytes and stop ids."""
  encoded = tuple(text.encode() for text in choose(texts, tokenizer))
  return Delimiters(encoded, dict(enumerate(tokenizer.token_bytes())), tuple(tokenizer.stop_ids))


def step_ends(
  delimiters: Delimiters,
  tokens_BT: np.ndarray,
  mask_BT: np.ndarray,
  turn_BT: np.ndarray | None = None,
) -> np.ndarray:
  """Marks the sampled tokens in which a delimiter ends, bool [B, T].

  A delimiter must lie within one turn. Delimiters may overlap. A token directly before a stop token
  is not marked, because the stop token would then be a separate step.

  Args:
    delimiters: delimiters of steps, with the bytes and stop ids of the tokenizer.
    tokens_BT: token ids.
    mask_BT: 1 for sampled tokens, 0 elsewhere.
    turn_BT: turn of each sampled token; None if every response is a single turn.
  """
  ends_BT = np.zeros(mask_BT.shape, bool)
  for row, mask_T in enumerate(mask_BT):
    time_X = np.flatnonzero(mask_T > 0)
    turns = [] if turn_BT is None else np.flatnonzero(np.diff(turn_BT[row, time_X])) + 1
    for time_U in np.split(time_X, turns):
      tokens = tokens_BT[row, time_U].tolist()
      pieces = [delimiters.token_bytes.get(token, b"") for token in tokens]
      text, end_U = b"".join(pieces), np.cumsum(list(map(len, pieces)))
      for delimiter in delimiters.texts:
        overlapping = re.finditer(b"(?=%b)" % re.escape(delimiter), text)
        ends = [match.start() + len(delimiter) for match in overlapping]
        ends_BT[row, time_U[np.searchsorted(end_U, ends)]] = True
      ends_BT[row, time_U[:-1]] &= ~np.isin(tokens[1:], delimiters.stop_ids)
  return ends_BT
