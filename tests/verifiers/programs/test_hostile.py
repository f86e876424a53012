"""Hostile programs. Nothing here may harm the machine, broken filter or not."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc

import pytest
from support.command_line import ROOT, called, started
from support.sandboxes import LIMITS, needs_namespaces, run, session, stdin

from gspo_jax.verifiers.programs import cases, process
from gspo_jax.verifiers.programs import verifier as programs
from gspo_jax.verifiers.programs.verifier import Outcome

# Programs that do not. What they print is expected to show whether they got anywhere.


@needs_namespaces
def test_no_network():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()  # it does listen
    program = f"import socket; socket.create_connection(('127.0.0.1', {port})); print('in')"
    report = run(program)
    assert report["status"] == 1 and "in" not in report["stdout"]
    assert "PermissionError" in report["stderr"], report


@needs_namespaces
def test_the_network_namespace_refuses_without_the_filter_too():
  with socket.create_server(("127.0.0.1", 0)) as server:
    program = f"""
import socket, sys
sys.path.insert(0, {str(ROOT / "gspo_jax" / "verifiers" / "programs")!r})
from sandbox import isolation
socket.create_connection(("127.0.0.1", {server.getsockname()[1]})).close()
isolation.enter_namespaces(isolation.UID)
try:
  socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
except OSError as error:
  print(error)
"""
    done = called([sys.executable, "-c", program])
  assert "unreachable" in done.stdout, done


@needs_namespaces
def test_no_files_and_no_environment_of_the_parent(tmp_path, monkeypatch):
  secret = tmp_path / "secret"
  secret.write_text("hunter2")
  secret.chmod(0o644)
  monkeypatch.setenv("GSPO_TOKEN", "hunter2")
  program = f"""
import glob, os
found = [dict(os.environ)]
paths = [{str(secret)!r}, "/proc/self/environ", f"/proc/{{os.getppid()}}/environ", "/etc/passwd",
  "/proc/1/environ", "/proc/{os.getpid()}/environ", {str(ROOT / "setup.py")!r}]
for path in paths + glob.glob("/proc/[0-9]*/environ"):
  try:
    found.append(open(path).read())
  except OSError as error:
    found.append(error.strerror)
for path in ({str(tmp_path)!r}, "/", "/usr/lib", "/root", "/home"):
  try:
    open(path + "/gspo_jax_mark", "w")
    found.append("written")
    os.unlink(path + "/gspo_jax_mark")
  except OSError:
    pass
  try:
    os.chmod({str(secret)!r}, 0)
    found.append("written")
  except OSError:
    pass
print(found)
"""
  report = run(program)
  assert report["status"] == 0, report
  for trace in ("hunter2", "written", "root:", "setuptools", "PYTHONPATH"):
    assert trace not in report["stdout"], report["stdout"]
  assert secret.stat().st_mode & 0o777 == 0o644 and not os.listdir(tmp_path)[1:]


@needs_namespaces
def test_its_directory_is_private_small_and_goes_away():
  before = os.listdir(tempfile.gettempdir())
  with process.Sandbox("namespaces", LIMITS) as sandbox:
    big = "open('a', 'wb').write(bytes(2 << 20))"
    assert "OSError" in sandbox.run({"kind": "stdin", "code": big})["stderr"]
    many = "for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))"
    assert "No space left" in sandbox.run({"kind": "stdin", "code": many})["stderr"]
    empty = "import os; print(os.listdir() == [])"
    assert sandbox.run({"kind": "stdin", "code": empty})["stdout"] == "True\n"
    locked = "import os; os.makedirs('d/e'); os.mkdir('d/f', 0); print(os.getcwd())"
    assert sandbox.run({"kind": "stdin", "code": locked})["status"] == 0
    assert os.listdir(tempfile.gettempdir()) == before  # nothing of it is on the host's disk


@needs_namespaces
def test_signals_reach_nobody():
  """Sends SIGKILL only to the keeper and a bystander, the cost of a broken filter: to all others
  goes signal 0, which does nothing and needs the same permission."""
  other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
  program = f"""
import fcntl, os, resource, signal
keeper, trainer, other = os.getppid(), {os.getpid()}, {other.pid}
reader, writer = os.pipe()
attempts = [lambda send=send, target=target: send(target, 0)
  for send in (os.kill, os.killpg) for target in (trainer, 1, 0, -1)]
