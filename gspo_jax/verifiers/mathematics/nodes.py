"""Nodes of a parsed answer, and their conversion to sets of real numbers."""

import dataclasses
from typing import Any

import sympy as sp

from gspo_jax.verifiers.mathematics import units


@dataclasses.dataclass(frozen=True)
class Scalar:
  """An expression or matrix. `places` is the digits after the point of a plain decimal, or None."""

  value: Any
  places: int | None = None
  unit: units.Unit | None = None


@dataclasses.dataclass(frozen=True)
class Group:
  """Items. `kind`: list (no brackets), tuple, set or ratio. `brackets` of a tuple, such as "(]"."""

  kind: str
  items: tuple
  brackets: str = ""


@dataclasses.dataclass(frozen=True)
class Region:
  """A set of real numbers. `name` is the variable in it, or None."""

  region: sp.Set
  name: str | None = None


@dataclasses.dataclass(frozen=True)
class Pieces:
  """Function by cases: pairs of value and condition. The condition None means otherwise."""

  pieces: tuple[tuple[Any, Any], ...]


@dataclasses.dataclass(frozen=True)
class Named:
  """A name and its value, `x = 5`.

  `relation` is the same equation, without a special role of the name; None if one side cannot be
  read. `parameter` is the letter x of f(x), or None.
  """

  name: str
  value: Any
  relation: "Relation | None" = None
  parameter: str | None = None


@dataclasses.dataclass(frozen=True)
class Relation:
  """Expressions with `=`, `<`, `<=` or `!=` between them."""

  operators: tuple[str, ...]
  members: tuple


@dataclasses.dataclass(frozen=True)
class Choice:
  """A letter of a multiple choice, and the value after it, if any."""

  letter: str
  value: Any = None


@dataclasses.dataclass(frozen=True)
class Word:
  """Text, compared as text."""

  text: str


def as_region(node) -> Region | None:
  """Converts a node to a set of real numbers. (1, 2) is an open interval; None for other nodes."""
  if isinstance(node, Region):
    return node
  if isinstance(node, Scalar) and not node.unit and node.value.is_extended_real:
    return Region(sp.FiniteSet(node.value))
  if not isinstance(node, Group) or not all(isinstance(item, Scalar) for item in node.items):
    return None
  values = [item.value for item in node.items]
  if any(item.unit for item in node.items) or not all(
    getattr(v, "is_number", 0) and v.is_extended_real for v in values
  ):
    return None
  if node.kind == "set":
    return Region(sp.FiniteSet(*values))
  if node.kind == "tuple" and len(values) == 2 and (values[0] - values[1]).is_extended_negative:
    return Region(sp.Interval(*values, node.brackets[0] == "(", node.brackets[1] == ")"))
  return None


def solve(operator: str, difference, x: sp.Symbol) -> sp.Set:
  """Returns the solutions x of `difference` `operator` 0."""
  if operator == "!=":
    zeros = sp.solveset(difference, x, sp.S.Reals)
    return sp.Complement(sp.S.Reals, zeros)
  relation = {"<": sp.Lt, ">": sp.Gt, "<=": sp.Le, ">=": sp.Ge, "=": sp.Eq}[operator](difference, 0)
  if relation in (sp.true, sp.false):
    return sp.S.Reals if relation == sp.true else sp.S.EmptySet
  return relation.as_set()


def unknowns(value) -> set:
  """Returns the variables and the values of unknown functions."""
  functions = value.atoms(sp.core.function.AppliedUndef)
  return functions | (value.free_symbols - set().union(*(f.free_symbols for f in functions)))
