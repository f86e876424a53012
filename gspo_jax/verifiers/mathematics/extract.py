r"""Finds the answer in a response: in a box (`\boxed{}`), in `<answer>`, or in a sentence.

Other modules parse the answer as a whole or not at all. So this module removes words around the
answer, but only words that do not change it: "18 is wrong" and "18 or 19" are not 18. All patterns
take time linear in the text.
"""

import re

from gspo_jax.verifiers import string_match, thought
from gspo_jax.verifiers.mathematics import choices, denials, quantity, spelling, units
from gspo_jax.verifiers.mathematics.denials import DENIAL
from gspo_jax.verifiers.mathematics.spelling import FORMULA, TEXT, inside, plain, trim

TAIL = 2000  # Number of last characters to search, of the text or of the text after the last box.
_MAX_MATCHES = 16  # Maximum number of boxes, markers or verbs to examine, from the end.
BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Spaces and delimiters between two boxes of a list.
_FILLER = re.compile(r"\\(?:q?quad|[,;:!()\[\] ])|\\(?:text|mbox)(?=\{)|[\s${}]")
# "and" or "or" before a box, with at most a name such as "x =" between. After "and the sum is", the
# box is another answer.
_JOINED = re.compile(r"\b(?:and|or)\b\W*(?:\b[A-Za-z]\w*\s*=)?\W*$")

# A marker that announces an answer: "####", "answer is", "answer:", also in other languages.
_MARKER = re.compile(
  r"####|(?:(?<![\w-])(?:answers?|(?:correct|right|best) (?:option|choice|letter)|ответ|respuesta"
  r"|r[ée]ponse|antwort|risposta|resposta)(?!\w)|答案)(?: to [\w' ]{1,60}\bis)?[*_]{0,3}\s{0,3}"
  r"(?:(?:ist?|are|est?|è|[:：=是为])[*_:：\s]{0,5}|(?=\$|\\[(\[]))",
  re.IGNORECASE,
)
_FINAL = re.compile(r"\bfinal answer is:?\s{0,3}", re.IGNORECASE)
# The end of a sentence. A full stop after a letter from A to J may belong to a choice: "B. 18".
_SENTENCE = re.compile(
  r"(?<=[\w)}\]$%°!*])(?<!\b[A-J])(?<!\bMr)(?<!\bMrs)(?<!\bi\.e)[.;](?=\s)|(?<=[a-z])!(?=\s)|[\n。]|\s(?=∴)"
)
# Words before an answer, or before the sentence that states it.
_LEAD = re.compile(
  r"(?:\W?(?:so|thus|therefore|hence|then|and|now|finally|still|just|simply|exactly|equal to|option"
  r"|choice|a total of|each|indeed|that|we (?:get|have|obtain|find|know)|it follows)\b[,:]?\s*)+",
  re.IGNORECASE,
)
# Verbs before a stated number, after any subject: "the total is 18". "Cannot be" is not among them.
_VERBS = (
  """is are was were equals? has have had gives?(?:_us)? makes? gets? got obtain leaves? yields?
  becomes? costs? takes? needs? earn(?:s|ed)? totals? ends?_with left_with
  increases?_by decreases?_by comes?_to amounts?_to adds?_up_to
  (?:must|will|should|turn(?:s|ed)?_out_to)_be (?:it|that|there)['’]s"""
).split()
_VERB = re.compile(rf"(?:\b(?:{'|'.join(_VERBS)})\b|:)\s+".replace("_", " "), re.IGNORECASE)
# Verbs before a number with a unit, as in "Jojo scored 54 points". The first list has stems of
# verbs, the second has irregular past tenses.
_STEMS = """
  scor walk earn us need collect receiv produc sav pick bak plant donat deliver bik hik travel
  practic climb complet finish work play cook wash harvest contribut start cover invest rais
  gain add remov order purchas serv deposit borrow print pack fill paint clean eat run make
  spend drink sell buy pay read weigh contain requir recruit repair grad teach stud hir sew
  knit catch leav swim fl div jump push pull load mov stay sleep wait fish shar drop lift draw
  cost grow keep total""".split()
_PAST_TENSES = """ran ate won lost found spent drove gave grew sold bought paid rose kept built rode
  wrote slept caught made took read saw drank cut flew swam""".split()
