r"""Normalises the spelling of answers in LaTeX. All patterns take time linear in the text."""

import re

MAX_ANSWER = 1000  # Maximum characters of an answer; a longer text is taken for a derivation.
SEPARATOR = r"(?:,| ?\{ ?, ?\} ?|\\,|,? ?\\! ?,?)"  # Separator of thousands in text or LaTeX.
_SPACE = "[ \\u00a0\\u202f\\u2009]"  # Space between thousands.
_ENVIRONMENT = r"\\begin\{[a-zA-Z]+\*?\}"
# A formula with its delimiters, by Pandoc's rules: "$5 and $6" are two prices, not a formula.
FORMULA = re.compile(
  r"\$\$(?P<a>[^$]+)\$\$|(?<!\\)\$(?P<b>(?:\\.|[^$\\])+)(?<!and )(?<!to )\$(?!\d)"
  r"|\\\((?P<c>(?:[^\\]|\\[^()])+)\\\)|\\\[(?P<d>(?:[^\\]|\\[^\[\]])+)\\\]"
  rf"|(?P<e>{_ENVIRONMENT}.+?\\end\{{\w+\*?\}})",
  re.DOTALL,
)
# A command with text as its argument.
TEXT = re.compile(
  r"\\(?:text(?:bf|it|rm|normal|sf|sl)?|mathrm|mathbf|mathit|mathsf|mathbb|mbox|emph)\s*\{([^{}]*)\}"
)
# A typeface around a whole answer.
_FACE = re.compile(
  r"\s*\\(?:math(?:bf|bb|cal|scr|frak)|boldsymbol|bm|pmb)\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*"
)
_DASHES = re.compile("[‐‑‒–—―−﹘﹣－]|⁻(?=\\s?\\d)")
_THOUSANDS = re.compile(rf"(?<=\d)(?:{SEPARATOR}|{_SPACE})(?=\d{{3}}(?!\d))")
_GAPS = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad(?![a-zA-Z])")
_ANGLES = {"<": "langle", ">": "rangle"}
# Commands of style, without meaning.
_STYLE = re.compile(
  r"\\(?:(?:left|right)\s*\.|(?:text|math)?color(?:box)?\s*\{[^{}]*\}|(?:underline|left|right|normalsize|large|Large"
  r"|LARGE|huge|Huge|blacksquare|qed|qedhere)(?![a-zA-Z])|bbox\s*\[[^\[\]]*\]|tag\*?\s*\{[^{}]*\}"
  r"|label\s*\{[^{}]*\})|\\(?:square|Box|checkmark)\s*$|[∎■]"
)
_ORDINAL = re.compile(
  r"(?<=\d) ?(?:\^ ?(?:\{ ?)?\\?|\\)(?:text|mathrm|mbox)? ?\{?(?:st|nd|rd|th)\b\}*"
)
# A multiplier within \text: 18\text{K} is 18,000.
_SUFFIX = re.compile(r"(?<=\d)\\(?:text|mathrm|mbox)\s*\{(K|k|M|mn|B|bn)\}")
_SUFFIXES = {"K": "thousand", "k": "thousand", "M": "million", "mn": "million"}
_ARROW = r"(?:∴|⇒|⟹|→|=>|\\(?:therefore|implies|(?:Long)?[rR]ightarrow)(?![a-zA-Z]))"
_SO = re.compile(  # An arrow before an answer, possibly after a bullet.
  rf"^ ?(?:[-*•] )?(?:\$ ?{_ARROW} ?\$|\\\( ?{_ARROW} ?\\\)|(?:(?P<open>\$|\\[(\[]) ?)?{_ARROW}) ?"
)
_LABEL = re.compile(
  r"^\s*\\text\s*\{\s*(?:the )?(?:(?:final|correct) )?(?:answer|value|result|total|number|sum"
  r"|area|volume|length|perimeter|probability|cost|time|solution)(?: of [a-z ]{1,40})?"
  r" ?(?:is|are|:|=)\s*\}",
  re.IGNORECASE,
)

