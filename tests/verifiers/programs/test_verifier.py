"""Programs that mean well, their outcomes, assertions in Python, and failures of the verifier."""

import dataclasses
import json
import os
import signal
import sysconfig
import threading
import time

import pytest
from support.sandboxes import LIMITS, PRINTS_2, needs_namespaces, run, stdin

from gspo_jax.verifiers.programs import cases, process
from gspo_jax.verifiers.programs.sandbox import paths
from gspo_jax.verifiers.programs.verifier import CodeVerifier, Outcome

# Programs that mean well.


def test_standard_input_and_output(verifier):
  program = "n = int(input())\nprint(sum(map(int, sys.stdin.read().split())), n)"
  tests = stdin(("2\n3 4\n", "7 2\n"), ("0\n", "0 0"), ("1\n5", "5 2"), ("1\n1", "1 1"))
  assert verifier.outcome(program, tests) == Outcome.WRONG
  right = dataclasses.replace(tests, outputs=(*tests.outputs[:2], "5 1", "1 1"))
  assert verifier.outcome(program, right) == Outcome.RIGHT


@needs_namespaces
def test_what_programs_of_contests_rely_on():
  program = """
import threading
from dataclasses import dataclass
@dataclass
class Point:
  x: int
def main():
  n, *rest = open(0).read().split()
  print(gcd(int(n), 12), Counter(rest)["a"], deque([1])[0], Point(3).x)
  depth = lambda n: n and depth(n - 1)
  print(depth(20000))
  sys.stdout.buffer.write("é\\n".encode()) if sys.stdout.flush() is None else 0
  open("scratch", "w").write("x" * 1000)
  print(len(open("scratch").read()))
if __name__ == "__main__":
  threading.stack_size(2**26)
  threading.Thread(target=main).start()
"""
  report = run(program, stdin="18\na b a\n")
  assert report["stdout"] == "6 2 1 3\n0\né\n1000\n", report
  assert report["status"] == 0


@needs_namespaces
def test_of_the_trainer_s_packages_a_program_sees_numpy():
  path = sysconfig.get_path("purelib")
  if path.startswith((sysconfig.get_path("stdlib"), "/usr/")):
    pytest.skip("they lie below Python's library, all of which is readable")
  names = run(f"import os; print(*os.listdir({paths.PACKAGES!r}))")["stdout"].split()
  assert "numpy" in names and {*names} <= {"numpy", "numpy.libs"}


@needs_namespaces
def test_numpy_is_there():
  limits = dataclasses.replace(LIMITS, memory_bytes=1 << 30, cpu_s=5, wall_s=20.0)
  program = "import numpy as np, tempfile; print(np.arange(4) @ np.ones(4), tempfile.mkdtemp()[:1])"
  assert run(program, limits)["stdout"] == "6.0 /\n"


def test_function_calls(verifier):
  tests = cases.parse(
    json.dumps(
      {"inputs": ['[1, 2]\n"a"', '[]\n"b"'], "outputs": ['["a", 3]', "[]"], "fn_name": "f"}
    )
  )
  method = "class Solution:\n  def f(self, x: List[int], s: str):\n    return (s, sum(x))"
  assert verifier.outcome(method, tests) == Outcome.WRONG
  function = "def f(x, s):\n  return [s, sum(x)] if x else x"
  assert verifier.outcome(function, tests) == Outcome.RIGHT


@pytest.mark.parametrize("before", ["from heapq import *", "def merge(a): return a"])
def test_a_method_of_solution_comes_before_a_function_of_its_name(verifier, before):
  tests = cases.parse(
    json.dumps(dict(inputs=["[3, 1]\n[2]"], outputs=["[1, 2, 3]"], fn_name="merge"))
  )
  method = "class Solution:\n  def merge(self, a: List[int], b: List[int]): return sorted(a + b)"
  assert verifier.outcome(f"{before}\n{method}", tests) == Outcome.RIGHT


def test_an_output_file_without_an_input_file(verifier):
  answer = dict(inputs=["3"], outputs=["6"], output_files=["output.txt"])
  program = "open('output.txt', 'w').write(str(int(input()) * 2))"
  assert verifier.outcome(program, cases.parse(json.dumps(answer))) == Outcome.RIGHT


@pytest.mark.parametrize(
  "program, outcome",
  {
    "raise ValueError('no')": "error",
    "def broken(": "error",
    "x = bytearray(1 << 30)": "memory",
    "x = [0]\nwhile True: x += x": "memory",
    "while True: pass": "timeout",
    "import time; time.sleep(60)": "timeout",
    "while True: print('x' * 4096)": "error",
    "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass": "timeout",
  }.items(),
)
def test_failures_have_names(verifier, program, outcome):
  started = time.monotonic()
  assert verifier.outcome(program, stdin(("", "7"))) == outcome
  assert time.monotonic() - started < 20


