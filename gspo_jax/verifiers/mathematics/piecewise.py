"""Compares piecewise functions: pairs of value and condition (`nodes.Pieces`)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import sympy as sp

from gspo_jax.verifiers.mathematics import nodes
from gspo_jax.verifiers.mathematics.nodes import Pieces, Region, Relation, Scalar, Word

Same = Callable[[object, object], bool]  # `equal.same_answer`.
_OPPOSITE = {"even": "odd", "odd": "even", "rational": "irrational", "irrational": "rational"}
_MAX_PIECES = 16  # Functions with more pieces match piece by piece only.


def same(gold, ours, same_answer: Same) -> bool:
  """Whether two piecewise functions are equal. An expression is a function of one piece."""
  first, second = (_pieces(side) for side in (gold, ours))
  if first is None or second is None:
    return False
  same_piece = functools.partial(_same_piece, same_answer=same_answer)
  if len(first) == len(second) and match_all(first, second, same_piece):
    return True
  return max(len(first), len(second)) <= _MAX_PIECES and _same_function(first, second, same_answer)


def rename(node: Pieces, old: sp.Symbol, new: sp.Symbol) -> Pieces | None:
  """Renames a variable of a piecewise function.

  Returns None if the new name already occurs, or a value is not a single expression.
  """
  pieces = []
  for value, condition in node.pieces:
    if not isinstance(value, Scalar) or new in value.value.free_symbols:
      return None
    if isinstance(condition, Region):
      if condition.name == new.name:
        return None
      if condition.name == old.name:
        condition = dataclasses.replace(condition, name=new.name)
    elif isinstance(condition, Relation):
      if any(new in member.free_symbols for member in condition.members):
        return None
      members = tuple(member.xreplace({old: new}) for member in condition.members)
      condition = Relation(condition.operators, members)
    elif isinstance(condition, Word):
      words = condition.text.split()
      if new.name in words:
        return None
      condition = Word(" ".join(new.name if word == old.name else word for word in words))
    pieces.append((dataclasses.replace(value, value=value.value.xreplace({old: new})), condition))
  return Pieces(tuple(pieces))


def _pieces(node) -> tuple | None:
  """Returns the pieces of a function or expression. Returns None for other nodes."""
  if isinstance(node, Pieces):
    return _explicit(node.pieces)
  return ((node, None),) if isinstance(node, Scalar) else None


def _explicit(pieces: tuple) -> tuple:
  """Writes "otherwise" as the opposite condition, for example "n odd" after "n even"."""
  words = [condition.text.split() for _, condition in pieces if isinstance(condition, Word)]
  if len(pieces) != 2 or len(words) != 1 or words[0][-1:] == [] or words[0][-1] not in _OPPOSITE:
    return pieces
  rest = Word(" ".join([*words[0][:-1], _OPPOSITE[words[0][-1]]]))
  return tuple((value, rest if condition is None else condition) for value, condition in pieces)


def match_all(first: Iterable, second: Iterable, equal: Same) -> bool:
  """Whether items match one to one, in any order.

  Each item takes its first match. If equality is transitive, no other choice finds more matches.
  """
  unmatched = list(second)
  for item in first:
    match = next((i for i, other in enumerate(unmatched) if equal(item, other)), None)
    if match is None:
      return False
    del unmatched[match]
  return not unmatched


def _same_piece(first: tuple, second: tuple, same_answer: Same) -> bool:
  """Whether two pieces have equal conditions and equal values."""
  (value, condition), (other_value, other_condition) = first, second
  same = _same_condition(condition, other_condition, same_answer)
  return same and same_answer(value, other_value)


def _same_condition(first, second, same_answer: Same) -> bool:
  if first is None or second is None:
    return first is second
  return same_answer(first, second)


def _same_function(first: tuple, second: tuple, same_answer: Same) -> bool:
  """Whether two functions of one variable have the same domain and the same values.

  Each piece of one function is compared with each piece of the other, where both conditions hold.
  """
  names = {c.name for _, c in (*first, *second) if isinstance(c, Region) and c.name}
  sets = [_sets(pieces) for pieces in (first, second)]
  if len(names) > 1 or None in sets:
    return False
  if sp.Union(*sets[0]) != sp.Union(*sets[1]):
    return False
  variable = sp.Symbol(names.pop() if names else "x", real=True)
  for (value, _), region in zip(first, sets[0]):
    for (other, _), other_region in zip(second, sets[1]):
      if not _same_on(value, other, sp.Intersection(region, other_region), variable, same_answer):
        return False
  return True


def _sets(pieces: tuple) -> list[sp.Set] | None:
  """Returns the set of numbers of each condition. Returns None if a condition is no set.

  The set of "otherwise" is the complement of all other conditions.
  """
  regions = [nodes.as_region(condition) for _, condition in pieces if condition is not None]
  if None in regions or len(regions) < len(pieces) - 1:
    return None
  rest = sp.Complement(sp.S.Reals, sp.Union(*(region.region for region in regions)))
  sets = iter(regions)
  return [rest if condition is None else next(sets).region for _, condition in pieces]


def _same_on(value, other, region: sp.Set, variable: sp.Symbol, same_answer: Same) -> bool:
  """Whether two values agree on a set of numbers."""
  if region is sp.S.EmptySet:
    return True
  if isinstance(region, sp.Union):
    return all(_same_on(value, other, part, variable, same_answer) for part in region.args)
  if isinstance(region, sp.FiniteSet):
    points = [{variable: point} for point in region]
    return all(same_answer(_evaluate(value, point), _evaluate(other, point)) for point in points)
  if not isinstance(region, sp.Interval):
    return same_answer(value, other)
  signed = sp.Symbol(f"{variable}", positive=True)
  for part, sign in ((sp.Interval(0, sp.oo), 1), (sp.Interval(-sp.oo, 0), -1)):
    if region.is_subset(part):  # With a fixed sign, SymPy simplifies |x|.
      point = {variable: sign * signed}
      return same_answer(value, other) or same_answer(
        _evaluate(value, point), _evaluate(other, point)
      )
  return same_answer(value, other)


def _evaluate(value, point: dict):
  """Returns an expression at a point. Values that are not expressions are returned unchanged."""
  if not isinstance(value, Scalar):
    return value
  return dataclasses.replace(value, value=sp.sympify(value.value.subs(point)))