_REPORT = re.compile(
  rf"((?:[^\d=]* )?[A-Za-z'’]+ (?:(?:{'|'.join(_STEMS)})[a-z]?(?:ed|e?s)|{'|'.join(_PAST_TENSES)})"
  r"(?: for| by| with| an?(?: \w+)? (?:total|profit|loss|sum|distance|score) of)? )"
  r"(?:[a-df-hj-zA-Z] ?= ?)?(?=\\?[$€£]?\d)"
)
# Text after an answer and its unit that does not change them. Any text may follow words such as
# "because"; text without digits and operators may follow words such as "at".
_TRAILER = re.compile(
  r"(?:,? ?(?:[-–—] )?(?:because|since|as|which|where|when|so|in(?! base)|after|for|that is|i\.e\.)"
  r"(?: .*)?"
  r"|,? ?(?:at|to|of|on|from|during|every|each|per|that|who|by|with|and|while|than|altogether"
  r"|together|overall|left|total|long|old|ago|back|today|yesterday|this|last|next|more"
  r"|\w+er than|also|\w+ing|I|[-–—])\b[^\d=+*/]*"
  r"|an?|\([a-z]*(?:teen|ty)(?:[- ][a-z]+)?\))",
  re.DOTALL,
)
# Text after the result of a calculation that does not change the result.
_TRAILER_OF_SUM = re.compile(r"(?!.*\bor\b)[A-Za-z][A-Za-z',.’“” \"-]*(?: \d.*)?")
_NUMBER = re.compile(
  r"(?:[(\[][^()\[\]]*[)\]]|[^\s,]*[-\\√π^_)}:+*/=][^\s,]*(?: [^a-zA-Z]+)?|[A-J]\b"
  r"|\\?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s/\s?\d+)?(?:\s?\\?%)?)(?=[\s,(]|[a-z]|$)"
)
# Characters that do not occur in calculations with counts such as "9 eggs * $2/egg". They are rare
# signs, and single letters except a, A, I, and the x of a product.
_NOT_IN_SUM = re.compile(
  r"[^A-Za-z\d\s.,+*/×÷·()$€£%:–\\-]|\\(?![$%])"
  r"|(?<![A-Za-z])(?!x\s*\$?\d)[b-zB-HJ-Z](?![A-Za-z])"
)
_OPERATOR = re.compile(
  r"[\d%)](?:[A-Za-z\s]*[-+*/×÷·–(]|\s*(?:[A-Za-z]{2,20}\s){0,5}x)|\b(?:of|times|plus|minus|by)\b"
)
_UNKNOWN = re.compile(r"(?:^|[^\w\\^)}*/+-]\s?)[A-Za-z]?\s*$")  # At most a lone x before "=".
# A unit of one letter after a formula, as in "$5\sqrt{2}$ m".
_UNIT_AFTER_FORMULA = re.compile(
  r"((?<!\\)\$|\\\)|π(?= \w[²³/])) ([msghJNVWKL](?:[²³]|/[smh][²³]?)?)(?=[\s.,;]|$)"
)
_MARKDOWN = re.compile(
  r"^(?:\s|>\s)+|^[-*•]\s+(?=\*\*)|(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?=[\s:.,;!?)]|$)"
)
# A displayed formula, which may have several lines.
_DISPLAY = re.compile(
  r"\\begin\{([a-zA-Z]+\*?)\}.*?\\end\{\1\}|\$\$[^$]+\$\$|\\\[(?:[^\\]|\\[^\[\]])+\\\]", re.DOTALL
)
# Words that a formula may contain.
_FUNCTIONS = re.compile(
  r"(?i:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|min|max|or|and|to)|[A-Z]{2,4}"
)


def extract(response: str, finished: bool = True) -> str | None:
  r"""Returns the answer in a response. Returns None if there is none.

  Only text after the thought counts (`thought.after`). If the response has boxes, the answer is the
  last complete one, together with boxes listed before it (`\boxed{1}` and `\boxed{2}`). There is no
  answer if all boxes are empty or incomplete. If "the final answer is" and only a value follow the
  last box, the answer is this value. If there is no box, the answer is the first of these:

  1. The value after the last "####", "answer is", "answer:" or "answer =". If there is an
     `<answer>`, such words count in the last `<answer>` only.
  2. The whole content of the last `<answer>`.
  3. The value stated by the last sentence with a number or formula, if there is no `<answer>`.

  Args:
    response: text of the response.
    finished: False for a truncated response; its last sentence is incomplete and not read.
  """
  text = thought.after(response)
  boxes = [match.span() for match in BOX.finditer(text)][-_MAX_MATCHES:]
  if boxes:
    return _boxed(text, boxes)
  tagged = string_match.last_tagged(text)
  tail = _DISPLAY.sub(_on_one_line, (text if tagged is None else tagged)[-TAIL:])
  answer = _announced(tail, finished)
  if answer is None and tagged is not None:
    answer = trim(tagged)
  elif answer is None and finished:
    answer = _last_statement(tail)
  return answer or None


