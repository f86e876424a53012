"""Decides whether two SymPy expressions are equal.

If there is a fast exact comparison, it decides. Otherwise the variables take several sets of values
(points), and the values of the expressions are compared in many digits. A wrong answer could pass
such a comparison by accident, with a negligible probability.
"""

import contextlib
import itertools
from collections.abc import Iterator

import sympy as sp
from mpmath.libmp import NoConvergence

from gspo_jax.verifiers.mathematics.values import MAX_FACTORIAL

MAX_TERMS = 1000  # Maximum number of terms of an evaluated sum or product.
DIGITS = 120  # Number of leading digits in which two equal values agree.
PRINTED = 14  # Correct digits of a printed floating-point number (float64).
# Points for comparisons. A point has a value for each of six variables, which are sorted by name.
_POINTS = [
  [sp.Rational(n, d) for n, d in ((13, 11), (29, 17), (41, 37), (53, 43), (67, 59), (71, 61))],
  [sp.Rational(n, d) for n, d in ((5, 17), (11, 23), (7, 31), (19, 41), (23, 47), (31, 59))],
  [sp.Rational(n, d) for n, d in ((-7, 5), (31, 13), (-17, 19), (23, 7), (-29, 31), (37, 11))],
  [sp.Rational(n, d) for n, d in ((19, 7), (-13, 29), (37, 3), (-43, 41), (17, 53), (-5, 47))],
  [sp.Rational(n, d) for n, d in ((-11, 3), (-3, 13), (-19, 23), (-41, 7), (-2, 37), (-59, 5))],
]
# Further points for expressions with kinks (|x|, roots): two points far from 0, and one near 0.
_FAR = [
  [sp.Rational(n, 3) for n in (10007, -10009, 10037, -10039, 10061, -10067)],
  [sp.Rational(n, 3) for n in (-10079, 10091, -10093, 10099, -10103, 10111)],
  [sp.Rational(-n, 17) for n in (3, 5, 7, 2, 11, 13)],
]

# Further points for expressions that are real in few places, such as logarithms. They are tried
# until two points are suitable. Each variable takes 25 values around 0 that are 1 apart, then 25
# values that are 30 apart.
_STEPS = [
  [sp.Rational(7 * (k * step % 25 - 12) + 3, 7) * scale for step in (1, 2, 3, 7, 11, 13)]
  for scale in (1, 30)
  for k in range(25)
]
_INTEGERS = [2, 3, 5, 8, 4, 7, 6, 9]  # Values of integers such as n in (-1)^n, even and odd.
MAX_KINKS = 8  # Maximum absolute values and roots whose zeros are computed, and their degree.
MAX_KINK = 10_000  # Largest zero: 2^x has a bounded size there.
MAX_COEFFICIENT = 10**30  # Largest coefficient of a polynomial whose zeros are computed.

_UNEVALUATED = (sp.Sum, sp.Product, sp.Integral, sp.Limit)
# Errors of SymPy for unsupported operations.
_REFUSALS = (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError)

# Piecewise functions. A few points might miss a piece, so such expressions must be identical.
_PIECEWISE = (sp.Max, sp.Min, sp.floor, sp.ceiling, sp.Mod)


def same_expression(a, b) -> bool:
  """Whether two expressions or matrices are equal wherever both are defined."""
  if a == b:
    return True
  matrices = [isinstance(side, sp.MatrixBase) for side in (a, b)]
  if any(matrices):
    return all(matrices) and a.shape == b.shape and all(map(same_expression, a, b))
  # Letters may be matrices (`values.MATRICES`), so the order of factors counts.
  if any(map(_has_products, (a, b))) and sp.expand(a - b) != 0:
    return False
  a, b = commuting(a), commuting(b)
  if a == b:
    return True
  a, b = (evaluate(side) for side in (a, b))
  if any(side.has(*_UNEVALUATED) or _is_large(side) for side in (a, b)):
    return a == b
  a, b = _replace_functions(a, b)
  symbols = sorted(a.free_symbols | b.free_symbols, key=str)
  if a.is_Rational and b.is_Rational:
    return a == b
  if not symbols:
    return _same_value(a, b)
  if any(side.has(*_PIECEWISE) for side in (a, b)):
    return a == b
  if len(symbols) > len(_POINTS[0]):
    return sp.expand(a - b) == 0
  return _same_at_points(a, b, symbols)


def commuting(value):
  """Replaces non-commuting variables by commuting ones."""
  if isinstance(value, sp.MatrixBase):
    return value.applyfunc(commuting)
  twins = {s: sp.Symbol(s.name, real=True) for s in value.free_symbols if not s.is_commutative}
  return value.xreplace(twins) if twins else value


def _has_products(value) -> bool:
  """Whether a value has a product of different non-commuting variables."""
  return any(
    len({s for f in mul.args for s in f.free_symbols if not s.is_commutative}) > 1
    for mul in value.atoms(sp.Mul)
    if not mul.is_commutative
  )


