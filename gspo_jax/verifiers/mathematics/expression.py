r"""Parses one expression, without lists and relations, to a SymPy value.

No token is ignored: an unsupported one raises `Unreadable`. Numbers stay exact. The size of powers
and factorials is bounded before they are computed. Letters that may be matrices (`values.MATRICES`)
do not commute, and `algebra.same_expression` compares their order in products.
"""

import re

import sympy as sp

from gspo_jax.verifiers.mathematics import forms, numerals
from gspo_jax.verifiers.mathematics.cuts import split
from gspo_jax.verifiers.mathematics.tokens import Token, Unreadable, spell
from gspo_jax.verifiers.mathematics.values import MAX_FACTORIAL, number, power, symbol

MAX_DEPTH = 40  # Maximum depth of nested brackets and exponents.
# Errors of SymPy for unsupported operations, such as sums of matrices of different shapes.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, TypeError, RuntimeError, ValueError)
_BASE = re.compile(r"\(?(?:in )?base[ -]?\w+\)?")
_TRIG = {
  "sin": sp.sin, "cos": sp.cos, "tan": sp.tan, "cot": sp.cot, "sec": sp.sec, "csc": sp.csc,
  "arcsin": sp.asin, "arccos": sp.acos, "arctan": sp.atan, "arccot": sp.acot, "sinh": sp.sinh,
  "cosh": sp.cosh, "tanh": sp.tanh, "exp": sp.exp, "ln": sp.log, "Re": sp.re, "Im": sp.im,
}  # fmt: skip
TRIGONOMETRIC = frozenset(_TRIG)
_INVERSE = {sp.sin: sp.asin, sp.cos: sp.acos, sp.tan: sp.atan, sp.cot: sp.acot}
_NARY = {"max": sp.Max, "min": sp.Min, "gcd": sp.gcd, "lcm": sp.lcm, "abs": sp.Abs}
_CONSTANTS = {"pi": sp.pi, "infty": sp.oo, "imath": sp.I}
GREEK = frozenset(
  """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon
  phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell""".split()
)
_FUNCTIONS = frozenset("fghFGH")  # Letters that are functions if a bracket follows.
_OPERATORS = forms.ENDS | {"pm", "mp", "cdot", "bmod", "mod"}  # Commands that begin no factor.
_CLOSING = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "\\{": "\\}"}


def read(tokens: list[Token], sign: int = 1):
  r"""Returns the SymPy value of all tokens, with `sign` (1 or -1) for \pm.

  Raises:
    Unreadable: the tokens are no expression, or its value is too large or undefined.
  """
  reader = _Reader(tokens, sign)
  try:
    value = reader.sum()
  except _REFUSALS as error:
    raise Unreadable(str(error)) from error
  if reader.position < len(tokens):
    raise Unreadable(f"unexpected {tokens[reader.position].text!r}")
  if isinstance(value, sp.MatrixBase):
    return sp.ImmutableMatrix(value)
  if value.has(sp.nan, sp.zoo):
    raise Unreadable("not defined")
  return value


