r"""Simplifies LaTeX's environments in the tokens of an answer.

An environment of lines, such as align, is replaced by its equations with commas between them. A
piecewise function becomes a `\begin{cases}`, and `pieces` returns its values and conditions.
Matrices are unchanged.
"""

import re

from gspo_jax.verifiers.mathematics import cuts, expression, names
from gspo_jax.verifiers.mathematics.tokens import Token, Unreadable, spell

_LINES = frozenset(
  """align aligned alignat alignedat flalign gather gathered split equation eqnarray multline
  multlined displaymath math subequations center""".split()
)
_CASES = frozenset("cases dcases rcases drcases numcases".split())
_WITH_ARGUMENT = frozenset("array alignat alignedat tabular".split())
_RELATIONS = frozenset("= < > le ge ne in notin approx equiv to".split())
_ARROWS = frozenset("Rightarrow implies Longrightarrow iff Leftrightarrow to".split())
_COMMA = Token("separator", ",")
# Words at the beginning of a condition, and words in place of the last condition.
_CONDITION = re.compile(r"(?:if|for|when|where|whenever|as|provided|on|in case|with|at)\b", re.I)
_OTHERWISE = re.compile(
  r"(?:if |in |for )?(?:otherwise|else|elsewhere|(?:all |any )?other(?: cases| values| x)?)", re.I
)


def unwrap(tokens: list[Token]) -> list[Token]:
  """Simplifies environments, and writes cases in words ("x if x > 0, ...") as `cases`."""
  result = _replace_lines(tokens)
  if any(map(_is_begin, result)):
    return result
  return _to_cases([_COMMA if t.text == "\\\\" else t for t in result if t.text != "&"])


def _replace_lines(tokens: list[Token]) -> list[Token]:
  """Replaces environments of lines, also nested ones, by their content.

  Writes piecewise functions as `cases`, and simplifies bold names.
  """
  result, index = [], 0
  while index < len(tokens):
    if tokens[index].kind == "command" and tokens[index].text == "bold":
      group, index = _bold(tokens, index)
      result += group
      continue
    if not _is_begin(tokens[index]):
      result.append(tokens[index])
      index += 1
      continue
    name, inside, end = cuts.environment(tokens, index)
    if name in _WITH_ARGUMENT and inside and inside[0].text == "{":
      inside = inside[cuts.match(inside) + 1 :]
    inside = _replace_lines(inside)
    # An environment after an opening brace is a piecewise function, if no closing brace follows.
    closed = end < len(tokens) and tokens[end].text == "\\}"
    if result and result[-1].text == "\\{" and not closed:
      result.pop()
      name = "cases"
    result += _content(name, inside) or _without_spaces(tokens[index:end])
    index = end
  return result


def _bold(tokens: list[Token], start: int) -> tuple[list[Token], int]:
  """Returns the tokens for a \\bold command, and the index after the command.

  A bold name becomes a vector, unless it is the whole answer. If the content is no name, only the
  command is removed.
  """
  end = cuts.match(tokens, start + 1)
  if end < 0:
    return tokens[start : start + 1], start + 1
  braces = tokens[start + 1].text == "{"
  inside = tokens[start + 2 : end] if braces else tokens[start + 1 : end + 1]
  if start == 0 and end == len(tokens) - 1:
    return _replace_lines(inside), end + 1
  if (
    inside
    and inside[0].kind in ("letter", "word", "command")
    and all(
      t.kind in ("letter", "word", "number") or t.text in ("_", *expression.GREEK) for t in inside
    )
  ):
    return [Token("command", "vec", tokens[start].spaced), *tokens[start + 1 : end + 1]], end + 1
  braced = [tokens[start + 1], *_replace_lines(inside), tokens[end]]
  return braced if braces else inside, end + 1


def _is_begin(token: Token) -> bool:
  return token.kind == "command" and token.text == "begin"


def _content(name: str, inside: list[Token]) -> list[Token]:
  """Returns the simplified tokens of an environment. Returns [] if it stays unchanged."""
  rows = [row for row in cuts.cut(inside, "\\\\")[1] if any(t.kind != "separator" for t in row)]
  if name in _CASES:
    if any(map(_piece, rows)):
      return _cases(inside)
    return _join_equations(rows)
  if name in _LINES:
    return _join_equations(_last_steps(_equations(rows)))
  relations = any(_has_relation(row) for row in rows)
  if name in ("array", "tabular", "matrix", "smallmatrix") and (
    relations or (len(rows) == 1 and not _cells(rows[0]))
  ):
    return _cases(inside) if all(map(_piece, rows)) and len(rows) > 1 else _join_equations(rows)
  return []


def _cells(row: list[Token]) -> list[list[Token]]:
  """Splits a row at its ampersands. Returns [] if there is none."""
  cells = cuts.cut(row, "&")[1]
  return cells if len(cells) > 1 else []


def _without_spaces(tokens: list[Token]) -> list[Token]:
  return [t for t in tokens if t.text != "quad"]


def _has_relation(tokens: list[Token]) -> bool:
  return any(t.text in _RELATIONS and t.kind in ("symbol", "command") for t in tokens)


def _cases(inside: list[Token]) -> list[Token]:
  """Puts tokens into an environment `cases`."""
  braces = [Token("open", "{"), Token("word", "cases"), Token("close", "}")]
  return [Token("command", "begin"), *braces, *inside, Token("command", "end"), *braces]


