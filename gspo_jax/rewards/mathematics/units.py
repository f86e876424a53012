"""Units: what the words after a number say about it. Cost is linear in the text."""

import dataclasses
import fractions
import re

F = fractions.Fraction

# name: dimension, and how much of it one is.
_TABLE = {
  "length": "m:1 mm:1/1000 cm:1/100 dm:1/10 km:1000 µm:1/1000000 nm:1/1000000000 in:127/5000"
  " ft:381/1250 yd:1143/1250 mi:201168/125",
  "mass": "g:1 mg:1/1000 kg:1000 tonne:1000000 lb:45359237/100000 oz:45359237/1600000",
  "time": "s:1 ms:1/1000 min:60 h:3600 day:86400 week:604800",
  "calendar": "month:1 year:12 decade:120 century:1200",
  "capacity": "gallon:1 quart:1/4 pint:1/8 cup:1/16",
  "volume": "L:1 mL:1/1000",
  "angle": "degree:1",
  "radian": "rad:1",
  "dollar": "$:1 cent:1/100",
  "sterling": "£:1 penny:1/100",
  "euro": "€:1",
  "yen": "¥:1",
  "rupee": "₹:1",
  "yuan": "yuan:1",
  "celsius": "°C:1",
  "fahrenheit": "°F:1",
  "kelvin": "K:1",
  "percent": "%:1",
  "acre": "acre:1",
  "hectare": "hectare:1",
  "watt": "W:1 kW:1000",
  "joule": "J:1 kJ:1000",
  "volt": "V:1",
  "newton": "N:1",
  "hertz": "Hz:1",
}
_NAMES = {
  "m": "meter metre meters metres",
  "cm": "centimeter centimetre centimeters centimetres cms",
  "mm": "millimeter millimetre millimeters millimetres",
  "dm": "decimeter decimetre decimeters decimetres",
  "km": "kilometer kilometre kilometers kilometres kms",
  "in": "inch inches",
  "ft": "foot feet",
  "yd": "yard yards yds",
  "mi": "mile miles",
  "g": "gram grams gm gms",
  "mg": "milligram milligrams",
  "kg": "kilogram kilograms kilo kilos kgs",
  "tonne": "tonnes",
  "lb": "lbs pound pounds",
  "oz": "ounce ounces",
  "s": "sec secs second seconds",
  "ms": "millisecond milliseconds",
  "min": "mins minute minutes",
  "h": "hr hrs hour hours",
  "day": "days",
  "week": "weeks",
  "month": "months",
  "year": "years yr yrs",
  "decade": "decades",
  "century": "centuries",
  "gallon": "gallons gal",
  "quart": "quarts qt",
  "pint": "pints pt",
  "cup": "cups",
  "L": "l liter litre liters litres",
  "mL": "ml milliliter millilitre milliliters millilitres",
  "degree": "° degrees deg",
  "rad": "radian radians rads",
  "$": "dollar dollars usd buck bucks",
  "cent": "cents ¢",
  "£": "gbp",
  "penny": "pence pennies",
  "€": "euro euros eur",
  "¥": "yen jpy",
  "₹": "rupee rupees rs inr",
  "°C": "celsius centigrade",
  "°F": "fahrenheit",
  "K": "kelvin",
  "%": "percent pct percentage",
  "acre": "acres",
  "hectare": "hectares",
  "W": "watt watts",
  "kW": "kilowatt kilowatts",
  "J": "joule joules",
  "V": "volt volts",
  "N": "newton newtons",
  "Hz": "hertz",
}
UNITS: dict[str, tuple[str, F]] = {}
for _dimension, _entries in _TABLE.items():
  for _entry in _entries.split():
    _name, _, _scale = _entry.partition(":")
    for _alias in [_name, *_NAMES.get(_name, "").split()]:
      UNITS[_alias] = (_dimension, F(_scale))
_SHAPES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "fps": "ft/s"}

# Words that multiply the number before them.
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
_ORDINALS = (
  "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth"
  " fifteenth sixteenth seventeenth eighteenth nineteenth twentieth".split()
)
MULTIPLIERS = {word: F(1, n) for n, word in enumerate(_ORDINALS, 3)}
MULTIPLIERS |= {"half": F(1, 2), "quarter": F(1, 4), "hundredth": F(1, 100)}
MULTIPLIERS |= {"thousandth": F(1, 1000), "millionth": F(1, 10**6), "billionth": F(1, 10**9)}
MULTIPLIERS |= {word + "s": value for word, value in MULTIPLIERS.items()} | {"halves": F(1, 2)}
MULTIPLIERS |= {"dozen": F(12), "hundred": F(100), "thousand": F(1000), "million": F(10**6)}
MULTIPLIERS |= {"billion": F(10**9), "trillion": F(10**12)}
COUNTED = frozenset("dozen quarter quarters half halves".split())  # and that are things as well

