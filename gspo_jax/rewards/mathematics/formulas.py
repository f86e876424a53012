r"""Formulas within a text: what is one, and which a sentence states. Every pattern is linear."""

import re

from gspo_jax.rewards.mathematics import units

LONGEST = 400  # characters of a formula, and of what is searched for one that is announced
_MATRIX = r"\\begin\{(?:[bpvBV]?(?:small)?matrix|array)\}"
FORMULA = re.compile(
  r"\$\$(?P<a>[^$]+)\$\$|(?<!\\)\$(?P<b>(?:\\.|[^$\\])+)\$"
  r"|\\\((?P<c>(?:[^\\]|\\[^()])+)\\\)|\\\[(?P<d>(?:[^\\]|\\[^\[\]])+)\\\]"
  rf"|(?P<e>{_MATRIX}.+?\\end\{{\w+\}})",
  re.DOTALL,
)
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|bb)|mbox)\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w*\}(?:\{[lcr| ]*\})?")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = re.compile("(?i:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|min|max|or|and)|[A-Z]{2,4}")

_BLANK = (None, False)
# A full stop behind B may belong to a choice: B. 18.
_SENTENCE = re.compile(r"(?<=[\w)}\]$%°!*])(?<!\b[A-J])[.?;](?=\s)")
# Letters that touch a digit, ^ or _ belong to the formula: 18cm, 2xy; but not those of 5th.
_PLAIN = re.compile(
  rf"{TEXT.pattern}|{_ENVIRONMENT.pattern}|\\[a-zA-Z]+"
  r"|(?P<word>(?<![A-Za-z\d^_])[A-Za-z]{2,}(?![A-Za-z\d^_])|(?<=\d)(?:st|nd|rd|th)\b|\bi\.e\b)"
)
_VALUE = re.compile(r"[\dπ√∞]|\\[a-zA-Z(\[]|\$[^$]+\$")
# Words before a number that make it another one, or none.
_HEDGE = re.compile(
  r"(?:\b(?:not|never|more|less|fewer|greater|smaller|between|either|neither|one of|about|around"
  r"|approximately|roughly|nearly|almost|at least|at most)|n't)\b\W*(?:\w+\W+){0,2}$"
  r"|\b(?:half|twice|double|triple)\b(?: of)?\W*$|^\W*[A-J]\W+(?:because|since|as)\b"
  r"|\b(?:sum|product|difference|quotient|ratio|square|cube|root|factorial) of\b"
  r"(?!.*(?:\b(?:is|are|be|equals?|gives)\b|[=:]))",
  re.IGNORECASE,
)
_NEGATIVE = re.compile(
  r"(?:(?<!\d)(?<!\d\s)\b(?:minus|negative)\s*|(?:=|\bis|\bequals)\s?-\s)$", re.IGNORECASE
)
# Words behind a number that go on with it.
_GOES_ON = re.compile(
  r"(?:squared|cubed|factorial)\b|(?:[a-z]+,?\s+){1,3}(?:or\b|and\s+\$?\d|(?P<on>[*+×=]))"
  r"|(?P<by>plus|minus|times|over|to|through|choose|mod|modulo|remainder|(?:divided|multiplied) by"
  r"|(?:out )?of|(?:more|less|fewer|greater) than)\s+\W{0,3}\d",
  re.IGNORECASE,
)
_SECOND = re.compile(r"([a-z]+),?\s+\d[\d.]*\s+([a-z]+)\b", re.IGNORECASE)  # hours 30 minutes
_OPERATOR = re.compile(
  r"(?:[-+*/^_=<>×·÷≈±√]|\bor|\\(?:cdot|times|div|pm|mp|approx|[lgn]eq?|in|to|sqrt))$"
)
# An "and" before it, and what Markdown sets bold, which is no power: **18** apples.
_DECORATION = re.compile(r"(?i:^\W?and\s+)|(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?=[\s:.,;!?)])")
_LABEL = re.compile(r"^(?:[a-zA-Z]|[A-Z]{2,4})[,:]?\s+(?=[-+$]?\d)")
# What touches a number that is a part of a formula.
_BEHIND = re.compile(r"\s?(?:\^(?!\s?\{?\s?\\?circ)|√|\\?sqrt|π|\\?pi(?![a-z]))|_[\d{]")
_BEFORE = re.compile(
  r"(?:√|\b(?:sqrt|log|ln|sin|cos|tan|exp)\s?[{(]?|\^\s?[{(]?-?|(?:π|\\?pi)\s?/\s?|_\{|\+\s?)\S$"
  r"|[\w)}][-+]$|[\d)}](?:-|\*\*?|\s?\*\*?\s|\s?[×·÷x]\s?)\S$"
)
_RATIO = re.compile(r"(?:^|\D)\d{1,2}:\d{1,2}$")
_ARTICLE = re.compile(r"(?:\s(?:a|I|and))+$")


