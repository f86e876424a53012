"""Starts, uses and ends sandboxes, and tests whether this machine allows them.

This module runs in the verifier's process. The code of the sandbox is in sandbox/. Its interpreter
starts without installed packages and without the verifier's environment variables.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from typing import Any

from gspo_jax.verifiers import children
from gspo_jax.verifiers.programs import ISOLATIONS
from gspo_jax.verifiers.programs.sandbox import wire
from gspo_jax.verifiers.programs.sandbox.isolation import SCRATCH

# Seconds for a sandbox's start, and for its report after a test's wall-clock limit.
START_LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Limits:
  """Resources that one test may use."""

  cpu_s: int = 6  # CPU seconds, LiveCodeBench's limit; the kernel counts whole seconds.
  wall_s: float = 15.0  # Wall-clock seconds; more than CPU seconds, for busy machines.
  memory_bytes: int = 1 << 30  # Address space.
  output_bytes: int = 16 << 20  # Per stream: standard output, standard error, result.
  file_bytes: int = 16 << 20  # Size of one file.
  scratch_bytes: int = 64 << 20  # Size of all files together; unlimited with isolation="none".
  open_files: int = 64
  threads: int = 64  # Unlimited with isolation="none".


DEFAULTS = Limits()


class SandboxError(Exception):
  """The sandbox failed, not the program in it."""


class Sandbox(contextlib.AbstractContextManager):
  """A sandbox: an interpreter that runs tests one after another, each in a new process."""

  def __init__(self, isolation: str, limits: Limits, channel: socket.socket | None = None):
    """Starts the sandbox, and waits until it is ready.

    Args:
      isolation: "namespaces" or "none".
      limits: resources of each test.
      channel: socket for the test's process. A sandbox with a channel runs a single test. A
        sandbox without a channel (None) runs any number of tests.

    Raises:
      SandboxError: the sandbox does not start, for example because the kernel denies a step.
      ValueError: the isolation is neither "namespaces" nor "none".
    """
    if isolation not in ISOLATIONS[1:]:
      raise ValueError(f"isolation={isolation!r} is not one of {', '.join(ISOLATIONS[1:])}")
    self._directory, self._process, self._control = "", None, None
    try:
      self._start(isolation, limits, channel)
      self._receive(START_LIMIT_S)
    except OSError as error:  # No memory, no space, or too many processes or files.
      self.close()
      raise SandboxError(f"no sandbox could be started: {error}") from error
    except BaseException:
      self.close()
      raise

  def _start(self, isolation: str, limits: Limits, channel: socket.socket | None) -> None:
    """Starts the interpreter; see `runner.main`."""
    self._limits = limits
    if isolation == "none":
      self._directory = tempfile.mkdtemp(prefix="gspo_jax_")
    self._control, theirs = socket.socketpair()
    scratch = self._directory or SCRATCH
    descriptors = [s.fileno() for s in (theirs, channel) if s is not None]
    settings = dict(
      control=descriptors[0],
      channel=descriptors[1] if channel else 0,
      isolation=isolation,
      directory=scratch,
      # With isolation "namespaces", `paths.plan` decides which packages are readable.
      packages=sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")}),
      limits=dataclasses.asdict(limits),
    )
    start = (
      f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); "
      "from sandbox import runner; del sys.path[0]; runner.main(sys.argv[1])"
    )
    # The interpreter starts without site-packages and user settings. With a fixed hash seed, the
    # order of sets, on which a program may depend, is the same in all runs.
    with theirs:
      self._process = subprocess.Popen(
        [os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", start, json.dumps(settings)],
        env=_ENVIRONMENT | {"HOME": scratch, "TMPDIR": scratch},
        cwd=self._directory or "/",
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
      )
      children.process_groups.add(self._process.pid)

  def start(self, request: dict[str, Any], most: int | None = None) -> None:
    """Starts a test.

    Args:
      request: the test. The program's process has a copy, so the request must not depend on the
        expected output.
      most: maximum bytes of a reported output; None for no maximum. The maximum may depend on the
        expected output, since the sandbox reads the maximum only after the program's end.

    Raises:
      SandboxError: the sandbox died.
    """
    try:
      self._control.settimeout(None)
      wire.send(self._control.fileno(), request)
      wire.send(self._control.fileno(), most)
    except (wire.Closed, OSError) as error:
      raise SandboxError(f"the sandbox died: {error!r}") from error

  def report(self) -> dict[str, Any]:
    """Waits for the running test, and returns its report (`runner._run`).

    Raises:
      SandboxError: the sandbox died, or its report is `START_LIMIT_S` seconds late.
    """
    return self._receive(self._limits.wall_s + START_LIMIT_S)

  def run(self, request: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    """Runs a test and returns its report. See `start` and `report`."""
    self.start(request, most)
    return self.report()

  def close(self) -> None:
    """Kills all processes of the sandbox, and removes its files."""
    if self._process is not None:
      if self._process.poll() is None:  # An ended process may have lost its id to another.
        with contextlib.suppress(ProcessLookupError):
          os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()
      children.process_groups.discard(self._process.pid)
    if self._control is not None:
      self._control.close()
    if self._directory:
      _remove(self._directory)

  def __exit__(self, *_):
    self.close()

  def _receive(self, limit_s: float) -> dict[str, Any]:
    """Returns the sandbox's next message; kills the sandbox after `limit_s` seconds."""
    # A socket's timeout would limit each read, and a message takes several reads.
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
  """Removes a program's files, of any depth and permissions. Ignores failures."""
  for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
    with contextlib.suppress(OSError):
      os.rmdir(directory)
    if not os.path.exists(directory):
      return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
      subprocess.run(
        [*command, "--", directory], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
      )