def evaluate(value):
  """Evaluates sums, products, integrals and limits.

  Returns the value unchanged if SymPy cannot evaluate it, or if a finite sum or product has more
  than `MAX_TERMS` terms.
  """
  for part in value.atoms(sp.Sum, sp.Product):
    terms = part.limits[0][2] - part.limits[0][1]
    if terms.is_number and terms.is_finite and not terms <= MAX_TERMS:
      return value
  if value.has(*_UNEVALUATED):
    with contextlib.suppress(*_REFUSALS):
      return value.doit()
  return value


def is_zero(value) -> bool:
  """Whether SymPy proves a difference to be 0."""
  with contextlib.suppress(*_REFUSALS):
    return sp.sympify(value).equals(0) is True
  return False


def _is_large(value) -> bool:
  """Whether a variable has an exponent too large to compute with."""
  return any(
    p.exp.is_number and p.base.free_symbols and abs(p.exp) > MAX_FACTORIAL
    for p in value.atoms(sp.Pow)
  )


def _replace_functions(a, b):
  """Replaces the values of unknown functions, such as f(2), by variables."""
  functions = a.atoms(sp.core.function.AppliedUndef) | b.atoms(sp.core.function.AppliedUndef)
  twins = {f: sp.Symbol(f"value of {f}", real=True) for f in functions}
  return (a.xreplace(twins), b.xreplace(twins)) if twins else (a, b)


def _same_value(a, b) -> bool:
  """Whether two numbers agree in their first `DIGITS` digits."""
  if not (a.is_finite and b.is_finite):
    return False
  if sp.S.Zero in (a, b):
    return _is_zero(b if a == 0 else a)
  size = sp.Abs(a).evalf(15, maxn=400), sp.Abs(b).evalf(15, maxn=400)
  if not all(s.is_Float for s in size):
    return sp.simplify(a - b) == 0
  if abs(size[0] - size[1]) > 1e-9 * max(size):
    return False
  first, second = a.evalf(DIGITS + 20, maxn=800), b.evalf(DIGITS + 20, maxn=800)
  difference = abs(sp.N(first - second, 15))
  return bool(difference <= max(size) * sp.Float(10) ** -DIGITS)


def _is_zero(value) -> bool:
  """Whether a number is 0.

  A number clearly above 1e-300 in size is not 0. Any other number is 0 only if SymPy proves it.
  """
  size = sp.Abs(value).evalf(15, maxn=800)
  if size.is_Float and size > sp.Float(10) ** -300 and size._prec > 1:
    return False
  return value.equals(0) is True


def _same_at_points(a, b, symbols) -> bool:
  """Whether two expressions agree at all suitable points that are tried.

  At least two points must be suitable. A point is suitable if all arguments of roots and logarithms
  are positive, and both values are defined and finite.
  """
  count, integers = 0, _integers(a, b)
  required = itertools.chain(_POINTS, _kink_points(a, b, symbols))
  points = [zip(required, itertools.repeat(True)), zip(_STEPS, itertools.repeat(False))]
  for index, (point, is_required) in enumerate(itertools.chain(*points)):
    if count >= 2 and not is_required:
      break
    values = _values(symbols, point, integers, index)
    try:
      if not _real_inside((a, b), values):
        continue
      first, second = a.xreplace(values), b.xreplace(values)
    except _REFUSALS:  # A function is not defined, for example (n - 4)!! for n = 2.
      continue
    if first.has(sp.nan, sp.zoo, sp.oo) or second.has(sp.nan, sp.zoo, sp.oo):
      continue
    if first.is_Rational and second.is_Rational:
      if first != second:
        return False
    elif not _same_value(first, second):
      return False
    count += 1
  return count >= 2


def _values(symbols, point: list, integers: list, index: int) -> dict:
  """Returns the values of all variables at a point; `index` chooses those of integers."""
  return dict(zip(symbols, point)) | {
    s: sp.Integer(_INTEGERS[(index + n) % len(_INTEGERS)]) for n, s in enumerate(integers)
  }


def _integers(*values) -> list:
  """Returns the integer variables of expressions, sorted by name.

  They are in exponents of negative numbers, as n in (-1)^n, or in double factorials.
  """
  powers = [p for v in values for p in v.atoms(sp.Pow) if p.base.is_number and p.base.is_negative]
  doubles = [double for v in values for double in v.atoms(sp.factorial2)]
  parts = [*(power.exp for power in powers), *doubles]
  return sorted(set().union(*(part.free_symbols for part in parts)), key=str)


