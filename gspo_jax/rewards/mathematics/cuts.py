"""Where tokens are cut: at relations, at other operators, before conditions that say nothing."""

import re

from gspo_jax.rewards.mathematics.tokens import Token, spell
from gspo_jax.rewards.mathematics.values import split

_RELATIONS = {"=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "approx": "~"}


def find(tokens: list[Token], *texts: str) -> bool:
  return len(cut(tokens, *texts)[1]) > 1


def cut(tokens: list[Token], *texts: str) -> tuple[list[str], list[list[Token]]]:
  """Operators that stand in no brackets (relations, or the given ones), and what they separate."""
  operators, parts, depth = [], [[]], 0
  for token in tokens:
    depth += {"open": 1, "close": -1}.get(token.kind, 0)
    if token.kind == "command" and token.text in ("begin", "end"):
      depth += 1 if token.text == "begin" else -1
    sign = token.kind in ("symbol", "command", "separator")
    if texts:
      hit = token.text if sign and token.text in texts else None
    else:
      hit = "in" if token.text == "in" and sign else _RELATIONS.get(token.text) if sign else None
    if hit and depth == 0:
      operators.append(hit)
      parts.append([])
    else:
      parts[-1].append(token)
  return operators, parts


def match(tokens: list[Token]) -> int:
  """The index of the bracket that closes the first one; -1: none does."""
  depth = 0
  for index, token in enumerate(tokens):
    depth += {"open": 1, "close": -1}.get(token.kind, 0)
    if depth == 0:
      return index
  return -1


def without_reals(tokens: list[Token]) -> list[Token]:
  r"""The name before "\in \mathbb{R}", which says nothing."""
  operators, parts = cut(tokens)
  return parts[0] if operators == ["in"] and shape(parts[1]) == "mathbbR" else tokens


def without_integers(tokens: list[Token]) -> list[Token]:
  r"""2k\pi of "2k\pi, k \in \mathbb{Z}"."""
  *others, last = split(tokens)
  operators, parts = cut(last)
  if not others or operators != ["in"] or shape(parts[1]) != "mathbbZ":
    return tokens
  before = tokens[: -len(last) - 1]
  used = any(t.kind == "letter" and t.text == spell(parts[0]) for t in before)
  return before if used and before else tokens


def shape(tokens: list[Token]) -> str:
  return re.sub("[ {}]", "", spell(tokens))
