"""Runs candidate programs within a sandbox, one process per test, and reports how each ended.

A sandbox has three kinds of processes, each the parent of the next. With isolation "none" there is
no outer process.

  outer      Moves to new namespaces of the kernel, and waits.
  keeper     Process 1 of the new namespaces. It is trusted, and never runs code of a candidate. It
             forks a process per test, enforces time limits, collects the output, and kills all
             processes of a test at its end.
  candidate  Confines itself (`_confine`), then runs the program.

The verifier trusts the messages of the keeper. Processes that run programs have no expected output.
"""

import atexit
import builtins
import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
import types

from . import assertions, calls, isolation, paths, wire
from .assertions import OUT_OF_MEMORY

# Exit status of a failed candidate; `assertions` has further statuses. No exit status alone lets a
# program pass a test.
FAILED = 1

_RESULT, _CHANNEL = 3, 4  # Descriptors in the candidate's process.

# The prelude: modules that LiveCodeBench imports before every program
# (lcb_runner/evaluation/testing_util.py), all by `from NAME import *`, and most also by
# `import NAME`.
_STAR = (
  "string re datetime collections heapq bisect copy math random statistics itertools functools "
  "operator io sys json builtins typing"
).split()
_PLAIN = [name for name in _STAR if name not in ("builtins", "typing")]
builtins.exit = builtins.quit = sys.exit  # Python's module `site` defines them, but is not loaded.


def main(settings: str) -> None:
  """Runs the outer process, and forks the keeper from it.

  With isolation "none", this process is the keeper.

  settings: JSON from `process.Sandbox`.
  """
  s = json.loads(settings)
  s["uid"] = isolation.UID + os.getpid()
  root = False
  if s["isolation"] == "namespaces":
    try:
      root = isolation.enter_namespaces(s["uid"])
    except OSError as error:
      wire.send(s["control"], {"error": str(error)})
      return
    keeper = os.fork()
    if keeper:
      for descriptor in filter(None, (s["control"], s["channel"])):
        os.close(descriptor)
      os.waitpid(keeper, 0)
      return
    isolation.die_with_parent()
  try:
    if s["isolation"] == "namespaces":
      mounts, moved, s["packages"] = paths.plan(s["packages"])
      isolation.enter_root(mounts, s["limits"]["scratch_bytes"])
      paths.move_modules(moved)
    _run_keeper(s, root)
  except wire.Closed:
    pass  # The verifier has ended. All processes of the namespace end with this one.
  except BaseException as error:
    wire.send(s["control"], {"error": f"{type(error).__name__}: {error}"})


def _run_keeper(s: dict, root: bool) -> None:
  """Runs the keeper: executes a test for each request, and sends a report.

  Args:
    s: settings.
    root: whether this process is the machine's root user.
  """
  isolation.hide_from_debuggers()
  if s["isolation"] == "namespaces" and os.getpid() != 1:
    raise RuntimeError("the keeper must be process 1 of a namespace, since it kills all others")
  prelude = {}
  os.chdir(s["directory"])
  wire.send(s["control"], {"ready": True})
  while True:
    request = wire.receive(s["control"], 1 << 30)
    if request["kind"] in ("stdin", "call") and not prelude:
      # LiveCodeBench's imports, once for all candidates.
      imports = [f"from {x} import *" for x in _STAR] + [f"import {x}" for x in _PLAIN]
      exec("\n".join(imports), prelude)
      del prelude["__builtins__"]
    wire.send(s["control"], _run(s, request, prelude, root))
    if s["channel"]:
      return  # A channel is for one test.
    if s["isolation"] == "namespaces":
      os.chdir("/")
      isolation.unmount_scratch()
      isolation.mount_scratch(s["limits"]["scratch_bytes"])
      os.chdir(s["directory"])


