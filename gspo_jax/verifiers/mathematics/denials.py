"""Recognises words with which a sentence denies its answer. All patterns take linear time."""

import re

# Words with which a sentence denies its number, doubts it, or changes it to another number.
DENIAL = re.compile(
  r"\b(?:not?|never|cannot|none|nobody|nothing|neither|nor|or|hardly|if|unless|whether|except|but"
  r"|suppose|assume|let|wrong|false|incorrect|impossible|doubt|instead|at (?:least|most)|maybe"
  r"|perhaps|guess(?:es|ed)?|wait|invalid|between(?=\W*(?:\d|$))|either|half|twice|double|triple"
  r"|whose|other than|(?<!the )(?:thirds?|quarters?)|(?:thirds?|quarters?) of)\b"
  r"|\bother (?:correct |possible |valid )?\W*$|^\W*(?:minus|negative)\b|n['’]t\b"
  r"|\b(?:(?:answer|it|number) (?:plus|minus|times)|squared|cubed|(?:upper|lower) bound)\b"
  r"|\b(?:square|cube|root|negative|opposite|reciprocal) of(?! \d)",
  re.IGNORECASE,
)
NO_REPORT = re.compile(  # Words such as "could" or "hope", after which the number is no fact.
  r"\b(?:answer|value|number|solution|could|may|might|would|should|ought|to|than|almost|any|every"
  r"|when|once|until|till|before|after|(?:think|want|hope|wish|expect|claim|believe|sa[iy])[a-z]*"
  r"|thought|(?-i:[a-z]+ly))\b",
  re.IGNORECASE,
)
_MAY_BE = re.compile(r"\b(?:can|could|may|might|would)(?: \w+)?\s*$")
RETRACTION = re.compile(
  r"[.!?]\s+(?:no\b(?! (?:other|further|more|additional) (?:values?|solutions?|answers?|steps?"
  r"|cases?|simplifications?|possibilit\w+)\b)|wait|but|actually"
  r"|that(?:'s| is) (?:wrong|not))",
  re.IGNORECASE,
)
# The reason before an answer, as in "since x is not 3, the answer is". Its denials concern other
# values, unless the sentence is a supposition, or the reason speaks of a claim.
_REASON = re.compile(
  r"(?:\W*(?:(?:but|and) )?(?:since|because)\b[^,]*,\s|(?P<claim>.*),\s(?:and )?"
  r"(?:so|thus|hence|therefore),? )(?=(?:we \w+(?: that)? )?(?:the|my|our) [\w ]*$)",
  re.IGNORECASE,
)
_CLAIM = re.compile(
  r"\b(?:wrong|false|incorrect|true|case|mistake\w*|claim\w*|say\w*|said|conclude\w*)\b",
  re.IGNORECASE,
)
_SUPPOSITION = re.compile(
  r"\b(?:if|unless|whether|suppos\w+|assum\w+|let|maybe|perhaps|guess\w*|doubt\w*)\b", re.IGNORECASE
)
# A denial that describes counted things, as in "the number of students who did not pass".
_COUNT = re.compile(
  r"\bnumber of (?:\w+ ){1,4}(?:who(?: [a-z]+){0,2}?|(?:that|which) (?:do|are|were|have))"
  r"(?:n['’]t| not| never| no| neither(?: \w+ nor)?)\b",
  re.IGNORECASE,
)
_OTHER = re.compile(r"(?<!\bin )\bother\b", re.IGNORECASE)
_SOME_OTHER = re.compile(r"\b(?:any|every|some|one of the) other\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[,?]\s|\bwhich\b|(?<=\d)\s(?=it\b|$)")


def in_announcement(words: str) -> bool:
  """Whether the words of a sentence before "answer is" deny the answer."""
  reason = None if _SUPPOSITION.search(words) else _REASON.match(words)
  if reason and not _CLAIM.search(reason["claim"] or ""):
    words = words[reason.end() :]
  clause = words.rpartition(",")[2]  # DENIAL has words at the beginning, such as "minus".
  return any(map(DENIAL.search, (words, clause))) or bool(_OTHER.search(words))


def in_subject(words: str) -> bool:
  """Whether the words of a sentence before its verb deny the value after the verb."""
  clause = _CLAUSE.split(_COUNT.sub("", words))[-1]
  return bool(DENIAL.search(clause) or _MAY_BE.search(clause) or _SOME_OTHER.search(clause))
