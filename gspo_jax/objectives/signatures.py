"""Signatures with short names of types, as `help` shows them."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from jax import Array
from jax.typing import ArrayLike


def short(function: Callable, scalars: Any) -> inspect.Signature:
  """Returns a signature with short names of types.

  A reduction is shown as an `Array`.

  Args:
    function: function that returns reductions.
    scalars: union type of all reductions.
  """
  signature = inspect.signature(function)
  optional = {ArrayLike | None: "ArrayLike | None"}
  names = optional | {ArrayLike: "ArrayLike", Array: "Array", scalars: "Array"}
  parameters = [
    p.replace(annotation=_Type(p.annotation, names)) for p in signature.parameters.values()
  ]
  results = _Type(signature.return_annotation, names)
  return signature.replace(parameters=parameters, return_annotation=results)


class _Type(str):
  """Text of a type, without modules and quotes."""

  def __new__(cls, annotation: Any, names: dict[Any, str]) -> "_Type":
    text = inspect.formatannotation(annotation)
    for kind, name in names.items():
      text = text.replace(inspect.formatannotation(kind), name)
    text = re.sub(r"\*<class '([\w.]+)'>", r"Unpack[\1]", text)
    text = re.sub(r"gspo_jax\.(\w+\.)*(\w+)", r"\2", text)
    return super().__new__(cls, re.sub(r"\bMean\b", "Array", text))

  __repr__ = str.__str__  # Without quotes.
