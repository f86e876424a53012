r"""Splits an answer into tokens.

The same mathematics in LaTeX, Unicode and plain text has equal tokens. So other modules handle only
one spelling of each command.
"""

import dataclasses
import functools
import re
import unicodedata

from gspo_jax.verifiers.mathematics import spelling, units
from gspo_jax.verifiers.mathematics.spelling import TEXT


class Unreadable(ValueError):
  """Error for a text that is no mathematics, or of an unsupported kind."""


@dataclasses.dataclass(frozen=True)
class Token:
  """A token of an answer.

  Kinds are number, letter, word (several letters), text (words within \\text), command (a name
  without its backslash), separator (comma, semicolon, and, or), open and close (brackets), and
  symbol (other characters).
  """

  kind: str
  text: str
  spaced: bool = False  # Whether white space precedes the token.


def _by_spelling(table: str) -> dict[str, str]:
  """Maps the further words of each entry to its first word.

  For example, "le ≤ ⩽; ge ≥" maps ≤ and ⩽ to le, and ≥ to ge.
  """
  return {word: name for name, *words in map(str.split, table.split(";")) for word in words}


# Commands by Unicode character.
_COMMANDS = _by_spelling("""
  cdot × ⋅ · ∙ •; circ ° º; sqrt √; infty ∞; le ≤ ⩽; ge ≥ ⩾; ne ≠; approx ≈; in ∈; cup ∪; cap ∩;
  emptyset ∅ Ø; pm ±; mp ∓; setminus ∖; langle ⟨; rangle ⟩; lfloor ⌊; rfloor ⌋; lceil ⌈; rceil ⌉;
  ldots …; land ∧; lor ∨; angle ∠; triangle △; sum ∑; int ∫; perp ⊥; parallel ∥; pi π; alpha α;
  beta β; gamma γ; delta δ; epsilon ε; theta θ; lambda λ; mu μ; rho ρ; sigma σ; tau τ; phi φ ϕ;
  chi χ; psi ψ; omega ω; Delta Δ; Omega Ω; Gamma Γ; to →; neg ¬
""")
_UNICODE = {sign: rf"\{name} " for sign, name in _COMMANDS.items()} | {
  "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "ℝ": r"\mathbb{R}",
  "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "′": "'",
  "’": "'", "″": "''", "‖": r"\|", "％": "%", "﹣": "-",
} | dict.fromkeys("\u00a0\u202f\u2009", " ")  # fmt: skip
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᵏᵐᵗᵀ", "0123456789+-=()nixyabkmtT"))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₖₘₓᵢⱼₐ", "0123456789+-=()nkmxija"))
_BARRED = re.compile("(?:\\d\u0305)+")  # Digits with Unicode's combining overline.
_SUPERSCRIPTS = re.compile(f"[{''.join(_SUPER)}]+")
_SUBSCRIPTS = re.compile(f"[{''.join(_SUB)}]+")
# Names of commands, by their other names.
_ALIASES = _by_spelling("""
  le leq leqslant; ge geq geqslant; ne neq; < lt; > gt; cdot times ast; / div;
  frac dfrac tfrac cfrac; emptyset varnothing; cup bigcup; cap bigcap;
  setminus backslash smallsetminus; { lbrace; } rbrace; [ lbrack; ] rbrack; ( lparen;
  ) rparen; | lvert rvert vert mid lVert rVert Vert; and land wedge; or lor vee;
  binom dbinom tbinom; arccot arcctg; tan tg; cot ctg; log lg; arcsin asin; arccos acos;
  arctan atan; circ degree degrees; infty inf infinity oo; ' prime;
  vec overrightarrow; bold mathbf boldsymbol bm pmb; phi varphi; epsilon varepsilon;
  ldots dots cdots dotsb dotsc dotsm; langle lang; rangle rang; to rightarrow;
  approx simeq thickapprox
""") | {name: f"mathbb {name}" for name in "RZNQ"}
_KINDS = (  # Kinds of tokens, by character or command.
  dict.fromkeys(["(", "[", "{", "langle", "lfloor", "lceil"], "open")
  | dict.fromkeys([")", "]", "}", "rangle", "rfloor", "rceil"], "close")
  | dict.fromkeys([",", ";", "and", "or"], "separator")
  | dict.fromkeys("$%#&_|<>/'", "symbol")
)
# Commands of layout, without meaning.
_IGNORED = frozenset(
  """left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm biggm Biggm
  mleft mright displaystyle textstyle limits nolimits therefore boxed fbox
  phantom middle rm bf it hfill scriptstyle small tiny scriptsize footnotesize
  ensuremath mathnormal nonumber notag hline strut
  mathstrut""".split()
)
# Words that are commands even without a backslash.
_WORDS = frozenset(
  """sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh log ln lg exp sqrt pi theta
  alpha beta gamma lambda phi infinity inf oo abs max min gcd lcm det asin acos atan infty leq geq
  neq cbrt binom frac""".split()
)
_TEXT = re.compile(
  r"\\(?P<name>text(?:bf|it|rm|normal|sc|sf|sl|tt|up)?|math(?:rm|it|sf|tt|up)|[mh]box|units?"
  r"|operatorname\*?)\s*\{(?P<content>(?:[^{}]|\{[^{}]*\})*)\}"
)
_EXPONENT_IN_TEXT = re.compile(r"\$\s?(\^[^$]{1,6})\$")
_ITALIC = ("mathit", "textit")
_UNIT_TEXT = r"\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?)\s*"
_RATE = re.compile(rf"\\[dt]?frac\s*\{{{_UNIT_TEXT}\}}\s*\{{{_UNIT_TEXT}\}}")
# Upright text written as {\rm m}, \rm{m} or \mathrm m.
_ROMAN = re.compile(
  r"\{\s*\\rm(?:\s|\\[ ,;:])\s*([^{}]*)\}|\\rm\s*\{([^{}]*)\}"
  r"|\\(?:mathrm|text)\s+([a-zA-Z])(?![a-zA-Z])"
)
_LANGUAGE = re.compile(r"[^\W\d_]{2,}")  # A word. A formula within \text has none.
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?![\dA-Za-z]))?"
# A decimal with repeating digits: overlined, in brackets, dotted, or with an ellipsis.
_REPEATING = re.compile(
  r"\d*\.\d*(?:\\(?:overline|bar)\s*\{?\d+\}?|\(\d+\)|\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?"
  r"|(?=\d*(?:\.\.\.|\\[lc]?dots))\d+(?:\.\.\.|\\[lc]?dots))"
)
_TYPESET = r"(?: ?\{ ?, ?\} ?|\\[,!;: ]|,? ?\\! ?,?| )"  # A separator of thousands in LaTeX.
_PLAIN = re.compile(
  rf"(?:\d{{1,3}}(?:{_TYPESET}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?{_EXPONENT}|\.\d+{_EXPONENT}"
)
_COMMAS = re.compile(rf"[1-9]\d{{0,2}}(?:(?:,|{_TYPESET})\d{{3}})+(?!\d)(?:\.\d+)?")
# A doubled backslash before a command, from escaping JSON twice. It cannot be a new row of a
# matrix: no row begins with the letters of these commands.
_DOUBLED = re.compile(
  r"(?<!\\)\\\\(?=(?:left|right|[dtc]?frac|sqrt|pi|infty|text|cdot|times|cup|leq?|geq?|pm)(?![a-zA-Z]))"
)
_NOT_EQUAL = re.compile(r"\\not\s*(?==)")
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
_SIGNS = ("=", "<", ">", "le", "ge", "ne", "in", "approx")
_RUN = re.compile(r"[A-Za-z]+")
_COMPARISON = re.compile(r"<=|>=|!=|==|=<|=>|~=|\*\*")
_COMPARISONS = {"<=": "le", ">=": "ge", "!=": "ne", "=<": "le", "=>": "to", "~=": "approx"}


