r"""What may stand before an equals sign so that the answer is what stands behind it."""

import re

from gspo_jax.rewards.mathematics.cuts import match, split
from gspo_jax.rewards.mathematics.tokens import Token, is_product, spell
from gspo_jax.rewards.mathematics.units import is_comment

_GREEK = re.compile(
  r"(?!pi$|infty$|frac$|sqrt$|sin$|cos$|tan$|log$|ln$|sum$|int$|begin$|end$)[a-zA-Z]+"
)


def name(tokens: list[Token]) -> str | None:
  """The name that the tokens are: x, x_1, f(2), AB, |AB|, AB/CD, (x, y), "the area"; else None.

  2x, -x, x^2 or x+1 are none: where they equal 18, the answer is not 18.
  """
  if not tokens:
    return None
  if all(t.kind == "text" or (t.kind == "word" and not is_product(t.text)) for t in tokens):
    text = " ".join(t.text for t in tokens)
    return None if any(map(is_comment, text.split())) else "text"
  inside = tokens[1:-1]
  if tokens[0].text == "(" and tokens[-1].text == ")":
    parts = split(inside)
    labels = [name(part) for part in parts]
    return ",".join(labels) if len(parts) > 1 and all(labels) else None
  if tokens[0].text in ("|", "[") and tokens[-1].text in ("|", "]"):
    return name(inside) if len(_capitals(inside)) > 1 else None
  colons = [i for i, t in enumerate(tokens) if t.text == ":"]
  if colons:
    labels = [name(tokens[: colons[0]]), name(tokens[colons[0] + 1 :])]
    return ":".join(labels) if all(labels) else None
  if tokens[0].text == "frac" and tokens[0].kind == "command":
    letters = [t for t in tokens[1:] if t.text not in "{}"]
    return spell(letters) if len(_capitals(letters)) > 2 and _capitals(letters) == letters else None
  return _simple(tokens)


def is_constant(tokens: list[Token]) -> bool:
  r"""Whether the tokens are a number that has a name, \pi say."""
  return len(tokens) == 1 and tokens[0].kind == "command" and tokens[0].text in ("pi", "infty")


def _simple(tokens: list[Token]) -> str | None:
  """A letter or a run of capitals, with marks before, subscripts, primes and arguments behind."""
  index, letters, label = 0, 0, ""
  while index < len(tokens):
    token = tokens[index]
    if token.kind == "command" and _GREEK.fullmatch(token.text) and not letters:
      label, index = label + token.text + " ", index + 1
      if index == len(tokens):
        return label
      if tokens[index].text == "{":
        end = match(tokens, index)
        inner = tokens[index + 1 : end]
        if end < 0 or not inner or (len(inner) > 1 and _capitals(inner) != inner):
          return None
        letters, label, index = 2, label + spell(inner), end + 1
      elif tokens[index].text == "_":
        letters = 2
    elif token.kind == "letter" and (
      letters == 0 or (token.text.isupper() and label[-1:].isupper()) or label.strip() == "m"
    ):
      letters, label, index = letters + 1, label + token.text, index + 1
    elif token.text == "_" and letters:
      end = (
        match(tokens, index + 1)
        if tokens[index + 1 : index + 2] and tokens[index + 1].text == "{"
        else index + 1
      )
      if end < 0 or end >= len(tokens):
        return None
      subscript = spell([t for t in tokens[index + 1 : end + 1] if t.text not in "{}"])
      label, index = f"{label}_{subscript}", end + 1
    elif token.text == "'" and letters:
      label, index = label + "'", index + 1
    elif spell(tokens[index : index + 5]) == "^ { - 1 }" and tokens[index + 5 : index + 6]:
      label, index = label + "^-1", index + 5  # of a function
      if tokens[index].text != "(":
        return None
    elif token.text == "(" and letters and match(tokens, index) == len(tokens) - 1:
      inner = tokens[index + 1 : -1]
      if len(inner) == 1 and inner[0].kind == "letter":
        return label + "()"
      function = label[0] in "fghp" or label[0].isupper() or len(inner) == 1
      return f"{label}({spell(inner)})" if inner and function else None
    else:
      return None
  return label if letters else None


def _capitals(tokens: list[Token]) -> list[Token]:
  return [t for t in tokens if t.kind == "letter" and t.text.isupper()]