@pytest.mark.parametrize(
  "end",
  ["quit()", "exit()", "exit(0)", "import sys; sys.exit()", "raise SystemExit", "sys.exit(1)",
   "import os; sys.stdout.flush(); os._exit(0)", "sys.stdout.close()", "sys.exit('bye')",
   "sys.stdout = open(1, 'w', closefd=False)", "print = None"],
)  # fmt: skip
def test_a_program_may_end_as_people_write_it(verifier, end):
  program = f"import sys\nprint(7)\n{end}"
  assert verifier.outcome(program, stdin(("", "7"))) == "right"
  assert verifier.outcome(program, stdin(("", "8"))) == "wrong"


def test_a_program_ends_when_its_threads_and_its_last_wishes_do(verifier):
  thread = "import threading, time\ndef late():\n  time.sleep(0.2)\n  print(7)\n"
  for end in ("quit()", "sys.exit(0)", ""):
    program = f"{thread}threading.Thread(target=late).start()\n{end}"
    assert verifier.outcome(program, stdin(("", "7"))) == "right"
    wish = f"import atexit\natexit.register(print, 7)\n{end}"
    assert verifier.outcome(wish, stdin(("", "7"))) == "right"
  assert verifier.outcome("print(7)\n1 / 0", stdin(("", "7"))) == "error"


def test_a_function_is_there_when_its_module_has_ended(verifier):
  tests = cases.Tests("call", ([1],), (7,), "f")
  for end in ("quit()", "sys.exit(f(1))"):
    assert verifier.outcome(f"import sys\ndef f(x): return 7\n{end}", tests) == "right"
    assert verifier.outcome(f"import sys\n{end}\ndef f(x): return 7", tests) == "error"
  assert verifier.outcome("def f(x): quit()", tests) == "error"


def test_long_lists_are_quick(verifier):
  expected = list(range(100_000))
  tests = cases.Tests("call", ([100_000],), (expected,), "f")
  assert verifier.outcome("def f(n): return list(range(n))", tests) == "right"


# Assertions in Python.

CHECK = {
  "prompt": "from typing import List\n\ndef helper(x):\n  return x + 1\n\n"
  'def f(x: List[int]) -> int:\n  """The sum plus one."""\n',
  "test": "METADATA = {}\n\ndef check(candidate):\n  assert candidate([1, 2]) == 4, 'first'\n"
  "  assert candidate([helper(1)]) == 3\n",
  "entry_point": "f",
}
CHECK_TESTS = cases.parse(json.dumps(CHECK))


@pytest.mark.parametrize(
  "program, outcome",
  [
    ("def f(x):\n  return sum(x) + 1", "right"),
    ("  return helper(sum(x))", "right"),  # continues the prompt
    ("def f(x: List[int]):\n  return helper(sum(x))", "right"),  # relies on its imports
    ("def f(x):\n  return None", "wrong"),
    ("def f(x):\n  return [][1]", "error"),
    ("def f(x):\n  raise AssertionError", "error"),
    ("def f(x):\n  while True: pass", "timeout"),
    ("def f(x):\n  return bytearray(1 << 30)", "memory"),
    ("import os\ndef f(x):\n  return len([os.dup(1) for _ in range(65)]) - 61", "error"),
    ("def f(x):\n  print('x' * (17 << 20), flush=True)\n  return 4", "error"),
    ("def g(x):\n  return 4", "wrong"),  # f is still the prompt's
    pytest.param("import os; os._exit(0)", "error", marks=pytest.mark.long),
    ("import sys; sys.exit(0)\ndef f(x): pass", "error"),
    pytest.param("import os; os._exit(105)", "error", marks=pytest.mark.long),
    ("def f(x):\n  import os; os._exit(0)", "error"),
    pytest.param(
      "class Any:\n  def __eq__(self, other): return True\ndef f(x): return Any()",
      "wrong",
      marks=pytest.mark.long,
    ),
    pytest.param(
      "class Any(int):\n  def __eq__(self, other): return True\ndef f(x): return Any(1)",
      "wrong",
      marks=pytest.mark.long,
    ),
    (
      "import builtins, sys\nbuiltins.AssertionError = ValueError\ndef check(c): pass\n"
      "def helper(x): return 0\nsys.modules['tests'] = 0\ndef f(x): return 0",
      "wrong",
    ),
    pytest.param(
      "import os\ndef f(x):\n  os.close(4)\n  return 4", "error", marks=pytest.mark.long
    ),
    pytest.param(
      "import os\ndef f(x):\n  os.write(4, bytes(8))\n  return 4", "wrong", marks=pytest.mark.long
    ),
    ("import os\ndef f(x):\n  os.write(4, b'\\xff' * 8)\n  return 4", "wrong"),
  ],
)
def test_assertions_run_where_no_candidate_does(verifier, program, outcome):
  assert verifier.outcome(program, CHECK_TESTS) == outcome


# The verifier itself.


