"""Numbers as arguments of a compiled program instead of constants in it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class WithNumbers(NamedTuple):
  """A jitted function whose last argument is given: scalars, which a sweep varies. Whatever their
  values are, the program is the same."""

  function: Callable
  numbers: Mapping[str, Any]

  def __call__(self, *arguments: Any) -> Any:
    return self.function(*arguments, self.numbers)

  def compile(self, *arguments: Any) -> "WithNumbers":
    """The same, compiled for arguments like these and for no others."""
    return self._replace(function=self.function.lower(*arguments, self.numbers).compile())

  def trace(self, *arguments: Any) -> Any:
    return self.function.trace(*arguments, self.numbers)


def with_numbers(function: Callable, numbers: Mapping[str, Any]) -> WithNumbers:
  """`function` with these numbers. They are Python's: in arithmetic an array keeps its type."""
  return WithNumbers(function, jax.tree.map(float, numbers))
