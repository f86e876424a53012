"""Handling of Ctrl-C, SIGTERM and SIGHUP, from the first second of a process to its last.

Python runs a signal handler in the main thread, after its return from C: from a compiler after
minutes. An exception of a handler may interrupt any statement, or is lost where Python ignores
exceptions (in JAX's callbacks of the garbage collector, for example). So handlers raise nothing
here: a thread receives the signals at once, and calls the latest `Answer`. Imports no slow module.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from gspo_jax.verifiers.children import process_groups

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRY_AGAIN = os.EX_TEMPFAIL  # 75, from sysexits.h: exit code after a notice
INTERRUPTED = 128 + signal.SIGINT  # 130, as in shells: exit code after Ctrl-C

Answer = Callable[[int], None]  # function of the signal's number

_answers: list[Answer] = []  # The last one is called.
_pipe: tuple[int, int] | None = None  # C handlers write, the thread reads.
_lock = threading.Lock()


def begin(text: str) -> None:
  """Ends the process at once on a signal, with a line that ends in `text`.

  Commands call this first.
  """
  _install(SIGNALS)
  _answers.append(lambda number: end(number, text))


@contextlib.contextmanager
def answered(answer: Answer, numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
  """Calls `answer` for these signals, in a thread.

  Ignored signals (nohup) stay ignored. Has no effect outside the main thread, where Python cannot
  set handlers.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before, wakeup = _install(numbers)
  _answers.append(answer)
  try:
    yield
  finally:
    _answers.remove(answer)
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
      signal.signal(number, handler)


def listen() -> None:
  """Answers pending signals, for a caller unable to wait for the thread."""
  if _pipe is None:
    return
  with _lock, contextlib.suppress(BlockingIOError):
    for number in os.read(_pipe[0], 4096):
      if number in SIGNALS and _answers:
        _answers[-1](number)


def code(number: int) -> int:
  """Returns the exit code of a process ended by this signal."""
  return INTERRUPTED if number == signal.SIGINT else TRY_AGAIN


def name(number: int) -> str:
  return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def end(number: int, text: str) -> NoReturn:
  """Ends the process and its process groups at once, with a line."""
  say(f"{name(number)}: {text}")
  for group in list(process_groups):
    with contextlib.suppress(OSError):
      os.killpg(group, signal.SIGKILL)
  os._exit(code(number))


def say(text: str) -> None:
  """Writes a line to stderr, past Python's buffers.

  If the terminal is gone (SIGHUP), this and all later output is discarded.
  """
  try:
    os.write(2, f"gspo_jax: {text}\n".encode())
  except OSError:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
      os.dup2(null, descriptor)


def _install(numbers: Sequence[int]) -> tuple[dict[int, object], int]:
  """Sends these signals to the thread. Returns the previous handlers and wakeup descriptor."""
  global _pipe
  if _pipe is None:
    _pipe = os.pipe()
    for descriptor in _pipe:
      os.set_blocking(descriptor, False)
    threading.Thread(target=_listen_always, name="stops", daemon=True).start()
  wakeup = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
  before = {n: signal.getsignal(n) for n in numbers}
  # JAX replaces C handlers, while Python still reports _ignore. JAX's handler stays.
  before = {
    n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None, _ignore)
  }
  for number in before:
    signal.signal(number, _ignore)
  return before, wakeup


def _ignore(*_: object) -> None:
  """Does nothing: the C handler has written to the pipe."""


def _listen_always() -> None:
  while True:
    select.select([_pipe[0]], [], [])
    listen()


def _reset() -> None:
  """Resets the signals in a fork, which has no such thread."""
  if _pipe is not None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
      if signal.getsignal(number) is _ignore:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset)
