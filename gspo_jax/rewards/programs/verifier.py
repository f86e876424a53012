"""Verifier of programs by their tests. Imports no jax; works from any thread.

Every candidate gets a sandbox of its own (sandbox/isolation.py says what confines it), and every
test in it a process of its own. Whether a test passed is decided here, outside: the sandbox returns
what a program printed or returned, as data, and never saw what was expected. Assertions that are
Python code (HumanEval's `check(candidate)`) run in a second sandbox, where `candidate` is a stub
that sends its arguments to the first one; so no code of the candidate's ever shares a process with
an assertion, and ending early, patching builtins or forging messages cannot make one pass.
"""

import concurrent.futures
import contextlib
import enum
import json
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gspo_jax.rewards import pool
from gspo_jax.rewards.programs import cases
from gspo_jax.rewards.programs.process import (
  DEFAULTS,
  Limits,
  Sandbox,
  SandboxError,
  choose_isolation,
)
from gspo_jax.rewards.programs.sandbox import runner, wire


class Outcome(enum.StrEnum):
  """A response is counted as this: all tests passed, or how the first one failed."""

  RIGHT = "right"
  WRONG = "wrong"
  UNPARSABLE = "unparsable"  # it holds no program
  ERROR = "error"  # an exception, a signal, no result, or too much output
  TIMEOUT = "timeout"  # of the program: CPU or wall-clock time
  MEMORY = "memory"
  CRASH = "crash"  # of the verifier


OUTCOMES = tuple(Outcome)


@contextlib.contextmanager
def open_verifier(config: Any) -> Iterator[Callable]:
  """A `CodeVerifier` that takes prompts; see `gspo_jax.rewards`."""
  cpu_s = math.ceil(config.time_limit_s)
  limits = Limits(cpu_s=cpu_s, wall_s=2 * cpu_s + 3, memory_bytes=config.memory_mb << 20)
  with CodeVerifier(config.workers, limits, config.isolation) as verifier:
    yield lambda responses, prompts, finished: (
      verifier.score(responses, [prompt.answer for prompt in prompts]),
      None,
    )


class CodeVerifier:
  """Scores responses that hold programs.

  Args:
    workers: candidates that run at the same time.
    limits: what a test may use.
    isolation: one of `process.ISOLATIONS`; "auto" takes the strongest that works, and
      never "none".

  Raises:
    RuntimeError: if programs cannot be confined.
  """

  def __init__(self, workers: int, limits: Limits = DEFAULTS, isolation: str = "auto"):
    self.isolation = choose_isolation(isolation)
    self._limits = limits
    self._threads = concurrent.futures.ThreadPoolExecutor(workers, "code_verifier")
    self._open: set[Sandbox] = set()
    self._kills = 0
    self._asked = threading.local()  # in each thread, what `_kills` was when its work was asked for

  def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Outcome]:
    """Returns one outcome per response, in order. Equal programs for equal tests run once.

    Raises:
      ValueError: if the lengths differ or an answer holds no tests.
    """
    tests = {text: cases.parse(text) for text in set(answers)}
    pairs = [
      (cases.extract(response, fences=tests[text].kind != "check"), text)
      for response, text in zip(responses, answers, strict=True)
    ]
    futures = {
      pair: self._threads.submit(self._try_twice, pair[0], tests[pair[1]], self._kills)
      for pair in dict.fromkeys(pairs)
    }
    try:
      return [futures[pair].result() for pair in pairs]
    except BaseException:  # an interrupt
      for future in futures.values():
        future.cancel()
      self._kill()
      raise

  def outcome(self, program: str, tests: cases.Tests) -> Outcome:
    """Runs a program on its tests up to the first that fails, as LiveCodeBench does.

    Raises:
      SandboxError: if the verifier failed, and not the program.
    """
    if tests.kind == "check":
      return self._check(program, tests)
    with self._sandbox() as sandbox:
      for given, expected in zip(tests.inputs, tests.outputs):
        if tests.kind == "stdin":
          report = sandbox.run({"kind": "stdin", "code": program, "stdin": given})
          right = cases.same_text(report["stdout"], expected)
        else:
          request = {"kind": "call", "code": program, "function": tests.function}
          report = sandbox.run(request | {"arguments": given})
          right = _same_result(report["result"], expected, tests.wrapped)
        if failure := _failure(report):
          return failure
        if tests.kind == "call" and not report["result"]:
          return Outcome.ERROR  # it ended early, whatever its status says
        if not right:
          return Outcome.WRONG
    return Outcome.RIGHT

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._threads.shutdown(wait=False, cancel_futures=True)
    self._kill()

  def _try_twice(self, program: str | None, tests: cases.Tests, kills: int) -> Outcome:
    """`kills`: what `_kills` was when this was asked for; what was asked before a kill ends."""
    if program is None:
      return Outcome.UNPARSABLE
    self._asked.kills, reason = kills, ""
    for _ in range(2):  # once may be the machine's doing (out of memory); twice is ours
      try:
        return self.outcome(program, tests)
      except Exception as error:  # a full disk, a directory too deep to delete, ...
        reason = f"{type(error).__name__}: {error}"
      if kills != self._kills:
        break
    return pool.Failure(Outcome.CRASH, reason)

  def _check(self, program: str, tests: cases.Tests) -> Outcome:
    """Assertions in one sandbox, the program in another, a socket between them."""
    ours, theirs = socket.socketpair()
    with ours, theirs, self._sandbox(ours) as asserting, self._sandbox(theirs) as candidate:
      ours.close()
      theirs.close()
      request = {"function": tests.function, "preamble": tests.preamble}
      program = cases.completes(program, tests)
      candidate.start(request | {"kind": "serve", "code": program})
      limit = self._limits.output_bytes
      assertions = {"kind": "check", "code": tests.code, "output_bytes": limit}
      checked = asserting.run(request | assertions)
      report = candidate.report()
    if checked["reason"] == "ended" and checked["status"] == runner.CHECKED:
      return Outcome.RIGHT
    if failure := _failure(report):
      return failure
    if checked["reason"] == "ended" and checked["status"] == runner.ASSERTION:
      return Outcome.WRONG
    return _failure(checked) or Outcome.ERROR

  @contextlib.contextmanager
  def _sandbox(self, channel: socket.socket | None = None) -> Iterator[Sandbox]:
    with Sandbox(self.isolation, self._limits, channel) as sandbox:
      self._open.add(sandbox)
      try:
        if getattr(self._asked, "kills", self._kills) != self._kills:
          raise SandboxError("interrupted while it was being made")
        yield sandbox
      finally:
        self._open.discard(sandbox)

  def _kill(self) -> None:
    self._kills += 1
    for sandbox in list(self._open):
      sandbox.close()


def _failure(report: dict[str, Any]) -> Outcome | None:
  """The failure that kept a program from its end; None if it came there."""
  status, reason = report["status"], report["reason"]
  if reason == "timeout" or status == -signal.SIGXCPU:
    return Outcome.TIMEOUT
  if status == -signal.SIGKILL and reason == "ended":
    return Outcome.TIMEOUT if report["cpu_s"] >= report["cpu_limit_s"] else Outcome.MEMORY
  if status == runner.OUT_OF_MEMORY:
    return Outcome.MEMORY
  return Outcome.ERROR if status != 0 or reason == "output" else None


def _same_result(result: str, expected: Any, wrapped: bool) -> bool:
  """Whether the JSON that a call left is the expected value. The JSON may be anything at all."""
  try:
    value = wire.decode(json.loads(result)["value"])
    return cases.same_value(value, expected, wrapped)
  except Exception:
    return False
