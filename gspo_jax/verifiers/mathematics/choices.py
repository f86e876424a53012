"""Splits a multiple choice, such as (B) 5, into the letter and the option after it."""

import re

from gspo_jax.verifiers.mathematics.denials import DENIAL
from gspo_jax.verifiers.mathematics.spelling import TEXT

# A command that sets the typeface of a choice's letter.
_TYPEFACE = re.compile(r"^\s*\\(?:text\w*|mathbf|mathrm|boldsymbol|bm)\s*\{([^{}]*)\}(?:\\ )?")
_NOUN = re.compile(r"^\s*(?i:option|choice)\s+\(?([A-J])(?!\w)\)?[.:]?")
_CHOICE = re.compile(
  r"\s*\\?(?:\(([A-J])\)\.?|([A-J])[.):](?![\w:])|([A-J])\s+(?=\d))"
  r"[\s~]*(|(?:[a-z]\s*=|-?[\d\\$.]|[A-Za-z][a-z]).*|(?<=[\s~])(?P<formula>-?[a-z(\[{|].*))",
  re.DOTALL,
)
# Words after a letter that make a sentence about it, or name another letter. They are no option.
_SENTENCE = re.compile(
  r"(?:is|are|was|were|can|could|may|might|must|should|would|will|do|does|did|has|had|and|fails?"
  r"|seems?|looks|appears|gives?|works?|rules?|too|both|through|same|hmm)\b"
  r"|(?:contradict|discard|elimin|exclu|reject|ruled|ruling|violat|unlikely|unsure|untrue)"
  r"|.*(?-i:\b[A-Jb-j]\b)",
  re.DOTALL | re.IGNORECASE,
)
_NONE = re.compile(r"(?:none of (?:these|the above)|not enough information)\W*", re.IGNORECASE)
_SIGN = re.compile(r"[\d\\^+*/=<>|(\[{_-]")  # A sign of a formula.
# Letters of other choices in brackets, such as (b), (c). Together they are no option.
_OTHERS = re.compile(
  r"(?:[\s,;/&$-]*(?:\\left)?[(\[{]\s*[A-Jb-j](?:\s*[,;/]\s*[A-Jb-j])*\s*(?:\\right)?[)\]}])+"
  r"\W*"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORDS = re.compile(r"\s*\(?[A-J][).:]\s*(?!is\b)[A-Za-z]{2}")


def in_words(text: str) -> bool:
  """Whether a text begins with a letter and words, as an option does, or a sentence about it."""
  return bool(_WORDS.match(_NOUN.sub(r"(\1) ", text)))


def split(text: str) -> tuple[str, str] | None:
  """Returns the letter and the option of a choice. Returns None for other text.

  The option is "" for a letter alone. An option in words is returned as an argument of \\text.
  """
  match = _CHOICE.fullmatch(_NOUN.sub(r"(\1)", _TYPEFACE.sub(r"\1 ", text)))
  if not match:
    return None
  letter, option = match[1] or match[2] or match[3], match[4]
  words = TEXT.sub(r"\1", option).strip()
  if _OTHERS.fullmatch(words):
    return None
  if match["formula"] and re.search(r"[A-Za-z]{2}|\b[A-J]\b", _COMMAND.sub(" ", words)):
    return None  # A remark, or another letter.
  if match["formula"] and _SIGN.search(words):
    return letter, option
  if re.match(r"[A-Za-z](?!\s*=)", words):
    if not _NONE.fullmatch(words) and (_SENTENCE.match(words) or DENIAL.search(words)):
      return None
    option = option if re.search(r"[\\{}$]", option) else rf"\text{{{option}}}"
  return letter, option
