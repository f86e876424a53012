"""Runs assertions in Python (HumanEval) on a function in another sandbox.

No code of the candidate is in this process: `candidate` is a stub. It sends its arguments over a
channel, and receives a value or the name of an exception. So a candidate can only return or raise.
Each of the following answers ends the assertions, even inside `except`:

- StopIteration, since `all(map(candidate, cases))` would take it for the end of the cases;
- NaN and infinity, unless the tests mention them: they pass `not abs(x - y) > 1e-6` and
  `abs(x - y) <= 1e-6 * max(abs(x), abs(y))`;
- an invalid message, or none.
"""

import ast
import builtins
import math
from collections.abc import Callable
from typing import Any

from . import wire

# Exit statuses, beside `runner.FAILED`.
OUT_OF_MEMORY = 101
ASSERTION = 102  # an assertion failed
RAISED = 103  # the candidate's function raised
GONE = 104  # the candidate ended before its answer
CHECKED = 105  # all assertions passed, and the function was called
BROKEN = 106  # the tests never called the function, or with arguments that cannot be sent

_NONFINITE = frozenset("nan inf infinity isnan isinf isfinite isposinf isneginf".split())


class _EndAssertions(BaseException):
  """Ends the assertions. Not an Exception; every further call of the stub raises it again."""


class _CandidateError(Exception):
  """Error raised by the candidate's function."""


class _Candidate:
  """The stub. `ended` is the final status, even if the assertions catch its exception."""

  def __init__(self, channel: int, most: int, allow_nonfinite: bool):
    self._channel, self._most, self._allow_nonfinite = channel, most, allow_nonfinite
    # Whether a returned value was not data; an assertion may then pass it back as an argument.
    self._opaque = False
    self.called, self.ended = False, 0

  def call(self, *arguments, **options) -> Any:
    if self.ended:
      raise _EndAssertions
    self.called = True
    try:
      question = wire.encode([arguments, options])
    except TypeError:  # a function, say
      self._end(ASSERTION if self._opaque else BROKEN)
    except Exception:  # Too deep, so the value came from the candidate.
      self._end(ASSERTION)
    try:
      wire.send(self._channel, question)
      answer = wire.receive(self._channel, self._most)
      raised = str(answer["raised"]) if "raised" in answer else None
      value = wire.decode(answer["value"]) if "value" in answer else object()
    except wire.Closed:
      self._end(GONE)
    except MemoryError:
      self._end(OUT_OF_MEMORY)
    except Exception:  # forged
      self._end(ASSERTION)
    if raised is not None:
      self._raise(raised)
    self._opaque |= "value" not in answer
    if not (self._allow_nonfinite or _is_finite(value)):
      self._end(ASSERTION)
    return value

  def _raise(self, name: str) -> None:
    """Raises the function's exception, so that tests of errors can pass."""
    kind = getattr(builtins, name, Exception)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
      kind = Exception
    if issubclass(kind, StopIteration | StopAsyncIteration):
      self._end(RAISED)
    if issubclass(kind, AssertionError | ExceptionGroup):
      kind = Exception
    mixed = type(
      kind.__name__, (_CandidateError,) if kind is Exception else (kind, _CandidateError), {}
    )
    raise mixed.__new__(mixed)  # Some constructors need arguments, which are unknown.

  def _end(self, status: int) -> None:
    self.ended = status
    raise _EndAssertions


def _is_finite(value: Any) -> bool:
  """Whether a value has neither NaN nor infinity in it."""
  if isinstance(value, float):
    return math.isfinite(value)
  if isinstance(value, complex):
    return math.isfinite(value.real) and math.isfinite(value.imag)
  if isinstance(value, dict):
    return all(map(_is_finite, value)) and all(map(_is_finite, value.values()))
  return not isinstance(value, list | tuple | set) or all(map(_is_finite, value))


def _mentions_nonfinite(code: str) -> bool:
  """Whether code mentions NaN or infinity: `math.inf`, `float("nan")`. Comments do not count."""
  parts = ast.walk(ast.parse(code))
  names = (getattr(x, "id", getattr(x, "attr", getattr(x, "value", ""))) for x in parts)
  return any(str(name).strip("+-").casefold() in _NONFINITE for name in names)


def check(request: dict, channel: int, load: Callable[[dict, str, dict], dict]) -> int:
  """Runs the tests and returns their exit status. `load` runs a module."""
  stub = _Candidate(channel, request["output_bytes"], _mentions_nonfinite(request["code"]))

  def candidate(*arguments, **options):
    return stub.call(*arguments, **options)

  try:
    module = load({"code": request["preamble"]}, "tests", {})
    module[request["function"]] = candidate
    exec(compile(request["code"], "<tests>", "exec", dont_inherit=True), module)
    module["check"](candidate)
    status = CHECKED
  except _CandidateError:
    status = RAISED
  except MemoryError:
    status = OUT_OF_MEMORY
  except BaseException:
    status = ASSERTION
  return stub.ended or (status if stub.called else BROKEN)
