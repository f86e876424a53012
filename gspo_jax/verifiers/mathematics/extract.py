r"""Finds the answer in a response: a box, or a sentence of a form that states one.

What stands in no such form is no answer, and of what does the whole is taken: `quantity` and
`structure` read all of it or nothing, so that "18 is wrong" and "18 or 19" are no numbers. Every
pattern is linear: no nested repetitions.
"""

import re

from gspo_jax.verifiers import string_match, thought
from gspo_jax.verifiers.mathematics import quantity, spelling, units
from gspo_jax.verifiers.mathematics.spelling import DENIED, FORMULA, TEXT, inside, plain, trim

TAIL = 2000  # characters at the end of a response that are searched where nothing is boxed
_LAST = 16  # boxes and markers at the end of a response that are looked at
BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FILLER = re.compile(r"\\(?:q?quad|[,;:!()\[\] ])|\\(?:text|mbox)(?=\{)|[\s${}]")
# Nothing but a name may follow the "and": "and the sum is 7" begins another answer.
_JOINED = re.compile(r"\b(?:and|or)\b\W*(?:\b[A-Za-z]\w*\s*=)?\W*$")

_MARKER = re.compile(
  r"####|(?:(?<![\w-])(?:answers?|(?:correct|right|best) (?:option|choice|letter)|ответ|respuesta"
  r"|r[ée]ponse|antwort|risposta|resposta)(?!\w)|答案)(?: to [\w' ]{1,60}\bis)?[*_]{0,3}\s{0,3}"
  r"(?:(?:ist?|are|est?|è|[:：=是为])[*_:：\s]{0,5}|(?=\$|\\[(\[]))",
  re.IGNORECASE,
)
_FINAL = re.compile(r"\bfinal answer is:?\s{0,3}", re.IGNORECASE)
# A full stop behind B may belong to a choice: B. 18.
_SENTENCE = re.compile(
  r"(?<=[\w)}\]$%°!*])(?<!\b[A-J])(?<!\bMr)(?<!\bMrs)(?<!\bi\.e)[.;](?=\s)|(?<=[a-z])!(?=\s)|[\n。]|\s(?=∴)"
)
# Words that may stand before an answer, or before the sentence that states it.
_LEAD = re.compile(
  r"(?:\W?(?:so|thus|therefore|hence|then|and|now|finally|still|just|simply|exactly|equal to|option"
  r"|choice|a total of|each|indeed|that|we (?:get|have|obtain|find|know)|it follows)\b[,:]?\s*)+",
  re.IGNORECASE,
)
# Verbs by which a sentence states its number, whatever it is of; "cannot be" is none.
_VERBS = (
  """is are was were equals? has have had gives?(?:_us)? makes? gets? got obtain leaves? yields?
  becomes? costs? takes? needs? earn(?:s|ed)? totals? ends?_with left_with
  increases?_by decreases?_by comes?_to amounts?_to adds?_up_to
  (?:must|will|should|turn(?:s|ed)?_out_to)_be (?:it|that|there)['’]s"""
).split()
_VERB = re.compile(rf"(?:\b(?:{'|'.join(_VERBS)})\b|:)\s+".replace("_", " "), re.IGNORECASE)
# Verbs right before a number with a unit, which tell that it was so: Jojo scored 54 points.
_DONE = """
  scor walk earn us need collect receiv produc sav pick bak plant donat deliver bik hik travel
  practic climb complet finish work play cook wash harvest contribut start cover invest rais
  gain add remov order purchas serv deposit borrow print pack fill paint clean eat run make
  spend drink sell buy pay read weigh contain requir recruit repair grad teach stud hir sew
  knit catch leav swim fl div jump push pull load mov stay sleep wait fish shar drop lift draw
  cost grow keep total""".split()
_DID = """ran ate won lost found spent drove gave grew sold bought paid rose kept built rode wrote
  slept caught made took read saw drank cut flew swam""".split()
