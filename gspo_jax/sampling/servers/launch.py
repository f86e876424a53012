"""Processes of servers that a run starts itself."""

import contextlib
import os
import signal
import subprocess
import urllib.parse
from pathlib import Path

STOP_S = 20.0  # from SIGTERM to SIGKILL
# A command that is killed, with all of its group, once the shell's input has come to its end.
_BOUND = """exec 3<&0
( {}
) </dev/null 3<&- &
server=$!
( cat <&3 >/dev/null; kill -9 -$$ ) &
exec 3<&-
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

  def _signal(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, number)