def tokenise(text: str, tight: bool = True, lone: bool = False) -> list[Token]:
  r"""Returns the tokens of an answer.

  Args:
    text: the answer.
    tight: whether 1,234 outside brackets is one number, not two.
    lone: whether \text{m} is a token of kind text, which may be a unit, and not a letter.

  Raises:
    Unreadable: the text ends with a backslash.
  """
  text = _DOUBLED.sub(r"\\", _to_ascii(spelling.plain(text)))
  text = _NOT_EQUAL.sub("!", text)
  tokens = list(_tokenise(_RATE.sub(_rate, _ROMAN.sub(_roman, text)), tight, lone))
  parts, depth = [[]], 0
  for token in tokens:
    depth += {"begin": 1, "end": -1}.get(token.text, 0) if token.kind == "command" else 0
    if token.text == "quad" and not depth:
      parts.append([])
    else:
      parts[-1].append(token)
  # A wide space (\quad) separates equations. Elsewhere it has no meaning.
  several = len(parts) > 1 and all(any(t.text in _SIGNS for t in part) for part in parts)
  gap = [Token("separator", ",")] * several
  return [token for part in parts for token in (*gap, *part)][len(gap) :]


def _to_ascii(text: str) -> str:
  """Replaces Unicode characters by LaTeX."""
  text = _SUPERSCRIPTS.sub(lambda m: "^{" + "".join(map(_SUPER.get, m[0])) + "}", text)
  text = _SUBSCRIPTS.sub(lambda m: "_{" + "".join(map(_SUB.get, m[0])) + "}", text)
  text = _BARRED.sub(lambda m: r"\overline{" + m[0].replace("\u0305", "") + "}", text)
  text = re.sub("(\\d)\u0307", r"\\dot{\1}", text)
  return re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", r"\\circ ", "".join(map(_character, text)))