def _on_one_line(display: re.Match) -> str:
  """Writes a displayed formula on one line, without full stops or semicolons after its parts."""
  return re.sub(r"[.;](?= |\\end|\$\$|\\\])", "", display[0].replace("\n", " "))


def _announced(text: str, finished: bool) -> str | None:
  """Returns the answer after the last marker. Returns None if there is no marker.

  Returns "" if no answer follows, or if the text denies or retracts the answer. "####" is a marker
  only before a value, or in the last line of a finished response. Elsewhere it begins a heading.
  """
  for match in [*_MARKER.finditer(text)][: -_MAX_MATCHES - 1 : -1]:
    lines = [line.strip() for line in text[match.end() :].split("\n") if re.search(r"\w", line)]
    line = lines[0] if lines else ""
    if match[0] == "####" and not (finished and len(lines) < 2) and not _is_value(line):
      continue
    before = _SENTENCE.split(text[: match.start()])[-1]
    denied = denials.in_announcement(before) or denials.RETRACTION.search(text, match.end())
    return "" if denied else _statement(line)
  return None


def _statement(line: str) -> str:
  """Returns the answer in the first sentence of a line.

  For "not 5. It is 6", returns 6.
  """
  first, *following = [part for part in _SENTENCE.split(_bare(line)) if part.strip()] or [""]
  correction = re.match(r"\s*(?:[Ii]t|rather) is (.+)", following[0]) if following else None
  if correction and first.startswith("not "):
    first = correction[1]
  value = _value(first.rpartition(r"\$ =")[2])  # A formula may end with an escaped $ by mistake.
  if _is_value(value):
    return value
  subject = re.match(r"[A-Z][A-Za-z', ]* (?=\$?\d)", first)  # "Jane began" of "Jane began 3 hours".
  denied = subject and DENIAL.search(subject[0])
  return _stated_value(first[subject.end() :] if subject and not denied else first)


def _last_statement(text: str) -> str:
  """Returns the value stated by the last sentence with a number or formula.

  Returns "" if there is no such sentence, or if this or a later sentence denies the value.
  """
  text = text.strip()
  if FORMULA.fullmatch(text):
    return trim(text)
  sentences = _SENTENCE.split("\n".join(map(_bare, text.split("\n"))))
  for sentence in filter(re.compile(r"\w").search, reversed(sentences)):
    if choices.in_words(sentence):  # A remark on an option, not an answer.
      return ""
    formula = _without_lead(sentence)
    if is_formula(formula):
      return trim(formula)
    if re.search(r"[\dπ√∞\\]|(?i:\b(?:option|choice) [A-J]\b)|\b[A-J] is correct", sentence):
      return _stated_value(sentence)
    if DENIAL.search(sentence):
      return ""
  return ""


def _stated_value(sentence: str) -> str:
  """Returns the value stated by a sentence, usually after a verb.

  If there is no such value, returns the sentence without words such as "so" at its beginning.
  Returns "" if the clause before the verb denies the value.
  """
  subject = re.fullmatch(
    r"(.+?) is (?:correct|(?:the|our|your) (?:final )?(?:solution|answer)s?)\W*", sentence
  )
  if subject:
    return _value(subject[1])
  if _result(sentence) and _is_value(value := _value(sentence)):
    return value
  for verb in [*_VERB.finditer(sentence)][: -_MAX_MATCHES - 1 : -1]:
    value = _value(sentence[verb.end() :])
    if _is_value(value):
      return "" if denials.in_subject(sentence[: verb.start()]) else value
  return _reported_value(sentence) or _value(sentence)


def _reported_value(sentence: str) -> str:
  """Returns a reported number with its unit. Returns "" if there is none.

  For example, "Jojo scored 54 points" reports "54 points".
  """
  report = _REPORT.match(sentence)
  if not report or DENIAL.search(report[1]) or denials.NO_REPORT.search(report[1]):
    return ""
  value = _value(sentence[report.end() :])
  number = quantity.read(value)
  return value if number and number.unit else ""


def _value(text: str) -> str:
  """Returns an answer and its unit, without the words around them.

  Returns "" for an approximation, such as "~5".
  """
  text = _without_lead(text)
  result = _result(text)
  text = result or text
  number = None if text.startswith(("~", "≈")) else _NUMBER.match(text)
  words = text[number.end() :].split(" ") if number else []
  for count in range(min(6, len(words)), 0, -1):
    unit, trailer = " ".join(words[:count]).rstrip(" ,."), " ".join(words[count:]).strip(" .")
    ends = not trailer or (_TRAILER.fullmatch(trailer) and not DENIAL.search(trailer))
    ends = ends or (result and _TRAILER_OF_SUM.fullmatch(trailer))
    if ends and (units.parse(unit) if unit else count == 1):
      return trim(number[0] + unit)
  return "" if text.startswith(("~", "≈")) else trim(text)