def _run(s: dict, request: dict, prelude: dict, root: bool) -> dict:
  """Runs one test in a new process, and returns the report.

  A second message of the verifier has the maximum bytes of a reported output; a longer output is
  reported as None. This maximum depends on the expected output. The keeper reads the message only
  after the candidate's end, since a candidate has a copy of all messages that the keeper read
  before.

  The report is a dict. `stdout` is the standard output, and `stderr` the last 2,000 bytes of the
  standard error. `result` is the value of a call as JSON, or "". `reason` is "ended", "timeout", or
  "output" for too much output. `status` is the exit status, or minus the number of a signal.
  `cpu_s`, `cpu_limit_s` and `wall_s` are in seconds.
  """
  stdin = os.memfd_create("stdin")
  os.write(stdin, request.get("stdin", "").encode("utf-8", "surrogatepass"))
  os.lseek(stdin, 0, os.SEEK_SET)
  pipes = {name: os.pipe() for name in ("stdout", "stderr", "result")}
  keeper, started = os.getpid(), time.monotonic()
  candidate = os.fork()
  if not candidate:
    writers = [pipes[name][1] for name in ("stdout", "stderr", "result")]
    _candidate(s, request, prelude, root, keeper, [stdin, *writers, s["channel"]])
  os.close(stdin)
  if s["channel"]:
    os.close(s["channel"])
  for _, writer in pipes.values():
    os.close(writer)
  readers = {name: reader for name, (reader, _) in pipes.items()}
  reason, output = _watch(s, candidate, readers, started + s["limits"]["wall_s"])
  _, status, usage = os.wait4(candidate, 0)
  if s["isolation"] == "namespaces":
    with contextlib.suppress(ChildProcessError):
      while True:  # Waits for the candidate's children, inherited by process 1.
        os.waitpid(-1, 0)
  for reader in readers.values():
    os.close(reader)
  most = wire.receive(s["control"], 1 << 30)
  outputs = {
    name: output[name].decode("utf-8", "replace")
    if most is None or len(output[name]) <= most
    else None
    for name in ("stdout", "result")
  }
  return outputs | dict(
    reason=reason,
    status=os.waitstatus_to_exitcode(status),
    cpu_s=usage.ru_utime + usage.ru_stime,
    cpu_limit_s=s["limits"]["cpu_s"],
    wall_s=time.monotonic() - started,
    stderr=output["stderr"][-2000:].decode("utf-8", "replace"),
  )


def _watch(s: dict, candidate: int, readers: dict, deadline: float) -> tuple[str, dict]:
  """Collects output until a candidate ends, is late or writes too much.

  Afterwards kills the candidate's processes. Returns the `reason` of the report, and a dict of
  outputs by name. Raises Closed if the verifier ended.
  """
  handle = os.pidfd_open(candidate)
  output = {name: bytearray() for name in readers}
  names = {reader: name for name, reader in readers.items()}
  poll = select.poll()
  poll.register(handle, select.POLLIN)
  poll.register(s["control"], select.POLLHUP | select.POLLRDHUP)
  for reader in names:
    os.set_blocking(reader, False)
    poll.register(reader, select.POLLIN)
  reason = ""
  while not reason:
    remaining_s = deadline - time.monotonic()
    events = poll.poll(max(0, remaining_s) * 1000)
    if not events and remaining_s <= 0:
      reason = "timeout"
    for descriptor, _ in events:
      if descriptor == handle:
        reason = "ended"
      elif descriptor == s["control"]:
        _kill(s, candidate)
        raise wire.Closed
      elif _drain(descriptor, output[names[descriptor]]) == 0:
        poll.unregister(descriptor)
    if any(len(part) > s["limits"]["output_bytes"] for part in output.values()):
      reason = "output"
    if time.monotonic() > deadline and reason != "ended":
      reason = "timeout"
  _kill(s, candidate)
  os.close(handle)
  if reason == "ended":
    for reader, name in names.items():
      while len(output[name]) <= s["limits"]["output_bytes"]:
        if not _drain(reader, output[name]):
          break
    if any(len(part) > s["limits"]["output_bytes"] for part in output.values()):
      reason = "output"
  return reason, output


def _drain(reader: int, output: bytearray) -> int | None:
  """Reads once. Returns the number of bytes, 0 at the end, or None if no byte is ready."""
  try:
    part = os.read(reader, 1 << 16)
  except BlockingIOError:
    return None
  output += part
  return len(part)


def _kill(s: dict, candidate: int) -> None:
  """Kills a candidate and its children. The candidate's id is not reused before `wait4`."""
  try:
    if s["isolation"] == "namespaces" and os.getpid() == 1:
      os.kill(-1, signal.SIGKILL)  # All processes of the namespace except this one.
    else:
      os.kill(candidate, signal.SIGKILL)
      os.killpg(candidate, signal.SIGKILL)  # Its children, unless they left the group.
  except ProcessLookupError:
    pass