def _kink_points(a, b, symbols) -> Iterator[list]:
  """Yields points for expressions with kinks: absolute values or roots.

  They are `_FAR`, and for each variable one point in each interval between its kinks. Only kinks of
  polynomials and fractions in one variable are known.
  """
  parts = a.atoms(sp.Abs, sp.Pow) | b.atoms(sp.Abs, sp.Pow)
  insides = {part.args[0] for part in parts if isinstance(part, sp.Abs) or _is_root(part)}
  if insides:
    yield from _FAR
  single = sorted((inside for inside in insides if len(inside.free_symbols) == 1), key=str)
  zeros = [(inside.free_symbols, _zeros(inside)) for inside in single[:MAX_KINKS]]
  for index, symbol in enumerate(symbols):
    kinks = sorted(set().union(*(values for variables, values in zeros if symbol in variables)))
    ends = [kinks[0] - 1, *kinks, kinks[-1] + 1] if kinks else []
    for start, end in itertools.pairwise(ends):
      # Between integers the middle is a multiple of 1/2, and 9^x an integer of many digits. At 3/7
      # of the way this is rare, and `MAX_KINK` limits the digits.
      value = start + (end - start) * sp.Rational(3, 7)
      yield [*_POINTS[0][:index], value, *_POINTS[0][index + 1 :]]


def _is_root(power: sp.Pow) -> bool:
  return power.exp.is_Rational and not power.exp.is_Integer


def _zeros(value) -> list:
  """Returns the real zeros and poles of a univariate fraction, to 12 digits.

  Returns [] for other expressions, and for fractions of a degree above `MAX_KINKS` or with
  coefficients above `MAX_COEFFICIENT`. Zeros above `MAX_KINK` are ignored.
  """
  if _degree(value) > MAX_KINKS:
    return []
  with contextlib.suppress(*_REFUSALS, NoConvergence, sp.polys.polyerrors.BasePolynomialError):
    parts = [sp.Poly(part, *value.free_symbols) for part in sp.fraction(sp.together(value))]
    roots = [root for part in parts for root in _real_roots(part)]
    return [root for root in roots if abs(root) <= MAX_KINK]
  return []


def _real_roots(polynomial: sp.Poly) -> list:
  """Returns the real roots of a univariate polynomial, to 12 digits.

  Returns [] if a coefficient, its numerator or its denominator exceeds `MAX_COEFFICIENT`.
  """
  coefficients = polynomial.coeffs()
  if all(c.is_Rational for c in coefficients):
    if any(max(abs(c.p), c.q) > MAX_COEFFICIENT for c in coefficients):
      return []
    intervals = polynomial.intervals(eps=sp.Rational(1, 10**12))
    return [(start + end) / 2 for (start, end), _ in intervals]
  if any(sp.Abs(c).evalf(15, maxn=400) > MAX_COEFFICIENT for c in coefficients):
    return []
  return [sp.Rational(str(root)) for root in polynomial.nroots(15) if root.is_real]


def _degree(value) -> int:
  """Returns an upper bound of the degree of a polynomial or fraction, without expanding it."""
  if isinstance(value, sp.Pow) and value.exp.is_Integer:
    return abs(int(value.exp)) * _degree(value.base)
  if not isinstance(value, sp.Add | sp.Mul):
    return len(value.free_symbols)
  combine = max if isinstance(value, sp.Add) and value.is_polynomial() else sum
  return combine(map(_degree, value.args))


def _real_inside(expressions, values) -> bool:
  """Whether all arguments of roots and logarithms are positive at a point."""
  for part in (p for e in expressions for p in sp.preorder_traversal(e)):
    if isinstance(part, sp.Pow) and not part.exp.is_integer:
      inside = part.base
    elif isinstance(part, sp.log):
      inside = part.args[0]
    else:
      continue
    if inside.free_symbols and not sp.sympify(inside.xreplace(values).evalf(15)).is_positive:
      return False
  return True


def constant_ratio(a, b):
  """Returns the constant value of `a / b`.

  Returns None if the ratio varies, is 0, or cannot be determined.
  """
  a, b = _replace_functions(a, b)
  symbols = sorted(a.free_symbols | b.free_symbols, key=str)
  if a.free_symbols != b.free_symbols or len(symbols) > len(_POINTS[0]):
    return None
  ratio, integers = None, _integers(a, b)
  for index, point in enumerate(_POINTS[:2]):
    values = _values(symbols, point, integers, index)
    try:
      top, bottom = a.xreplace(values), b.xreplace(values)
    except _REFUSALS:
      continue
    if bottom == 0 or not (top / bottom).is_finite:
      continue
    if ratio is None:
      ratio = top / bottom
  return ratio if ratio is not None and ratio != 0 and same_expression(a, ratio * b) else None


def rounds_to(rounded, places: int, value) -> bool:
  """Whether a decimal is the correct rounding of an irrational number.

  The decimal must have at least `PRINTED` digits after the point, and at least `PRINTED`
  significant digits.
  """
  if value.free_symbols or not value.is_real or value.is_Rational:
    return False
  digits = len(str(abs(rounded.p) * 10**places // rounded.q)) if rounded != 0 else 0
  if places < PRINTED or digits < PRINTED:
    return False
  error = sp.Abs(value.evalf(digits + 20, maxn=800) - rounded)
  return bool(error * 2 * 10**places <= 1)
