"""Handling of Ctrl-C, SIGTERM and SIGHUP, from the start of a process to its end.

Python runs a signal handler only when the main thread returns from C code. This may take minutes in
a compiler. An exception raised by a handler may interrupt any statement. Python sometimes ignores
such an exception, for example in JAX's callbacks of the garbage collector. So the handlers of this
module do nothing. Instead, a thread receives the signals at once, and calls the latest `Answer`.
This module imports no slow module.
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
TRY_AGAIN = os.EX_TEMPFAIL  # Exit code after SIGTERM or SIGHUP: 75, from sysexits.h.
INTERRUPTED = 128 + signal.SIGINT  # Exit code after Ctrl-C: 130, as in shells.

Answer = Callable[[int], None]  # Function of the signal's number.

_answers: list[Answer] = []  # Only the last answer is called.
# Python's handlers in C write the signals' numbers to this pipe, and the thread reads them.
_pipe: tuple[int, int] | None = None
_lock = threading.Lock()


def begin(text: str) -> None:
  """Makes signals end the process at once, after a line with `text`.

  Commands call this before slow imports.
  """
  _install(SIGNALS)
  _answers.append(lambda number: end(number, text))


@contextlib.contextmanager
def answered(answer: Answer, numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
  """Makes these signals call `answer`, in a thread, within the context.

  Signals that the process ignores (nohup) stay ignored. Outside the main thread the context has no
  effect, since Python sets handlers in the main thread only.
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
  """Answers pending signals at once, without waiting for the thread."""
  if _pipe is None:
    return
  with _lock, contextlib.suppress(BlockingIOError):
    for number in os.read(_pipe[0], 4096):
      if number in SIGNALS and _answers:
        _answers[-1](number)


def code(number: int) -> int:
  """Returns the exit code of a process after this signal."""
  return INTERRUPTED if number == signal.SIGINT else TRY_AGAIN


def name(number: int) -> str:
  return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def end(number: int, text: str) -> NoReturn:
  """Prints a line, and ends the process and its children's process groups at once."""
  say(f"{name(number)}: {text}")
  for group in list(process_groups):
    with contextlib.suppress(OSError):
      os.killpg(group, signal.SIGKILL)
  os._exit(code(number))


def say(text: str) -> None:
  """Writes a line to stderr, bypassing Python's buffers.

  If the terminal is gone (SIGHUP), this line and all later output are discarded.
  """
  try:
    os.write(2, f"gspo_jax: {text}\n".encode())
  except OSError:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
      os.dup2(null, descriptor)


def _install(numbers: Sequence[int]) -> tuple[dict[int, object], int]:
  """Directs these signals to the thread.

  Returns the replaced handlers, and the previous wakeup descriptor.
  """
  global _pipe
  if _pipe is None:
    _pipe = os.pipe()
    for descriptor in _pipe:
      os.set_blocking(descriptor, False)
    threading.Thread(target=_listen_always, name="stops", daemon=True).start()
  wakeup = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
  before = {n: signal.getsignal(n) for n in numbers}
  # If Python reports _ignore, JAX may since have set another handler in C, which must stay.
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
  """Restores default handlers in a forked child, which does not have the thread."""
  if _pipe is not None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
      if signal.getsignal(number) is _ignore:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset)
