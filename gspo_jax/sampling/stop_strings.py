"""Detection of stop strings in sampled tokens."""

from collections.abc import Callable, Sequence

from gspo_jax.sampling.requests import Request


def end(
  request: Request,
  tail: Sequence[int] | None,
  new: Sequence[int],
  detokenize: Callable[[list[int]], str] | None,
) -> tuple[int | None, list[int] | None]:
  """Finds the end of the first stop string in a response's `new` tokens.

  A stop string may begin before `new`. So the last tokens before `new`, the `tail`, are searched
  too. A tail has at most as many tokens as the longest stop string has bytes, so the cost of a
  search does not grow with the response. Tokens without a text, such as special tokens, are
  ignored.

  Args:
    request: request with the stop strings. A stop string may begin in the turn's tokens before the
      response (`Request.unfinished`).
    tail: `tail` from the previous call for this response; None at the first call.
    new: new tokens of the response.
    detokenize: function from token ids to text; None if there are no stop strings.

  Returns:
    Two values. The first is the number of `new` tokens up to and including the token that completes
    a stop string; None if no stop string is complete. The second is `tail` for the next call; None
    if the request has no stop strings.
  """
  strings = request.stop_strings
  if not strings:
    return None, None
  longest = max(len(s.encode()) for s in strings)

  def with_text(tokens: Sequence[int]) -> list[int]:
    # Each token is doubled: some tokenizers drop a first space, so " " alone would look empty.
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
