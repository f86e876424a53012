"""Parses numbers in words, at the beginning of an answer or in a base such as "base five"."""

import re

from gspo_jax.verifiers.mathematics import units
from gspo_jax.verifiers.mathematics.spelling import TEXT

_SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
  fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = {word: value for value, word in enumerate(_SMALL)}
WORDS |= {word: 10 * value for value, word in enumerate(_TENS, 2)}
_SCALES = {"hundred": 100} | {
  word: 1000**power for power, word in enumerate("thousand million billion trillion".split(), 1)
}
_BASES = WORDS | {"binary": 2, "ternary": 3, "quaternary": 4, "quinary": 5, "senary": 6}
_BASES |= {"septenary": 7, "octal": 8, "nonary": 9, "decimal": 10, "hexadecimal": 16}
_SIGN = re.compile(r"\s*(?P<sign>-|(?:minus|negative)\b)?\s*(?P<currency>\\?[$€£¥₹])?\s*", re.I)
_NUMERAL = re.compile(
  rf"(?P<digits>\d{{1,3}}(?:,\d{{3}})+|\d{{1,15}})(?![\d.,/^])"
  rf"|(?P<word>{'|'.join([*WORDS, *_SCALES])}|and|an?)\b",
  re.IGNORECASE,
)
_GAP = re.compile(r"(?<=sand|lion),\s|\s*-?\s*")
_HALF = re.compile(r"\s+and (?:a|one)[ -]half\b", re.IGNORECASE)
_MAX_ITEMS = 24  # Maximum words and digits of a numeral.
_LARGEST = 10**15  # Every word of a numeral has a value below this bound.


def to_digits(text: str) -> str:
  """Converts a number in words to digits, for example "12 hundred fifty" to 1250.

  Returns other text unchanged, and text with more than a unit after the number. `units` reads
  "5 hundred", so this text is unchanged, too.
  """
  bare = TEXT.sub(r" \1 ", text)
  start = _SIGN.match(bare)
  items, end = _items(bare, start.end())
  value = _value(items)
  half = _HALF.match(bare, end)
  if value is None or not (half or len(items) > 2 or items[0].isalpha()):
    return text
  rest = bare[half.end() if half else end :].strip(" .,")
  currency = start["currency"] or ""
  if rest and (rest.startswith("of ") or units.parse(f" {rest}", currency[-1:]) is None):
    return text
  number = f"{'-' * bool(start['sign'])}{currency}{value}{'.5' * bool(half)}"
  return number + (rf"\text{{ {rest}}}" if rest else "")


def _items(text: str, position: int) -> tuple[list[str], int]:
  """Returns the words and digits of a numeral, and its end."""
  items, ends = [], [position]
  while len(items) < _MAX_ITEMS and (match := _NUMERAL.match(text, position)):
    items.append(match[0].lower().replace(",", ""))
    ends.append(match.end())
    position = _GAP.match(text, match.end()).end()
  while items and items[-1] in ("and", "a", "an"):
    items.pop()
  return items, ends[len(items)]


def _value(items: list[str]) -> int | None:
  """Returns the value of a numeral's words. Returns None for words such as "twenty twenty"."""
  total, group, limit, scale = 0, 0, _LARGEST, _LARGEST
  for index, item in enumerate(items):
    if item in ("a", "an"):
      if index or items[1] not in _SCALES:
        return None
      group, limit = 1, 1
    elif item == "and":
      if not index or items[index - 1] not in _SCALES:
        return None
    elif item == "hundred":
      if not 0 < group < 100:
        return None
      group, limit = 100 * group, 100
    elif item in _SCALES:
      if not group or _SCALES[item] >= scale:
        return None
      limit = scale = _SCALES[item]
      total, group = total + group * scale, 0
    else:
      value = WORDS.get(item)
      value = int(item) if value is None else value
      if value >= limit:
        return None
      group, limit = group + value, 10 if item in _TENS else 1
  return total + group if items else None


def base(text: str) -> str | None:
  """Returns the digits of a base, 5 of "base five". Returns None for other text."""
  words = re.sub(r"[(){}\s,.-]+", " ", text).strip().lower()
  words = re.sub(r"^(?:in )?(?:base )?", "", words)
  return words if words.isdigit() else str(_BASES[words]) if words in _BASES else None
