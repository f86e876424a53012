"""Verifier of programs by their tests. Imports no JAX, and works from any thread.

Each candidate program has a separate sandbox (sandbox/isolation.py), and each test has a separate
process in the sandbox. The sandbox sends the printed text, or the returned value as JSON. This
process compares the text or value with the expected output, in linear time and memory (cases.py).
So the sandbox never has the expected output. Only the maximum length of a reported output depends
on the expected output. The sandbox reads this maximum after the program's end.

Assertions in Python (HumanEval's `check(candidate)`) run in a second sandbox. There `candidate` is
a stub, which sends its arguments to the program's sandbox and receives the value. So no code of the
program shares a process with an assertion. The program cannot make an assertion pass by ending
early, by patching builtins or by forging messages.
"""

import concurrent.futures
import contextlib
import dataclasses
import enum
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gspo_jax.verifiers import pool
from gspo_jax.verifiers.programs import cases, extraction, files, process
from gspo_jax.verifiers.programs.process import DEFAULTS, Limits, Sandbox, SandboxError
from gspo_jax.verifiers.programs.sandbox import assertions, wire

TOLERANCE = 1e-6  # The usual tolerance of programming contests.


class Outcome(enum.StrEnum):
  """Outcome of a response; of several failures, the first one."""

  RIGHT = "right"  # The program passed all tests.
  WRONG = "wrong"  # The program had a wrong output, or failed an assertion.
  UNPARSABLE = "unparsable"  # The response has no program.
  ERROR = "error"  # An exception or signal, no result, or too much output.
  TIMEOUT = "timeout"  # The program took too much CPU or wall-clock time.
  MEMORY = "memory"  # The program needed too much memory.
  CRASH = "crash"  # The verifier raised, or the tests are invalid: no verdict.


OUTCOMES = tuple(Outcome)


@contextlib.contextmanager
def open_verifier(
  workers: int, time_limit_s: float, memory_mb: int, isolation: str, tolerance: float
) -> Iterator[Callable]:
  """Yields the verifying function of a `CodeVerifier`, for `gspo_jax.rewards.scorer`.

  It maps (responses, prompts, finished) to (outcomes, None). The name of the chosen isolation is
  printed, and the metric verifier/isolation/NAME is 1. The arguments are keys of the section
  `reward` of the configuration.
  """
  cpu_s = math.ceil(time_limit_s)
  limits = Limits(cpu_s=cpu_s, wall_s=2 * cpu_s + 3, memory_bytes=memory_mb << 20)
  with CodeVerifier(workers, limits, isolation, tolerance) as verifier:
    sys.stderr.write(process.describe(isolation, verifier.isolation) + "\n")

    def verify(responses, prompts, *_):
      return verifier.score(responses, [prompt.answer for prompt in prompts]), None

    verify.notes = {f"verifier/isolation/{verifier.isolation}": 1.0}
    yield verify


def check_answer(text: str) -> None:
  """Raises ValueError for an answer without valid tests; see `cases.parse`."""
  cases.parse(text)


