"""Runs assertions in Python (HumanEval) on a function in another sandbox.

No code of the candidate program is in this process. The assertions call a stub, which sends its
arguments over a channel, and receives a value or the name of an exception. So a candidate can only
return or raise. Some answers might pass the assertions by accident or design. Each of these answers
ends the assertions without success, even if the tests catch exceptions:

- StopIteration: `all(map(candidate, cases))` would take it for the end of the cases.
- NaN and infinity, unless the tests mention them: NaN passes `not abs(x - y) > 1e-6`, and infinity
  passes `abs(x - y) <= 1e-6 * max(abs(x), abs(y))`.
- An invalid message, or none.
"""

import ast
import builtins
import math
from collections.abc import Callable
from typing import Any

from . import wire

# Exit statuses of this process, in addition to `runner.FAILED`.
OUT_OF_MEMORY = 101
ASSERTION = 102  # An assertion failed, or an answer of the function is not allowed.
RAISED = 103  # The candidate's function raised an exception.
GONE = 104  # The candidate's process ended before its answer.
CHECKED = 105  # All assertions passed, and the function was called.
BROKEN = 106  # The tests never called the function, or passed arguments that cannot be sent.

# Names and texts that mention NaN or infinity.
_NONFINITE = frozenset("nan inf infinity isnan isinf isfinite isposinf isneginf".split())


class _EndAssertions(BaseException):
  """Ends the assertions. It is no Exception, so `except Exception` does not catch it."""


class _CandidateError(Exception):
  """Error raised by the candidate's function."""


class _Candidate:
  """The stub in place of the candidate's function.

  Args:
    channel: descriptor of the channel to the other sandbox.
    most: maximum bytes of an answer.
    allow_nonfinite: whether NaN and infinity are valid answers.
  """

  def __init__(self, channel: int, most: int, allow_nonfinite: bool):
    self._channel, self._most, self._allow_nonfinite = channel, most, allow_nonfinite
    # Whether the function returned an object that the channel cannot send, such as a function. An
    # assertion may pass this object back as an argument.
    self._opaque = False
    self.called = False  # Whether the assertions called the function.
    self.ended = 0  # Exit status once the assertions must end, even if they catch errors; else 0.

  def call(self, *arguments, **options) -> Any:
    """Returns the candidate's value, or raises its exception."""
    if self.ended:
      raise _EndAssertions
    self.called = True
    try:
      question = wire.encode([arguments, options])
    except TypeError:  # The channel cannot send an argument, for example a function.
      self._end(ASSERTION if self._opaque else BROKEN)
    except Exception:  # An argument is nested so deeply that only the candidate can have made it.
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
    except Exception:  # The message is invalid, and so forged.
      self._end(ASSERTION)
    if raised is not None:
      self._raise(raised)
    self._opaque |= "value" not in answer
    if not (self._allow_nonfinite or _is_finite(value)):
      self._end(ASSERTION)
    return value

  def _raise(self, name: str) -> None:
    """Raises the function's exception, since tests may expect one.

    name: name of a builtin exception. The raised exception is also a `_CandidateError`, by which
      `check` distinguishes it from exceptions of the tests.
    """
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
    """Ends the assertions with an exit status."""
    self.ended = status
    raise _EndAssertions


def _is_finite(value: Any) -> bool:
  """Whether a value contains neither NaN nor infinity."""
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
  """Runs the assertions and returns an exit status.

  Args:
    request: a dict of the assertions (`code`), the `preamble`, the name of the `function`, and
      `output_bytes`.
    channel: descriptor of the channel to the other sandbox.
    load: function that runs code as a module, `runner._load`.
  """
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
