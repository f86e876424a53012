"""Starting, asking and ending a sandbox, and finding out which isolation this machine allows.

The verifier's side of it. What runs inside lies in sandbox/ and is loaded by an interpreter that
has nothing of our environment.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from typing import Any

from gspo_jax.rewards.programs.sandbox import wire
from gspo_jax.rewards.programs.sandbox.isolation import SCRATCH

ISOLATIONS = ("auto", "namespaces", "seccomp", "none")
START_LIMIT_S = 60.0  # for a sandbox to be ready, and for a report that is overdue


@dataclasses.dataclass(frozen=True)
class Limits:
  """Resources that one test may use."""

  cpu_s: int = 6  # LiveCodeBench's limit per test; whole seconds, as the kernel counts
  wall_s: float = 15.0  # a busy machine must not fail a program that computes
  memory_bytes: int = 1 << 30  # address space
  output_bytes: int = 16 << 20
  file_bytes: int = 16 << 20  # of one file
  scratch_bytes: int = 64 << 20  # of all files; they lie in memory
  open_files: int = 64
  threads: int = 64


DEFAULTS = Limits()


class SandboxError(Exception):
  """The sandbox failed, and not the program in it."""


class Sandbox:
  """One sandbox: an interpreter that runs tests one after another, each in a fresh process."""

  def __init__(self, isolation: str, limits: Limits, channel: socket.socket | None = None):
    """Starts it. `channel` is given to the first test's process; there is no second test then.

    Raises:
      SandboxError: if it does not start; says which step the kernel denied.
    """
    self._directory = tempfile.mkdtemp(prefix="gspo_jax_")
    ours, theirs = socket.socketpair()
    descriptors = [s.fileno() for s in (theirs, channel) if s is not None]
    settings = dict(
      control=descriptors[0],
      channel=descriptors[1] if channel else 0,
      isolation=isolation,
      directory=self._directory,
      readable=_readable(),
      packages=_packages(),
      limits=dataclasses.asdict(limits),
    )
    start = (
      f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); "
      "from sandbox import runner; del sys.path[0]; runner.main(sys.argv[1])"
    )
    scratch = SCRATCH if isolation == "namespaces" else self._directory
    # No site-packages and no user's settings at the start; a fixed hash seed, so that a program
    # that depends on the order of a set does not pass in one run and fail in the next.
    try:
      self._process = subprocess.Popen(
        [os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", start, json.dumps(settings)],
        env=_ENVIRONMENT | {"HOME": scratch, "TMPDIR": scratch},
        cwd=self._directory,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
      )
    except OSError as error:  # no memory, or too many processes or files
      _remove(self._directory)
      raise SandboxError(f"no process could be started: {error}") from error
    theirs.close()
    self._control, self._limits = ours, limits
    try:
      self._receive(START_LIMIT_S)
    except BaseException:
      self.close()
      raise

  def start(self, request: dict[str, Any]) -> None:
    try:
      self._control.settimeout(None)
      wire.send(self._control.fileno(), request)
    except (wire.Closed, OSError) as error:
      raise SandboxError(f"the sandbox died: {error!r}") from error

  def report(self) -> dict[str, Any]:
    """Tells how the test that was started ended: runner._run has the fields.

    Raises:
      SandboxError: if the sandbox died, or did not report although the test is long overdue.
    """
    return self._receive(self._limits.wall_s + START_LIMIT_S)

  def run(self, request: dict[str, Any]) -> dict[str, Any]:
    self.start(request)
    return self.report()

  def close(self) -> None:
    """Kills everything in it."""
    if self._process.poll() is None:  # else its number may be another's by now
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGKILL)
    self._control.close()
    self._process.wait()
    _remove(self._directory)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _receive(self, limit_s: float) -> dict[str, Any]:
    # A timer, and not a timeout of the socket: this is a blocking read of a whole message.
    timer = threading.Timer(limit_s, self._process.kill)
    timer.daemon = True
    timer.start()
    try:
      message = wire.receive(self._control.fileno(), 16 * self._limits.output_bytes + (1 << 20))
    except (wire.Closed, ValueError, OSError) as error:
      raise SandboxError(f"the sandbox died or did not answer: {error!r}") from error
    finally:
      timer.cancel()
    if "error" in message:
      raise SandboxError(message["error"])
    return message


def _remove(directory: str) -> None:
  """Removes a directory in which a program may have made others unreadable."""
  shutil.rmtree(directory, ignore_errors=True)
  for path, names, _ in os.walk(directory):
    for inner in (os.path.join(path, name) for name in names):
      if not os.path.islink(inner):  # or the mode of what it points at would change
        os.chmod(inner, 0o700)
  shutil.rmtree(directory, ignore_errors=True)


_ENVIRONMENT = {
  "PYTHONHASHSEED": "0",
  "PYTHONIOENCODING": "utf-8:surrogateescape",
  "LC_ALL": "C.UTF-8",
  "OPENBLAS_NUM_THREADS": "1",  # BLAS reserves memory for every thread
}


def _packages() -> list[str]:
  """Directories in which a program finds NumPy, if the trainer has it."""
  return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _readable() -> list[str]:
  """Python, its packages, and the libraries of the system."""
  paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_packages()]
  paths += ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
  paths += [path for path in ("/lib", "/lib64") if not os.path.islink(path)]
  if sys.base_prefix not in ("/", "/usr"):
    paths.append(os.path.join(sys.base_prefix, "lib"))
  paths = sorted({path for path in paths if os.path.exists(path)})
  return [p for p in paths if not any(p.startswith(other + "/") for other in paths)]


def choose_isolation(wanted: str) -> str:
  """Returns `wanted`, or for "auto" the strongest isolation that works on this machine.

  Raises:
    ValueError: for an unknown name.
    RuntimeError: if it does not work here; says why, and what to do.
  """
  if wanted not in ISOLATIONS:
    raise ValueError(f"reward.isolation={wanted!r} is not one of {', '.join(ISOLATIONS)}")
  reasons = []
  for isolation in ("namespaces", "seccomp") if wanted == "auto" else (wanted,):
    try:
      with Sandbox(isolation, DEFAULTS) as sandbox:
        report = sandbox.run({"kind": "stdin", "code": _PROBE})
    except SandboxError as error:
      reasons.append(f"{isolation}: {error}")
      continue
    if report["stdout"].strip() == ("open" if isolation == "none" else "refused"):
      return isolation
    reasons.append(f"{isolation}: a probe ended with {report['stdout'] or report['stderr']!r}")
  raise RuntimeError(
    "candidate programs cannot be confined on this machine, so they are not run ("
    + "; ".join(reasons)
    + "). Allow user namespaces, or Landlock and seccomp, to this process (Linux 5.13 or later), "
    "or set reward.isolation=none to run what the model writes with your rights and your network"
  )


_PROBE = """
import socket, statistics
try:
  socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
  print("open")
except OSError:
  print("refused")
"""
