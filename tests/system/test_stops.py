"""Being told to stop, whatever the process is in; tests/cli has commands, tests/runs has runs."""

import signal
import sys
import time
from pathlib import Path

import pytest
from support.command_line import called, started

from gspo_jax.system import stops

# In C for minutes, as a compiler is: no handler of Python's runs. With a child of its own.
IN_C = """
import hashlib, subprocess, sys
from gspo_jax.system import stops
stops.begin("so much for that")
child = subprocess.Popen(["sleep", "100"], start_new_session=True)
stops.process_groups.add(child.pid)
print(child.pid, flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(
  "number, said, code",
  [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 75), (signal.SIGHUP, "SIGHUP", 75)],
)
def test_a_command_ends_at_once_with_one_line_and_what_it_started_with_it(number, said, code):
  process = started([sys.executable, "-c", IN_C])
  child = int(process.stdout.readline())
  time.sleep(0.2)  # it is in C by now
  process.send_signal(number)
  assert process.wait(60) == code
  assert process.stderr.read() == f"gspo_jax: {said}: so much for that\n"
  wait_for_the_end_of(child)


def wait_for_the_end_of(pid):
  status, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 60
  while status.exists() and ") Z " not in status.read_text():
    assert time.monotonic() < deadline, f"process {pid} goes on"
    time.sleep(0.05)


GONE = "from gspo_jax.system import stops; import os; os.close(2); stops.say(''); print('lost')"


def test_a_terminal_that_is_gone_is_written_to_no_more():
  done = called([sys.executable, "-c", GONE])
  assert done.returncode == 0 and not done.stdout


class Swallows:
  def __del__(self):  # Python prints and forgets what is raised here
    signal.raise_signal(signal.SIGINT)


def test_nothing_is_raised_that_could_be_swallowed():
  came = []
  before = signal.getsignal(signal.SIGINT)
  with stops.answered(came.append):
    Swallows()
    stops.listen()
  assert came == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is before


FORK = """
import os, signal
from gspo_jax.system import stops
came = []
with stops.answered(came.append):
  child = os.fork()
  if not child:
    signal.raise_signal(signal.SIGINT)
    os._exit(0)  # if it was not ended
  _, status = os.waitpid(child, 0)
  stops.listen()
print(os.waitstatus_to_exitcode(status), came)
"""


def test_a_fork_has_its_signals_to_itself():
  done = called([sys.executable, "-c", FORK])
  assert done.stdout == f"{-signal.SIGINT} []\n", done.stderr
