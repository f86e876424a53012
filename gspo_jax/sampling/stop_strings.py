"""Detection of stop strings in sampled tokens."""

from collections.abc import Sequence
from typing import Any

from gspo_jax.sampling.requests import Request


def text_bytes(tokenizer: Any) -> list[bytes]:
  """Returns the bytes of each token id's text; b"" for special tokens."""
  # Each id is doubled: some tokenizers drop a first space, so " " alone would look empty.
  bytes_V = tokenizer.token_bytes()
  return [text if tokenizer.decode([i, i]) else b"" for i, text in enumerate(bytes_V)]


def end(
  request: Request, tail: bytes | None, new: Sequence[int], text_bytes: Sequence[bytes] | None
) -> tuple[int | None, bytes | None]:
  """Finds the end of the first stop string in a response's `new` tokens.

  A stop string may begin before `new`. So the last bytes before `new`, the `tail`, are searched
  too. Bytes are searched rather than text, since a character may lie in several tokens.

  Args:
    request: request with the stop strings. A stop string may begin in the turn's tokens before the
      response (`Request.unfinished`).
    tail: `tail` from the previous call for this response; None at the first call.
    new: new tokens of the response.
    text_bytes: bytes of each token id's text; None if there are no stop strings.

  Returns:
    Two values. The first is the number of `new` tokens up to and including the token that completes
    a stop string; None if no stop string is complete. The second is `tail` for the next call; None
    if the request has no stop strings.
  """
  strings = [s.encode() for s in request.stop_strings]
  if not strings:
    return None, None

  def joined(tokens: Sequence[int]) -> bytes:  # Servers may sample ids beyond the tokenizer's.
    return b"".join(text_bytes[i] for i in tokens if i < len(text_bytes))

  before = max(map(len, strings)) - 1  # Bytes of an incomplete stop string.
  if tail is None:
    tail = joined(request.prior[len(request.prior) - request.unfinished :])
  tail = tail[max(0, len(tail) - before) :]

  def complete(count: int) -> bool:
    text = tail + joined(new[:count])
    return any(s in text for s in strings)

  length = None
  if new and complete(len(new)):
    length = next(n for n in range(1, len(new) + 1) if complete(n))
  return length, tail + joined(new)
