"""Extraction of programs from responses. All searches take linear time."""

import re

from gspo_jax.verifiers import thought
from gspo_jax.verifiers.programs.cases import Tests


def extract(response: str, fences: bool = True) -> str | None:
  """Returns the program in a response. Returns None if there is none.

  The program is the last complete Markdown block with the language Python, else the last block
  without a language. Only text after the thought counts (`thought.after`). The indentation of a
  fence, as in a list, is removed from the lines of its block.

  fences: whether a program must be in a block. If not, a whole response without ``` is a program,
    since base models complete functions without fences.
  """
  text = thought.after(response)
  blocks, block, mark, opening, indent = {}, None, "", "", 0  # `blocks`: last one by language.
  for line in text.split("\n"):
    fence, label = _fence(line)
    if fence and block is None:
      block, opening, mark = [], fence, label.strip("{}.").lower()
      indent = len(line) - len(line.lstrip(" \t"))
    elif fence.startswith(opening) and fence and not label:
      blocks["python" if mark in ("python", "py", "python3", "py3") else mark] = block
      block = None
    elif block is not None:
      block.append(line[:indent].lstrip(" \t") + line[indent:])
  lines = blocks.get("python", blocks.get(""))
  program = None if lines is None else "\n".join(lines)
  if program is None and not fences and "```" not in text:
    program = text
  return program if program and program.strip() else None


def _fence(line: str) -> tuple[str, str]:
  """Returns a line's fence (three or more ` or ~) and language. A missing part is ""."""
  text = line.strip(" \t\r")
  rest = text.lstrip(text[:1]) if text[:1] in ("`", "~") else text
  fence = text[: len(text) - len(rest)]
  if len(fence) < 3 or "`" in rest:
    return "", ""
  words = rest.split(maxsplit=1)
  return fence, words[0] if words else ""


# Decorators, and lines at which HumanEval's protocol ends a response (arXiv:2107.03374).
_END = re.compile(r"^(?:[#@]|(?:if|print)\b|(?:(?:async +)?def|class)\b[ \t]*(\w*))", re.MULTILINE)


def completes(program: str, tests: Tests) -> str:
  """Prepends the preamble, unless the program defines the tested function itself.

  If the first statement is indented, the program is a body, and ends as in HumanEval's protocol:
  base models run on, or stop after a stop string. Functions and classes that it uses stay.
  """
  lines = (line for line in program.split("\n") if line.strip() and line.lstrip()[0] != "#")
  if next(lines, "").startswith((" ", "\t")):
    return tests.preamble + _body(program, tests.function)
  name = re.escape(tests.function)
  defined = re.search(rf"^(?:(?:async\s+)?def\s+{name}\s*[(\[]|{name}\s*=)", program, re.M)
  return program if defined else tests.preamble + program


def _body(text: str, function: str) -> str:
  """Returns a function's body, and the functions and classes that it uses."""
  starts, names = [], []
  for match in _END.finditer(text):
    starts.append(match.start())
    names.append(match[1])
    if match[1] == function:  # The rest defines the function again.
      break
  parts = [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)])]
  used, count = {*re.findall(r"\w+", parts[0])} - {function}, 1
  for i, name in enumerate(names, 1):
    if name in used:
      count = i + 1
      used |= {*re.findall(r"\w+", parts[i])} - {function}
  return "".join(parts[:count])