class _Reader:
  """A recursive-descent parser. Each method reads from the current position on."""

  def __init__(self, tokens: list[Token], sign: int):
    self.tokens, self.sign = tokens, sign
    self.position = self.depth = self.bars = 0  # `bars`: number of open |.
    self.bound: set[str] = set()  # Variables of sums and limits; a bound i or e is no constant.

  def peek(self, offset: int = 0) -> Token:
    index = self.position + offset
    return self.tokens[index] if index < len(self.tokens) else Token("end", "")

  def take(self, text: str | None = None) -> Token:
    token = self.peek()
    if token.kind == "end" or (text is not None and token.text != text):
      raise Unreadable(f"expected {text or 'more'}, got {token.text!r}")
    self.position += 1
    return token

  def accept(self, *texts: str) -> bool:
    token = self.peek()
    if token.text in texts and token.kind not in ("text", "word", "letter"):
      self.position += 1
      return True
    return False

  def sum(self):
    self.depth += 1
    if self.depth > MAX_DEPTH:
      raise Unreadable("nested too deeply")
    value = self.product()
    while True:
      if self.accept("+"):
        value = value + self.product()
      elif self.accept("-"):
        value = value - self.product()
      elif sign := self.plus_minus():
        value = value + sign * self.product()
      else:
        break
    if self.accept("choose"):
      value = self.binomial(value, self.sum())
    self.depth -= 1
    return value

  def product(self):
    value = self.unary()
    while True:
      if self.accept("cdot", "*"):
        value = value * self.unary()
      elif self.accept("/"):
        value = self.divide(value, self.unary())
      elif self.accept("bmod", "mod"):
        value = sp.Mod(value, self.unary())
      elif self.starts_factor():
        value = value * self.power()
      else:
        return value

  def divide(self, top, bottom):
    if bottom == 0:
      raise Unreadable("division by zero")
    return top * bottom**-1 if not isinstance(bottom, sp.MatrixBase) else top * bottom.inv()

  def starts_factor(self) -> bool:
    token = self.peek()
    if token.kind == "number":
      return self.starts_power()
    if token.kind in ("letter", "word", "open"):
      return True
    if token.text == "|":
      return not self.bars
    return token.kind == "command" and token.text not in _OPERATORS

  def starts_power(self) -> bool:
    """Whether a number is a factor, as in n 2^n, 2!3! and 2^4 3^2. "3 4" and 2x3^2 are refused."""
    before, last = [Token("end", ""), *self.tokens[max(0, self.position - 2) : self.position]][-2:]
    cross = last.text == "x" and (before.kind in ("number", "close") or before.text == "!")
    factor = before.text in ("^", "_") or last.kind != "number"
    return factor and not cross and self.peek(1).text in ("^", "!")

  def unary(self):
    if self.accept("-"):
      return -self.unary()
    if self.accept("+"):
      return self.unary()
    if sign := self.plus_minus():
      return sign * self.unary()
    return self.power()

  def plus_minus(self) -> int:
    r"""Reads a \pm or \mp, and returns its sign, 1 or -1; 0 for other tokens."""
    return self.sign if self.accept("pm") else -self.sign if self.accept("mp") else 0

  def power(self):
    before = self.letters_before()
    value = self.postfix(self.atom())
    while self.accept("^"):
      value = self.postfix(power(value, self.exponent()))
      if self.peek().text == "^":
        raise Unreadable("a double exponent")
    return before * value

  def letters_before(self):
    """Reads all but the last letter of a word, a of ab^2. Returns 1 if no word follows."""
    token = self.peek()
    if token.kind != "word":
      return sp.Integer(1)
    if len(token.text) > 4:
      raise Unreadable(f"the word {token.text!r}")
    self.tokens = list(self.tokens)
    self.tokens[self.position] = Token("letter", token.text[-1])
    return sp.Mul(*map(self.letter, token.text[:-1]))

  def exponent(self):
    """Reads an exponent: an atom with an optional minus sign. x^a^b is x^(a^b)."""
    self.depth += 1
    if self.depth > MAX_DEPTH:
      raise Unreadable("nested too deeply")
    if self.accept("-"):
      value = -self.exponent()
      self.depth -= 1
      return value
    before = self.letters_before()
    digits = self.peek().kind == "number"  # 2\frac{1}{3} in x^2\frac{1}{3} is no mixed number.
    value = self.postfix(number(self.take().text) if digits else self.atom())
    if self.accept("^"):
      value = power(value, self.exponent())
    self.depth -= 1
    return before * value

  def postfix(self, value):
    while True:
      if self.peek().text == "!" and self.peek().kind == "symbol":
        count = 0
        while self.accept("!"):
          count += 1
        value = self.factorial(value, count)
      elif self.accept("%"):
        value = value / 100
      elif self.accept("circ"):
        value = value * sp.pi / 180
      else:
        return value

  def factorial(self, value, count: int):
    if count > 2 or (value.is_number and not (value.is_Integer and 0 <= value <= MAX_FACTORIAL)):
      raise Unreadable("a factorial of this")
    return sp.factorial(value) if count == 1 else sp.factorial2(value)

  def atom(self):
    token = self.take()
    if token.kind == "number":
      return self.mixed(number(token.text))
    if token.kind == "letter":
      return self.named(token.text)
    if token.kind == "open":
      return self.bracket(token)
    if token.text == "|":
      self.bars += 1
      value = self.sum()
      self.take("|")
      self.bars -= 1
      return value.det() if isinstance(value, sp.MatrixBase) else sp.Abs(value)
    if token.kind == "command":
      return self.command(token.text)
    raise Unreadable(f"unexpected {token.text!r}")

  def mixed(self, value):
    r"""Reads a fraction or base after a number, as in 3\frac{1}{2} or 204_5. Returns the whole."""
    if base := self.base():
      return sp.Symbol(f"{value}_{base}", real=True)
    following = [self.peek(i) for i in range(4)]
    if not value.is_Integer:
      return value
    if following[0].text == "frac" and all(t.kind != "letter" for t in following):
      fraction = self.atom()
      if self.peek().text == "^":
        raise Unreadable("a power of a mixed number")
      return value + fraction if fraction.is_Rational and 0 < fraction < 1 else value * fraction
    first, slash, last, _ = following
    if (first.kind, slash.text, last.kind) == ("number", "/", "number") and first.spaced:
      top, bottom = number(first.text), number(last.text)
      if top.is_Integer and bottom.is_Integer and 0 < top < bottom:
        self.position += 3
        return value + top / bottom
    return value

  def base(self) -> str:
    """Reads a number's base, as in _5, _{five} or "base 5". Returns "" for other tokens."""
    if self.accept("_"):
      text = self.subscript()
      return numerals.base(text) or text
    brackets = self.peek().text == "("
    for count in range(1, 4):
      text = " ".join(self.peek(brackets + i).text for i in range(count)).lower()
      if _BASE.fullmatch(text) and (digits := numerals.base(text)):
        self.position += count + 2 * brackets
        return digits
    return ""

  def subscript(self) -> str:
    """Reads the text of a subscript, without its braces."""
    if self.peek().text != "{":
      return spell([self.take()])
    return spell(self.group_tokens())

  def group_tokens(self) -> list[Token]:
    """Returns the tokens within the brackets at this position."""
    opening, start, depth = self.take(), self.position, 1
    while depth:
      depth += {"open": 1, "close": -1}.get(self.take().kind, 0)
    if self.tokens[self.position - 1].text != _CLOSING.get(opening.text):
      raise Unreadable("brackets do not match")
    return self.tokens[start : self.position - 1]

  def inner(self, tokens: list[Token]):
    """Parses a separate list of tokens as an expression, e.g. the content of brackets."""
    reader = _Reader(tokens, self.sign)
    reader.depth, reader.bound = self.depth + 1, self.bound
    value = reader.sum()
    if reader.position < len(tokens):
      raise Unreadable(f"unexpected {tokens[reader.position].text!r}")
    return value

  def letter(self, name: str):
    constant = None if name in self.bound else {"e": sp.E, "i": sp.I}.get(name)
    return constant or symbol(name)

  def named(self, name: str):
    """Reads a letter's subscript, primes and arguments."""
    plain = True
    if self.accept("_"):
      name, plain = f"{name}_{self.subscript()}", False
    while self.accept("'"):
      name, plain = name + "'", False
    if self.peek().text == "(" and not self.peek().spaced:
      start = self.position
      inside = self.group_tokens()
      single = len(inside) == 1 and name[0].isupper()
      if name[0] in _FUNCTIONS or single or any(t.kind == "separator" for t in inside):
        return sp.Function(name, real=True)(*map(self.inner, split(inside)))
      self.position = start
    return self.letter(name) if plain else symbol(name)

  def bracket(self, token: Token):
    closing = _CLOSING.get(token.text)
    if closing is None or token.text == "\\{":
      raise Unreadable("a set within an expression")
    bars, self.bars = self.bars, 0
    value = self.sum()
    self.take(closing)
    self.bars = bars
    floors = {"lfloor": sp.floor, "lceil": sp.ceiling}
    value = floors[token.text](value) if token.text in floors else value
    digits = token.text == "(" and value.is_Integer and self.base()  # For example (204)_5.
    return sp.Symbol(f"{value}_{digits}", real=True) if digits else value

  def argument(self):
    r"""Reads a command's argument, a group or a single token. \frac12 has the arguments 1 and 2."""
    if self.peek().text == "{":
      return self.bracket(self.take())
    token = self.peek()
    if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
      self.tokens = list(self.tokens)
      self.tokens[self.position] = Token("number", token.text[1:])
      return number(token.text[0])
    if token.kind == "word":
      raise Unreadable(f"the word {token.text!r}")
    return self.atom()

  def command(self, name: str):
    if name in _CONSTANTS:
      return _CONSTANTS[name]
    if name in GREEK:
      return symbol(f"{name}_{self.subscript()}" if self.accept("_") else name)
    if name in ("frac", "binom"):
      combine = self.divide if name == "frac" else self.binomial
      return combine(self.argument(), self.argument())
    if name in ("sqrt", "cbrt"):
      return self.root(sp.Integer(3 if name == "cbrt" else 2))
    if name in _TRIG or name == "log":
      return self.function(name)
    if name in _NARY:
      return _NARY[name](*map(self.inner, split(self.group_tokens())))
    if name == "det":
      return self.postfix(self.atom()).det()
    if name == "begin":
      return forms.matrix(self)
    if name in ("sum", "prod", "int"):
      return forms.series(self, name)
    if name == "lim":
      return forms.limit(self)
    if name in ("vec", "bold"):
      return forms.vector(self)
    return forms.opaque(self, name)

  def binomial(self, top, bottom):
    if any(v.is_number and not (v.is_Integer and abs(v) <= MAX_FACTORIAL) for v in (top, bottom)):
      raise Unreadable("a binomial of this")
    return sp.binomial(top, bottom)

  def root(self, index):
    if self.peek().text == "[":
      index = self.inner(self.group_tokens())
    token = self.peek()
    if token.kind == "number":
      value = number(self.take().text)
    else:
      value = self.bracket(self.take()) if token.text in ("{", "(") else self.argument()
    if index == 0:
      raise Unreadable("a root of order 0")
    return power(value, 1 / index)

  def function(self, name: str):
    base, exponent = None, None
    for _ in range(2):
      if name == "log" and self.accept("_"):
        base = self.argument()
      elif self.accept("^"):
        exponent = self.exponent()
    value = self.operand()
    if name == "log":
      result = sp.log(value) / sp.log(10 if base is None else base)
    elif exponent == -1 and _TRIG[name] in _INVERSE:
      return _INVERSE[_TRIG[name]](value)
    else:
      result = _TRIG[name](value)
    return result if exponent is None else power(result, exponent)

  def operand(self):
    r"""Reads a function's operand: brackets, or factors up to an operator, bracket or function."""
    if self.peek().text in ("(", "{", "["):
      return self.postfix(self.atom())
    negative = self.accept("-")
    value = self.power()
    while self.starts_factor() and self.peek().kind not in ("open", "number"):
      token = self.peek()
      if token.kind == "command" and (token.text in _TRIG or token.text == "log"):
        break
      value = value * self.power()
    return -value if negative else value
