"""Parses a whole answer to a node (`nodes`), such as a list, a relation or a value with a unit."""

import contextlib
import dataclasses
import re

import sympy as sp

from gspo_jax.verifiers.mathematics import (
  algebra,
  choices,
  cuts,
  equal,
  expression,
  layout,
  names,
  nodes,
  numerals,
  suffixes,
  units,
)
from gspo_jax.verifiers.mathematics.cuts import split
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
from gspo_jax.verifiers.mathematics.spelling import without_quantifier
from gspo_jax.verifiers.mathematics.suffixes import Letters
from gspo_jax.verifiers.mathematics.tokens import (
  Token,
  Unreadable,
  fold,
  is_product,
  spell,
  tokenise,
)

_REFUSALS = (  # Errors of SymPy for unsupported operations, such as unsolvable inequalities.
  ArithmeticError, AttributeError, IndexError, NotImplementedError, RecursionError, TypeError,
)  # fmt: skip
MAX_ITEMS = 64  # Maximum number of items in a list, tuple or set, or of pieces of a function.
MAX_UNIT = 16  # Maximum number of tokens in a unit.
_SETS = {"R": sp.S.Reals, "Z": sp.S.Integers, "N": sp.S.Naturals, "Q": sp.S.Rationals}
_NOTHING = re.compile(
  r"(?:there (?:is|are) )?no (?:such )?(?:real |integer |valid |possible )?"
  r"(?:solutions?|roots?|values?)(?: exists?)?|no such \w+(?: exists?)?"
  r"|(?:the )?(?:empty|null) set|none|empty"
)
_EVERYTHING = re.compile(r"(?:all|any|every) (?:real )?(?:numbers?|reals|values?)|all reals")
_HALF = ("half", "one half", "a half")


def read(
  text: str,
  tight: bool = True,
  unit_letters: Letters = "variables",
  solve_inequalities: bool = True,
):
  r"""Parses an answer to a node.

  Args:
    text: the answer.
    tight: whether 1,234 is one number and not two.
    unit_letters: letters that are read as units if possible. "variables" means no letters, "text"
      letters in \text, and "units" also letters after a number (12 m).
    solve_inequalities: whether an inequality is solved to a set of numbers, which is slow.

  Raises:
    Unreadable: the text is no mathematics, or of an unsupported kind.
  """
  try:
    text = numerals.to_digits(text)
    choice = choices.split(text)
    if choice:
      letter, option = choice
      value = read(option, tight, unit_letters, solve_inequalities) if option else None
      return Choice(letter, value)
    tokens = tokenise(without_quantifier(text), tight, unit_letters != "variables")
    return _Structure(unit_letters, solve_inequalities).parse(layout.unwrap(tokens))
  except _REFUSALS as error:
    raise Unreadable(repr(error)) from error


