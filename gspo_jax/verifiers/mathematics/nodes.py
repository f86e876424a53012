"""Declares the nodes of a parsed answer (`structure`), and converts them to sets of numbers."""

import dataclasses
from typing import Any

import sympy as sp

from gspo_jax.verifiers.mathematics import units


@dataclasses.dataclass(frozen=True)
class Scalar:
  """An expression or matrix, with an optional unit."""

  value: Any  # SymPy value.
  places: int | None = None  # Number of digits after the point of a plain decimal, else None.
  unit: units.Unit | None = None


@dataclasses.dataclass(frozen=True)
class Group:
  """Several items, such as the tuple (1, 2] or the list 1, 2."""

  kind: str  # "list" (without brackets), "tuple", "set", or "ratio" (1:2).
  items: tuple  # Nodes.
  brackets: str = ""  # Both brackets of a tuple, such as "(]".


@dataclasses.dataclass(frozen=True)
class Region:
  """A set of real numbers."""

  region: sp.Set
  name: str | None = None  # Name of the variable, "x" for x > 0; None if it is unknown.


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A piecewise function, such as x if x > 0, -x otherwise."""

  pieces: tuple[tuple[Any, Any], ...]  # Pairs (value, condition). None means "otherwise".


@dataclasses.dataclass(frozen=True)
class Named:
  """A name and its value, such as x = 5."""

  name: str
  value: Any  # Node.
  relation: "Relation | None" = None  # The equation; None if a side cannot be read.
  parameter: str | None = None  # Letter x of a name f(x), else None.
  names: tuple[str, ...] = ()  # All names of x = y = z = 1; () if there is only one.


@dataclasses.dataclass(frozen=True)
class Relation:
  """Expressions with relations between them, such as a < b = c."""

  operators: tuple[str, ...]  # "=", "!=", "<", ">", "<=" or ">=".
  members: tuple  # SymPy values, one more than operators.


@dataclasses.dataclass(frozen=True)
class Choice:
  """A letter of a multiple choice."""

  letter: str
  value: Any = None  # Node after the letter, as 5 in (B) 5, else None.


@dataclasses.dataclass(frozen=True)
class Word:
  """An answer in words, compared as text."""

  text: str


def as_region(node) -> Region | None:
  """Converts a node to a set of real numbers. Returns None if this is impossible.

  A number becomes a set of one number. An ascending tuple of two numbers, such as (1, 2) or (1, 2],
  becomes an interval.
  """
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


def is_pair(group: Group) -> bool:
  """Whether a group consists of two expressions without names."""
  values = [item.value for item in group.items if isinstance(item, Scalar)]
  matrices = any(isinstance(value, sp.MatrixBase) for value in values)
  return len(values) == len(group.items) == 2 and not matrices


def solve(operator: str, difference, x: sp.Symbol) -> sp.Set:
  """Returns the real solutions x of a relation between `difference` and 0."""
  if operator == "!=":
    zeros = sp.solveset(difference, x, sp.S.Reals)
    return sp.Complement(sp.S.Reals, zeros)
  relation = {"<": sp.Lt, ">": sp.Gt, "<=": sp.Le, ">=": sp.Ge, "=": sp.Eq}[operator](difference, 0)
  if relation in (sp.true, sp.false):
    return sp.S.Reals if relation == sp.true else sp.S.EmptySet
  return relation.as_set()


def unknowns(value) -> set:
  """Returns the unknowns of a value: variables, and values of unknown functions such as f(x).

  Variables in the arguments of such functions are not included.
  """
  functions = value.atoms(sp.core.function.AppliedUndef)
  return functions | (value.free_symbols - set().union(*(f.free_symbols for f in functions)))