@functools.lru_cache(maxsize=1 << 12)
def _character(char: str) -> str:
  """Replaces one Unicode character by LaTeX, if it has an equivalent."""
  if char.isascii():
    return char
  if char in _UNICODE:
    return _UNICODE[char]
  plain = unicodedata.normalize("NFKC", char)
  if "⁄" in plain and len(plain) > 1:  # A fraction such as ½.
    return r"\frac{" + plain.replace("⁄", "}{") + "}"
  return _UNICODE.get(plain, plain)


def _tokenise(text: str, tight: bool, lone: bool = False):
  """Yields the tokens of an ASCII text; arguments as in `tokenise`."""
  position, depth, spaced = 0, 0, False
  # If the commas of a list are followed by spaces, a comma without a space is within a number.
  loose = bool(re.search(r",\s", text)) and not re.search(r"\d,(?:\d{1,2}|\d{4,})(?!\d)", text)
  while position < len(text):
    char = text[position]
    if char.isspace() or char in "$~":
      position, spaced = position + 1, True
      continue
    tokens, end = [], position + 1
    if (
      char.isdigit()
      or (char == "." and _REPEATING.match(text, position))
      or (char == "." and text[position + 1 : position + 2].isdigit())
    ):
      match = _REPEATING.match(text, position)
      if not match and ((tight and depth == 0) or loose):
        match = _COMMAS.match(text, position)
      match = match or _PLAIN.match(text, position)
      tokens, end = [Token("number", match[0], spaced)], match.end()
    elif char == "\\":
      tokens, end = _command(text, position, spaced, lone)
    elif char.isalpha():
      match = _RUN.match(text, position)
      run = match[0] if match else char
      tokens, end = _letters(run, spaced), position + len(run)
    elif match := _COMPARISON.match(text, position):
      end = match.end()
      name = _COMPARISONS.get(match[0])
      kind = "command" if name else "symbol"
      tokens = [Token(kind, name or {"**": "^", "==": "="}[match[0]], spaced)]
    elif text.startswith("...", position):
      tokens, end = [Token("command", "ldots", spaced)], position + 3
    elif char not in '."':
      tokens = [Token(_KINDS.get(char, "symbol"), char, spaced)]
    depth += sum({"open": 1, "close": -1}.get(token.kind, 0) for token in tokens)
    yield from tokens
    position, spaced = end, not tokens and text[position:end] in ("\\ ", "\\,", "\\;", "\\:")


