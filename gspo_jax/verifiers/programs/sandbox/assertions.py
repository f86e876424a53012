"""Assertions in Python, as HumanEval has them, against a function that runs in another sandbox.

No code of a candidate's is in this process: `candidate` is a stub that sends its arguments over a
channel and gets a value, or the name of an exception, back. What a candidate can do to the
assertions is return and raise, and so each of the following ends them, whatever they catch:

- an exception that ends iterations, where `all(map(candidate, cases))` would take it for the end;
- NaN and infinity, where the tests speak of neither: they pass `not abs(x - y) > 1e-6` and
  `abs(x - y) <= 1e-6 * max(abs(x), abs(y))`;
- an answer that is none, and none at all.
"""

import ast
import builtins
import math
from collections.abc import Callable
from typing import Any

from . import wire

# Exit statuses, beside `runner.FAILED`.
OUT_OF_MEMORY = 101
ASSERTION = 102  # one failed
RAISED = 103  # the candidate's function did
GONE = 104  # the candidate ended before its answer
CHECKED = 105  # all held, and the function was called
BROKEN = 106  # the tests themselves: they never called it, or with what cannot be sent

_UNREAL = frozenset("nan inf infinity isnan isinf isfinite isposinf isneginf".split())


class _Over(BaseException):
  """Ends the assertions. It is no Exception, and once raised it is raised by every further call."""


class _Raised(Exception):
  """The candidate's function raised."""


class _Candidate:
  """The stub. `ended` is the status that is settled, whatever the assertions make of it."""

  def __init__(self, channel: int, most: int, unreal: bool):
    self._channel, self._most, self._unreal = channel, most, unreal
    self._opaque = False  # it has returned what is no data, and an assertion may pass that on
    self.called, self.ended = False, 0

  def call(self, *arguments, **options) -> Any:
    if self.ended:
      raise _Over
    self.called = True
    try:
      question = wire.encode([arguments, options])
    except TypeError:  # a function, say
      self._end(ASSERTION if self._opaque else BROKEN)
    except Exception:  # too deep: it came from the candidate
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
    if not (self._unreal or _real(value)):
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
    mixed = type(kind.__name__, (_Raised,) if kind is Exception else (kind, _Raised), {})
    raise mixed.__new__(mixed)  # some want arguments, which nobody knows here

  def _end(self, status: int) -> None:
    self.ended = status
    raise _Over


def _real(value: Any) -> bool:
  """Whether there is neither NaN nor infinity in it."""
  if isinstance(value, float):
    return math.isfinite(value)
  if isinstance(value, complex):
    return math.isfinite(value.real) and math.isfinite(value.imag)
  if isinstance(value, dict):
    return all(map(_real, value)) and all(map(_real, value.values()))
  return not isinstance(value, list | tuple | set) or all(map(_real, value))


def _speaks_of_nan(code: str) -> bool:
  """Whether tests name NaN or infinity: `math.inf`, `float("nan")`. Comments and prose do not."""
  parts = ast.walk(ast.parse(code))
  names = (getattr(x, "id", getattr(x, "attr", getattr(x, "value", ""))) for x in parts)
  return any(str(name).strip("+-").casefold() in _UNREAL for name in names)


def check(request: dict, channel: int, load: Callable[[dict, str, dict], dict]) -> int:
  """Runs the tests and returns their exit status; `load` runs a module."""
  stub = _Candidate(channel, request["output_bytes"], _speaks_of_nan(request["code"]))

  def candidate(*arguments, **options):
    return stub.call(*arguments, **options)

  try:
    module = load({"code": request["preamble"]}, "tests", {})
    module[request["function"]] = candidate
    exec(compile(request["code"], "<tests>", "exec", dont_inherit=True), module)
    module["check"](candidate)
    status = CHECKED
  except _Raised:
    status = RAISED
  except MemoryError:
    status = OUT_OF_MEMORY
  except BaseException:
    status = ASSERTION
  return stub.ended or (status if stub.called else BROKEN)