def test_outcomes_of_responses(verifier):
  fence = "Think.\n```python\n{}\n```\nDone."
  programs = [
    "print(2)", "print(3)", "print(", "while 1: pass", "x = bytearray(1 << 30)", "print(2)",
  ]  # fmt: skip
  responses = [fence.format(program) for program in programs] + ["print(2)", "```python\nprint(2)"]
  outcomes = verifier.score(responses, [PRINTS_2] * len(responses))
  assert outcomes == [*"right wrong error timeout memory right unparsable unparsable".split()]
  with pytest.raises(ValueError, match="JSON"):
    verifier.score(["x"], ["42"])


def test_a_crash_of_the_verifier_is_not_a_wrong_answer(verifier, monkeypatch):
  starts = []
  original = process.Sandbox.__init__

  def dying(self, *args):
    original(self, *args)
    starts.append(self)
    if len(starts) in broken:
      os.killpg(self._process.pid, signal.SIGKILL)

  monkeypatch.setattr(process.Sandbox, "__init__", dying)
  broken = {1}  # once is the machine's doing
  assert verifier.score(["```\nprint(2)\n```"], [PRINTS_2]) == [Outcome.RIGHT]
  starts.clear()
  broken = {1, 2}
  assert verifier.score(["```\nprint(2)\n```"], [PRINTS_2]) == [Outcome.CRASH]


@pytest.mark.parametrize(
  "module, step, error",
  [
    (process.socket, "socketpair", OSError(28, "No space")),
    (process.subprocess, "Popen", OSError(28, "No space")),
    (process.subprocess, "Popen", BlockingIOError("Resource temporarily unavailable")),
    (process.threading, "Timer", RuntimeError("can't start new thread")),
  ],
)
def test_nothing_that_a_machine_refuses_is_raised(verifier, monkeypatch, module, step, error):
  """No space, files or threads: a crash of that response; the next call succeeds."""

  def refuse(*_, **__):
    raise error

  with monkeypatch.context() as patch:
    patch.setattr(module, step, refuse)
    assert verifier.score(["```\nprint(2)\n```"], [PRINTS_2]) == [Outcome.CRASH]
  assert verifier.score(["```\nprint(2)\n```"], [PRINTS_2]) == [Outcome.RIGHT]


def test_a_full_disk_is_none_of_a_sandbox_s(verifier, monkeypatch):
  """It lies in memory. With isolation `none` it has a directory, and the response is a crash."""

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  with CodeVerifier(1, LIMITS, "none") as unconfined:
    monkeypatch.setattr(process.tempfile, "mkdtemp", full)
    assert verifier.score(["```\nprint(2)\n```"], [PRINTS_2]) == [Outcome.RIGHT]
    assert unconfined.score(["```\nprint(2)\n```"], [PRINTS_2]) == [Outcome.CRASH]


DEEP = """
import os
os.mkdir("locked", 0)
for _ in range(1500):
  os.mkdir("d" * 100)
  os.chdir("d" * 100)
open("file", "w").close()
print(2)
"""


def test_directories_of_any_depth_are_removed(verifier, monkeypatch, tmp_path):
  monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
  assert verifier.score([f"```\n{DEEP}\n```"], [PRINTS_2]) == [Outcome.RIGHT]
  with CodeVerifier(1, LIMITS, "none") as unconfined:
    assert unconfined.score([f"```\n{DEEP}\n```"], [PRINTS_2]) == [Outcome.RIGHT]
  assert not os.listdir(tmp_path)


@needs_namespaces
def test_from_several_threads_and_queueing_takes_no_time():
  """Six programs of 0.7 s in two sandboxes at once: each has 2 s, all need 2.1 s."""
  answer = json.dumps({"inputs": [""], "outputs": ["7"]})
  program = "```\nimport time; time.sleep(0.7); print(7)  # {}\n```"
  with CodeVerifier(2, LIMITS, "namespaces") as verifier:
    outcomes = [None, None]

    def score(n):
      outcomes[n] = verifier.score([program.format(3 * n + i) for i in range(3)], [answer] * 3)

    threads = [threading.Thread(target=score, args=(n,)) for n in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert outcomes == [[Outcome.RIGHT] * 3] * 2


def test_it_refuses_to_run_unconfined(monkeypatch):
  original = process.Sandbox.__init__

  def denied(self, isolation, *args):
    if isolation != "none":
      raise process.SandboxError("unshare: Operation not permitted")
    original(self, isolation, *args)

  monkeypatch.setattr(process.Sandbox, "__init__", denied)
  for isolation in ("auto", "namespaces"):
    message = (
      rf"^reward.isolation={isolation}: .*\(unshare: Operation .*reward.isolation=none[^\n]*$"
    )
    with pytest.raises(ValueError, match=message):
      CodeVerifier(1, isolation=isolation)
  with CodeVerifier(1, LIMITS, "none") as verifier:
    assert verifier.outcome("print(7)", stdin(("", "7"))) == Outcome.RIGHT
  for name in ("jail", "seccomp"):
    with pytest.raises(ValueError, match=rf"reward\.isolation='{name}'"):
      CodeVerifier(1, isolation=name)
    with pytest.raises(ValueError, match=name):
      original(process.Sandbox.__new__(process.Sandbox), name, LIMITS)
