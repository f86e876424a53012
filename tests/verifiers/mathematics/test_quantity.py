"""Plain numbers with units, which are read and compared in the trainer."""

from fractions import Fraction

import pytest

from gspo_jax.verifiers.mathematics import quantity, units


@pytest.mark.parametrize(
  "text, value",
  [
    ("18", 18), ("18.", 18), ("-18", -18), ("−18", -18), ("007", 7), (".5", 0.5), (r"\$18", 18),
    ("-$5", -5), ("70,000", 70_000), ("70{,}000", 70_000), (r"70\,000", 70_000),
    (r"32,\! 349", 32_349), ("1 234 567", 1_234_567), ("1,234.5", 1234.5),
    (r"18 \text{ apples}", 18), (r"5\text{ cm}^2", 5), ("60 miles/hour", 60), (r"90^\circ", 90),
    (r"\text{18}", 18), ("50%", 50), ("1.5 million", 1_500_000), ("2 dozen", 24),
    ("3 quarters", 0.75), ("1e3", 1000), ("3/4", 0.75), (r"\dfrac{3}{4}", 0.75),
    (r"-\frac34", -0.75), (r"3\frac{1}{2}", 3.5), ("3 1/2", 3.5),
  ],
)  # fmt: skip
def test_value(text, value):
  assert quantity.read(text).value == value


@pytest.mark.parametrize(
  "text",
  ["", "x", "5x", "5 xy", "1,2", "1,23", "(1,234)", "18 or 20", "1/0", "--5", r"2\sqrt{3}", r"2\pi",
   "5 factorial", "5!", "5'", "7 is wrong", "7 incorrectly", "3 apples and 2 pears", "0,111",
   "9" * 100],
)  # fmt: skip
def test_not_a_plain_number(text):
  assert quantity.read(text) is None


@pytest.mark.parametrize(
  "text, scale, dimensions",
  [
    ("cm^2", Fraction(1, 10_000), {"length": 2}),
    ("square feet", Fraction(381, 1250) ** 2, {"length": 2}),
    ("cubic meters", 1, {"length": 3}),
    ("liters", Fraction(1, 1000), {"length": 3}),
    ("km/h", Fraction(1000, 3600), {"length": 1, "time": -1}),
    ("miles per hour", Fraction(201168, 125 * 3600), {"length": 1, "time": -1}),
    ("mph", Fraction(201168, 125 * 3600), {"length": 1, "time": -1}),
    ("dollars per pound", Fraction(100_000, 45359237), {"dollar": 1, "mass": -1}),
    ("cents", Fraction(1, 100), {"dollar": 1}),
    (" red apples", 1, {"apple": 1}),
    (" eggs per day", Fraction(1, 86400), {"egg": 1, "time": -1}),
    (" berries in total", 1, {"berry": 1}),
    ("°", 1, {"angle": 1}),
    ("per cent", 1, {"percent": 1}),
  ],
)
def test_unit(text, scale, dimensions):
  factor, unit = units.parse(text)
  assert (factor, unit.scale, dict(unit.dimensions)) == (1, scale, dimensions)


@pytest.mark.parametrize(
  "text",
  [" is wrong", " or so", " apples and pears", " never", " exactly", " squared", " x", "apples",
   " per", " per per day", " more than that", "%%", " score", " + 1"],
)  # fmt: skip
def test_no_unit(text):
  assert units.parse(text) is None