def _equations(rows: list[list[Token]]) -> list[list[Token]]:
  """Joins each row that begins with a relation to the row above."""
  equations = []
  for row in rows:
    row = [t for t in row if t.text != "&"]
    row = _strip(row)
    if row and row[0].kind == "command" and row[0].text in _ARROWS:
      row = row[1:]
    if equations and row and _has_relation(row[:1]):
      equations[-1] += row
    elif row:
      equations.append(row)
  return equations


def _join_equations(rows: list[list[Token]]) -> list[Token]:
  """Returns the equations of rows with commas between them."""
  equations = _equations(rows)
  return [t for row in equations for t in (*row, _COMMA)][:-1]


def _last_steps(rows: list[list[Token]]) -> list[list[Token]]:
  """Returns only the last row if the rows are steps of a solution.

  Of the rows 2x = 62 and x = 31, only x = 31 is returned. Other rows are returned unchanged.
  """
  sides = cuts.cut(rows[-1], "=")[1] if rows else []
  unknown = sides[0] if len(sides) > 1 and names.name(sides[0]) else []
  if len(unknown) == 1 and all(
    any(t.text == unknown[0].text for t in row)
    and spell(cuts.cut(row, "=")[1][0]) != unknown[0].text
    for row in rows[:-1]
  ):
    return rows[-1:]
  return rows


def _words(tokens: list[Token]) -> str:
  """Joins the words at the beginning of tokens."""
  count = next((i for i, t in enumerate(tokens) if t.kind not in ("word", "text")), len(tokens))
  return " ".join(t.text for t in tokens[:count])


def _piece(row: list[Token]) -> tuple[list[Token], list[Token]] | None:
  """Splits a row of cases into value and condition. Returns None for other rows."""
  cells = [_strip(cell) for cell in _cells(row)]
  if cells:
    value, condition = cells[0], [t for cell in cells[1:] for t in cell]
    if _is_condition(value) and not _is_condition(condition):
      value, condition = condition, value
  else:
    spaces = [i for i, t in enumerate(row) if t.kind == "separator" or _starts_condition(row[i:])]
    places = [i for i in spaces if _is_condition(_strip(row[i:])) and not _has_relation(row[:i])]
    if not places:
      return None
    value, condition = row[: places[0]], row[places[0] :]
  value, condition = _strip(value), _strip(condition)
  worded = cells and any(t.kind in ("word", "text") for t in condition)  # For example "n even".
  if (
    not value
    or _is_condition(value)
    or _has_relation(condition[:1])
    or not (worded or _is_condition(condition))
  ):
    return None
  return value, condition


def _strip(tokens: list[Token]) -> list[Token]:
  """Removes separators at both ends, and wide spaces anywhere."""
  tokens = _without_spaces(tokens)
  while tokens and tokens[0].kind == "separator":
    tokens = tokens[1:]
  while tokens and tokens[-1].kind == "separator":
    tokens = tokens[:-1]
  return tokens


def _is_condition(tokens: list[Token]) -> bool:
  """Whether tokens are a condition: a relation, or words such as "if" or "otherwise"."""
  return _has_relation(tokens) or _starts_condition(tokens)


def _starts_condition(tokens: list[Token]) -> bool:
  """Whether tokens begin with a word such as "if", or are "otherwise"."""
  words = _words(tokens)
  return bool(words and (_CONDITION.match(words) or _OTHERWISE.fullmatch(words)))


def pieces(tokens: list[Token]) -> list[tuple[list[Token], list[Token] | None]] | None:
  """Returns the values and conditions of an environment `cases`.

  The condition None means "otherwise". Returns None for other tokens.
  """
  if not tokens or not _is_begin(tokens[0]):
    return None
  name, inside, end = cuts.environment(tokens, 0)
  if name != "cases" or end < len(tokens):
    return None
  rows = [row for row in cuts.cut(inside, "\\\\")[1] if _strip(row)]
  return [_read(row) for row in rows]


def _read(row: list[Token]) -> tuple[list[Token], list[Token] | None]:
  """Returns value and condition of a case, without words such as "if"."""
  piece = _piece(row)
  if piece is None:
    raise Unreadable("a case without a condition")
  value, condition = piece
  if _OTHERWISE.fullmatch(_words(condition)):
    return value, None
  word = _CONDITION.match(_words(condition))
  if word:
    rest = (
      condition[0].text[len(word[0]) :].strip() if condition[0].text.startswith(word[0]) else ""
    )
    condition = ([Token("text", rest, True)] if rest else []) + condition[1:]
  return value, condition


def _to_cases(tokens: list[Token]) -> list[Token]:
  """Writes cases in words, such as "x if x > 0, -x if x < 0", as an environment."""
  if not any(t.kind in ("word", "text") for t in tokens):
    return tokens
  operators, sides = cuts.cut(tokens, "=")
  start = len(sides[0]) + 1 if operators and names.name(sides[0]) else 0
  rows = [row for row in cuts.cut(tokens[start:], ",", ";", "and")[1] if row]
  starts = [[i for i in range(len(row)) if _starts_condition(row[i:])] for row in rows]
  if len(rows) < 2 or not all(len(indices) == 1 and indices[0] for indices in starts):
    return tokens
  lines = [t for row in rows for t in (*row, Token("symbol", "\\\\"))]
  return tokens[:start] + _cases(lines)