_TOLD = re.compile(
  rf"((?:[^\d=]* )?[A-Za-z'’]+ (?:(?:{'|'.join(_DONE)})[a-z]?(?:ed|e?s)|{'|'.join(_DID)})"
  r"(?: for| by| with| an?(?: \w+)? (?:total|profit|loss|sum|distance|score) of)? )"
  r"(?:[a-df-hj-zA-Z] ?= ?)?(?=\\?[$€£]?\d)"
)
_UNTOLD = re.compile(  # Words of wishes, thoughts or other subjects before such a verb.
  r"\b(?:answer|value|number|solution|could|may|might|would|should|ought|to|than|almost|any|every"
  r"|when|once|until|till|before|after|(?:think|want|hope|wish|expect|claim|believe|sa[iy])[a-z]*"
  r"|thought|(?-i:[a-z]+ly))\b",
  re.IGNORECASE,
)
_MAY_BE = re.compile(r"\b(?:can|could|may|might|would)(?: \w+)?\s*$")
_TAKEN_BACK = re.compile(r"[.!?]\s+(?:no\b|wait|but|actually|that(?:'s| is) (?:wrong|not))", re.I)
# What may follow an answer and its unit, and adds nothing to them; numbers only behind some words.
_BEHIND = re.compile(
  r"(?:,? ?(?:[-–—] )?(?:because|since|as|which|where|when|so|in(?! base)|after|for|that is|i\.e\.)"
  r"(?: .*)?"
  r"|,? ?(?:at|to|of|on|from|during|every|each|per|that|who|by|with|and|while|than|altogether"
  r"|together|overall|left|total|long|old|ago|back|today|yesterday|this|last|next|more"
  r"|\w+er than|also|\w+ing|I|[-–—])\b[^\d=+*/]*"
  r"|an?|\([a-z]*(?:teen|ty)(?:[- ][a-z]+)?\))",
  re.DOTALL,
)
_BEHIND_A_SUM = re.compile(r"(?!.*\bor\b)[A-Za-z][A-Za-z',.’“” \"-]*(?: \d.*)?")
_NUMBER = re.compile(
  r"(?:[(\[][^()\[\]]*[)\]]|[^\s,]*[-\\√π^_)}:+*/=][^\s,]*(?: [^a-zA-Z]+)?|[A-J]\b"
  r"|\\?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s/\s?\d+)?(?:\s?\\?%)?)(?=[\s,(]|[a-z]|$)"
)
# What stands in no sum of counts, as 9 eggs * $2/egg is one: signs, and letters but articles and x.
_UNCOUNTED = re.compile(
  r"[^A-Za-z\d\s.,+*/×÷·()$€£%:–\\-]|\\(?![$%])"
  r"|(?<![A-Za-z])(?!x\s*\$?\d)[b-zB-HJ-Z](?![A-Za-z])"
)
_OPERATOR = re.compile(
  r"[\d%)](?:[A-Za-z\s]*[-+*/×÷·–(]|\s*(?:[A-Za-z]{2,20}\s){0,5}x)|\b(?:of|times|plus|minus|by)\b"
)
_UNKNOWN = re.compile(r"(?:^|[^\w\\^)}*/+-]\s?)[A-Za-z]?\s*$")  # x alone, before an equals sign
# A unit of one letter behind a formula, as in "$5\\sqrt{2}$ m".
_UNIT_BEHIND = re.compile(
  r"((?<!\\)\$|\\\)|π(?= \w[²³/])) ([msghJNVWKL](?:[²³]|/[smh][²³]?)?)(?=[\s.,;]|$)"
)
_MARKDOWN = re.compile(
  r"^(?:\s|>\s)+|^[-*•]\s+(?=\*\*)|(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?=[\s:.,;!?)]|$)"
)
_DISPLAY = re.compile(
  r"\\begin\{([a-zA-Z]+\*?)\}.*?\\end\{\1\}|\$\$[^$]+\$\$|\\\[(?:[^\\]|\\[^\[\]])+\\\]", re.DOTALL
)
_FUNCTIONS = re.compile(
  r"(?i:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|min|max|or|and|to)|[A-Z]{2,4}"
)


def extract(response: str, finished: bool = True) -> str | None:
  r"""Extracts the answer of a response; None if there is none.

  Only what follows the thought counts (`thought.after`). The last complete `\boxed{}` is the
  answer, together with those before it that it is listed with (`\boxed{1}` and `\boxed{2}`); a
  response whose only box is empty or cut off gives none. Without a box: all that the last
  `<answer>` holds, else what follows the last "####" or "answer is/:/=", else what the last
  sentence with a number states: none where the response was cut off (not `finished`), as it is
  where the tokens ran out.
  """
  text = thought.after(response)
  boxes = [match.span() for match in BOX.finditer(text)][-_LAST:]
  if boxes:
    return _boxed(text, boxes)
  tagged = string_match.last_tagged(text)
  tail = _DISPLAY.sub(_on_one_line, (text if tagged is None else tagged)[-TAIL:])
  answer = _announced(tail, finished)
  if answer is None and tagged is not None:
    answer = trim(tagged)
  elif answer is None and finished:
    answer = _last(tail)
  return answer or None


