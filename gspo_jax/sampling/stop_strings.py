"""Where a stop string ends a response."""

from collections.abc import Callable, Sequence


def longest(strings: Sequence[str]) -> int:
  """The most tokens that a stop string can be made of: no token is shorter than a byte."""
  return max(len(s.encode()) for s in strings)


def end(
  strings: Sequence[str],
  old: Sequence[int],
  new: Sequence[int],
  detokenize: Callable[[list[int]], str],
) -> int | None:
  """Number of `new` tokens with the one that completes a stop string; None: none is complete.

  Args:
    old: what came before, at least its last `longest` tokens; no stop string is complete in them.
      More are not read, so that a long response costs no more than a short one.
    new: what may complete one.
  """
  old = list(old[-longest(strings) :])

  def complete(count: int) -> bool:
    text = detokenize([*old, *new[:count]])
    return any(s in text for s in strings)

  if not complete(len(new)):
    return None
  return next(n for n in range(1, len(new) + 1) if complete(n))
