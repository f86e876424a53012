"""Reads the tests of a programming problem, extracts programs, and compares outputs.

A data set stores a problem's tests as its gold answer: a JSON object in one of these forms.

  {"inputs": [...], "outputs": [...], "fn_name": null}     standard input and output; the lists
      "input_files" and "output_files" may be added, with the names of files that a program uses
  {"inputs": [...], "outputs": [...], "fn_name": "name"}   calls of a function
  {"prompt": ..., "test": ..., "entry_point": ...}         assertions in Python: HumanEval's columns
  {"public_test_cases": ..., "private_test_cases": ..., "metadata": ...}   LiveCodeBench's columns

APPS and TACO store the first two forms in their column `input_output`.
"""

import ast
import base64
import dataclasses
import decimal
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from gspo_jax.verifiers.programs import files
from gspo_jax.verifiers.programs.sandbox import wire

MAX_DECODED = 1 << 30  # Maximum bytes of decompressed private tests; the largest have about 100 MB.
_HUMANEVAL = ("prompt", "test", "entry_point")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,9})?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Tests:
  """Tests of a program. The comment of a field names the kinds that use it."""

  kind: str  # "stdin": whole programs. "call": function calls. "check": assertions on a function.
  inputs: tuple[Any, ...] = ()  # stdin: texts. call: lists of arguments. check: one placeholder.
  outputs: tuple[Any, ...] = ()  # Expected output of each input.
  function: str = ""  # call, check: name of the function.
  wrapped: bool = False  # call: values are compared as APPS and TACO do; see `same_result`.
  preamble: str = ""  # check: code before the function's body, including its head.
  code: str = ""  # check: the assertions.
  input_files: tuple[str, ...] = ()  # stdin: names of files to read in place of standard input.
  output_files: tuple[str, ...] = ()  # stdin: names of files that may replace standard output.
  tolerance: float = 0.0  # stdin, call: allowed error of an expected decimal; 0 for none.

  def passes(self, output: str, expected: Any) -> bool:
    """Whether a printed text, or a call's value as JSON, is the expected output."""
    if self.kind == "stdin":
      return same_text(output.rpartition(files.MARK)[2], expected, self.tolerance)
    return same_result(output, expected, self.wrapped, self.tolerance)


def parse(text: str) -> Tests:
  """Parses the tests in a gold answer.

  Raises:
    ValueError: the text is not JSON of a known form, or a program that does nothing would pass.
  """
  try:
    fields = _loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"tests must be a JSON object, but {text[:60]!r} is not: {error}") from error
  if not isinstance(fields, dict):
    raise ValueError(f"tests must be a JSON object, but {text[:60]!r} is not")
  try:
    if "private_test_cases" in fields:
      fields = _from_livecodebench(fields)
    if "test" in fields:
      prompt, code, function = (fields[name] for name in _HUMANEVAL)
      _require_check(prompt, code, function)
      return Tests("check", ("",), ("",), function, preamble=prompt, code=code)
    names = (tuple(fields.get(f"{kind}_files", ())) for kind in ("input", "output"))
    return _cases(fields["inputs"], fields["outputs"], fields.get("fn_name"), *names)
  except KeyError as error:
    raise ValueError(f"tests {text[:60]!r}... have no field {error}") from error
  except (AttributeError, RecursionError, TypeError, ValueError) as error:
    raise ValueError(f"tests {text[:60]!r}... cannot be read: {error}") from error


def _loads(text: str) -> Any:
  return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
  """Reads an integer of any length. Python's `int` refuses more than 4,300 digits."""
  return int(digits) if len(digits) < 4300 else int(decimal.Decimal(digits))


def _require_check(prompt: Any, code: Any, function: Any) -> None:
  """Raises ValueError unless `code` has assertions, and its `check` uses the function."""
  if not all(isinstance(text, str) for text in (prompt, code, function)) or not function.strip():
    raise ValueError("prompt, test and entry_point must be text, and entry_point a name")
  _parse_code(standalone(prompt), "prompt")
  tree = _parse_code(code, "test")
  defined = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "check"]
  if not defined:
    raise ValueError("test must define a function `check`, as the tests of HumanEval do")
  arguments = [argument.arg for argument in (*defined[-1].args.posonlyargs, *defined[-1].args.args)]
  names = {x.id for part in defined[-1].body for x in ast.walk(part) if isinstance(x, ast.Name)}
  if not arguments or not names & {arguments[0], function}:
    raise ValueError("`check` of test never uses its argument, the function")
  kinds = [x for x in ast.walk(tree) if isinstance(x, ast.Assert | ast.Raise)]
  texts = (getattr(x, "id", getattr(x, "attr", "")) for x in ast.walk(tree))
  if not kinds and not any("assert" in text.lower() for text in texts):
    raise ValueError("test asserts nothing, so every program would be right")


