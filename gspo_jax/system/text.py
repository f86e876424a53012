"""Helpers for text on a terminal or a page."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterable

# Control characters except tab and line feed (a terminal obeys them), marks of direction (they
# reorder the text after them), characters without width (except the joiners of some scripts), tags,
# and lone surrogates (they cannot be shown).
_INVISIBLE = re.compile(
  "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff"
  "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
  r"""Returns the text with invisible characters as escape sequences, such as \x1b."""
  return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
  """Suggests the most similar word. Returns "; did you mean WORD?", or "" if none is similar.

  prefix: text before the word.
  """
  by_lower = {choice.lower(): choice for choice in words}
  near = difflib.get_close_matches(word.lower(), by_lower, n=1)
  return f"; did you mean {prefix}{by_lower[near[0]]}?" if near else ""


def near_path(path: str, suffix: str = "") -> str:
  """Suggests a similar path of the same directory, like `did_you_mean`.

  suffix: end of every suggested path.
  """
  folder, name = os.path.split(path.rstrip("/"))
  with contextlib.suppress(OSError):
    names = [entry for entry in os.listdir(folder or ".") if entry.endswith(suffix)]
    return did_you_mean(name, names, os.path.join(folder, ""))
  return ""


def seconds_text(seconds: float) -> str:
  """Formats seconds with three digits, and as m:ss from ten minutes on."""
  return f"{seconds:.3g} s" if seconds < 600 else clock_text(seconds)


def clock_text(seconds: float) -> str:
  """Formats seconds as m:ss or h:mm:ss."""
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