def _result(text: str) -> str:
  """Returns the result of a calculation with counts. Returns "" if there is none.

  For example, "15 gallons * 8 pints = 120 pints" has the result "120 pints". An equation in
  unknowns, 2x + 3 = 7, has no such result.
  """
  *names, terms, right = ["", *text.split("=")] if "=" in text else ["", "", ""]
  start = max((match.end() for match in _NOT_IN_SUM.finditer(terms)), default=0)
  counts = terms[start:].rstrip()
  if not counts or (re.search(r"\d", terms) and not _OPERATOR.search(counts)):
    return ""
  if re.search(r"[\w\\^)}]$", terms[:start]) and not counts[0].isspace():
    return ""
  if not all(_UNKNOWN.search(name) or _result(name + "=1") for name in names):
    return ""
  subject = re.match(r"[^\d$(]*", counts)[0].split()[-2:]
  return "" if DENIAL.search(" ".join(subject)) else right.strip()


def _without_lead(text: str) -> str:
  """Removes words such as "so" or "we get" at the beginning."""
  lead = _LEAD.match(text)
  return text[lead.end() :] if lead else text


def _bare(line: str) -> str:
  """Removes Markdown and delimiters of formulas from a line.

  The delimiters remain if the whole line is one formula.
  """
  line = _MARKDOWN.sub("", plain(line))
  if FORMULA.fullmatch(line.rstrip(" .")):
    return line
  return FORMULA.sub(inside, _UNIT_AFTER_FORMULA.sub(r"\1 \\text{\2}", line))


def _is_value(line: str) -> bool:
  """Whether a whole line is a value.

  A value is a formula or a number, with or without a unit, or "no solution".
  """
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
  r"""Whether all of `text` is mathematics, with words only in \text and the like."""
  bare = re.sub(
    r"\\(?:begin|end)\{\w*\*?\}(?:\{[lcr| \d]*\})?|\\[a-zA-Z]+", " ", TEXT.sub(" ", text)
  )
  words = re.findall(r"[A-Za-z]{2,}", bare)
  return bool(re.search(r"\w", text)) and all(map(_FUNCTIONS.fullmatch, words))


def _boxed(text: str, boxes: list[tuple[int, int]]) -> str | None:
  """Returns the content of the last complete box, and of boxes listed before it.

  boxes: a pair for each box, the indices at which the box and its argument start.
  """
  spans = [(start, *_argument(text, end)) for start, end in boxes]
  spans = [(start, end, content) for start, end, content in spans if content]
  # Of nested boxes, only the inner one remains.
  spans = [a for a, b in zip(spans, [*spans[1:], (len(text),)]) if a[1] <= b[0]]
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
  """Returns the value after "the final answer is" in a text.

  Returns None if there is no such sentence. Returns None too if the sentence has more than a value
  and its unit, since the box is then more certain.

  text: text after the last box.
  """
  end = max((match.end() for match in _FINAL.finditer(text)), default=None)
  line = text[end:].partition("\n")[0] if end is not None else ""
  content = trim(_SENTENCE.split(_bare(line))[0])
  return content if _is_value(content) and re.search(r"[\d\\]|\$\w\$", line) else None


def _is_listing(gap: str) -> bool:
  r"""Whether two boxes with the text `gap` between them are a list.

  The gap of a list is short. It has no words, or it ends with "and" or "or" (`_JOINED`). It is no
  relation, and contains no arrow and no end of a sentence.
  """
  if len(gap) > 80 or re.search(r"[.!?:]\s|\n\s*\n|\\[a-zA-Z]*arrow|\\to", gap):
    return False
  bare = _FILLER.sub(" ", gap)
  if re.fullmatch(r"\s*[=<>≈]+\s*", bare):
    return False
  return not re.search(r"\w", bare) or bool(_JOINED.search(bare))


def _argument(text: str, start: int) -> tuple[int, str | None]:
  """Returns the end and content of a box's argument.

  The argument is in braces, or a single word. The content is None if it is empty, or if a brace
  is not closed within `MAX_ANSWER` characters.
  """
  if not text.startswith("{", start):
    word = re.match(r"[^\s{}$]+", text[start : start + spelling.MAX_ANSWER])
    return (start + word.end(), trim(word[0]) or None) if word else (start, None)
  depth = 0
  for match in _BRACE.finditer(text, start, start + spelling.MAX_ANSWER + 2):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if depth == 0:
      return match.end(), text[start + 1 : match.start()].strip() or None
  return start, None