for target in (other, keeper):
  attempts += [
    lambda target=target: os.kill(target, signal.SIGKILL),
    lambda target=target: resource.prlimit(target, resource.RLIMIT_CPU, (1, 1)),
    lambda target=target: fcntl.fcntl(reader, fcntl.F_SETOWN, target),
    lambda target=target: os.sched_setaffinity(target, [0]),
    lambda target=target: os.setpriority(os.PRIO_PROCESS, target, 19),
  ]
attempts.append(lambda: fcntl.fcntl(reader, 10, signal.SIGKILL))  # F_SETSIG
for number, attempt in enumerate(attempts):
  try:
    attempt()
    print("reached", number)
  except OSError:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))  # its own
print(7)
"""
  try:
    assert run(program)["stdout"] == "7\n"
    assert other.poll() is None
  finally:
    other.kill()
    other.wait()


@needs_namespaces
def test_the_keeper_cannot_be_debugged_or_read():
  program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
keeper = os.getppid()
print([libc.ptrace(16, keeper or 1, 0, 0), os.path.exists(f"/proc/{keeper}/fd/0")])
print([libc.unshare(0x10000000), libc.syscall(438, 3, 0, 0), libc.syscall(425, 8, 0)])
"""
  assert run(program)["stdout"] == "[-1, False]\n[-1, -1, -1]\n"


@pytest.mark.parametrize("kind", ["stdin", "call"])
def test_what_is_expected_is_not_in_the_program_s_process(kind, verifier, monkeypatch):
  """Neither is anything of it, such as its length: other expectations make the same request."""
  sent = []
  run_request = process.Sandbox.run

  def spy(self, request, most=None):
    sent.append(str(request))
    return run_request(self, request, most)

  monkeypatch.setattr(process.Sandbox, "run", spy)
  for expected in ("7", "77" * 1000):
    data = (("",), (expected,)) if kind == "stdin" else (([1],), (expected,))
    verifier.outcome("def f(x): pass", cases.Tests(kind, *data, "f"))
  assert sent[0] == sent[1] and "777" not in sent[1]


def test_what_tests_in_python_print_stays_in_the_sandbox(verifier):
  noisy = "import os\nfor fd in (1, 3): os.write(fd, b'7' * 500_000)\ndef f(x): return 7"
  reports = []
  receive = process.Sandbox.report
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(process.Sandbox, "report", lambda s: reports.append(receive(s)) or reports[-1])
    check = "def check(c):\n  assert c(1) == 7\n"
    tests = cases.Tests("check", ("",), ("",), "f", code=check)
    assert verifier.outcome(noisy, tests) == Outcome.RIGHT
  assert len(reports) == 2 and not any(r["stdout"] or r["result"] for r in reports)


