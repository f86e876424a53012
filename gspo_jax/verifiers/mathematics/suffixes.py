r"""Parses the tokens after an expression as a unit, such as cm, \text{ m} or km/h."""

import re
from typing import Literal

from gspo_jax.verifiers.mathematics import units
from gspo_jax.verifiers.mathematics.tokens import Token, is_product

Letters = Literal["variables", "text", "units"]  # See `structure.read`.
_SIGNS = frozenset("% $ € £ ¥ ₹ circ".split())
_OTHERS = _SIGNS | {"^", "{", "}", "(", ")", "/", "cdot", "-"}


def unit(tokens: list[Token], start: int, currency: str, letters: Letters):
  """Parses the tokens from `start` on as a unit. Returns None for other tokens.

  A unit is returned as (factor, unit), as by `units.parse`.

  Args:
    tokens: tokens of the expression and its unit.
    start: index of the unit's first token.
    currency: sign before the expression; "" if there is none.
    letters: which letters are read as units; see `structure.read`.
  """
  rest = tokens[start:]
  if not all(
    t.kind in ("word", "text", "letter") or t.text in _OTHERS for t in rest if t.kind != "number"
  ):
    return None
  typeset = any(t.kind == "text" for t in rest)
  if typeset and not _begins_unit(rest):
    return None
  brackets = [t.text for t in rest if t.text in ("(", ")")]
  if brackets and (brackets != ["(", ")"] or rest[0].text != "(" or rest[-1].text != ")"):
    return None
  if not (typeset or any(t.kind == "word" or t.text in _SIGNS for t in rest)):
    numeric = all(t.kind == "number" for t in tokens[:start])
    if not (letters == "units" and numeric and rest[0].kind == "letter"):
      return None
  if letters == "variables" and _glued_product(rest[0]):
    return None
  spaced = rest[0].spaced or rest[0].kind == "text"
  return units.parse(" " * spaced + " ".join(t.text for t in rest), currency, typeset)


def _begins_unit(rest: list[Token]) -> bool:
  r"""Whether the first token belongs to the unit.

  In 2m \text{ kg} it does not: m is a variable.
  """
  first, second = rest[0], rest[min(1, len(rest) - 1)]
  product = _glued_product(first)
  if first.kind != "letter" and not (product and second.kind == "text"):
    return True
  rate = re.match(r"/|per\b", second.text)
  return product and bool(rate or units.parse(" " + second.text, typeset=True) is None)


def _glued_product(token: Token) -> bool:
  """Whether letters right after a number may be a product, as in 2mg."""
  return token.kind == "word" and not token.spaced and is_product(token.text)