def _parse_code(code: str, name: str) -> ast.Module:
  try:
    return ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"{name} is no Python: {error}") from error


def standalone(preamble: str) -> str:
  """Adds the body `pass` to a preamble if its function has no body."""
  try:
    ast.parse(preamble)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return f"{preamble.rstrip()}\n{' ' * 99}pass\n"
  return preamble


def _cases(
  inputs: list,
  outputs: list,
  function: str | None,
  input_files: tuple[str, ...] = (),
  output_files: tuple[str, ...] = (),
) -> Tests:
  """Builds tests of a function, or of a whole program if `function` is empty."""
  if not isinstance(inputs, list) or not isinstance(outputs, list):
    raise ValueError("inputs and outputs must be lists")
  if not inputs or len(inputs) != len(outputs):
    raise ValueError(
      f"{len(inputs)} inputs and {len(outputs)} outputs: give one output per input, at least one"
    )
  if not isinstance(function, str | None):
    raise ValueError(f"fn_name must be text, not {function!r:.40}")
  if not all(isinstance(name, str) for name in (*input_files, *output_files)):
    raise ValueError("input_files and output_files must be lists of names")
  if not function:
    texts = tuple(map(_text, inputs)), tuple(map(_text, outputs))
    if not any(text.strip() for text in texts[1]):
      raise ValueError("no output is expected, so the program `pass` would be right")
    return Tests("stdin", *texts, input_files=input_files, output_files=output_files)
  wrapped = not all(isinstance(case, str) for case in inputs)
  if all(x in (None, "null") or (wrapped and x == [None]) for x in outputs):
    raise ValueError("no result is expected, so a function with the body `pass` would be right")
  if not wrapped:  # LiveCodeBench has an argument per line, as JSON.
    arguments = tuple([_loads(line) for line in case.split("\n")] for case in inputs)
    return Tests("call", arguments, tuple(map(_loads, outputs)), function)
  if not all(isinstance(case, list) for case in inputs):
    raise ValueError("with fn_name, an input must be a list of arguments")
  return Tests("call", tuple(inputs), tuple(outputs), function, wrapped=True)  # APPS, TACO


def _text(value: Any) -> str:
  """Converts an input or output to text, one line for each item of a list."""
  if value is None:
    raise ValueError("an input or output is null")
  return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
  """Converts LiveCodeBench's columns to inputs, outputs and a function's name."""
  cases = [*_load_column(row["public_test_cases"]), *decode_private(row["private_test_cases"])]
  return dict(
    inputs=[case["input"] for case in cases],
    outputs=[case["output"] for case in cases],
    fn_name=(_load_column(row["metadata"]) or {}).get("func_name"),
  )


def _load_column(column: Any) -> Any:
  return _loads(column) if isinstance(column, str) else column


def decode_private(column: str | list) -> list[dict[str, str]]:
  """Decodes LiveCodeBench's private tests.

  The column is JSON, or JSON that was pickled, compressed by zlib and encoded in base64. A pickle
  that names a class or function is refused.

  Raises:
    ValueError: the column has neither form, or a pickle has more than `MAX_DECODED` bytes.
  """
  if not isinstance(column, str):
    return column
  if not column:
    return []
  try:
    return _loads(column)
  except ValueError:
    pass
  try:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(column, validate=True), MAX_DECODED)
    if not unpacker.eof:
      raise ValueError(f"it is incomplete, or has more than {MAX_DECODED} bytes")
    content = _Unpickler(io.BytesIO(data)).load()
    cases = _loads(content) if isinstance(content, str) else content
    if not isinstance(cases, list):
      raise ValueError(f"a list was expected, not {type(cases).__name__}")
    return cases
  except Exception as error:  # Invalid pickles raise errors of many types.
    raise ValueError(f"private tests cannot be decoded: {error}") from error


class _Unpickler(pickle.Unpickler):
  def find_class(self, module: str, name: str):
    raise pickle.UnpicklingError(f"the pickle names {module}.{name}; only text is accepted")

  def persistent_load(self, pid):
    raise pickle.UnpicklingError("the pickle refers to something outside it")


def same_text(output: str, expected: str, tolerance: float = 0.0) -> bool:
  """Whether printed outputs are equal by LiveCodeBench's rule, within `tolerance`.

  Spaces around the texts and their lines do not count. The number of lines must be equal. Lines are
  equal if they have the same text or the same sequence of decimal numbers. If a number in
  `expected` has a point or exponent, an absolute or relative error of `tolerance` is allowed.

  Reference: grade_stdio in lcb_runner/evaluation/testing_util.py of LiveCodeBench.
  """
  ours, gold = output.strip(), expected.strip()
  if ours.count("\n") != gold.count("\n"):  # Avoids splitting an output of millions of lines.
    return False
  bound = decimal.Decimal(tolerance)
  lines = zip(ours.split("\n"), gold.split("\n"))
  return all(_same_line(line, gold_line, bound) for line, gold_line in lines)