class CodeVerifier(contextlib.AbstractContextManager):
  """Verifies the programs in batches of responses.

  Args:
    workers: number of programs that run at the same time.
    limits: resources of a test.
    isolation: one of `ISOLATIONS`, as for `process.choose_isolation`.
    tolerance: allowed error of a decimal in an expected output, absolute or relative; 0 for none.

  Raises:
    ValueError: the isolation is unknown, or not possible on this machine.
  """

  def __init__(
    self,
    workers: int,
    limits: Limits = DEFAULTS,
    isolation: str = "auto",
    tolerance: float = TOLERANCE,
  ):
    self.isolation = process.choose_isolation(isolation)
    self._limits, self._tolerance = limits, tolerance
    self._threads = concurrent.futures.ThreadPoolExecutor(workers, "code_verifier")
    self._open: set[Sandbox] = set()  # Sandboxes in use.
    self._kills = 0  # Number of calls of `_kill`. Each call stops all work submitted before it.
    self._submitted = threading.local()  # Per thread: `_kills` when its work was submitted.

  def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Outcome]:
    """Returns one outcome per response, in order. Equal programs for equal tests run once.

    If the verifier fails on a response, the outcome of this response is a crash.

    Args:
      responses: texts of the responses.
      answers: the tests of each response, in a form of `cases`.

    Raises:
      ValueError: the lengths differ, or an answer has no valid tests.
    """
    tests = {
      text: dataclasses.replace(cases.parse(text), tolerance=self._tolerance)
      for text in set(answers)
    }
    pairs = [
      (extraction.extract(response, fences=tests[text].kind != "check"), text)
      for response, text in zip(responses, answers, strict=True)
    ]
    futures = {
      pair: self._threads.submit(self._try_twice, pair[0], tests[pair[1]], self._kills)
      for pair in dict.fromkeys(pairs)
    }
    try:
      return [futures[pair].result() for pair in pairs]
    except BaseException:  # After an interrupt, no program may continue to run.
      for future in futures.values():
        future.cancel()
      self._kill()
      raise

  def outcome(self, program: str, tests: cases.Tests) -> Outcome:
    """Runs a program on its tests until the first failure, as LiveCodeBench does.

    Raises:
      SandboxError: the sandbox failed, not the program.
    """
    if tests.kind == "check":
      return self._check(program, tests)
    if tests.input_files or tests.output_files:
      program = files.with_files(program, tests.input_files, tests.output_files)
    with self._sandbox() as sandbox:
      for value, expected in zip(tests.inputs, tests.outputs):
        if failure := _test(sandbox, program, tests, value, expected):
          # JSON has converted integer keys of dicts to text, so the test is repeated with integers.
          numbered = cases.number_keys(value) if tests.wrapped else value
          if numbered == value or _test(sandbox, program, tests, numbered, expected):
            return failure
    return Outcome.RIGHT

  def __exit__(self, *_):
    self._threads.shutdown(wait=False, cancel_futures=True)
    self._kill()

  def _try_twice(self, program: str | None, tests: cases.Tests, kills: int) -> Outcome:
    """Returns the outcome of a program, after a second attempt if the verifier fails.

    Args:
      program: None for a response without program.
      tests: tests of the program.
      kills: value of `_kills` when the work was submitted.
    """
    if program is None:
      return Outcome.UNPARSABLE
    self._submitted.kills, reason = kills, ""
    for _ in range(2):  # The first failure may be the machine's, e.g. for lack of memory.
      try:
        return self.outcome(program, tests)
      except Exception as error:  # For example a full disk, or a directory too deep to delete.
        reason = f"{type(error).__name__}: {error}"
      if kills != self._kills:
        break
    return pool.Failure(Outcome.CRASH, reason)

  def _check(self, program: str, tests: cases.Tests) -> Outcome:
    """Runs assertions in one sandbox and the program in another, with a socket between."""
    ours, theirs = socket.socketpair()
    with ours, theirs, self._sandbox(ours) as asserting, self._sandbox(theirs) as candidate:
      ours.close()
      theirs.close()
      request = {"function": tests.function, "preamble": cases.standalone(tests.preamble)}
      program = extraction.completes(program, tests)
      candidate.start(request | {"kind": "serve", "code": program}, most=0)
      check = request | {"kind": "check", "code": tests.code}
      verdict = asserting.run(check | {"output_bytes": self._limits.output_bytes}, most=0)
      report = candidate.report()
    status = verdict["status"] if verdict["reason"] == "ended" else None
    if status == assertions.CHECKED:
      return Outcome.RIGHT
    if status == assertions.BROKEN:
      return Outcome.CRASH
    if failure := _failure(report):
      return failure
    if status == assertions.ASSERTION:
      return Outcome.WRONG
    return _failure(verdict) or Outcome.ERROR

  @contextlib.contextmanager
  def _sandbox(self, channel: socket.socket | None = None) -> Iterator[Sandbox]:
    """Opens a sandbox, and registers it for `_kill`."""
    with Sandbox(self.isolation, self._limits, channel) as sandbox:
      self._open.add(sandbox)
      try:
        if getattr(self._submitted, "kills", self._kills) != self._kills:
          raise SandboxError("the sandbox was interrupted during its start")
        yield sandbox
      finally:
        self._open.discard(sandbox)

  def _kill(self) -> None:
    """Ends all running programs."""
    self._kills += 1
    for sandbox in list(self._open):
      sandbox.close()


def _test(
  sandbox: Sandbox, program: str, tests: cases.Tests, value: Any, expected: Any
) -> Outcome | None:
  """Runs one test; returns the failure, or None if the program passes.

  Args:
    sandbox: sandbox of the program.
    program: code of the program.
    tests: all tests of the program; their kind and rules apply to this test.
    value: input of this test.
    expected: expected output of this test.
  """
  request = {"kind": tests.kind, "code": program}
  if tests.kind == "stdin":
    request["stdin"] = value
  else:
    request |= {"function": tests.function, "arguments": wire.encode(value)}
  report = sandbox.run(request, cases.most_bytes(expected))
  if failure := _failure(report):
    return failure
  output = report["stdout" if tests.kind == "stdin" else "result"]
  if tests.kind == "call" and output == "":
    return Outcome.ERROR  # The function ended the process, and returned no value.
  if output is None or not tests.passes(output, expected):
    return Outcome.WRONG
  return None


def _failure(report: dict[str, Any]) -> Outcome | None:
  """Returns the failure of a process, or None if it ended normally.

  report: see `runner._run`.
  """
  status, reason = report["status"], report["reason"]
  if reason == "timeout" or status == -signal.SIGXCPU:
    return Outcome.TIMEOUT
  if status == -signal.SIGKILL and reason == "ended":
    return Outcome.TIMEOUT if report["cpu_s"] >= report["cpu_limit_s"] else Outcome.MEMORY
  if status == assertions.OUT_OF_MEMORY:
    return Outcome.MEMORY
  return Outcome.ERROR if status != 0 or reason == "output" else None