def _on_one_line(display: re.Match) -> str:
  """Removes line breaks and full stops of a displayed formula."""
  return re.sub(r"[.;](?= |\\end|\$\$|\\\])", "", display[0].replace("\n", " "))


def _announced(text: str, finished: bool) -> str | None:
  """Returns the text after the last marker, "" if it is no answer. None without a marker.

  "####" begins a heading of Markdown if its line is more than a value, and not the last one.
  """
  for match in [*_MARKER.finditer(text)][: -_LAST - 1 : -1]:
    lines = [line.strip() for line in text[match.end() :].split("\n") if re.search(r"\w", line)]
    line = lines[0] if lines else ""
    if match[0] == "####" and not (finished and len(lines) < 2) and not _is_value(line):
      continue
    before = _SENTENCE.split(text[: match.start()])[-1]
    denied = DENIED.search(before) or _TAKEN_BACK.search(text, match.end())
    return "" if denied else _statement(line)
  return None


def _statement(line: str) -> str:
  """Returns the first sentence of a line without filler words."""
  first, *following = [part for part in _SENTENCE.split(_bare(line)) if part.strip()] or [""]
  instead = re.match(r"\s*(?:[Ii]t|rather) is (.+)", following[0]) if following else None
  if instead and first.startswith("not "):
    first = instead[1]
  value = _value(first.rpartition(r"\$ =")[2])  # a formula that was to end there
  if _is_value(value):
    return value
  named = re.match(r"[A-Z][A-Za-z', ]* (?=\$?\d)", first)  # Jane began 3 hours ago.
  return _stated(first[named.end() :] if named and not DENIED.search(named[0]) else first)


def _last(text: str) -> str:
  """Returns the statement of the last sentence with a number or formula."""
  text = text.strip()
  if FORMULA.fullmatch(text):
    return trim(text)
  sentences = _SENTENCE.split("\n".join(map(_bare, text.split("\n"))))
  for sentence in filter(re.compile(r"\w").search, reversed(sentences)):
    formula = _without_lead(sentence)
    if is_formula(formula):
      return trim(formula)
    if re.search(r"[\dπ√∞\\]|(?i:\b(?:option|choice) [A-J]\b)|\b[A-J] is correct", sentence):
      return _stated(sentence)
    if DENIED.search(sentence):
      return ""
  return ""


def _stated(sentence: str) -> str:
  """Returns the text after a verb, unless the sentence denies something before it."""
  named = re.fullmatch(
    r"(.+?) is (?:correct|(?:the|our|your) (?:final )?(?:solution|answer)s?)\W*", sentence
  )
  if named:
    return _value(named[1])
  if _result(sentence) and _is_value(value := _value(sentence)):
    return value
  for verb in [*_VERB.finditer(sentence)][::-1]:
    value = _value(sentence[verb.end() :])
    if _is_value(value):
      subject = sentence[: verb.start()]
      clause = re.split(r"[,?]\s|\bwhich\b|(?<=\d)\s(?=it\b|$)", subject)[-1]
      return "" if DENIED.search(clause) or _MAY_BE.search(clause) else value
  return _reported(sentence) or _value(sentence)


def _reported(sentence: str) -> str:
  """Returns 54 points of "Jojo scored 54 points": the first number with its unit, or ""."""
  report = _TOLD.match(sentence)
  if not report or DENIED.search(report[1]) or _UNTOLD.search(report[1]):
    return ""
  value = _value(sentence[report.end() :])
  number = quantity.read(value)
  return value if number and number.unit else ""


def _value(text: str) -> str:
  """Returns an answer and its unit without the words after it."""
  text = _without_lead(text)
  result = _result(text)
  text = result or text
  number = None if text.startswith(("~", "≈")) else _NUMBER.match(text)
  words = text[number.end() :].split(" ") if number else []
  for count in range(min(6, len(words)), 0, -1):
    unit, behind = " ".join(words[:count]).rstrip(" ,."), " ".join(words[count:]).strip(" .")
    ended = not behind or (_BEHIND.fullmatch(behind) and not DENIED.search(behind))
    ended = ended or (result and _BEHIND_A_SUM.fullmatch(behind))
    if ended and (units.parse(unit) if unit else count == 1):
      return trim(number[0] + unit)
  return "" if text.startswith(("~", "≈")) else trim(text)