def _candidate(
  s: dict, request: dict, prelude: dict, root: bool, keeper: int, descriptors: list
) -> None:
  """Runs the candidate: confines this process, runs the program, and ends the process.

  descriptors: standard input, output and error, result and channel; 0 if there is no channel.
  """
  code = FAILED
  try:
    isolation.die_with_parent()
    if os.getppid() != keeper:
      os._exit(FAILED)  # The keeper died before `die_with_parent`.
    os.setsid()
    # Descriptors are first copied to high numbers, so that none is overwritten before it is copied.
    high = [fcntl.fcntl(d, fcntl.F_DUPFD, 200) for d in descriptors if d]
    for target, descriptor in enumerate(high):
      os.dup2(descriptor, target)
    os.closerange(len(high), 1 << 20)
    _confine(s, root)
    sys.path += s["packages"]
    sys.argv = sys.orig_argv = ["program"]
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(50_000)
    code = _KINDS[request["kind"]](request, prelude)
  except SystemExit:  # The program's exit status does not matter, only its output.
    code = 0
  except MemoryError:
    code = OUT_OF_MEMORY
  except BaseException as error:
    _report(error)
  try:
    _finish()
  except BaseException:
    code = code or FAILED
  finally:
    os._exit(code)


def _finish() -> None:
  """Runs Python's steps at the end of a program, since `os._exit` omits them."""
  threading._shutdown()  # Waits for the program's threads.
  atexit._run_exitfuncs()
  for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
    if stream is not None and not getattr(stream, "closed", False):
      stream.flush()


def _report(error: BaseException) -> None:
  """Prints an exception on stderr."""
  try:
    import traceback

    traceback.print_exception(error, limit=-5)
  except BaseException:  # The program may have replaced functions used here.
    pass


def _confine(s: dict, root: bool) -> None:
  """Limits this process, and gives up its rights unless isolation is "none"."""
  if s["isolation"] == "namespaces" and root:
    isolation.take_identity(s["uid"])
  # The kernel limits the threads of a user. Without namespaces, it would count all processes of the
  # trainer's user, so no limit is set.
  alone = s["isolation"] == "namespaces"
  isolation.set_limits(s["limits"], 1 + s["limits"]["threads"] if alone else None)
  if s["isolation"] != "none":
    isolation.drop_capabilities()
    calls.apply()


def _load(request: dict, name: str, names: dict) -> dict:
  """Runs the program as the module `name`, and returns the module's variables.

  If the program calls `quit()`, functions that it defined before can still be tested.

  names: variables of the module before the program.
  """
  module = types.ModuleType(name)
  sys.modules[name] = module
  module.__dict__.update(names)
  with contextlib.suppress(SystemExit):
    for part in ("preamble", "code"):
      if request.get(part):
        # The preamble's function has no real body, so it is removed before the program.
        module.__dict__.pop(request.get("function"), None)
        exec(compile(request[part], f"<{part}>", "exec", dont_inherit=True), module.__dict__)
  return module.__dict__


def _stdin(request: dict, prelude: dict) -> int:
  """Runs the whole program with its standard input."""
  _load(request, "__main__", prelude)
  return 0


def _call(request: dict, prelude: dict) -> int:
  """Calls a function once, and writes its value to the result descriptor."""
  module = _load(request, "solution", prelude)
  value = _find(module, request["function"])(*wire.decode(request["arguments"]))
  data = memoryview(json.dumps(_encode_value(value)).encode())
  while data:
    data = data[os.write(_RESULT, data) :]
  return 0


def _encode_value(value) -> dict:
  """Encodes a value, or the name of its type if `wire` cannot encode it."""
  try:
    return {"value": wire.encode(value)}
  except TypeError:
    return {"other": type(value).__name__}


def _find(module: dict, name: str):
  """Returns a method of the module's class `Solution`, as LiveCodeBench does, or a function."""
  solution = module.get("Solution")
  if isinstance(solution, type) and hasattr(solution, name):
    return getattr(solution(), name)
  return module[name]


def _serve(request: dict, prelude: dict) -> int:
  """Answers calls of one function over the channel until the channel is closed."""
  function = _find(_load(request, "solution", {}), request["function"])
  while True:
    try:
      arguments = wire.decode(wire.receive(_CHANNEL, 1 << 30))
    except wire.Closed:
      return 0
    try:
      answer = _encode_value(function(*arguments[0], **arguments[1]))
    except MemoryError:
      raise
    except Exception as error:
      _report(error)
      kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
      answer = {"raised": kinds[0]}
    try:
      wire.send(_CHANNEL, answer)
    except wire.Closed:  # An assertion has failed, and its process has ended.
      return 0


def _check(request: dict, prelude: dict) -> int:
  """Runs a data set's assertions on a function in another sandbox."""
  return assertions.check(request, _CHANNEL, _load)


_KINDS = {"stdin": _stdin, "call": _call, "serve": _serve, "check": _check}
