"""The tests of a programming problem, as text that data sets can carry, and how outputs compare.

An answer is a JSON object in one of these forms:

  {"inputs": [...], "outputs": [...], "fn_name": null}     standard input and output
  {"inputs": [...], "outputs": [...], "fn_name": "name"}   calls of a function
  {"prompt": ..., "test": ..., "entry_point": ...}         assertions in Python: HumanEval's columns
  {"public_test_cases": ..., "private_test_cases": ..., "metadata": ...}   LiveCodeBench's columns

The first two are what APPS and TACO have in their column `input_output`.
"""

import base64
import dataclasses
import decimal
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from typing import Any

from gspo_jax.rewards import thought

MAX_DECODED = 1 << 30  # bytes of private tests after decompression; the largest have about 100 MB
_HUMANEVAL = ("prompt", "test", "entry_point")


@dataclasses.dataclass(frozen=True)
class Tests:
  """The task of a program."""

  kind: str  # "stdin": whole programs | "call": one function | "check": assertions
  inputs: tuple[Any, ...] = ()  # stdin: texts; call: lists of arguments; check: one placeholder
  outputs: tuple[Any, ...] = ()  # what is expected, parallel to `inputs`
  function: str = ""  # call, check: its name
  wrapped: bool = False  # call: an expected value may stand alone in a list (APPS, TACO)
  preamble: str = ""  # check: what stands before the function
  code: str = ""  # check: the assertions


def parse(text: str) -> Tests:
  """Reads an answer.

  Raises:
    ValueError: if it is not JSON of a known form, or has no test.
  """
  try:
    fields = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"tests must be a JSON object, and {text[:60]!r} is not: {error}") from error
  if not isinstance(fields, dict):
    raise ValueError(f"tests must be a JSON object, and {text[:60]!r} is not")
  try:
    if "private_test_cases" in fields:
      fields = _from_livecodebench(fields)
    if "test" in fields:
      prompt, code, function = (fields[name] for name in _HUMANEVAL)
      if not (code and function):
        raise ValueError("it is empty")
      return Tests("check", ("",), ("",), function, preamble=prompt, code=code)
    return _cases(fields["inputs"], fields["outputs"], fields.get("fn_name"))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"tests {text[:60]!r}... cannot be read: {error!r}") from error


def _cases(inputs: list, outputs: list, function: str | None) -> Tests:
  if not inputs or len(inputs) != len(outputs):
    raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
  if not function:
    return Tests("stdin", tuple(map(_text, inputs)), tuple(map(_text, outputs)))
  if all(isinstance(case, str) for case in inputs):  # LiveCodeBench: an argument per line, as JSON
    arguments = tuple([json.loads(line) for line in case.split("\n")] for case in inputs)
    return Tests("call", arguments, tuple(map(json.loads, outputs)), function)
  return Tests("call", tuple(inputs), tuple(outputs), function, wrapped=True)  # APPS, TACO


def _text(value: str | list) -> str:
  return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
  """LiveCodeBench's columns as inputs, outputs and a function's name."""
  load = lambda value: json.loads(value) if isinstance(value, str) else value  # noqa: E731
  cases = [*load(row["public_test_cases"]), *decode_private(row["private_test_cases"])]
  return dict(
    inputs=[case["input"] for case in cases],
    outputs=[case["output"] for case in cases],
    fn_name=(load(row["metadata"]) or {}).get("func_name"),
  )


def decode_private(column: str | list) -> list[dict[str, str]]:
  """LiveCodeBench's private tests: JSON, or base64 of zlib of a pickled string of JSON.

  Nothing that the pickle names is imported or called: it may hold strings and builtin containers.

  Raises:
    ValueError: if it is none of these, or decompresses to more than `MAX_DECODED` bytes.
  """
  if not isinstance(column, str):
    return column
  try:
    return json.loads(column)
  except ValueError:
    pass
  try:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(column, validate=True), MAX_DECODED)
    if not unpacker.eof:
      raise ValueError(f"it is cut off, or holds more than {MAX_DECODED} bytes")
    content = _Unpickler(io.BytesIO(data)).load()
    cases = json.loads(content) if isinstance(content, str) else content
    if not isinstance(cases, list):
      raise ValueError(f"a list was expected, not {type(cases).__name__}")
    return cases
  except Exception as error:  # pickle raises whatever its bytes make it stumble over
    raise ValueError(f"private tests cannot be decoded: {error}") from error


class _Unpickler(pickle.Unpickler):
  def find_class(self, module: str, name: str):
    raise pickle.UnpicklingError(f"the pickle names {module}.{name}; only text is accepted")

  def persistent_load(self, pid):
    raise pickle.UnpicklingError("the pickle refers to something outside it")


def extract(response: str, fences: bool = True) -> str | None:
  """The program that a response gives, or None.

  It is the last complete fenced block that is marked as Python; if none is, the last one without a
  mark. Only what follows the thought counts (`thought.after`). With `fences=False` a response
  without any fence is a program as a whole, as base models complete functions.
  """
  text = thought.after(response)
  found, block, mark, opening = {}, None, "", ""
  for line in text.split("\n"):
    fence, label = _fence(line)
    if fence and block is None:
      block, opening, mark = [], fence, label.strip("{}.").lower()
    elif fence.startswith(opening) and fence and not label:
      found["python" if mark in ("python", "py", "python3") else mark] = block
      block = None
    elif block is not None:
      block.append(line)
  lines = found.get("python", found.get(""))
  program = None if lines is None else "\n".join(lines)
  if program is None and not fences and "```" not in text:
    program = text
  return program if program and program.strip() else None


def _fence(line: str) -> tuple[str, str]:
  """The fence that a line consists of, three or more of ` or ~, and its mark; else nothing."""
  text = line.strip(" \t\r")
  rest = text.lstrip(text[:1]) if text[:1] in ("`", "~") else text
  fence = text[: len(text) - len(rest)]
  if len(fence) < 3 or "`" in rest:
    return "", ""
  words = rest.split(maxsplit=1)
  return fence, words[0] if words else ""


def completes(program: str, tests: Tests) -> str:
  """The program of assertion tests: one that defines no such function continues the prompt."""
  defined = re.search(
    rf"^(?:async\s+)?(?:def\s+)?{re.escape(tests.function)}\b\s*[(=]", program, re.M
  )
  return program if defined else tests.preamble + program


def same_text(output: str, expected: str) -> bool:
  """LiveCodeBench's rule for printed output (grade_stdio in lcb_runner/evaluation/testing_util.py).

  Both are stripped and cut into lines, which are stripped. As many lines; each is the same text, or
  the same sequence of decimal numbers, exactly and not approximately.
  """
  ours, gold = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
  return len(ours) == len(gold) and all(map(_same_line, ours, gold))


def _same_line(ours: str, gold: str) -> bool:
  if ours == gold:
    return True
  try:
    return [decimal.Decimal(x) for x in ours.split()] == [decimal.Decimal(x) for x in gold.split()]
  except (decimal.InvalidOperation, ValueError):
    return False


def same_value(value: Any, expected: Any, wrapped: bool = False) -> bool:
  """LiveCodeBench's rule for returned values (grade_call_based): equal, a tuple being a list.

  That holds for the outermost tuple only. `wrapped`: the expected value may stand alone in a list.
  """
  if isinstance(value, tuple):
    value = list(value)
  if value == expected:
    return True
  return wrapped and isinstance(expected, list) and len(expected) == 1 and value == expected[0]