# Environment variables of the sandbox's interpreter.
_ENVIRONMENT = {
  "PYTHONHASHSEED": "0",
  "PYTHONIOENCODING": "utf-8:surrogateescape",
  "LC_ALL": "C.UTF-8",
  "OPENBLAS_NUM_THREADS": "1",  # BLAS reserves memory for each thread.
}


def choose_isolation(setting: str) -> str:
  """Runs a trial program with a setting's isolation, and returns the isolation.

  setting: value of reward.isolation. "auto" means "namespaces", and never falls back to "none".

  Raises:
    ValueError: the value is unknown, a sandbox cannot be started, or a sandbox with "namespaces"
      does not confine programs.
  """
  if setting not in ISOLATIONS:
    raise ValueError(f"reward.isolation={setting!r} is not one of {', '.join(ISOLATIONS)}")
  isolation = "namespaces" if setting == "auto" else setting
  try:
    with Sandbox(isolation, _PROBE_LIMITS) as sandbox:
      report = sandbox.run({"kind": "stdin", "code": _PROBE})
    ending = report["stdout"].strip() or report["stderr"].strip().rpartition("\n")[2]
    if isolation == "none" or ending == "confined":
      return isolation
    reason = f"a trial program ended with {ending!r}"
  except SandboxError as error:
    reason = str(error)
  if isolation == "none":
    raise ValueError(f"reward.isolation=none: {reason}")
  raise ValueError(
    f"reward.isolation={setting}: programs cannot be confined on this machine, so they are not run "
    f"({reason}). Allow user namespaces to this process (Linux 5.14 or later; in a container: "
    "--privileged, or --cap-add=SYS_ADMIN with --security-opt for seccomp and apparmor unconfined),"
    " or set reward.isolation=none to run what the model writes with your rights and your network"
  )


def describe(setting: str, isolation: str) -> str:
  """Describes the result of `choose_isolation` in one line."""
  if isolation == "none":
    return "reward.isolation=none: programs run with your rights, your files and your network"
  return (
    f"reward.isolation={setting}: {isolation}; a trial program had no network, and its number of "
    "threads was limited"
  )


_PROBE_LIMITS = dataclasses.replace(DEFAULTS, threads=8)

# The trial program prints "confined" if it has no network and the number of threads is limited.
# Otherwise it prints its findings. Threads are tested because the kernel does not limit those of
# the root user.
_PROBE = """
import _thread, socket, statistics
faults = []
try:
  socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
  faults.append("an open network")
except OSError:
  pass
_thread.stack_size(1 << 16)
hold, threads = _thread.allocate_lock(), 0
hold.acquire()
try:
  while threads < 32:
    _thread.start_new_thread(hold.acquire, (True, 9))
    threads += 1
  faults.append("threads without a bound")
except RuntimeError:
  if not threads:
    faults.append("no thread can be started")
print(" and ".join(faults) or "confined")
"""
