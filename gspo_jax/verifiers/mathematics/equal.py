"""Compares answers parsed by `structure`.

Numbers are compared exactly, or in many digits (`algebra.DIGITS`). A decimal counts as the rounding
of a number only if it has enough digits (`quantity.ROUNDED`, `algebra.PRINTED`).
"""

import fractions
import re

import sympy as sp

from gspo_jax.verifiers.mathematics import algebra, names, nodes, piecewise
from gspo_jax.verifiers.mathematics.nodes import (
  Choice,
  Group,
  Named,
  Pieces,
  Region,
  Relation,
  Scalar,
  Word,
)
from gspo_jax.verifiers.mathematics.quantity import Quantity, same
from gspo_jax.verifiers.mathematics.spelling import TEXT, normalise
from gspo_jax.verifiers.mathematics.tokens import fold
from gspo_jax.verifiers.mathematics.units import Unit
from gspo_jax.verifiers.mathematics.values import rational


def same_answer(gold, ours) -> bool:
  """Whether two nodes of `structure.read` are the same answer.

  The comparison is not symmetric. The relation m + n = 204 may answer the gold number 204, but the
  number 204 does not answer the gold relation m + n = 204.
  """
  if isinstance(gold, Choice) or isinstance(ours, Choice):
    return _same_choice(gold, ours)
  if isinstance(gold, Named) or isinstance(ours, Named):
    return _same_named(gold, ours)
  if isinstance(gold, Pieces) or isinstance(ours, Pieces):
    return piecewise.same(gold, ours, same_answer)
  if isinstance(gold, Scalar) and isinstance(ours, Relation):
    return _is_sum(ours) and _same_scalar(gold, Scalar(ours.members[-1]))
  if isinstance(gold, Relation) or isinstance(ours, Relation):
    relations = isinstance(gold, Relation) and isinstance(ours, Relation)
    return relations and _same_relation(gold, ours)
  if isinstance(gold, Word) or isinstance(ours, Word):
    return _spelling(gold) == _spelling(ours) is not None
  if isinstance(gold, Group) and isinstance(ours, Group):
    if _same_group(gold, ours):
      return True
    if "list" in (gold.kind, ours.kind) or gold.kind == ours.kind == "tuple":
      return False
  if isinstance(gold, Scalar) and isinstance(ours, Scalar):
    return _same_scalar(gold, ours)
  if isinstance(gold, Region) or isinstance(ours, Region):
    return _same_region(gold, ours)
  return _same_vector(gold, ours) or _same_vector(ours, gold) or _single(gold, ours)


def _single(gold, ours) -> bool:
  """Compares the only item of a list or set with another answer."""
  for group, other in ((gold, ours), (ours, gold)):
    if isinstance(group, Group) and group.kind in ("list", "set") and len(group.items) == 1:
      return same_answer(group.items[0], other)
  return False


def _same_choice(gold, ours) -> bool:
  """Compares choices. For example, (B) 5 equals both B and 5, but not (C) 5."""
  if isinstance(gold, Choice) and isinstance(ours, Choice):
    values = gold.value is None or ours.value is None or same_answer(gold.value, ours.value)
    return gold.letter == ours.letter and values
  letters = (node.letter if isinstance(node, Choice) else _spelling(node) for node in (gold, ours))
  values = [node.value if isinstance(node, Choice) else node for node in (gold, ours)]
  return len({*letters}) == 1 or (None not in values and same_answer(*values))


def _spelling(node) -> str | None:
  """Returns the text of a word or of a single variable. Returns None for other nodes."""
  if isinstance(node, Word):
    return node.text
  if isinstance(node, Scalar) and isinstance(node.value, sp.Symbol) and not node.unit:
    return node.value.name
  return None


def _same_named(gold, ours) -> bool:
  """Compares answers, at least one of them with a name, such as x = 5."""
  chains = [_each_name(node) for node in (gold, ours)]
  if all(isinstance(node, Group) for node in chains) and same_answer(*chains):
    return True
  lists = [_distribute(node) for node in (gold, ours)]
  if all(isinstance(node, Group | Region) for node in lists):
    return same_answer(*lists)
  if isinstance(gold, Named) and isinstance(ours, Named):
    if gold.parameter != ours.parameter and None not in (gold.parameter, ours.parameter):
      ours = _rename_parameter(ours, gold.parameter)
    if gold.name == ours.name or "text" in (gold.name, ours.name):
      return same_answer(gold.value, ours.value)
    return bool(gold.relation and ours.relation) and _same_relation(gold.relation, ours.relation)
  if isinstance(gold, Relation) or isinstance(ours, Relation):
    relations = [node.relation if isinstance(node, Named) else node for node in (gold, ours)]
    return None not in relations and _same_relation(*relations)
  if isinstance(ours, Named) and ours.name in names.CONSTANTS:
    return False  # A constant has no other value: i = 18 is false.
  return same_answer(*(node.value if isinstance(node, Named) else node for node in (gold, ours)))