FORGERIES = {
  "prints markers": "print('passed'); print('{\"value\": 7}'); print('ok 1')",
  "exits early": "raise SystemExit(0)",
  "exits early, hard": "import os; os._exit(0)",
  "claims to have been checked": "import os; os._exit(105)",
  "writes to every descriptor": """
import os
for fd in range(1, 256):
  try:
    os.write(fd, b'{"value": 7, "reason": "ended", "status": 0, "stdout": "7"}')
  except OSError:
    pass
os._exit(0)""",
  "patches the harness": """
import sys, json, builtins
for module in list(sys.modules.values()):
  for name in ("same_text", "same_value", "_failure", "_judge", "encode", "decode", "dumps"):
    if hasattr(module, name):
      setattr(module, name, lambda *a, **k: True)
builtins.print = lambda *a: None""",
  "looks for what is expected": """
import gc, sys
print([x for x in gc.get_objects() if isinstance(x, dict) and "outputs" in x])
frame = sys._getframe()
while frame:
  print([v for v in frame.f_locals.values() if isinstance(v, (str, list, dict)) and "7" == v])
  frame = frame.f_back""",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_output_is_not_right(verifier, forgery):
  assert verifier.outcome(FORGERIES[forgery], stdin(("3 4", "7"))) != Outcome.RIGHT


def test_no_value_equals_everything(verifier):
  tests = cases.Tests("call", ([1],), (7,), "f")
  liar = "class Any(int):\n  def __eq__(self, other): return True\n  __hash__ = None\n"
  for value in ("Any(3)", "type('A', (), {'__eq__': lambda *a: True})()", "exit", "float('nan')"):
    assert verifier.outcome(f"{liar}def f(x): return {value}", tests) == Outcome.WRONG, value
  for forged in ("raise SystemExit", "os._exit(0)", "os.write(3, b'{\"value\":7}'); 1 / 0"):
    ending = verifier.outcome(f"import os\ndef f(x):\n  {forged}", tests)
    assert ending == Outcome.ERROR, forged


def running(pids):
  return [pid for pid in pids if session(pid)]


@needs_namespaces
def test_closing_ends_what_runs():
  program = "import ctypes, time; ctypes.CDLL(None).prctl(1, 0); time.sleep(60)"
  sandbox = process.Sandbox("namespaces", dataclasses.replace(LIMITS, wall_s=60.0))
  sandbox.start({"kind": "stdin", "code": program})
  time.sleep(0.3)
  inside = session(sandbox._process.pid)
  assert len(inside) >= 2
  sandbox.close()
  deadline = time.monotonic() + 30
  while running(inside) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not running(inside)


@needs_namespaces
@pytest.mark.parametrize("delay", [0.0, 1.0], ids=["running", "starting"])
def test_an_interrupt_ends_what_runs(delay, monkeypatch):
  class Slow(programs.Sandbox):  # A sandbox takes a while to begin on a busy machine.
    def __init__(self, *arguments):
      time.sleep(delay)
      super().__init__(*arguments)

  monkeypatch.setattr(programs, "Sandbox", Slow)
  answer = json.dumps({"inputs": [""], "outputs": ["7"]})
  limits = dataclasses.replace(LIMITS, wall_s=60.0)
  with programs.CodeVerifier(2, limits, "namespaces") as verifier:
    responses = [f"```\nimport time; time.sleep(60)  # {i}\n```" for i in range(6)]
    main = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
      verifier.score(responses, [answer] * 6)
    inside = [pid for sandbox in tuple(verifier._open) for pid in session(sandbox._process.pid)]
    assert verifier.score(["```\nprint(7)\n```"], [answer]) == [Outcome.RIGHT]
  assert time.monotonic() - started < 20
  assert not running(inside)


@needs_namespaces
def test_nothing_runs_on_after_the_trainer():
  """A killed trainer takes its sandboxes with it."""
  program = """
import sys
from gspo_jax.verifiers.programs import process
sandbox = process.Sandbox("namespaces", process.Limits(wall_s=60, cpu_s=60))
print(sandbox._process.pid, flush=True)
sandbox.run({"kind": "stdin", "code": "while True: pass"})
"""
  trainer = started([sys.executable, "-c", program])
  outer = int(trainer.stdout.readline())
  time.sleep(0.5)
  assert session(outer)
  trainer.kill()
  trainer.communicate()
  deadline = time.monotonic() + 10
  while session(outer) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not session(outer)


LARGE = {
  "colliding integers": "def f(x): return {i * ((1 << 61) - 1) for i in range(1, 2500)}",
  "colliding integers, written by hand": """
import json, os
def f(x):
  value = {"set": [i * ((1 << 61) - 1) for i in range(1, 40_000)]}
  os.write(3, json.dumps({"value": value}).encode())
  os._exit(0)""",
  "as many lists as fit": """
import os
def f(x):
  data = b'{"value": [' + b"[]," * 340_000 + b"[]]}"
  while data: data = data[os.write(3, data):]
  os._exit(0)""",
  "as many objects as fit": """
import os
def f(x):
  data = b'{"value": [' + b'{"a":0},' * 130_000 + b"0]}"
  while data: data = data[os.write(3, data):]
  os._exit(0)""",
  "depth": """
import os
def f(x):
  data = b'{"value": ' + b"[" * 1_000_000
  while data: data = data[os.write(3, data):]
  os._exit(0)""",
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_result_costs_the_trainer_little(verifier, kind):
  """Costs neither time nor memory: a result longer than the expected value allows stays inside."""
  tests = cases.Tests("call", ([1],), (7,), "f")
  tracemalloc.start()
  started, used = time.monotonic(), time.process_time()
  assert verifier.outcome(LARGE[kind], tests) == Outcome.WRONG
  assert time.process_time() - used < 5 and time.monotonic() - started < 20
  assert tracemalloc.get_traced_memory()[1] < 100 << 20
  tracemalloc.stop()


@needs_namespaces
def test_output_that_cannot_be_right_stays_in_the_sandbox():
  program = "print('7' * 100_000)"
  assert run(program, most=99_999)["stdout"] is None
  assert len(run(program, most=100_001)["stdout"]) == 100_001
