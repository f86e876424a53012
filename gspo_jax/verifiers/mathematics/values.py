"""Builds SymPy values of bounded size: numbers, variables and powers."""

import fractions
import re

import sympy as sp

from gspo_jax.verifiers.mathematics.tokens import Unreadable, decimal

MAX_BITS = 50_000  # Maximum bits of a power of a number.
MAX_FACTORIAL = 3000  # Largest operand of a factorial, and largest exponent of an expression.
MATRICES = frozenset("ABCDMNPQXYZT")  # Letters that may be matrices.


def symbol(name: str) -> sp.Symbol:
  """Returns a real variable, or a non-commuting one for a matrix."""
  if name in MATRICES:
    return sp.Symbol(name, commutative=False)
  return sp.Symbol(name, real=True)


def power(base, exponent):
  """Returns `base ** exponent`, or the transpose if a matrix has the exponent T.

  Raises:
    Unreadable: the power is too large, or the exponent of a matrix is no small integer.
  """
  if isinstance(base, sp.MatrixBase):
    if exponent in (sp.Symbol("T", commutative=False), sp.Symbol("\\top", real=True)):
      return base.T
    if not (exponent.is_Integer and abs(exponent) <= 20):
      raise Unreadable("a power of a matrix")
    return base**exponent
  if base.is_Rational and exponent.is_Rational:
    bits = max(abs(base.p), base.q).bit_length()
    if bits > 1 and abs(exponent.p) * bits > MAX_BITS * exponent.q:
      raise Unreadable("a number too large")
    if exponent.q % 2 and exponent.q > 1 and base < 0:  # The real root, not SymPy's complex one.
      return (-1) ** exponent.p * (-base) ** exponent
  elif exponent.is_Integer and abs(exponent) > MAX_FACTORIAL and not base.is_Symbol:
    raise Unreadable("a power too large")
  return base**exponent


def number(text: str) -> sp.Rational:
  r"""Returns the exact value of a number.

  Forms are 12, 1,234.5, 1e-3, and repeating decimals 0.\overline{3}, 0.(3), 0.\dot{3}, 0.333...

  Raises:
    Unreadable: the number is too large, or digits before an ellipsis do not repeat.
  """
  text = decimal(text)
  match = re.fullmatch(r"(\d*)\.(\d*?)(?:\\(?:overline|bar)\{?|\()(\d+)[)}]?", text)
  dotted = re.fullmatch(r"(\d*)\.(\d*)\\dot\{?(\d)\}?(?:(\d*)\\dot\{?(\d)\}?)?", text)
  endless = re.fullmatch(r"(\d*)\.(\d+?)(?:\.\.\.|\\[lc]?dots)", text)
  if match:
    whole, head, block = match.groups()
  elif dotted:
    whole, head, first, middle, last = dotted.groups()
    block = first + (middle or "") + (last or "")
  elif endless:
    whole, digits = endless.groups()
    repeated = re.fullmatch(r"(\d*?)(?:(\d)\2{2,}|(\d\d)\3{2,}|(\d{3,6})\4+)", digits)
    if not repeated:
      raise Unreadable("digits without a period")
    head, block = repeated[1], repeated[2] or repeated[3] or repeated[4]
  else:
    exponent = re.search(r"[eE]([-+]?\d+)$", text)
    if exponent and abs(int(exponent[1])) > 400:
      raise Unreadable("a number too large")
    return rational(fractions.Fraction(text))
  value = fractions.Fraction(f"0{whole}.{head}0")
  period = fractions.Fraction(int(block), 10 ** len(block) - 1)
  return rational(value + period / 10 ** len(head))


def rational(value: fractions.Fraction) -> sp.Rational:
  """Converts a fraction to SymPy's type."""
  return sp.Rational(value.numerator, value.denominator)