# The end "for all x" of a formula, or "for all positive integers n".
_EVERY = (
  r"(?:all|every|any|each)(?: (?:real|positive|natural|non-?negative))*"
  r"(?: (?:numbers?|integers?|reals))?"
)
_FOR_ALL = re.compile(
  rf"(?:\\text ?\{{[, ]*(?:for|where) {_EVERY} ?\}}|\bfor {_EVERY}|\\forall) ?(?P<letter>[a-z])"
  r"(?: ?\\in ?\\mathbb ?\{?[RZNQ]\}?(?:[_^]\{?[>0+*]{1,2}\}?)?)? ?$"
)
_NOT_REAL = re.compile(r"positive|negative|natural|integer|[ZNQ]|[_^]")
_NUMBERS = {
  "R": re.compile(r"\breals?\b|R"),
  "Q": re.compile("Q"),
  "Z": re.compile("natural|integer|[ZN]"),
}


def without_quantifier(text: str) -> str:
  """Removes "for all x" after a formula, and "for all positive integers n" after f(n) = ...

  Conditions such as "for all positive integers k" remain after other formulas, since they may be
  about a parameter.
  """
  text = re.sub(r"\s+", " ", text)
  match = _FOR_ALL.search(text)
  letter = match["letter"] if match else ""
  function = re.match(rf"[ $]*[A-Za-z](?:\({letter}\)|_{letter}|_\{{{letter}\}}) ?=", text)
  if not match or (_NOT_REAL.search(match[0]) and not function):
    return text
  return text[: match.start()].rstrip(" ,")


def same_numbers(gold: str, ours: str) -> bool:
  """Whether two texts quantify over the same numbers.

  The numbers of "for all x" are real, rational or integers; their sign does not count. True if a
  text does not name them.
  """
  numbers = {_numbers(text) for text in (gold, ours)} - {None}
  return len(numbers) < 2


def _numbers(text: str) -> str | None:
  """Returns the numbers R, Q or Z of "for all x", or None."""
  match = _FOR_ALL.search(re.sub(r"\s+", " ", text))
  if not match:
    return None
  return next((label for label, names in _NUMBERS.items() if names.search(match[0])), None)


def plain(text: str) -> str:
  """Removes text and style around an answer, and unifies dashes and white space.

  For example, removes "the answer is", arrows such as "∴", colours, sizes, and the suffix of 12th.
  """
  # The patterns see no long white space, on which adjacent quantifiers would take cubic time.
  text = _SO.sub(lambda match: match["open"] or "", re.sub(r"\s+", " ", text))
  face = _FACE.fullmatch(text)
  text = face[1] if face and re.search(r"\d", face[1]) else text
  text = re.sub(r"\\hspace\*?\s*\{[^{}]*\}", r"\\quad ", _LABEL.sub("", text))
  text = re.sub(r"\\(left\s*<|right\s*>)", lambda m: rf"\{_ANGLES[m[1][-1]]} ", text)
  text = _SUFFIX.sub(lambda m: rf"\text{{ {_SUFFIXES.get(m[1], 'billion')}}}", text)
  return _ORDINAL.sub("", _STYLE.sub("", _DASHES.sub("-", text)))


def trim(text: str) -> str:
  """Removes Markdown, math delimiters and punctuation around an answer."""
  text = text.strip().strip("*_` \t")
  if not text.endswith("..."):
    text = text.rstrip(".,;:。*_` \\")  # A backslash may be the rest of a thin space, \,.
  match = FORMULA.fullmatch(text)
  return inside(match).strip().rstrip(".,;") if match else text


def inside(formula: re.Match) -> str:
  """Returns the content between a formula's delimiters."""
  return next(filter(None, formula.groups()))


def normalise(text: str) -> str:
  """Normalises an answer's spelling, without changing its meaning."""
  text = FORMULA.sub(lambda match: f" {inside(match)} ", plain(trim(text)))
  text = re.sub(r"^\s*(?:\\text\s*\{\s*)?(?:minus|negative)\b[\s}]+(?=[\d$\\])", "-", text)
  text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", _THOUSANDS.sub(",", text.strip()))
  text = " ".join(_GAPS.sub(" ", text).split())
  return text if text.endswith("...") else text.rstrip(".,;")