# Words that no unit has: they change the value in a way of their own, comment on it, or deny it.
_COMMENTS = frozenset(
  """is are was were be been am not no non never none nothing wrong right false true incorrect
  correct invalid isn't aren't wasn't don't doesn't can't cannot but nor if unless except maybe
  perhaps guess unsure sorry hope think believe impossible undefined unknown error mistake instead
  actually wait because since so i you we they he she it""".split()
)
_REFUSED = _COMMENTS | frozenset(
  """and or minus plus times divided multiplied over under above below less more fewer greater than
  at least most about approx around only just without with mod modulo remainder factorial choose
  root sqrt squared cubed power to from between through until up down out by as when where why what
  how which that this its who answer equals equal both either neither all some another other double
  doubled twice thrice triple tripled quadruple halved negative positive opposite reciprocal inverse
  sum difference product quotient ratio average mean score gross couple several many few off short
  dozens hundreds thousands millions billions trillions zero infinity infinite per""".split()
  + _NUMBERS
)
_ADVERB = re.compile(r"(?!family|assembly|jelly|belly|fly|butterfly|lily|supply|reply)\w+ly")
_ORDINAL = re.compile(
  r".*(?:third|four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|red|sand)ths?"
)
_FILLER = frozenset("a an the of more each total left remaining altogether overall".split())
_TERM = re.compile(r"(?:^|[°%])\s*[-*·]\s*[a-zA-Z](?![a-zA-Z])|^\s*[aA]$")  # 5 - m, 5a
_TAIL = re.compile(r"\s+(?:in total|in all|altogether|each|apiece|overall|times)$")
_ITEM = re.compile(
  r"\s*(?P<per>/|\bper\b)?\s*(?:\\cdot|[·*-])?\s*"
  r"(?P<word>[^\W\d_]+(?:'[a-z]+)?|[$£€¥₹%°¢](?:[CF]\b)?)\.?"
  r"(?:\s*\^\s*\{?\s*(?P<power>-?[1-4])\s*\}?)?"
)


@dataclasses.dataclass(frozen=True)
class Unit:
  """`scale` of the product of dimensions; a thing that is counted is a dimension of its own."""

  scale: F
  dimensions: tuple[tuple[str, int], ...]  # (name, power), sorted

  @property
  def percent(self) -> bool:
    return self.dimensions == (("percent", 1),)

  @property
  def degrees(self) -> bool:
    return self.dimensions == (("angle", 1),)


DEGREES, PERCENT = Unit(F(1), (("angle", 1),)), Unit(F(1), (("percent", 1),))


def parse(text: str) -> tuple[F, Unit | None] | None:
  """What follows a number as (factor of the number, unit or None); None: it is no unit.

  `text` is plain: "apples", "cm^2", "miles per hour", "thousand dollars", "°", "%". A word that is
  no unit of measurement has three letters or more and stands apart from the number.
  """
  if _TERM.search(text):
    return None
  apart = not text[:1].isalpha()
  text = _TAIL.sub("", " " + text.strip().replace("per cent", "percent"))
  factor, start, groups = F(1), 0, [[]]
  signs = []
  while start < len(text.rstrip()):
    match = _ITEM.match(text, start)
    if not match:
      return None
    start = match.end()
    if match["per"]:
      if not groups[-1] and len(groups) > 1:
        return None
      groups.append([])
    word, power = match["word"], match["power"]
    lower = word.casefold()
    if lower in MULTIPLIERS and not power:
      if groups != [[]]:
        return None
      factor *= MULTIPLIERS[lower]
    elif lower in ("squared", "cubed") and groups[-1] and not power:
      groups[-1][-1] = (groups[-1][-1][0], 2 if lower == "squared" else 3)
    elif lower not in _FILLER:
      if word not in UNITS and lower not in UNITS and lower not in {*_COMPOUND, *_SHAPES}:
        refused = lower in _REFUSED or _ADVERB.fullmatch(lower) or _ORDINAL.fullmatch(lower)
        if refused or len(word) < 3 or not (apart or signs):
          return None
      groups[-1].append((word, int(power or 1)))
      signs.append(word)
  if len(signs) > 5:
    return None
  dimensions, scale = {}, F(1)
  for index, group in enumerate(groups):
    if not group and index:
      return None
    sign = -1 if index else 1
    for name, power, size in _measure(group):
      dimensions[name] = dimensions.get(name, 0) + sign * power
      scale *= size ** (sign * power)
  dimensions = tuple(sorted((name, power) for name, power in dimensions.items() if power))
  if any(
    dimensions.count((name, 1)) == 0 for name in ("percent", "angle") if name in dict(dimensions)
  ):
    return None
  return factor, (Unit(scale, dimensions) if dimensions else None)


def _measure(group: list[tuple[str, int]]) -> list[tuple[str, int, F]]:
  """(dimension, power, scale) of words that are multiplied; adjectives do not count."""
  found, shape = [], 1
  for word, power in group:
    lower = word.casefold()
    if lower in _SHAPES:
      shape = _SHAPES[lower]
      continue
    if lower in _COMPOUND:
      over, _, under = _COMPOUND[lower].partition("/")
      found += [(*_one(over, 1),), (*_one(under, -1),)]
    elif word in UNITS or lower in UNITS:
      found.append(_one(word if word in UNITS else lower, power * shape))
      shape = 1
  if found or not group:
    return found
  if shape > 1 and len(group) == 1:
    return [("unit", shape, F(1))]
  word, power = group[-1]
  return [(_singular(word.casefold()), power * shape, F(1))]


def _one(name: str, power: int) -> tuple[str, int, F]:
  dimension, size = UNITS[name]
  if dimension == "volume":  # a litre is a cubic decimetre
    return "length", 3 * power, F(1, 10) if size == 1 else F(1, 100)
  return dimension, power, size


def _singular(word: str) -> str:
  for end, instead in (("ies", "y"), ("ses", "s"), ("xes", "x"), ("ches", "ch"), ("shes", "sh")):
    if word.endswith(end) and len(word) > len(end) + 1:
      return word[: -len(end)] + instead
  return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def is_comment(word: str) -> bool:
  """Whether a word denies or comments rather than names something."""
  word = word.casefold()
  return word in _COMMENTS or bool(_ADVERB.fullmatch(word))
