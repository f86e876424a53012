"""Being told to stop, from the first second of a process to its last: Ctrl-C, SIGTERM, SIGHUP.

Python runs a handler in the main thread, once that is back from C: from a compiler after minutes.
And what a handler raises tears apart what must be whole, or is lost where Python ignores exceptions
(in JAX's callbacks of the garbage collector, for one). So nothing is raised here: a thread hears
the signals at once and gives them to whoever answers. Imports
nothing that takes time.
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
TRY_AGAIN = os.EX_TEMPFAIL  # 75, of sysexits.h: the exit code after a notice
INTERRUPTED = 128 + signal.SIGINT  # 130, as shells have it: the one after Ctrl-C

Answer = Callable[[int], None]

_answers: list[Answer] = []  # the last one counts
_pipe: tuple[int, int] | None = None  # C handlers write, the thread reads
_lock = threading.Lock()


def begin(text: str) -> None:
  """Ends the process at once on a signal from now on.

  Its line ends in `text`. Commands call this first.
  """
  _hear(SIGNALS)
  _answers.append(lambda number: end(number, text))


@contextlib.contextmanager
def answered(answer: Answer, numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
  """Gives these signals to `answer`, in a thread, within. What is ignored (nohup) stays ignored. In
  another thread than the main one nothing is heard, as Python has it."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before, wakeup = _hear(numbers)
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
  """Ends the process and its process groups now, with a line."""
  say(f"{name(number)}: {text}")
  for group in list(process_groups):
    with contextlib.suppress(OSError):
      os.killpg(group, signal.SIGKILL)
  os._exit(code(number))


def say(text: str) -> None:
  """Writes past Python's buffers. Without a terminal (SIGHUP) this and all later output is
  discarded."""
  try:
    os.write(2, f"gspo_jax: {text}\n".encode())
  except OSError:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
      os.dup2(nowhere, descriptor)


def _hear(numbers: Sequence[int]) -> tuple[dict[int, object], int]:
  """Has these signals go to the thread; the handlers before, and the descriptor before."""
  global _pipe
  if _pipe is None:
    _pipe = os.pipe()
    for descriptor in _pipe:
      os.set_blocking(descriptor, False)
    threading.Thread(target=_always, name="stops", daemon=True).start()
  wakeup = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
  before = {n: signal.getsignal(n) for n in numbers}
  # Where JAX has put its own in the place of _heard, Python still has _heard, and JAX's stays.
  before = {
    n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None, _heard)
  }
  for number in before:
    signal.signal(number, _heard)
  return before, wakeup


def _heard(*_: object) -> None:
  """The C handler has told the thread already."""


def _always() -> None:
  while True:
    select.select([_pipe[0]], [], [])
    listen()


def _forget() -> None:
  """Resets signals in a fork, which has no such thread."""
  if _pipe is not None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
      if signal.getsignal(number) is _heard:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
