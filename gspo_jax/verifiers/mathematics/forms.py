r"""Parses matrices, sums, integrals, limits, vectors and unknown commands.

The argument `reader` is the parser of `expression`. Each function starts at the parser's
position.
"""

import re

import sympy as sp

from gspo_jax.verifiers.mathematics import cuts
from gspo_jax.verifiers.mathematics.tokens import Token, Unreadable, spell
from gspo_jax.verifiers.mathematics.values import symbol

MAX_ENTRIES = 100  # Maximum entries of a matrix.
_MATRICES = frozenset("matrix pmatrix bmatrix Bmatrix smallmatrix array vmatrix".split())
# Commands that end a product.
ENDS = frozenset("cup cap setminus in notin le ge ne approx equiv to choose".split())


def matrix(reader):
  r"""Reads a matrix after its `\begin`; a `vmatrix` becomes its determinant."""
  name, inside, reader.position = cuts.environment(reader.tokens, reader.position - 1)
  if name == "array" and inside and inside[0].text == "{":
    inside = inside[cuts.match(inside) + 1 :]
  if name not in _MATRICES:
    raise Unreadable(f"the environment {name}")
  lines = cuts.cut(inside, "\\\\")[1]
  rows = [cuts.cut(line, "&")[1] for line in (lines if lines[-1] else lines[:-1])]
  if sum(map(len, rows)) > MAX_ENTRIES or len({*map(len, rows)}) != 1:
    raise Unreadable("a matrix of this shape")
  value = sp.ImmutableMatrix([[reader.inner(entry) for entry in row] for row in rows])
  return value.det() if name == "vmatrix" else value


def series(reader, name: str):
  """Reads a sum, a product or an integral with bounds; `name` is the command."""
  lower = upper = None
  for _ in range(2):
    if reader.accept("_"):
      lower = reader.group_tokens() if reader.peek().text == "{" else [reader.take()]
    elif reader.accept("^"):
      upper = reader.exponent()
  if name == "int":
    if lower is None or upper is None:
      raise Unreadable("an integral without bounds")
    body, variable = _integrand(reader)
    return sp.Integral(reader.inner(body), (symbol(variable), reader.inner(lower), upper))
  if not lower or len(lower) < 3 or lower[1].text != "=" or upper is None:
    raise Unreadable("a sum without bounds")
  reader.bound = reader.bound | {lower[0].text}
  body = reader.product()
  bounds = (symbol(lower[0].text), reader.inner(lower[2:]), upper)
  return (sp.Sum if name == "sum" else sp.Product)(body, bounds)


def limit(reader):
  """Reads a one-sided or two-sided limit."""
  reader.take("_")
  bounds = reader.group_tokens()
  if len(bounds) < 3 or bounds[0].kind != "letter" or bounds[1].text != "to":
    raise Unreadable("a limit without a point")
  point = (
    [t for t in bounds[2:] if t.text not in ("{", "}")] if bounds[-1].text == "}" else bounds[2:]
  )
  side = point[-1].text if len(point) > 2 and point[-2].text == "^" else ""
  point = point[:-2] if side in ("+", "-") else bounds[2:]
  reader.bound = reader.bound | {bounds[0].text}
  value, variable = reader.inner(point), symbol(bounds[0].text)
  result = sp.Limit(reader.product(), variable, value, side if side in ("+", "-") else "+-")
  return result if result.atoms(sp.core.function.AppliedUndef) else result.doit()


def _integrand(reader) -> tuple[list, str]:
  """Reads an integrand and its variable.

  The differential may be at the end or in a numerator, as in dx/(1+x^2).
  """
  start, tokens = reader.position, reader.tokens
  places = [i for i in range(start, len(tokens)) if re.fullmatch("d[a-z]?", tokens[i].text)]
  place = places[0] if places else len(tokens)
  name = "".join(t.text for t in tokens[place : place + 1])
  end = place + 1 + (name == "d")
  variable = name[1:] or "".join(t.text for t in tokens[place + 1 : end])
  if not variable.isalpha():
    raise Unreadable("an integral without a variable")
  fraction = next((i for i in range(start, place) if cuts.match(tokens, i) > place), None)
  if fraction is None:
    reader.position = end
    return tokens[start:place], variable
  top = cuts.match(tokens, fraction)
  bottom = cuts.match(tokens, top + 1)
  if tokens[fraction - 1].text != "frac" or end != top or tokens[top + 1].text != "{":
    raise Unreadable("an integral of this form")
  reader.position = bottom + 1
  numerator = tokens[fraction + 1 : place] or [Token("number", "1")]
  return [*tokens[start : fraction + 1], *numerator, *tokens[top : bottom + 1]], variable


def vector(reader):
  r"""Reads the argument of \vec, or of a command for bold type.

  A letter becomes a variable that differs from the plain letter. A number is unchanged.
  """
  inside = reader.group_tokens() if reader.peek().text == "{" else [reader.take()]
  if all(token.kind in ("number", "symbol") for token in inside):
    return reader.inner(inside)
  return sp.Symbol("vec " + spell(inside), real=True)


def opaque(reader, name: str):
  """Reads an unknown command as a function of its arguments, or a variable if it has none."""
  if name in ENDS or not name.isalpha() or name in ("end", "circ"):
    raise Unreadable(f"unexpected \\{name}")
  arguments = []
  while reader.peek().text == "{" and len(arguments) < 3:
    arguments.append(sp.Symbol(spell(reader.group_tokens()), real=True))
  return sp.Function("\\" + name, real=True)(*arguments) if arguments else symbol("\\" + name)