def _result(text: str) -> str:
  """Returns 120 pints of "15 gallons * 8 pints / gallon = 120 pints", but "" of 2x + 3 = 7."""
  *names, terms, right = ["", *text.split("=")] if "=" in text else ["", "", ""]
  start = max((match.end() for match in _UNCOUNTED.finditer(terms)), default=0)
  counted = terms[start:].rstrip()
  if not counted or (re.search(r"\d", terms) and not _OPERATOR.search(counted)):
    return ""
  if re.search(r"[\w\\^)}]$", terms[:start]) and not counted[0].isspace():
    return ""
  if not all(_UNKNOWN.search(name) or _result(name + "=1") for name in names):
    return ""
  subject = re.match(r"[^\d$(]*", counted)[0].split()[-2:]
  return "" if DENIED.search(" ".join(subject)) else right.strip()


def _without_lead(text: str) -> str:
  lead = _LEAD.match(text)
  return text[lead.end() :] if lead else text


def _bare(line: str) -> str:
  """A line without Markdown and with formulas as plain text."""
  line = _MARKDOWN.sub("", plain(line))
  if FORMULA.fullmatch(line.rstrip(" .")):
    return line
  return FORMULA.sub(inside, _UNIT_BEHIND.sub(r"\1 \\text{\2}", line))


def _is_value(line: str) -> bool:
  """Whether a whole line is a formula or number, with its unit."""
  text = trim(_bare(line))
  if is_formula(text) or quantity.read(text, letters=True):
    return True
  if re.match(r"(?i:no (?:real )?solutions?)$", text):
    return True
  words = text.split(" ")
  return any(
    re.search(r"[\d})πa-z]$", words[-count - 1])
    and is_formula(" ".join(words[:-count]))
    and units.parse(" " + " ".join(words[-count:]))
    for count in range(1, min(5, len(words)))
    if words[-count].isalpha()
  )


def is_formula(text: str) -> bool:
  r"""Whether all of `text` is mathematics: no words outside \text and the like."""
  bare = re.sub(
    r"\\(?:begin|end)\{\w*\*?\}(?:\{[lcr| \d]*\})?|\\[a-zA-Z]+", " ", TEXT.sub(" ", text)
  )
  words = re.findall(r"[A-Za-z]{2,}", bare)
  return bool(re.search(r"\w", text)) and all(map(_FUNCTIONS.fullmatch, words))


def _boxed(text: str, boxes: list[tuple[int, int]]) -> str | None:
  """Returns the content of the last complete box, and of the boxes in its list."""
  spans = [(start, *_argument(text, end)) for start, end in boxes]
  spans = [(start, end, content) for start, end, content in spans if content]
  spans = [a for a, b in zip(spans, [*spans[1:], (len(text),)]) if a[1] <= b[0]]  # nested ones
  if not spans:
    return None
  final = _after_box(text[spans[-1][1] :][-TAIL:])
  if final:
    return final
  answer = last = spans[-1][2]
  for (_, end, content), (start, *_) in zip(spans[-2::-1], spans[:0:-1]):
    gap = text[end:start]
    if not _is_listing(gap):
      break
    if content != last:
      answer = content + (" or " if re.search(r"\bor\b", gap) else ", ") + answer
    last = content
  return answer


def _after_box(text: str) -> str | None:
  """Returns the text of "the final answer is" after the last box. It replaces the box.

  The box is the surer one where more is said than a value and its unit.
  """
  end = max((match.end() for match in _FINAL.finditer(text)), default=None)
  line = text[end:].partition("\n")[0] if end is not None else ""
  content = trim(_SENTENCE.split(_bare(line))[0])
  return content if _is_value(content) and re.search(r"[\d\\]|\$\w\$", line) else None


def _is_listing(gap: str) -> bool:
  r"""Whether the text between two boxes lists them: `, \boxed` or `and \boxed`."""
  if len(gap) > 80 or re.search(r"[.!?:]\s|\n\s*\n|\\[a-zA-Z]*arrow|\\to", gap):
    return False
  bare = _FILLER.sub(" ", gap)
  if re.fullmatch(r"\s*[=<>≈]+\s*", bare):
    return False
  return not re.search(r"\w", bare) or bool(_JOINED.search(bare))


def _argument(text: str, start: int) -> tuple[int, str | None]:
  """Returns the braces' content or the word at `start`, and its end. None: not closed."""
  if not text.startswith("{", start):
    word = re.match(r"[^\s{}$]+", text[start : start + spelling.MAX_ANSWER])
    return (start + word.end(), trim(word[0]) or None) if word else (start, None)
  depth = 0
  for match in _BRACE.finditer(text, start, start + spelling.MAX_ANSWER + 2):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if depth == 0:
      return match.end(), text[start + 1 : match.start()].strip() or None
  return start, None