def _distribute(node):
  """Converts (x, y) = (1, 2) to the list x = 1, y = 2. Returns other nodes unchanged."""
  if not isinstance(node, Named) or "(" in node.name or not isinstance(node.value, Group):
    return node
  labels, group = node.name.split(","), node.value
  if group.brackets != "()" or not len(labels) == len(group.items) > 1:
    return node
  return Group("list", tuple(map(Named, labels, group.items)))


def _each_name(node):
  """Converts x = y = 1 to the list x = 1, y = 1. Returns other nodes unchanged."""
  if not isinstance(node, Named) or not node.names:
    return node
  return Group("list", tuple(Named(name, node.value) for name in node.names))


def _rename_parameter(function: Named, parameter: str) -> Named:
  """Renames a function's parameter.

  For example, f(t) = t + 1 becomes f(x) = x + 1. Returns the function unchanged if this is
  impossible, for example because its value already has the letter x.
  """
  old, new = (sp.Symbol(letter, real=True) for letter in (function.parameter, parameter))
  if isinstance(function.value, Pieces):
    value = piecewise.rename(function.value, old, new)
  else:
    value = getattr(function.value, "value", None)
    value = (
      None if value is None or new in value.free_symbols else Scalar(value.xreplace({old: new}))
    )
  if value is None:
    return function
  name = function.name.removesuffix(f"({function.parameter})") + f"({parameter})"
  return Named(name, value, None, parameter)


def _is_sum(relation: Relation) -> bool:
  """Whether a relation states the value of a sum, such as m + n = 204.

  x + y = 204 does not count, since it is the equation of a line.
  """
  total, *values = relation.members
  letters = total.args if isinstance(total, sp.Add) else ()
  return (
    set(relation.operators) == {"="}
    and len(letters) > 1
    and all(map(_is_name, letters))
    and all(value.is_Rational and value == values[0] for value in values)
  )


def _is_name(term) -> bool:
  """Whether a term of a sum is a name.

  Examples are m, x_1, α, and a length AB. The letters x, y and z are coordinates, and no names.
  """
  letters = term.args if isinstance(term, sp.Mul) else (term,)
  pattern = "[A-Z]" if len(letters) > 1 else "[a-wA-Z]|[a-zA-Z]_.+|[a-z]{2,}"
  return all(letter.is_Symbol and re.fullmatch(pattern, letter.name) for letter in letters)


def _same_relation(gold: Relation, ours: Relation) -> bool:
  """Compares relations, from left to right or from right to left.

  Relations with one operator may also differ by a constant factor: x = y and 2x = 2y.
  """
  operators = tuple(_REVERSE.get(o, o) for o in reversed(ours.operators))
  for other in (ours, Relation(operators, ours.members[::-1])):
    if gold.operators == other.operators:
      if all(map(algebra.same_expression, gold.members, other.members)):
        return True
      if len(gold.operators) == 1 and _proportional(gold, other):
        return True
  return False


_REVERSE = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _proportional(gold: Relation, ours: Relation) -> bool:
  """Whether two relations are equal up to a constant factor.

  The factor must be positive, unless the operator is = or !=.
  """
  a, b = (algebra.commuting(r.members[0] - r.members[1]) for r in (gold, ours))
  if isinstance(a, sp.MatrixBase) or isinstance(b, sp.MatrixBase):
    return False
  if a.is_number or b.is_number:
    return False
  if gold.operators[0] in ("=", "!="):
    a, b = (sp.numer(sp.together(side)) for side in (a, b))
    return algebra.constant_ratio(a, b) is not None
  ratio = algebra.constant_ratio(a, b)
  return ratio is not None and bool(ratio.is_positive)