def stated(text: str) -> tuple[str | None, bool]:
  r"""The formula that the first sentence of `text` states, and whether nothing else but its unit.

  That is the longest one: 5\sqrt{2} of "5\sqrt{2} cm long". What is said before or behind it
  may make it no answer: "not 5", "5 plus 3", "5 or more". The words around it are left out.
  """
  cut, text = len(text) > LONGEST, _DECORATION.sub("", text[:LONGEST])
  first = _SENTENCE.split(text, maxsplit=1)[0]
  if is_formula(first):
    return (trim(first), True) if not cut or len(first) < len(text) else _BLANK
  sentence = _up_to_a_value(text)
  start, end = _with_value(sentence)
  before, behind = sentence[:start], sentence[end:]
  if (not behind and cut) or is_hedged(before):
    return _BLANK
  if goes_on := _GOES_ON.match(behind):  # 9 eggs * 2 dollars = 18 dollars; 20% of 50 = 10
    _, equals, last = behind.rpartition("=")
    joined = goes_on["on"] or goes_on["by"]
    return (stated(last)[0], False) if joined and equals else _BLANK
  second = _SECOND.match(behind)
  if second and set(second.groups()) <= units.UNITS.keys():
    return _BLANK
  content = _without_ends(sentence[start:end].rstrip(" /" if behind else None))  # $5/day
  bare = _ARTICLE.sub("", content)
  factor = re.match(r"[A-Za-z]{1,12}\b", behind)
  if factor and factor[0].casefold() in units.MULTIPLIERS:  # 2 dozen are not 2
    content = f"{bare} {factor[0]}" if bare == content else ""  # nor are 3 and a half 3
  else:
    content = signed(before, bare)
  unit = not behind or units.parse(" " + behind.strip(" .,*_`$")) is not None
  whole = unit and not start and not sentence[:end].rstrip().endswith(":")
  return (trim(content), whole) if bare and content else _BLANK


def _up_to_a_value(text: str) -> str:
  """The text up to the end of the first sentence that has a value."""
  value = _VALUE.search(text)
  end = _SENTENCE.search(text, value.end() if value else 0)
  return text[: end.start()] if end else text


def _with_value(sentence: str) -> tuple[int, int]:
  """Where the first stretch without plain words begins and ends that has a digit, say."""
  words = [match.span() for match in _PLAIN.finditer(sentence) if _is_word(match)]
  start = 0
  for word, after in [*words, (len(sentence), len(sentence))]:
    if _VALUE.search(sentence, start, word):
      return start, word
    start = after
  return start, start


def _is_word(match: re.Match) -> bool:
  """Whether what `_PLAIN` has found is a word of a language."""
  return bool(match["word"]) and not _FUNCTIONS.fullmatch(match["word"])


def _without_ends(text: str) -> str:
  """Without labels before it and brackets that open behind it; empty if it is only a part."""
  text = _LABEL.sub("", text.lstrip(" =:,)*_`"))
  text = re.sub(r"(?:\s[-–]|—)$", "", text.rstrip(" \\([{,;:*_`")).rstrip()
  if text.endswith("$") and len(re.findall(r"(?<!\\)\$", text)) % 2:
    text = text[:-1].rstrip()
  if text.startswith("(") and ")" not in text:
    text = text[1:]
  opened, closed = (len(re.findall(brackets, text)) for brackets in (r"[(\[{]", r"[)\]}]"))
  return "" if opened != closed or _OPERATOR.search(text) else text


def is_hedged(before: str) -> bool:
  """Whether the words before a number make it another one, or none."""
  return bool(_HEDGE.search(before + " "))


def signed(before: str, number: str) -> str:
  """The number with the sign that the words before it give it: negative 5; x = - 5."""
  return "-" + number if _NEGATIVE.search(before) else number


def sentence_before(text: str, end: int) -> str:
  """The part before `end` of the sentence that `text[end]` is in; a line ends it too."""
  line = text[max(0, end - LONGEST) : end].rpartition("\n")[2]
  return _SENTENCE.split(line)[-1]


def around(text: str, start: int, end: int) -> str | None:
  r"""The formula that the number `text[start:end]` is a part of: x^2+5; None: it stands alone.

  Of an equation the last member; empty where only a part of the formula can be told.
  """
  letter = re.match(r"[A-Za-z](?![A-Za-z])", text[end : end + 2])
  before = _BEFORE.search(text[max(0, start - 12) : start + 1])
  ratio = _RATIO.search(text[max(0, start - 12) : end]) if end - start < 3 else None
  glued = letter and letter[0] not in units.UNITS
  if not (glued or before or ratio or _BEHIND.match(text, end)):
    return None
  first = max(start - LONGEST, text.rfind("\n", 0, start) + 1)
  line = text[first : end + LONGEST].split("\n")[0]
  words = [match.span() for match in _PLAIN.finditer(line) if _is_word(match)]
  left = max((stop for _, stop in words if stop <= start - first), default=0)
  right = min((begin for begin, _ in words if begin >= end - first), default=len(line))
  return _without_ends(_SENTENCE.split(line[left:right])[-1].rstrip(" .").rpartition("=")[2])


def is_formula(text: str) -> bool:
  r"""Whether `text` is mathematics all through: short, no words outside \text and the like."""
  if len(text) > LONGEST:
    return False
  bare = TEXT.sub(" ", _ENVIRONMENT.sub(" ", text))
  bare = re.sub(r"\\[a-zA-Z]+", " ", bare)
  bare = re.sub(r"(?<=[\d)])(?:and|or)(?=[A-Z(])", " ", bare)  # x=1orW=2
  return bool(re.search(r"\w", bare + "".join(TEXT.findall(text)))) and all(
    map(_FUNCTIONS.fullmatch, _WORD.findall(bare))
  )


def trim(text: str) -> str:
  """Without the Markdown, math delimiters and punctuation around an answer."""
  text = text.strip().strip("*_` \t")
  if not text.endswith("..."):
    text = text.rstrip(".,;:*_` \\")  # a thin space is \,
  match = FORMULA.fullmatch(text)
  return next(filter(None, match.groups())).strip().rstrip(".,;") if match else text
