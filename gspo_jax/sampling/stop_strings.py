"""Where a stop string ends a response."""

from collections.abc import Callable, Sequence

from gspo_jax.sampling.requests import Request


def longest(strings: Sequence[str]) -> int:
  """The most tokens that a stop string can be made of: no token is shorter than a byte."""
  return max((len(s.encode()) for s in strings), default=0)


def end(
  request: Request,
  old: Sequence[int],
  new: Sequence[int],
  detokenize: Callable[[list[int]], str] | None,
) -> int | None:
  """Number of `new` tokens with the one that completes a stop string; None: none is complete.

  Args:
    old: sampled for the request before them, at least the last `longest` tokens; no stop string is
      complete in them. More are not read, so that a long response costs no more than a short one.
    new: what may complete one.
  """
  strings = request.stop_strings
  if not (strings and new):
    return None
  most = longest(strings)
  before = [*request.last_begun(most), *old][-most:]

  def complete(count: int) -> bool:
    text = detokenize([*before, *new[:count]])
    return any(s in text for s in strings)

  if not complete(len(new)):
    return None
  return next(n for n in range(1, len(new) + 1) if complete(n))
