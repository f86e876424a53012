r"""Recognises gold answers that are placeholders, such as "proof", and gold answers in words.

All patterns take time linear in the text.
"""

import re

from gspo_jax.verifiers.mathematics.spelling import TEXT
from gspo_jax.verifiers.mathematics.tokens import is_product

# Placeholders in lower case. Spaces, hyphens and underscores do not count.
_PHRASES = """
  notfound; answer not found; solution not found; none found; none; none given; none provided; null
  nan; unknown; answer unknown; not known; answer missing; tbd; tba; todo; placeholder; proofs
  a proof; no proof; proven; proved; it is proved; hence proved; hence proven; is proven; is proved
  the statement is proved; the statement is proven; statement proved; statement proven; qed
  to prove; to be proved; to be proven; prove; prove it; not applicable; not available; unavailable
  not provided; not given; not specified; unspecified; not stated; not mentioned; not answered
  unanswered; not solved; unsolved; problem not solved; answer not provided; answer not given
  answer not available; answer unavailable; no answer; no answers; no final answer; no answer found
  no answer given; no answer provided; no answer available; no answer needed; no answer required
  no numerical answer; no numeric answer; no short answer; no solution provided; no solution given
  no solution available; no solution found; answers vary; answer varies; various answers
  multiple answers; multiple possible answers; many possible answers; multiple answers possible
  any valid answer; any correct answer; open ended; open ended question; subjective; explanation
  omitted; answer omitted; skipped; various; varies; depends; it depends; many answers; error
  failed; parsing error; missing; not sure; i don't know; i do not know; don't know; idk; prove that
  show that; demonstration; answer; the answer; solution; the solution; q.e.d
  略; 证明略; 证略; 答案略; 解略; 略解; 证明; 證明; 証明; 证明题; 证毕; 未知; 无; 无答案; 没有答案
  暂无; 暂无答案; 未找到; 不适用
  доказательство; доказано; нет ответа; ответа нет; не найдено; неизвестно; beweis; preuve
  démonstration; demostración; demostracion; dimostrazione; prueba; demonstração
"""
_GAPS = re.compile(r"[\s_~-]+")
_PLACEHOLDERS = frozenset(_GAPS.sub("", p) for p in re.split(r"[;\n]", _PHRASES) if p.strip())
# Placeholders that may be followed by any text.
_PLACEHOLDERS_WITH_MORE = re.compile(
  r"(?:(?:the )?proof|(?:the |your )?(?:sample )?(?:answers?|solutions?|responses?)"
  r" (?:may|might|will|can|could) (?:vary|differ)|(?:please )?(?:see|refer to)"
  r" (?:the |an? |our |your )?(?:full |complete |attached |detailed |above |below )?(?:solutions?"
  r"|proofs?|above|below|explanations?|figures?|diagrams?|images?|pictures?|graphs?|attached"
  r"|attachment|answers?|text|work|steps|notes?|derivation|drawing|table|discussion)"
  r"|см)\b.*|(?:解答|证明|答案|详)?见(?:解析|解答|答案|证明|上|下|图).*"
)
_NOT_APPLICABLE = re.compile(r"(?i:n\s?[/\\.]\s?a\.?|#n/a)|NA")
_SIGNS = re.compile(r"[\s$?.…·\-–—_]*")
_LOOKS = re.compile(r"\\(?:boxed|fbox|left|right|[,;:! ()\[\]])|[${}]")
_EDGES = " \t\n.,;:!?\"'“”‘’`*_()[]<>。，；：！？（）【】"
_WORDS = re.compile(r"[^\W\d_]{2,}(?:['’ -][^\W\d_]+)*")


def placeholder(gold: str) -> bool:
  """Whether a gold answer is a placeholder: "proof", "N/A", "answers may vary"."""
  gold = gold[:300]
  if _SIGNS.fullmatch(gold):
    return True
  text = _bare(gold).strip(_EDGES)
  words = " ".join(_GAPS.split(text)).casefold()
  return bool(
    _NOT_APPLICABLE.fullmatch(text)
    or _GAPS.sub("", words) in _PLACEHOLDERS
    or _PLACEHOLDERS_WITH_MORE.fullmatch(words)
  )


def word(gold: str) -> str | None:
  """Returns a gold answer of words, in lower case. Returns None for other answers.

  Two to four capital letters may be a length, such as AB, and are no word.
  """
  text = " ".join(_bare(gold).strip(_EDGES).split())
  if not _WORDS.fullmatch(text) or is_product(text) or (text.isupper() and len(text) < 5):
    return None
  return text.casefold()


def _bare(gold: str) -> str:
  """Removes LaTeX commands of layout, and delimiters of formulas."""
  return _LOOKS.sub(" ", TEXT.sub(r" \1 ", gold)).strip()
