"""Detection of stop strings in sampled tokens."""

from collections.abc import Callable, Sequence

from gspo_jax.sampling.requests import Request


def end(
  request: Request,
  tail: Sequence[int] | None,
  new: Sequence[int],
  detokenize: Callable[[list[int]], str] | None,
) -> tuple[int | None, list[int] | None]:
  """Finds the end of the first stop string in `new` tokens.

  Args:
    request: request with the stop strings.
    tail: `tail` from the previous call; None at the first call. It has the last tokens with a text
      before `new`, as many as the longest stop string has bytes. So a call's cost does not grow
      with the response. Special tokens without a text are ignored.
    new: new tokens of the response.
    detokenize: function from token ids to text; None without stop strings.

  Returns:
    The number of `new` tokens up to the end of a stop string, or None without a complete stop
    string; and `tail` for the next call.
  """
  strings = request.stop_strings
  if not strings:
    return None, None
  longest = max(len(s.encode()) for s in strings)

  def with_text(tokens: Sequence[int]) -> list[int]:
    # Each token is doubled, since some tokenizers drop a leading space.
    return [token for token in tokens if detokenize([token, token])]

  def complete(count: int) -> bool:
    text = detokenize([*prefix, *new[:count]])
    return any(s in text for s in strings)

  turn = request.prior[len(request.prior) - request.unfinished :]
  prefix = with_text(turn)[-longest:] if tail is None else tail
  length = None
  if new and complete(len(new)):
    length = next(n for n in range(1, len(new) + 1) if complete(n))
  return length, [*prefix, *with_text(new)][-longest:]
