"""Converts Unicode equations of docstrings to TeX.

  J = 1/G Σ_i min( s_i Â_i, clip(s_i, 1 − clip_low, 1 + clip_high) Â_i )

Terminals show the equation unchanged, and the site typesets it. A paragraph that begins with
`symbol =` is an equation.
"""

import re

EQUATION = re.compile(r"[^\W_]\u0302?\d?(?:_\w+)?(?:\(\w\))? (?:=|←) ")
_SYMBOLS = {
  "Σ": r"\sum", "Π": r"\prod", "·": r"\cdot ", "×": r"\times ", "−": "-", "*": "^*",
  "≥": r"\ge ", "≤": r"\le ", "←": r"\leftarrow ", "∈": r"\in ", "∩": r"\cap ",
  "²": "^2", "½": r"\tfrac{1}{2}", "Â": r"\hat{A}", "Q\u0302": r"\hat{Q}", "…": r"\ldots ",
  "(": r"\left(", ")": r"\right)", "[": r"\left[", "]": r"\right]",
  "{": r"\left\{", "}": r"\right\}",
}  # fmt: skip
_OPERATORS = ("min", "max", "exp", "log")
_TOKEN = re.compile(
  r"(?P<fraction>\x01)|(?P<size>\|)|(?P<name>[A-Za-z]{2,}(?:_\w+)+)|(?P<word>[A-Za-z]{2,})"
  r"|(?P<script>[_^](?:\{[^}]*\}|\([^)]*\)|·?[^\W_]+(?:_[^\W_]+)?|·\w))|(?P<other>Q\u0302|.)",
  re.DOTALL,
)


def split(paragraph: str) -> list[str]:
  """Splits a paragraph into equations, at commas before a wide space or a new line."""
  symbol = EQUATION.pattern
  parts = re.split(rf",(?:\n *| {{2,}})(?={symbol})|,\s+(?={symbol}(?!.*,\s+{symbol}))", paragraph)
  return [" ".join(part.split()).rstrip(".,") for part in parts]


def tex(equation: str, in_script: bool = False) -> str:
  """Converts an equation, or its subscript or superscript, to TeX."""
  equation, fractions = _without_fractions(equation)
  parts, sizes = [], 0
  for match in _TOKEN.finditer(equation):
    kind, token = match.lastgroup, match[0]
    if kind == "fraction":
      upper, lower = fractions.pop(0)
      parts.append(rf"\frac{{{tex(_bare(upper))}}}{{{tex(_bare(lower))}}}")
    elif kind == "size":
      parts.append((r"\left|", r"\right|")[sizes % 2])
      sizes += 1
    elif kind == "name":
      escaped = token.replace("_", r"\_")
      parts.append(rf"\mathtt{{{escaped}}}")
    elif kind == "word":
      parts.append(token if in_script else _word(token, equation[match.end() :]))
    elif kind == "script":
      parts.append(_script(token))
    else:
      parts.append(_SYMBOLS.get(token, token))
  return re.sub(r" \} *\\text\{ ", " ", "".join(parts))


def _word(word: str, rest: str) -> str:
  if word in _OPERATORS:
    return rf"\{word} "
  if re.match(r"[(\[{]", rest) or word in ("mean", "std"):
    return rf"\operatorname{{{word}}} "
  return rf"\text{{ {word} }}"


def _script(token: str) -> str:
  """Converts a subscript or superscript: letters are italic (y_it), words are not (π_old)."""
  mark, inside = token[0], re.sub(r"^[({](.*)[)}]$", r"\1", token[1:])
  if re.fullmatch(r"[a-z]{3,}", inside):
    return rf"{mark}{{\mathrm{{{inside}}}}}"
  return f"{mark}{{{tex(inside, in_script=True)}}}"


def _without_fractions(text: str) -> tuple[str, list[tuple[str, str]]]:
  """Replaces each a/b without spaces by a mark; returns the text and the fractions."""
  fractions, begin = [], 0
  while (slash := text.find("/", begin)) > 0:
    start, end = _start(text, slash), _end(text, slash + 1)
    if start == slash or end == slash + 1:
      begin = slash + 1
      continue
    fractions.append((text[start:slash], text[slash + 1 : end]))
    text = f"{text[:start]}\x01{text[end:]}"
    begin = start + 1
  return text, fractions


def _start(text: str, end: int) -> int:
  """Returns the start of the numerator that ends at `end`."""
  depth, start = 0, end
  while start > 0:
    letter = text[start - 1]
    depth += (letter in ")]}") - (letter in "([{")
    if depth < 0 or (depth == 0 and letter in " ,"):
      break
    start -= 1
  return start


def _end(text: str, start: int) -> int:
  """Returns the end of the denominator that begins at `start`."""
  depth, end = 0, start
  while end < len(text):
    letter = text[end]
    depth += (letter in "([{") - (letter in ")]}")
    if depth < 0 or (depth == 0 and letter in " ,"):
      break
    end += 1
  return end


def _bare(text: str) -> str:
  """Removes brackets around a numerator or denominator."""
  return re.sub(r"^\(([^()]*)\)$", r"\1", text)
