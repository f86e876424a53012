r"""Recognises names before an equals sign, such as x or "the area". The answer follows the sign."""

import re

from gspo_jax.verifiers.mathematics.cuts import cut, match, split
from gspo_jax.verifiers.mathematics.denials import DENIAL
from gspo_jax.verifiers.mathematics.expression import GREEK
from gspo_jax.verifiers.mathematics.tokens import Token, is_product

# Parts of `_NAME`. A letter may have a mark above it. Points name lengths and angles, such as AB
# and \angle ABC.
_MARK = r"(?:\\(?:bar|hat|vec|tilde|overline|mathbb|mathcal|dot) )"
_LETTER = rf"(?:[a-zA-Z]|\\(?:{'|'.join(sorted(GREEK))}) )"
_POINTS = r"[A-Z]{2,}|m?\\(?:angle|triangle|widehat) \{?[A-Z]{1,4}\}?"
_BASE = rf"(?:{_MARK}\{{(?:{_LETTER}|[A-Z]+)\}}|{_MARK}?{_LETTER}|{_POINTS})"
_INDEX = r"(?:_(?:\w|\\\w+ |\{[^{}]*\})|'|\^\*|\^\{\*\})*"
_CALL = r"(?:\([^()=<>]*\)|\[[^\[\]=<>]*\])"
# Letters of functions. Other letters are not included: x(y+z) is a product, and n(3) may be one.
_FUNCTION = r"(?:[fghpquA-Z]|\\(?:mathbb|vec) \{[A-Z]\}|\\(?:phi|varphi|sigma|tau|mu|pi|Phi) )"
# Functions whose value a question may ask for. A sine is not among them.
_MEASURE = (
  r"\\?(?:det|dim|deg|rank|Var|Cov|Pr|tr|gcd|lcm|max|min|sup|inf|vol|[Aa]rea|perimeter|ord) ?"
)
_SIZED = r"(?:[A-Z]+|[abuvwz]|[A-Z]\\(?:cup|cap|setminus) [A-Z]|\\vec (?:\{\w+\}|\w))"
_NAME = re.compile(
  rf"#?{_BASE}{_INDEX}|#\([A-Z]\)|\|{_SIZED}{_INDEX}\||\|\|{_SIZED}{_INDEX}\|\||\[[A-Z]{{2,}}\]"
  rf"|{_FUNCTION}{_INDEX}(?:\^\{{?-1\}}?)?{_CALL}|[dsvyr]\((?:\d+|[tnx])\)|[a-z]\([A-Z][^()=<>+-]*\)"
  rf"|{_MEASURE}{_INDEX}(?:{_CALL}|{_BASE}{_INDEX}{_CALL}?)|\\frac \{{[A-Z]+\}}\{{[A-Z]+\}}"
)
# A name in words, without words that deny or change the value after it.
_WORDS = re.compile(r"(?!.*\b(?:than|minus|negative)\b)[A-Z][A-Z' -]+[ :]*", re.IGNORECASE)


def name(tokens: list[Token]) -> str | None:
  r"""Returns the name spelled by tokens. Returns None for other tokens.

  Examples are x, x_1, f(2), AB, |AB|, \frac{AB}{CD}, (x, y) and x:y. For words such as "the area",
  the name is "text".

  2x, -x, x^2 and x+1 are no names: if one of them equals 18, the answer is not 18.
  """
  if not tokens:
    return None
  words = " ".join(t.text for t in tokens)
  if len(words) > 1 and all(
    t.kind == "text" or (t.kind == "word" and not is_product(t.text)) for t in tokens
  ):
    return "text" if _WORDS.fullmatch(words) and not DENIAL.search(words) else None
  if tokens[0].text == "(" and match(tokens) == len(tokens) - 1:
    labels = list(map(name, split(tokens[1:-1])))
    return ",".join(labels) if len(labels) > 1 and all(labels) else None
  ratio = cut(tokens, ":")[1]
  if len(ratio) > 1:
    labels = list(map(name, ratio))
    return ":".join(labels) if all(labels) else None
  text = "".join(f"\\{t.text} " if t.kind == "command" else t.text for t in tokens)
  return re.sub("[{}]", "", text) if _NAME.fullmatch(text) else None


_INTEGRALS = frozenset("int iint iiint oint".split())
_SERIES = frozenset("lim sum prod max min sup inf limsup liminf".split())


def series(tokens: list[Token]) -> str | None:
  """Returns "series" for an integral, sum or limit. Returns None for other tokens.

  The tokens must be a single integral, sum or limit with an unknown function. For example, the
  answer in "sum of f(k) = 5" is 5.
  """
  if not tokens or tokens[0].kind != "command":
    return None
  head = next((i for i, t in enumerate(tokens) if t.text not in _INTEGRALS), len(tokens))
  body = tokens[max(head, 1) :]
  if len(body) < 3 or body[0].text != "_":
    return None
  end = match(body, 1) + 1
  bounds, rest = body[1:end], body[end:]
  if not rest:
    return None
  if head:
    inner = next((i for i, t in enumerate(rest) if t.text in _INTEGRALS), 0)
    if inner:  # A double integral.
      return series(rest[inner:]) if rest[0].text == "^" and match(rest, 1) + 1 == inner else None
    *_, d, last = [Token("end", ""), *(t for t in rest if t.text not in ("vec", "{", "}"))]
    variable = last.kind == "letter" or last.text in GREEK
    single = re.fullmatch("d[a-zA-Z]", last.text) or (variable and d.text == "d")
  else:
    single = tokens[0].text in _SERIES and not any(len(cut(rest, sign)[1]) > 1 for sign in "+-")
  bound = {t.text for t in bounds}
  unknown = any(
    following.text == "_" or (t.text in "fghFGHP" and t.text not in bound)
    for t, following in zip(rest, [*rest[1:], Token("end", "")])
    if t.kind == "letter"
  )
  return "series" if single and unknown else None


# Names of constants, which have no other value.
CONSTANTS = frozenset(["\\pi ", "\\infty ", "e", "i"])


def multiplied_name(tokens: list[Token]) -> list[Token]:
  """Returns the name after a number, x of 2x. Returns [] for other tokens."""
  number = tokens[0].kind == "number" or tokens[0].text in ("frac", "-")
  for start in range(1, len(tokens) if number else 0):
    if name(tokens[start:]) and not any(t.kind in ("letter", "word") for t in tokens[:start]):
      return tokens[start:]
  return []


def parameter(tokens: list[Token]) -> str | None:
  """Returns the parameter of a function, x of f(x). Returns None for other tokens."""
  call = tokens[-3:]
  single = len(call) == 3 and (call[0].text, call[1].kind, call[2].text) == ("(", "letter", ")")
  return call[1].text if single and len(tokens) > 3 and call[1].text.islower() else None