def _command(text: str, position: int, spaced: bool, lone: bool) -> tuple[list[Token], int]:
  """Returns the tokens of the command at a position, and the command's end."""
  match = _TEXT.match(text, position)
  if match:
    content = _EXPONENT_IN_TEXT.sub(r"\1", match["content"])
    unit = content.strip(" .,;")
    if lone and len(unit) == 1 and match["name"] not in _ITALIC and _is_unit(unit):
      # Right behind a letter, \mathrm{h} may be a variable and not hours.
      apart = spaced or "math" not in match["name"] or content[0] == " "
      return [Token("text", unit, apart)], match.end()
    return _in_text(content, spaced or content[:1].isspace()), match.end()
  match = _COMMAND.match(text, position)
  if not match:
    raise Unreadable("a backslash ends the text")
  name, end = match[1], match.end()
  quad = re.match(r"q?quad", name)
  if quad:
    return [Token("separator", "quad")], position + 1 + quad.end()
  if name in _IGNORED or name in ",;:! ()[]":
    return [], end
  name = _ALIASES.get(name, name)
  if name == "\\":
    skip = re.compile(r"\s*\[-?[\d.]+(?:pt|em|ex|mm|cm)\]").match(text, end)
    return [Token("symbol", "\\\\", spaced)], skip.end() if skip else end
  if name in "{}":
    return [Token(_KINDS[name], "\\" + name, spaced)], end
  return [Token(_KINDS.get(name, "command"), name, spaced)], end


def _in_text(content: str, spaced: bool) -> list[Token]:
  """Returns the tokens within a \\text command: words, a unit, or mathematics without words."""
  bare = content.strip(" .,;")
  if re.fullmatch(r"(?:and|or)", bare):
    return [Token("separator", bare, spaced)]
  if bare == "to":  # A ratio, "3 to 4".
    return [Token("symbol", ":", spaced)]
  if not bare:
    return []
  if len(bare) > 1 and _is_unit(bare):
    return [Token("text", units.spaces(bare), True)]
  if bare in _WORDS or not _LANGUAGE.search(bare):
    tokens = list(_tokenise(bare, True))
    return [dataclasses.replace(token, spaced=True) for token in tokens[:1]] + tokens[1:]
  tokens = []
  for part in re.split(r"(\b(?:and|or)\b|,)", bare):
    part = part.strip()
    if part:
      tokens.append(Token("separator" if part in ("and", "or", ",") else "text", part, True))
  return tokens


def _is_unit(text: str) -> bool:
  """Whether a text is a unit of measurement, such as m/s."""
  return units.parse(" " + text, typeset=True) is not None


def _rate(match: re.Match) -> str:
  """Writes a fraction of two units with a slash."""
  parts = [TEXT.sub(r"\1", part) for part in match.groups()]
  return f"{match[1]}/{match[2]}" if all(map(_is_unit, parts)) else match[0]


def _roman(match: re.Match) -> str:
  """Writes upright text as an argument of \\mathrm."""
  return rf"\mathrm{{{match[1] or match[2] or match[3]}}}"


def _letters(run: str, spaced: bool) -> list[Token]:
  """Returns the tokens of successive letters: a separator, command, word, or single letters."""
  if run in ("and", "or", "AND", "OR"):
    return [Token("separator", run.lower(), spaced)]
  if run == "to":
    return [Token("symbol", ":", spaced)]
  if run in _WORDS:
    return [Token("command", _ALIASES.get(run, run), spaced)]
  if re.fullmatch(r"(?:or|and)[A-Z]", run):  # No space: "x=1orW=2".
    return [Token("separator", run[:-1]), Token("letter", run[-1])]
  if len(run) == 1 or (run.isupper() and len(run) <= 4):
    return [Token("letter", c, spaced and not i) for i, c in enumerate(run)]
  return [Token("word", run, spaced)]


def is_product(run: str) -> bool:
  """Whether letters may be a product of variables, such as abc, rather than a word.

  A product has at most four letters, and none of e, i, o and u.
  """
  return len(run) <= 4 and not re.search("[eiou]", run, re.IGNORECASE)


def fold(text: str) -> str:
  """Converts first letters of words, and words in capitals, to lower case.

  For example, Monday and MONDAY become monday. Products such as mgH are unchanged.
  """

  def lower(match: re.Match) -> str:
    word = match[0]
    if len(word) < 2 or (is_product(word) and not re.search("(?i:a)", word[1:])):
      return word
    return word.lower() if word.isupper() else word[0].lower() + word[1:]

  return re.sub(r"[A-Za-z']+", lower, text)


def decimal(text: str) -> str:
  """Removes the separators of thousands from a number."""
  return re.sub(_TYPESET + "|,", "", text)


def spell(tokens: list[Token]) -> str:
  """Joins tokens to a text. Equal tokens give equal texts."""
  return " ".join(decimal(t.text) if t.kind == "number" else t.text for t in tokens)
