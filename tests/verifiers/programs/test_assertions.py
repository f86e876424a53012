"""Assertions in Python: what a program can do to make them pass, short of being right."""

import json

import pytest

from gspo_jax.verifiers.programs import cases

PROMPT = 'def f(x):\n  """Doc."""\n'


def parse(check, prompt=PROMPT):
  return cases.parse(json.dumps({"prompt": prompt, "test": check, "entry_point": "f"}))


def outcome(verifier, check, program, prompt=PROMPT):
  return verifier.outcome(program, parse(check, prompt))


ALL = "def check(c):\n  assert all(map(c, [1, 2, 3]))\n"
ANY = "def check(c):\n  assert not any(map(c, [1, 2, 3]))\n"
NEXT = "def check(c):\n  assert next(map(c, [1]), True)\n"


@pytest.mark.parametrize("check", [ALL, ANY, NEXT], ids=["all", "any", "next"])
@pytest.mark.parametrize(
  "raises",
  ["StopIteration", "StopAsyncIteration", "type('Mine', (StopIteration,), {})", "GeneratorExit",
   "SystemExit", "KeyboardInterrupt", "type('Mine', (BaseException,), {})"],
)  # fmt: skip
def test_an_exception_is_no_end_of_an_iteration(verifier, check, raises):
  assert outcome(verifier, check, f"def f(x): raise {raises}") == "error"


CLOSE = "def check(c):\n  assert not abs(c(1) - 2.0) > 1e-6\n"
RELATIVE = "def check(c):\n  assert abs(c(1) - 2.0) <= 1e-6 * max(abs(c(1)), 2.0)\n"
RATIO = "def check(c):\n  assert not abs(c(1) - 2.0) / abs(c(1)) > 1e-6\n"
INSIDE = "def check(c):\n  assert not abs(c([1])[0] - 2.0) > 1e-6\n"


@pytest.mark.parametrize("check", [CLOSE, RELATIVE, RATIO])
@pytest.mark.parametrize("value", ["math.nan", "math.inf", "complex(math.nan, 0)", "1e999"])
def test_what_is_no_number_is_near_to_none(verifier, check, value):
  assert outcome(verifier, check, f"import math\ndef f(x): return {value}") == "wrong"


def test_near_is_near_and_nan_inside_a_value_is_seen(verifier):
  for check in (CLOSE, RELATIVE, RATIO):
    assert outcome(verifier, check, "def f(x): return 2.0000001") == "right"
  for value in ("[nan]", "(nan,)", "{0: nan}"):
    assert outcome(verifier, INSIDE, f"nan = float('nan')\ndef f(x): return {value}") == "wrong"


def test_tests_that_speak_of_nan_get_it(verifier):
  nan = "import math\ndef check(c):\n  assert math.isnan(c(1))\n"
  assert outcome(verifier, nan, "def f(x): return float('nan')") == "right"
  assert outcome(verifier, nan, "def f(x): return 1.0") == "wrong"
  documented = CLOSE.replace("\n", "\n  'Is it finite, inf or nan?'  # nan\n", 1)
  assert outcome(verifier, documented, "def f(x): return float('nan')") == "wrong"
  prompt = 'def f(x):\n  """Is it finite, inf or nan?"""\n'
  assert outcome(verifier, CLOSE, "def f(x): return float('nan')", prompt) == "wrong"
  inf = "def check(c):\n  assert c(1) == float('inf')\n"
  assert outcome(verifier, inf, "def f(x): return 1e999") == "right"


FORGIVING = """
def check(c):
  for _ in range(3):
    try:
      c(1)
    except BaseException:
      pass
  assert c is not None
"""


@pytest.mark.parametrize(
  "program",
  ["def f(x) return 1", "1 / 0\ndef f(x): return 1", "def g(x): return 1\nf = g\ndel f",
   "import os\nos._exit(0)", "import os\ndef f(x): os._exit(0)", "def f(x): quit()",
   "import os\ndef f(x): os.close(4)", "def f(x): raise StopIteration",
   "import os\ndef f(x): os.write(4, b'\\0\\0\\0\\0\\0\\0\\0\\1{')",
   "def f(x): raise MemoryError", "import sys\nsys.settrace(lambda *a: 1 / 0)\ndef f(x): return 1"],
)  # fmt: skip
def test_no_answer_is_no_pass_whatever_the_tests_forgive(verifier, program):
  assert outcome(verifier, FORGIVING, program) != "right"


ERRORS = """
def check(c):
  try:
    c(1)
  except ValueError:
    return
  assert False
"""


def test_tests_of_errors(verifier):
  for error in ("ValueError('no')", "type('Mine', (ValueError,), {})", "int('x')"):
    assert outcome(verifier, ERRORS, f"def f(x): raise {error}") == "right", error
  bad_text = "def f(x): raise UnicodeDecodeError('a', b'', 0, 1, 'r')"  # wants arguments
  assert outcome(verifier, ERRORS, bad_text) == "right"
  for error in ("KeyError", "AssertionError", "type('ValueError', (Exception,), {})"):
    assert outcome(verifier, ERRORS, f"def f(x): raise {error}") == "error", error
  assert outcome(verifier, ERRORS, "def f(x): return 1") == "wrong"


