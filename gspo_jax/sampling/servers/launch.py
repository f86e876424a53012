"""Processes of servers that a run starts itself."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.parse
from pathlib import Path

STOP_S = 10.0  # from SIGTERM to SIGKILL
GONE_S = 10.0  # from SIGKILL until memory and ports are free, at most
# A command that is killed, with all of its group, once the shell's input has come to its end.
# SIGTERM is for the command alone: it ends the shell's first `wait`, and what watches the input
# does not hear it.
_BOUND = """trap : TERM
exec 3<&0
( {}
) </dev/null 3<&- &
server=$!
( trap '' TERM; cat <&3 >/dev/null; kill -9 -$$ ) &
exec 3<&-
wait $server
wait $server"""


def filled(command: str, url: str, index: int, weights: str) -> str:
  """The command for one server, with what stands for its address and weights filled in."""
  parts = urllib.parse.urlsplit(url)
  fields = dict(host=parts.hostname, port=parts.port, index=index, weights=weights)
  for name, value in fields.items():
    command = command.replace(f"{{{name}}}", str(value))
  return command


class Process:
  """A server in a shell and a session of its own, whose output goes to a file."""

  def __init__(self, command: str, log: Path):
    log.parent.mkdir(parents=True, exist_ok=True)
    self.log = log
    with open(log, "ab") as output:
      self._process = subprocess.Popen(
        ["/bin/sh", "-c", _BOUND.format(command)],
        stdin=subprocess.PIPE,  # nothing is written: it ends with this process, however that does
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  @property
  def pid(self) -> int:
    """Of the shell, which is also the number of its group."""
    return self._process.pid

  @property
  def alive(self) -> bool:
    return self._process.poll() is None

  def stop(self) -> None:
    """Ends it with all its children: those of a server that died may hold its memory and port."""
    self._signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(STOP_S)
    self._signal(signal.SIGKILL)
    self._process.wait()
    self._process.stdin.close()
    end = time.monotonic() + GONE_S
    while _running(self.pid) and time.monotonic() < end:
      time.sleep(0.05)

  def _signal(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, number)


def _running(group: int) -> bool:
  """Whether a process of a group is not over: zombies are, and nobody may ever take them away."""
  for file in Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # it has just ended
      state, _, its_group = file.read_text(errors="replace").rpartition(")")[2].split()[:3]
      if int(its_group) == group and state not in "ZX":
        return True
  return False
