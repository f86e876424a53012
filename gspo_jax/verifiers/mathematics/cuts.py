"""Splits tokens at operators outside of brackets, and removes redundant conditions."""

import re

from gspo_jax.verifiers.mathematics.tokens import Token, Unreadable, spell

_INTEGERS = ("mathbbZ", "vecZ", "boldZ", "Z")  # Spellings of the set, by `shape`.
_INTEGER_SET = (Token("command", "mathbb"), Token("letter", "Z"))
_BOUNDS = frozenset(["<", ">", "<=", ">=", "!="])
_RELATIONS = dict(le="<=", ge=">=", ne="!=", approx="~") | {x: x for x in ("=", "<", ">", "in")}


def find(tokens: list[Token], *texts: str) -> bool:
  """Whether one of the operators `texts` occurs outside of brackets."""
  return len(cut(tokens, *texts)[1]) > 1


def cut(tokens: list[Token], *texts: str) -> tuple[list[str], list[list[Token]]]:
  """Returns the operators outside of brackets, and the parts between them.

  texts: operators to split at. If there are none, the tokens are split at relations, and the values
    of `_RELATIONS` are returned as operators.
  """
  names = dict(zip(texts, texts)) or _RELATIONS
  operators, parts, depth = [], [[]], 0
  for token in tokens:
    depth += _depth_change(token)
    sign = token.kind in ("symbol", "command", "separator")
    if depth == 0 and sign and token.text in names:
      operators.append(names[token.text])
      parts.append([])
    else:
      parts[-1].append(token)
  return operators, parts


def split(tokens: list[Token]) -> list[list[Token]]:
  """Splits at commas, semicolons, "and" and "or" outside of brackets."""
  return cut(tokens, ",", ";", "and", "or")[1]


def match(tokens: list[Token], start: int = 0) -> int:
  """Returns the index of the closing bracket for the bracket at `start`.

  Returns -1 if the bracket is never closed, and `start` if the token there is no bracket.
  """
  depth = 0
  for index in range(start, len(tokens)):
    depth += _depth_change(tokens[index])
    if depth == 0:
      return index
  return -1


def environment(tokens: list[Token], start: int) -> tuple[str, list[Token], int]:
  r"""Returns name and content of the environment at `start`, and the index after it.

  Raises:
    Unreadable: the environment is not closed, or is closed by another name.
  """
  end = match(tokens, start)
  labels = [tokens[i + 1 : match(tokens, i + 1) + 1] for i in (start, end) if end > start]
  if len(labels) < 2 or not labels[0] or spell(labels[0]) != spell(labels[1]):
    raise Unreadable("environments do not match")
  inside = tokens[start + 1 + len(labels[0]) : end]
  return re.sub("[ {}*]", "", spell(labels[0])), inside, end + 1 + len(labels[1])


def _depth_change(token: Token) -> int:
  """Returns 1 for an opening bracket or \\begin, -1 for a closing bracket or \\end, else 0."""
  name = token.text if token.kind == "command" else token.kind
  return {"open": 1, "begin": 1, "close": -1, "end": -1}.get(name, 0)


def without_reals(tokens: list[Token]) -> list[Token]:
  r"""Removes the condition "\in \mathbb{R}", since variables are real anyway."""
  operators, parts = cut(tokens)
  return parts[0] if operators == ["in"] and shape(parts[1]) == "mathbbR" else tokens


def without_integers(tokens: list[Token]) -> list[Token]:
  r"""Removes the condition ", k \in \mathbb{Z}" or "(k \in \mathbb{Z})" after a formula in k.

  Inequalities in k alone keep it, spelled \mathbb{Z}: the integers above 2 are not all numbers
  above 2.
  """
  plain = _without_last_brackets(tokens)
  *before, last = split(plain)
  operators, parts = cut(last)
  if not before or operators != ["in"] or shape(parts[1]) not in _INTEGERS:
    return tokens
  name, letters = spell(parts[0]), [_letters(part) for part in before]
  if not any(name in names for names in letters):
    return tokens
  bounds = [not _BOUNDS.isdisjoint(cut(part)[0]) for part in before]
  alone = all(bounds) and all(names == {name} for names in letters)
  return [*plain[: -len(parts[1])], *_INTEGER_SET] if alone else plain[: -len(last) - 1]


def _without_last_brackets(tokens: list[Token]) -> list[Token]:
  r"""Writes a last condition in brackets, as in x = k\pi (k \in \mathbb{Z}), after a comma."""
  start = max((i for i, t in enumerate(tokens) if t.text == "("), default=0)
  inside = tokens[start + 1 : -1]
  if not start or tokens[-1].text != ")" or cut(inside)[0] != ["in"]:
    return tokens
  comma = [] if tokens[start - 1].kind == "separator" else [Token("separator", ",")]
  return [*tokens[:start], *comma, *inside]


def _letters(tokens: list[Token]) -> set[str]:
  """Returns the letters and words among tokens."""
  return {t.text for t in tokens if t.kind in ("letter", "word")}


def shape(tokens: list[Token]) -> str:
  """Joins tokens to a text without spaces and braces."""
  return re.sub("[ {}]", "", spell(tokens))