@dataclasses.dataclass(frozen=True)
class _Structure:
  """Parser with the options of `read`.

  A method for one kind of answer returns None if the tokens are of another kind.
  """

  unit_letters: Letters
  solve_inequalities: bool

  def parse(self, tokens: list[Token]):
    """Parses a whole answer, or an item of one."""
    if not tokens:
      raise Unreadable("an answer or item without tokens")
    return self.words(tokens) or self.items(tokens) or self.relation_or_value(tokens)

  def cases(self, tokens: list[Token]) -> Pieces | None:
    """Parses a piecewise function. Returns None for other tokens."""
    pieces = layout.pieces(tokens)
    if pieces is None:
      return None
    if len(pieces) > MAX_ITEMS:
      raise Unreadable("too many cases")
    return Pieces(tuple((self.parse(v), c and self.condition(c)) for v, c in pieces))

  def condition(self, tokens: list[Token]):
    """Parses the condition of a piece: a set of numbers or a relation, else words."""
    if len(tokens) == 1 and re.search("[<>=≤≥]|\\\\[lg]e", tokens[0].text):  # In \text{}.
      tokens = tokenise(tokens[0].text)
    outside = any(t.text == "notin" for t in tokens)
    plain = [dataclasses.replace(t, text="in") if t.text == "notin" else t for t in tokens]
    with contextlib.suppress(Unreadable, ValueError, *_REFUSALS):
      node = _points(self.parse(plain))
      if outside and isinstance(node, Region):
        return Region(sp.Complement(sp.S.Reals, node.region), node.name)
      if isinstance(node, Region | Relation) and not outside:
        return node
    return Word(re.sub(r"\b(?:is|are|an?|number|integer)\b\s*|[{}$]", "", spell(tokens)).strip())

  def words(self, tokens: list[Token]):
    """Parses an answer in words. Returns None for other tokens."""
    if not any(t.kind in ("word", "text") for t in tokens):
      return None
    spelled = " ".join(t.text for t in tokens).strip(" .!,")
    text = spelled.casefold()
    if _NOTHING.fullmatch(text):
      return Region(sp.S.EmptySet)
    if _EVERYTHING.fullmatch(text):
      return Region(sp.S.Reals)
    if text.replace("-", " ") in _HALF:
      return Scalar(sp.Rational(1, 2))
    parts = re.split(r" *(?:,|and|or) ", text)
    digits = ["100" if part == "hundred" else numerals.to_digits(part) for part in parts]
    if all(map(str.isdigit, digits)):
      return Scalar(sp.Integer(digits[0])) if len(digits) == 1 else None
    if any(t.kind not in ("word", "text", "letter", "separator") for t in tokens):
      return None
    product = tokens[0].kind == "letter" or (
      tokens[0].kind == "word" and is_product(text.split()[0])
    )
    if product and (
      len(tokens) == 1 or suffixes.unit(tokens, 1, "", self.unit_letters)
    ):  # A product such as ab, or a letter with a unit such as x \text{ cm}.
      return None
    return Word(re.sub(r"^(?:an?|the) ", "", fold(spelled)))

  def items(self, tokens: list[Token]):
    """Parses items between separators; several conditions on one variable are one set."""
    whole, tokens = tokens, cuts.without_integers(tokens)
    outer = cuts.find(tokens, ";") and cuts.find(tokens, ",", "and", "or")
    parts = [part for part in (cuts.cut(tokens, ";")[1] if outer else split(tokens)) if part]
    if len(parts) < 2:
      if parts and len(parts[0]) < len(whole):
        return self.parse(parts[0])
      return None
    if len(parts) > MAX_ITEMS:
      raise Unreadable("too many items")
    items = [self.parse(part) for part in parts]
    join = sp.Union if cuts.find(tokens, "or") else sp.Intersection
    if join is sp.Union and any(isinstance(item, Region) for item in items):
      items = [_points(item) for item in items]
    variables = {item.name if isinstance(item, Region) else None for item in items}
    if len(variables) == 1 and None not in variables:
      return Region(join(*(item.region for item in items)), items[0].name)
    either = cuts.find(tokens, "or") and not cuts.find(tokens, ",", ";", "and")
    if either and all(isinstance(i, Scalar) and equal.same_answer(items[0], i) for i in items):
      return items[0]  # Two forms of one value: "3/8 or 0.375".
    return Group("list", tuple(_flatten(items)))

  def relation_or_value(self, tokens: list[Token]):
    """Parses an answer without separators outside of brackets."""
    operators, members = cuts.cut(tokens)
    if not operators:
      return self.value(tokens)
    if operators == ["~"] and not members[0]:
      return self.value(members[1])
    if any(not member for member in members):
      raise Unreadable("a relation without a side")
    if set(operators) <= {"=", "~"}:
      return self.equation(operators, members)
    if operators == ["in"]:
      node = self.value(members[1])
      if names.name(members[0]) is None:
        raise Unreadable("an element that has no name")
      if isinstance(node, Group) and node.kind == "tuple":
        return nodes.as_region(node) or node
      return node
    if "in" in operators or "~" in operators:
      raise Unreadable("a mixed relation")
    return self.inequality(operators, members)

  def equation(self, operators: list[str], members: list[list[Token]]):
    """Parses an equation: a named value, a value with equal forms, or a relation."""
    if "~" in operators and "=" in operators:  # x = 1/3 ≈ 0.33 has the value 1/3.
      last = operators.index("~") + 1
      operators, members = operators[: last - 1], members[:last]
    labels = [names.name(member) or names.series(member) for member in members]
    label = next((label for label in labels[:-1] if label), None)
    for i, unknown in enumerate(map(names.multiplied_name, members[:-1]) if label else ()):
      # Refuses 2x = y = 18, x = 2x = 18 and x = 5 y = 18, but not P = 4s = 18.
      apart = unknown and unknown[0].spaced and members[i][-len(unknown) - 1].text != "pi"
      if unknown and (i == 0 or apart or names.name(unknown) == labels[0]):
        raise Unreadable("two equations, or a multiple of the unknown")
    if label or (len(members) == 2 and labels[1] and labels[1] not in names.CONSTANTS):
      value = self.value(members[-1] if label else members[0])
      relation = self.relation(["="], [members[0], members[-1]])
      several = None not in labels[:-1] and len({*labels[:-1]}) == len(labels) - 1 > 1
      all_names = tuple(labels[:-1]) if several else ()
      return Named(label or labels[1], value, relation, names.parameter(members[0]), all_names)
    values = [self.value(member) for member in members]
    if all(isinstance(value, Scalar) for value in values):
      close = operators == ["~"] and len({value.unit for value in values if value.unit}) < 2
      if close and (side := _exact(*values)):
        return side
      if any(value.unit for value in values):  # For example 3 hours = 180 minutes.
        if not all(equal.same_answer(value, values[-1]) for value in values):
          raise Unreadable("an equation that is false")
        return values[-1]
      exact = [algebra.evaluate(value.value) for value in values]
      if all(algebra.is_zero(a - exact[-1]) for a in exact[:-1]):
        return values[-1]
      if not any(value.free_symbols for value in exact):
        raise Unreadable("an equation that is false")
    relation = self.relation(["="] * len(operators), members)
    if relation is None:
      raise Unreadable("an equation of this kind")
    return relation

  def relation(self, operators, members) -> Relation | None:
    """Parses a relation. Returns None if a side is no expression."""
    try:
      return Relation(tuple(operators), tuple(expression.read(member) for member in members))
    except Unreadable:
      return None

  def inequality(self, operators, members):
    """Parses an inequality to a relation.

    If it has one variable and `solve_inequalities` is set, solves it to a set of numbers instead.
    """
    values = [expression.read(member) for member in members]
    symbols = set().union(*(nodes.unknowns(value) for value in values))
    if len(symbols) != 1 or not self.solve_inequalities:
      return Relation(tuple(operators), tuple(values))
    unknown, x = next(iter(symbols)), sp.Symbol("x", real=True)
    values = [value.xreplace({unknown: x}) for value in values]
    region = sp.S.Reals
    for operator, first, second in zip(operators, values, values[1:]):
      region = sp.Intersection(region, nodes.solve(operator, first - second, x))
    return Region(region, str(unknown))

  def value(self, tokens: list[Token]):
    """Parses a value, with separators and relations only within brackets."""
    if not tokens:
      raise Unreadable("a value without tokens")
    if any(t.kind == "command" and t.text in ("cup", "cap", "setminus") for t in tokens):
      return self.regions(tokens)
    if cuts.find(tokens, ":"):
      parts = [self.value(part) for part in cuts.cut(tokens, ":")[1]]
      return Group("ratio", tuple(parts))
    node = self.cases(tokens) or self.named_set(tokens) or self.bracketed(tokens)
    if node is not None:
      return node
    if any(t.kind == "command" and t.text in ("pm", "mp") for t in tokens):
      return Group("list", (self.scalar(tokens, 1), self.scalar(tokens, -1)))
    return self.scalar(tokens)

  def named_set(self, tokens: list[Token]):
    """Parses the empty set, or a set such as the real numbers."""
    if [t.text for t in tokens] == ["emptyset"]:
      return Region(sp.S.EmptySet)
    match = re.fullmatch(r"(?:mathbb|vec|bold)([RZNQ])", cuts.shape(tokens))
    return Region(_SETS[match[1]]) if match else None

  def bracketed(self, tokens: list[Token]):
    """Parses an answer in brackets: a set, a tuple, or one item."""
    if tokens[0].kind != "open" or cuts.match(tokens) != len(tokens) - 1:
      return None
    opening, closing, inner = tokens[0].text, tokens[-1].text, tokens[1:-1]
    if opening in ("lfloor", "lceil"):
      return None
    if not inner:
      return Region(sp.S.EmptySet) if opening in ("\\{", "{") else None
    # Plain braces around the whole content, as in \left( {1,2} \right), only group it.
    while opening != "{" and inner[0].text == "{" and cuts.match(inner) == len(inner) - 1 > 1:
      inner = inner[1:-1]
    parts = split(inner)
    if len(parts) > MAX_ITEMS:
      raise Unreadable("too many items")
    if opening in ("\\{", "{"):
      builder = cuts.cut(inner, ":", "|")[1]
      if opening == "\\{" and len(builder) == 2 and names.name(cuts.without_reals(builder[0])):
        return self.parse(builder[1])
      if opening == "{" and len(parts) == 1:
        return self.parse(inner)
      return Group("set", tuple(_flatten([self.parse(part) for part in parts])))
    if len(parts) == 1 and opening == "(":
      return self.parse(inner) if closing == ")" else None
    if len(parts) == 1 and inner[0].text == "begin":
      return self.parse(inner)
    brackets = "()" if opening == "langle" else opening + closing
    if brackets not in ("()", "[]", "(]", "[)"):
      raise Unreadable("brackets do not match")
    items = tuple(self.parse(part) for part in parts)
    return Group("tuple", items, brackets if len(items) == 2 else "()")

  def regions(self, tokens: list[Token]):
    """Parses unions, intersections and differences of sets, from left to right."""
    operators, parts = cuts.cut(tokens, "cup", "cap", "setminus")
    result = None
    for operator, part in zip(["", *operators], parts):
      region = nodes.as_region(self.value(part) if part else None)
      if region is None:
        raise Unreadable("a union of other things than sets")
      join = {"cup": sp.Union, "cap": sp.Intersection, "setminus": sp.Complement}.get(operator)
      result = join(result, region.region) if join else region.region
    return Region(result)

  def scalar(self, tokens: list[Token], sign: int = 1) -> Scalar:
    """Parses an expression with an optional unit, and `sign` for \\pm."""
    currency = ""
    if tokens[0].kind == "symbol" and tokens[0].text in "$€£¥₹":
      currency, tokens = tokens[0].text, tokens[1:]
    for start in range(max(1, len(tokens) - MAX_UNIT), len(tokens)):
      unit = suffixes.unit(tokens, start, currency, self.unit_letters)
      if unit:
        factor, unit = unit
        degrees = unit and "angle" in dict(unit.dimensions)
        if degrees and any(t.text in expression.TRIGONOMETRIC for t in tokens):
          continue
        try:
          value = expression.read(tokens[:start], sign)
        except Unreadable:
          continue
        if not tokens[start].spaced and len(tokens[start].text) == 1 and value.free_symbols:
          break
        return Scalar(value * factor, _places(tokens[:start]), unit)
    unit = units.parse(currency)[1] if currency else None
    return Scalar(expression.read(tokens, sign), _places(tokens), unit)