def _same_group(gold: Group, ours: Group) -> bool:
  """Compares the items of two groups, by the rules of their kinds."""
  kinds = {gold.kind, ours.kind}
  if "ratio" in kinds and len(kinds) > 1:
    return False
  if kinds == {"list"} and all(getattr(i, "kind", "") == "tuple" for i in gold.items + ours.items):
    kinds = {"set"}  # Repeated tuples are one solution. Repeated numbers count separately.
  if len(gold.items) != len(ours.items) and kinds != {"set"}:
    return _single(gold, ours)
  if kinds == {"tuple"}:
    brackets = gold.brackets == ours.brackets
    return brackets and _in_order(gold.items, ours.items)
  if kinds == {"list", "tuple"}:
    pair, roots = (gold, ours) if gold.kind == "tuple" else (ours, gold)
    if _has_one_label(roots) and nodes.is_pair(pair):
      return False  # The roots x = -1 or x = 3 are neither a pair nor the interval (-1, 3).
  if kinds in ({"ratio"}, {"list", "tuple"}):
    bracket = next((g.brackets for g in (gold, ours) if g.kind == "tuple"), "()")
    return bracket == "()" and _in_order(gold.items, ours.items)
  # If only one side has names (x = 1, y = 2 against 1, 2), the order counts. A set has none, but
  # x_1 and x_2 are names of the roots in a set.
  ordered = _has_labels(gold) != _has_labels(ours)
  if kinds == {"list"}:
    return (_in_order if ordered else _any_order)(gold.items, ours.items)
  if "tuple" in kinds or (ordered and _has_labels(gold, True) != _has_labels(ours, True)):
    return False
  if kinds == {"set"}:
    return all(
      any(same_answer(a, b) for b in group)
      for items, group in ((gold.items, ours.items), (ours.items, gold.items))
      for a in items
    )
  return _any_order(gold.items, ours.items)


def _has_labels(group: Group, roots: bool = False) -> bool:
  """Whether all items of a list have names, at least two of them different.

  roots: whether names without their indices must differ.
  """
  labels = [item.name for item in group.items if isinstance(item, Named)]
  labels = [label.partition("_")[0] for label in labels] if roots else labels
  return len(labels) == len(group.items) > 1 and len(set(labels)) > 1


def _has_one_label(group: Group) -> bool:
  """Whether all items of a list have the same name, as in x = -1 or x = 3."""
  labels = {getattr(item, "name", None) for item in group.items}
  return len(labels) == 1 < len(group.items) and labels.isdisjoint([None, "text", "series"])


def _in_order(a, b) -> bool:
  return len(a) == len(b) and all(map(same_answer, a, b))


def _any_order(a, b) -> bool:
  return piecewise.match_all(a, b, same_answer)


def _same_vector(matrix, group) -> bool:
  """Whether a matrix of one column or row equals a tuple."""
  if not isinstance(matrix, Scalar) or not isinstance(matrix.value, sp.MatrixBase):
    return False
  if not isinstance(group, Group) or group.kind != "tuple" or group.brackets not in ("()", "[]"):
    return False
  return 1 in matrix.value.shape and _in_order([Scalar(v) for v in matrix.value], group.items)


def _same_scalar(gold: Scalar, ours: Scalar) -> bool:
  """Compares matrices, or numbers and expressions with their units."""
  if any(isinstance(side.value, sp.MatrixBase) for side in (gold, ours)):
    return algebra.same_expression(gold.value, ours.value)
  a, b = gold.value, ours.value
  if a.is_Rational and b.is_Rational and not _one_in_degrees(gold, ours):
    quantities = [
      Quantity(fractions.Fraction(int(s.value.p), int(s.value.q)), s.places, s.unit)
      for s in (gold, ours)
    ]
    return bool(same(*quantities))
  return _same_real(gold, ours)


def _one_in_degrees(gold: Scalar, ours: Scalar) -> bool:
  """Whether exactly one of two values is in degrees."""
  return [bool(s.unit and s.unit.degrees) for s in (gold, ours)].count(True) == 1