def _same_line(ours: str, gold: str, tolerance: decimal.Decimal) -> bool:
  ours, gold = ours.strip(), gold.strip()
  if ours == gold:
    return True
  golds = gold.split()
  words = ours.split(maxsplit=len(golds))
  if len(words) != len(golds):
    return False
  try:
    if all(decimal.Decimal(x) == decimal.Decimal(y) for x, y in zip(words, golds)):
      return True
  except (ArithmeticError, ValueError):
    pass
  return bool(tolerance) and all(_same_word(x, y, tolerance) for x, y in zip(words, golds))


def _same_word(ours: str, gold: str, tolerance: decimal.Decimal) -> bool:
  """Compares decimals by the tolerance, integers by value, and other words as text."""
  if ours == gold:
    return True
  if not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(gold)):
    return False
  x, y = decimal.Decimal(ours), decimal.Decimal(gold)
  if gold.lstrip("+-").isdigit():
    return x == y
  try:
    return abs(x - y) <= tolerance * max(1, abs(y))
  except ArithmeticError:  # An exponent is too large.
    return False


def most_bytes(expected: Any) -> int:
  """Returns the maximum bytes of an output, with ample room for other spellings of `expected`."""
  text = expected if isinstance(expected, str) else json.dumps(wire.encode(expected))
  return (1 << 20) + 16 * len(text)


def same_result(text: str, expected: Any, wrapped: bool = False, tolerance: float = 0.0) -> bool:
  """Whether a returned value is the expected one by LiveCodeBench's rule.

  By this rule (grade_call_based) a returned tuple counts as a list. A tuple within the value equals
  no list, unless `wrapped` is set. The time is linear: no sets or dicts of the value are built.

  Args:
    text: JSON `{"value": wire.encode(value)}`; any other text is unequal.
    expected: the expected value, from JSON.
    wrapped: whether the value is compared as JSON, as in APPS and TACO. If so, all tuples count as
      lists and all keys as texts, and a value may also equal the only item of the list `expected`.
    tolerance: allowed error of a float in `expected`, absolute or relative to it; 0 for none.
  """
  try:
    value = json.loads(text)["value"]
    if isinstance(value, dict) and "tuple" in value:
      value = value["tuple"]
    alone = wrapped and isinstance(expected, list) and len(expected) == 1
    rule = _Rule(wrapped, tolerance)
    return _same(value, expected, rule) or (alone and _same(value, expected[0], rule))
  except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError):
    return False


class _Rule(NamedTuple):
  """Options for comparing values."""

  as_json: bool  # Whether all tuples count as lists, and keys of dicts as texts.
  tolerance: float  # Allowed error of a float, absolute or relative; 0 for none.


def _same(value: Any, expected: Any, rule: _Rule) -> bool:
  """Whether a value encoded by `wire.encode` is the expected one."""
  if isinstance(value, dict):
    ((kind, content),) = value.items()
    if kind == "dict":
      return isinstance(expected, dict) and _same_pairs(content, expected, rule)
    if kind == "tuple" and rule.as_json:
      return _same(content, expected, rule)
    if kind not in ("int", "complex"):
      return False  # JSON has no tuples, sets or bytes.
    value = int(content, 16) if kind == "int" else complex(*content)
  if isinstance(value, list):
    same_length = isinstance(expected, list) and len(value) == len(expected)
    return same_length and all(_same(x, y, rule) for x, y in zip(value, expected))
  if isinstance(expected, list | dict):
    return False
  if value == expected:
    return True
  numbers = isinstance(expected, float) and isinstance(value, int | float)
  if not rule.tolerance or not numbers or isinstance(value, bool):
    return False
  return abs(value - expected) <= rule.tolerance * max(1.0, abs(expected)) < math.inf


def _same_pairs(pairs: list, expected: dict[str, Any], rule: _Rule) -> bool:
  """Whether pairs (key, value) equal the items of `expected`, whose keys are texts."""
  if len(pairs) != len(expected):
    return False
  missing = set(expected)
  for key, value in pairs:
    if rule.as_json and isinstance(key, int | float | None):
      key = json.dumps(key)
    if not isinstance(key, str) or key not in missing or not _same(value, expected[key], rule):
      return False
    missing.remove(key)
  return True


def number_keys(value: Any) -> Any:
  """Converts the keys of each dict to integers if all its keys are texts of integers."""
  if isinstance(value, list):
    return [number_keys(item) for item in value]
  if not isinstance(value, dict):
    return value
  numbers = all(re.fullmatch(r"-?(?:0|[1-9]\d{0,17})", key) for key in value)
  return {int(k) if numbers else k: number_keys(x) for k, x in value.items()}
