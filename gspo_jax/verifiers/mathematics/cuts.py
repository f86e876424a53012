"""Where tokens are cut: at relations, at other operators, before conditions that say nothing."""

import re

from gspo_jax.verifiers.mathematics.tokens import Token, spell

_RELATIONS = dict(le="<=", ge=">=", ne="!=", approx="~") | {x: x for x in ("=", "<", ">", "in")}


def find(tokens: list[Token], *texts: str) -> bool:
  return len(cut(tokens, *texts)[1]) > 1


def cut(tokens: list[Token], *texts: str) -> tuple[list[str], list[list[Token]]]:
  """Operators that stand in no brackets (relations, or the given ones), and what they separate."""
  wanted = dict(zip(texts, texts)) or _RELATIONS
  operators, parts, depth = [], [[]], 0
  for token in tokens:
    depth += _opened(token)
    sign = token.kind in ("symbol", "command", "separator")
    if depth == 0 and sign and token.text in wanted:
      operators.append(wanted[token.text])
      parts.append([])
    else:
      parts[-1].append(token)
  return operators, parts


def split(tokens: list[Token]) -> list[list[Token]]:
  """Cuts at separators that stand in no brackets."""
  return cut(tokens, ",", ";", "and", "or")[1]


def match(tokens: list[Token], start: int = 0) -> int:
  """The index of the bracket that closes the one at `start`; -1: none does."""
  depth = 0
  for index in range(start, len(tokens)):
    depth += _opened(tokens[index])
    if depth == 0:
      return index
  return -1


def _opened(token: Token) -> int:
  """How many brackets or environments a token opens: 1, 0, or -1 where it closes one."""
  name = token.text if token.kind == "command" else token.kind
  return {"open": 1, "begin": 1, "close": -1, "end": -1}.get(name, 0)


def without_reals(tokens: list[Token]) -> list[Token]:
  r"""The name before "\in \mathbb{R}", which says nothing."""
  operators, parts = cut(tokens)
  return parts[0] if operators == ["in"] and shape(parts[1]) == "mathbbR" else tokens


def without_integers(tokens: list[Token]) -> list[Token]:
  r"""2k\pi of "2k\pi, k \in \mathbb{Z}"."""
  *before, last = split(tokens)
  operators, parts = cut(last)
  if not before or operators != ["in"] or shape(parts[1]) != "mathbbZ":
    return tokens
  formula = tokens[: -len(last) - 1]
  used = any(t.kind == "letter" and t.text == spell(parts[0]) for t in formula)
  return formula if used else tokens


def shape(tokens: list[Token]) -> str:
  return re.sub("[ {}]", "", spell(tokens))