def _same_real(gold: Scalar, ours: Scalar) -> bool:
  """Compares symbolic values, with units as in `quantity.same`."""
  a, b = gold.value, ours.value
  if _one_in_degrees(gold, ours):
    plain, degrees = (gold, ours) if ours.unit and ours.unit.degrees else (ours, gold)
    if plain.unit is None and algebra.same_expression(plain.value, degrees.value):
      return True
    if plain.unit is None or plain.unit.dimensions == (("radian", 1),):
      return algebra.same_expression(plain.value, degrees.value * sp.pi / 180)
    return False
  if gold.unit and ours.unit:
    if gold.unit.dimensions != ours.unit.dimensions:
      return False
    a, b = (side.value * rational(side.unit.scale) for side in (gold, ours))
  elif _percent(gold.unit) or _percent(ours.unit):
    percent, number = (a, b) if _percent(gold.unit) else (b, a)
    return any(algebra.same_expression(x, number) for x in (percent / 100, percent))
  if algebra.same_expression(a, b):
    return True
  for exact, rounded in ((gold, ours), (ours, gold)):
    if exact.places is None and rounded.places is not None:
      return algebra.rounds_to(rounded.value, rounded.places, exact.value)
  return False


def _percent(unit: Unit | None) -> bool:
  return bool(unit and unit.percent)


def _same_region(gold, ours) -> bool:
  """Compares sets of real numbers. A tuple of two numbers may be an interval."""
  variables = {side.name for side in (gold, ours) if isinstance(side, Region) and side.name}
  if len(variables) > 1:
    return False
  regions = [nodes.as_region(side) for side in (gold, ours)]
  if None in regions:
    return False
  a, b = (side.region for side in regions)
  if a == b:
    return True
  pieces = [_pieces(side) for side in (a, b)]
  if None in pieces:
    return bool(sp.SymmetricDifference(a, b).is_empty)
  return len(pieces[0]) == len(pieces[1]) and all(
    p[2:] == q[2:] and algebra.same_expression(p[0], q[0]) and algebra.same_expression(p[1], q[1])
    for p, q in zip(*pieces)
  )


def _pieces(region: sp.Set) -> list[tuple] | None:
  """Returns a set's intervals as (start, end, left open, right open).

  Returns None if the set does not consist of intervals and points.
  """
  if region is sp.S.EmptySet:
    return []
  pieces = []
  for part in region.args if isinstance(region, sp.Union) else [region]:
    if isinstance(part, sp.Interval) or part is sp.S.Reals:
      part = sp.Interval(-sp.oo, sp.oo) if part is sp.S.Reals else part
      pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
    elif isinstance(part, sp.FiniteSet):
      pieces += [(value, value, False, False) for value in part]
    else:
      return None
  return sorted(pieces, key=lambda piece: [sp.N(piece[0]), sp.N(piece[1])])


# A month or a clock time, whose spelling varies in case and full stops.
_DATE = re.compile(
  r"(\d(?:st|nd|rd|th)?,? (?:of )?)?\b(?:january|february|march|april|may|june|july|august"
  r"|september|october|november|december)\b(?(1)|,? \d)|\d [ap]m\b"
)
# Capitals in a typeface, such as \text{BD} and \mathrm{IV}.
_CAPITALS = re.compile(r"\\(?:text|math)(?:bf|it|rm|sf)?\s*\{\s*([A-Z]{2,})\s*\}")


def same_text(gold: str, ours: str) -> bool:
  """Compares texts. Dollar signs, repeated spaces and typefaces of capitals do not count.

  If both texts consist of words, `fold` first unifies their capitals. Dates and clock times are
  compared without regard to case, and "p.m." is PM.
  """
  a, b = (" ".join(normalise(text).replace("$", " ").split()) for text in (gold, ours))
  words = re.compile(r"(?:\\text\s*\{)?([A-Za-z][A-Za-z' ,-]{2,})\}?")
  if words.fullmatch(a) and words.fullmatch(b):
    a, b = (fold(words.fullmatch(text)[1]) for text in (a, b))
  plain = {_CAPITALS.sub(r"\1", text) for text in (a, b)}
  return len(plain) == 1 or _date(a) == _date(b) is not None


def same_half_days(gold: str, ours: str) -> bool:
  """Whether two clock times agree in a.m. and p.m.; True if a text is no clock time."""
  dates = [_date(normalise(text)) or "" for text in (gold, ours)]
  halves = [{*re.findall(r"\d ([ap])m\b", date)} for date in dates]
  return set() in halves or halves[0] == halves[1]


def _date(text: str) -> str | None:
  """Returns a date or clock time in lower case, without full stops. Returns None for other text."""
  text = " ".join(TEXT.sub(r" \1", text).casefold().split())
  text = re.sub(r"(?: |(?<=:\d\d))([ap])(?:\. ?m\.?|m)(?![a-z])", r" \1m", text)
  return text if _DATE.search(text) else None
