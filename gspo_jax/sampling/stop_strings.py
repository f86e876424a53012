"""Where a stop string ends a response."""

from collections.abc import Callable, Sequence

from gspo_jax.sampling.requests import Request


def end(
  request: Request,
  tail: Sequence[int] | None,
  new: Sequence[int],
  detokenize: Callable[[list[int]], str] | None,
) -> tuple[int | None, list[int] | None]:
  """Counts `new` tokens up to the end of a stop string, and returns the next `tail`.

  Args:
    tail: as the call before returned it, for the tokens before these; None at the first. It is the
      last tokens that have a text, as many as a stop string has bytes: none is complete in them. So
      a long response costs no more than a short one, and what is special in between counts for
      nothing.
    new: what may complete one.

  Returns:
    None where none is complete.
  """
  strings = request.stop_strings
  if not strings:
    return None, None
  most = max(len(s.encode()) for s in strings)

  def with_text(tokens: Sequence[int]) -> list[int]:
    # Twice, since some leave out a space at the beginning.
    return [token for token in tokens if detokenize([token, token])]

  def complete(count: int) -> bool:
    text = detokenize([*before, *new[:count]])
    return any(s in text for s in strings)

  turn = request.prior[len(request.prior) - request.unfinished :]
  before = with_text(turn)[-most:] if tail is None else tail
  completing = None
  if new and complete(len(new)):
    completing = next(n for n in range(1, len(new) + 1) if complete(n))
  return completing, [*before, *with_text(new)][-most:]