LIAR = """
class Liar({}):
  __eq__ = __ge__ = __le__ = lambda self, other: True
  __ne__ = __lt__ = __gt__ = lambda self, other: False
  __sub__ = __rsub__ = __abs__ = lambda self, *other: 0
  __hash__ = lambda self: 1
  __bool__ = lambda self: True
  __class__ = float
def f(x): return Liar({})
"""


@pytest.mark.parametrize("kind", ["int, 3", "float, 3.5", "str, 'x'", "object,"])
def test_no_object_of_a_program_s_own_gets_out(verifier, kind):
  base, _, value = kind.partition(",")
  program = LIAR.replace("{}", base, 1).replace("{}", value.strip())
  for check in ("assert c(1) == 2", "assert not c(1) != 2", "assert 1.9 < c(1) < 2.1"):
    assert outcome(verifier, f"def check(c):\n  {check}\n", program) != "right", check


PATCHES = """
import builtins, sys, math, unittest
builtins.abs = builtins.all = builtins.isinstance = lambda *a: 0
builtins.AssertionError = ValueError
math.isclose = lambda *a, **k: True
unittest.TestCase.assertEqual = lambda *a: None
sys.settrace(lambda *a: None)
sys.modules["tests"] = sys
def check(c): pass
def helper(x): return 0
def f(x): return 0
"""


def test_what_a_program_patches_is_its_own(verifier):
  check = """
import math, unittest
def check(c):
  assert math.isclose(c(1), 2.0) and abs(c(1) - 2) < 1e-6
  unittest.TestCase().assertEqual(c(1), 2)
"""
  assert outcome(verifier, check, PATCHES) in ("wrong", "error")
  assert outcome(verifier, check, "def f(x): return 2") == "right"


def test_keys_that_collide_cost_a_program_its_own_time(verifier):
  program = """
import json, os
def f(x):
  value = {"set": [i * ((1 << 61) - 1) for i in range(1, 30_000)]}
  data = json.dumps({"value": value}).encode()
  os.write(4, len(data).to_bytes(8, "big") + data)
"""
  assert outcome(verifier, "def check(c):\n  assert c(1) == 1\n", program) == "timeout"


def test_tests_that_cannot_judge_are_no_verdict(verifier):
  """A function without a call, or with an argument that cannot be sent, gives no verdict."""
  never = "def check(c):\n  for x in []:\n    assert c(x)\n"
  sends = "def check(c):\n  assert c(lambda: 1) == 1\n"
  for check in (never, sends):
    for program in ("def f(x): return 1", "def f(x) return"):
      assert outcome(verifier, check, program) == "crash"
  opaque = "def check(c):\n  assert c(c(1))\n"  # The program returns a value that cannot be sent.
  assert outcome(verifier, opaque, "def f(x): return print") == "wrong"


def test_a_prompt_may_end_before_its_function_begins(verifier):
  check = "def check(c):\n  assert f(1) == 1\n"  # the function by its name
  for prompt in ("def f(x):\n", "import math\ndef f(x: int) -> int:", "class A: pass\ndef f(x):\n"):
    for program, expected in {
      "def f(x):\n  return x": "right",
      "  return x": "right",
      "  return x + 1": "wrong",
      "def f(x) return x": "error",
    }.items():
      program = program if program.startswith("def") else "\n" + program
      assert outcome(verifier, check, program, prompt) == expected, (prompt, program)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(test="METADATA = {}\n"), "must define a function `check`"),
    (dict(test="def test(c):\n  assert c(1) == 1\n"), "must define a function `check`"),
    (dict(test="def check(c):\n  pass\n"), "never uses its argument"),
    (dict(test="def check():\n  assert True\n"), "never uses its argument"),
    (dict(test="def check(c)\n  assert c(1) == 1\n"), "test is no Python"),
    (dict(test="def check(c):\n  assert c(1) ==\n"), "test is no Python"),
    (dict(test=""), "must define a function `check`"),
    (dict(test="(" * 100_000), "test is no Python"),
    (dict(test="def check(c):\n  assert c(1)\0\n"), "test is no Python"),
    (dict(test=None), "must be text"),
    (dict(test=["assert f(1) == 1"]), "must be text"),
    (dict(entry_point=""), "must be text"),
    (dict(entry_point=None), "must be text"),
    (dict(prompt="Write a function f."), "prompt is no Python"),
  ],
)
def test_tests_that_no_program_can_pass_or_fail_are_errors(changes, message):
  good = {"prompt": PROMPT, "test": "def check(c):\n  assert c(1) == 1\n", "entry_point": "f"}
  assert cases.parse(json.dumps(good)).kind == "check"
  with pytest.raises(ValueError, match=message):
    cases.parse(json.dumps(good | changes))