def _points(node):
  """Converts a named number such as x = 2 to a set; other nodes are returned unchanged."""
  region = isinstance(node, Named) and nodes.as_region(node.value)
  return Region(region.region, node.name) if region else node


def _places(tokens: list[Token]) -> int | None:
  """Counts the digits after the point of a plain decimal. Returns None for other tokens."""
  digits = [t for t in tokens if t.text not in ("-", "+")]
  if len(digits) != 1 or digits[0].kind != "number":
    return None
  match = re.fullmatch(r"[\d, ]*\.(\d+)", digits[0].text)
  return len(match[1]) if match else None


def _exact(first: Scalar, second: Scalar) -> Scalar | None:
  """Returns the exact side of a correct approximation, 90√2 of 90√2 ≈ 127.28, else None."""
  for exact, decimal in ((first, second), (second, first)):
    if decimal.places is None or exact.places is not None or exact.value.is_Integer:
      continue
    if exact.value.is_real and not exact.value.free_symbols:
      error = sp.Abs(exact.value - decimal.value).evalf(15, maxn=400)
      if 2 * error <= sp.Rational(1, 10**decimal.places):
        return exact
  return None


def _flatten(items: list) -> list:
  r"""Flattens the lists within a list, which come from \pm."""
  flat = []
  for item in items:
    if (
      isinstance(item, Group)
      and item.kind == "list"
      and all(isinstance(i, Scalar) for i in item.items)
    ):
      flat += item.items
    elif isinstance(item, Named) and isinstance(item.value, Group) and item.value.kind == "list":
      flat += [Named(item.name, value) for value in item.value.items]
    else:
      flat.append(item)
  return flat
