"""Splits tokens at operators outside of brackets, and removes redundant conditions."""

import re

from gspo_jax.verifiers.mathematics.tokens import Token, Unreadable, spell

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
  r"""Removes the condition ", k \in \mathbb{Z}" after a formula in k."""
  *before, last = split(tokens)
  operators, parts = cut(last)
  if not before or operators != ["in"] or shape(parts[1]) != "mathbbZ":
    return tokens
  formula = tokens[: -len(last) - 1]
  used = any(t.kind == "letter" and t.text == spell(parts[0]) for t in formula)
  return formula if used else tokens


def shape(tokens: list[Token]) -> str:
  """Joins tokens to a text without spaces and braces."""
  return re.sub("[ {}]", "", spell(tokens))
