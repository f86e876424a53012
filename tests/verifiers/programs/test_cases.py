"""Tests of programs as data sets carry them, and LiveCodeBench's rules of comparison."""

import base64
import collections
import json
import os
import pickle
import tracemalloc
import zlib

import pytest
from support.cost import assert_linear

from gspo_jax.verifiers.programs import cases, extraction
from gspo_jax.verifiers.programs.sandbox import wire

CASES = [{"input": "1\n", "output": "2", "testtype": "stdin"}]


def packed(value, protocol=4):
  """Packs tests like LiveCodeBench's publishers."""
  return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def same(value, expected, wrapped=False):
  """Compares a value after its way out of a sandbox."""
  return cases.same_result(json.dumps({"value": wire.encode(value)}), expected, wrapped)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_private_tests_of_livecodebench(protocol):
  assert cases.decode_private(packed(json.dumps(CASES), protocol)) == CASES
  assert cases.decode_private(packed(CASES, protocol)) == CASES
  assert cases.decode_private(json.dumps(CASES)) == CASES


class _Bomb:
  def __reduce__(self):
    return os.mkdir, (os.environ["BOMB"],)


def test_a_pickle_is_never_executed(tmp_path, monkeypatch):
  monkeypatch.setenv("BOMB", str(tmp_path / "boom"))
  for value in (_Bomb(), [CASES, _Bomb()], collections.OrderedDict(a=1), os.system):
    for protocol in (0, 2, 4):
      with pytest.raises(ValueError, match="only text is accepted"):
        cases.decode_private(packed(value, protocol))
  assert not (tmp_path / "boom").exists()
  pickle.loads(pickle.dumps(_Bomb()))
  assert (tmp_path / "boom").exists()  # it would have gone off


def test_bad_private_tests_are_errors(monkeypatch):
  good = packed(json.dumps(CASES))
  for column in ("!!!", "AAAA", good[:-8], packed(json.dumps({})), packed("x"), packed(3)):
    with pytest.raises(ValueError, match="private tests"):
      cases.decode_private(column)
  for opcodes in (b".", b"(R.", b"\x80\x04]}b.", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f."):
    with pytest.raises(ValueError, match="private tests"):
      cases.decode_private(base64.b64encode(zlib.compress(opcodes)).decode())
  monkeypatch.setattr(cases, "MAX_DECODED", 1000)
  with pytest.raises(ValueError, match="more than 1000 bytes"):
    cases.decode_private(packed(json.dumps(CASES * 1000)))


def test_columns_of_livecodebench():
  public = json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}])
  private = packed(json.dumps([{"input": '"a"\n{}', "output": "[null]", "testtype": "functional"}]))
  row = {
    "public_test_cases": public,
    "private_test_cases": private,
    "metadata": '{"func_name":"f"}',
  }
  tests = cases.parse(json.dumps(row))
  assert (tests.kind, tests.function) == ("call", "f")
  assert tests.inputs == ([[1], 2], ["a", {}]) and tests.outputs == (3, [None])
  row |= {"metadata": "{}"}
  tests = cases.parse(json.dumps(row))
  assert tests.kind == "stdin" and tests.inputs == ("[1]\n2", '"a"\n{}')


def test_columns_of_apps_and_taco():
  tests = cases.parse('{"inputs": [["1", "2"], "3"], "outputs": [["4"], "5\\n"]}')
  assert tests.kind == "stdin"
  assert (tests.inputs, tests.outputs) == (("1\n2", "3"), ("4", "5\n"))
  tests = cases.parse('{"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[[3]]]}')
  assert (tests.inputs, tests.outputs, tests.wrapped) == (([[1, 2]],), ([[3]],), True)
  assert same([3], [[3]], wrapped=True) and same([[3]], [[3]], wrapped=True)
  assert not same([3], [[3]]) and not same(3, [[3]], wrapped=True)


@pytest.mark.parametrize(
  "value, expected, equal",
  [
    ({1: 2, 2: 1}, {"1": 2, "2": 1}, True), ({1: 2}, {"1": 3}, False), ({1: 2}, {"01": 2}, False),
    ({1.5: 1, True: 2, None: 3}, {"1.5": 1, "true": 2, "null": 3}, True),
    ({1: 2, "1": 2}, {"1": 2, "2": 2}, False), ({(1, 2): 3}, {"(1, 2)": 3}, False),
    ([(1, 2), (3,)], [[1, 2], [3]], True), ([(1, 2)], [[2, 1]], False),
    ({"a": ((1,), 2)}, {"a": [[1], 2]}, True), (((1, 2),), [[1, 2]], True),
    ({1}, [1], False), ((), [], True), ((), {}, False),
  ],
)  # fmt: skip
def test_values_of_python_as_json_has_them(value, expected, equal):
  assert same(value, [expected], wrapped=True) is equal


@pytest.mark.parametrize(
  "text",
  ["", "42", "[]", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}',
   '{"prompt": "", "test": "", "entry_point": "f"}', '{"test": "x"}', "[" * 100_000,
   '{"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"}',
   '{"public_test_cases": "x", "private_test_cases": "", "metadata": ""}',
   '{"public_test_cases": "[]", "private_test_cases": "", "metadata": "{}"}',
   '{"public_test_cases": "[1]", "private_test_cases": "", "metadata": "[1]"}',
   '{"public_test_cases": "[{}]", "private_test_cases": "", "metadata": "{}"}',
   '{"inputs": "12", "outputs": "34"}', '{"inputs": {"a": 1}, "outputs": [1]}',
   '{"inputs": [1], "outputs": [1], "fn_name": "f"}', '{"inputs": [1], "outputs": null}',
   '{"inputs": [[1]], "outputs": [1], "fn_name": 3}',
   '{"inputs": ["1", "2"], "outputs": ["", " \\n"]}', '{"inputs": ["1"], "outputs": [[]]}',
   '{"inputs": ["1"], "outputs": [null]}', '{"inputs": [null], "outputs": ["1"]}',
   '{"inputs": [[1], [2]], "outputs": [null, [null]], "fn_name": "f"}',
   '{"inputs": ["1"], "outputs": ["null"], "fn_name": "f"}',
   '{"inputs": ["1"], "outputs": ["1"], "input_files": [1]}'],
)  # fmt: skip
def test_answers_without_tests_are_errors(text):
  with pytest.raises(ValueError, match="tests"):
    cases.parse(text)


@pytest.mark.parametrize(
  "output, expected, same",
  [
    ("1 2\n3\n", "1 2\n3", True), ("  1 2 \n 3\n\n\n", "1 2\n3", True), ("1\n\n2", "1\n2", False),
    ("1\n2\n3", "1\n2", False), ("1", "1\n2", False), ("1 2", "1\n2", False),
    ("1  2", "1 2", True),  # Equal numbers.
    ("a  b", "a b", False),  # Different texts.
    ("1.0", "1", True), ("1e2 0.50", "100 .5", True),
    ("0.1", "0.10000000000000001", False),  # exact, not approximate
    ("50000000000000001", "50000000000000000", False), ("Yes", "YES", False),
    ("yes 1.0", "yes 1", False), ("", "", True), ("", "0", False),
    ("nan", "nan", True),  # the same text
    ("nan", "NaN", False), ("sNaN", "1", False), ("1e999999999", "1", False),
    ("1_000", "1000", True),  # Python and upstream read it.
    ("1\r\n2\r\n", "1\n2\n", True),
  ],
)  # fmt: skip
def test_printed_output(output, expected, same):
  assert cases.same_text(output, expected) is same


@pytest.mark.parametrize(
  "output, expected, close",
  [
    ("0.3333333", "0.333333333", True), ("0.33333", "0.333333333", False),
    ("3.1415926\n2", "3.141592653589\n2", True), ("1000000.5", "1000000.0", True),
    ("1000002.5", "1000000.0", False), ("1e-7", "0.0", True), ("-0.0000001", "0.0", True),
    ("2", "2.0000001", True), ("2.", "1.9999999999", True), ("5e-1", "0.50000001", True),
    ("1.0000001", "1", False),  # an integer
    ("1000000001", "1000000000", False), ("1000000001.0", "1000000000", False),
    ("Case 1: 0.3333333", "Case 1: 0.333333333", True), ("case 1: 0.5", "Case 1: 0.5", False),
    ("Case 2: 0.5", "Case 1: 0.5", False), ("0.5", "0.5 0.5", False), ("0.5 0.5", "0.5", False),
    ("nan", "0.5", False), ("inf", "1e300", False), ("0.5x", "0.5", False), ("0_5", "0.5", False),
    ("1e999999999", "0.5", False), ("0.5", "1e999999999", False), ("٠.5000001", "0.5", False),
    ("yes", "Yes", False), ("1.2.3", "1.2.30", False), ("0x1", "1.0", False),
  ],
)  # fmt: skip
def test_decimals_agree_within_the_tolerance(output, expected, close):
  assert cases.same_text(output, expected, 1e-6) is close
  assert not close or not cases.same_text(output, expected)


@pytest.mark.parametrize(
  "value, expected, close",
  [
    (0.1 + 0.2, 0.3, True), (0.30001, 0.3, False), ([1.0000001, 2], [1.0, 2], True),
    ([(0.5,)], [[0.5000001]], False), ({"a": 0.5000001}, {"a": 0.5}, True), (1.0000001, 1, False),
    (3, 3.0000001, True), (True, 1.0000001, False), ("0.5000001", 0.5, False), (None, 0.5, False),
    (float("nan"), 0.5, False), (float("inf"), 1e308, False), (1e308, float("inf"), False),
    (10**400, 1e308, False), (0.5, [0.5], False), (0.5 + 0j, 0.5000001, False),
  ],
)  # fmt: skip
def test_floats_agree_within_the_tolerance(value, expected, close):
  result = json.dumps({"value": wire.encode(value)})
  assert cases.same_result(result, expected, tolerance=1e-6) is close


@pytest.mark.parametrize(
  "value, expected, equal",
  [
    ((1, 2), [1, 2], True),
    ([(1, 2)], [[1, 2]], False),  # upstream: only the outermost tuple
    (1, True, True), (1.0, 1, True), (1 + 0j, 1, True), (0.1 + 0.2, 0.3, False),
    (float("nan"), float("nan"), False), (None, None, True), (None, 0, False), ("1", 1, False),
    ("a", ["a"], False), ({"a": 1}, {"a": 1}, True),
    ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}, True), ({"a": 1}, {"a": 1, "b": 2}, False),
    ({"a": 1, "b": 2}, {"a": 1, "c": 2}, False), ({1: 2}, {"1": 2}, False), ({}, [], False),
    ([], {}, False), ({1}, [1], False), (b"a", "a", False), (7**5000, 7**5000, True),
    ([7**5000], [7**5000 + 1], False), ([1, [2, [3]]], [1, [2, [3]]], True),
    ([1, [2, [3]]], [1, [2, [4]]], False), ([1, 2], [1], False),
    (type("Liar", (int,), {"__eq__": lambda *_: True})(3), 7, False),
  ],
)  # fmt: skip
def test_returned_values(value, expected, equal):
  assert same(value, expected) is equal


@pytest.mark.parametrize(
  "text",
  ["", "7", "[]", "{}", "null", '{"value"', '{"value": {}}', '{"value": {"int": 7}}',
   '{"value": {"int": "7", "tuple": []}}', '{"value": {"complex": [1, 2, 3]}}',
   '{"value": {"complex": "7"}}', '{"value": {"dict": 7}}', '{"value": {"dict": [7]}}',
   '{"value": {"dict": [[[], 7]]}}', '{"value": {"dict": [["a", 1], ["a", 1]]}}',
   '{"value": {"tuple": 7}}', '{"value": ' + "[" * 200_000, '{"value": ' + "9" * 9000 + "}",
   '{"value": {"complex": [1' + "0" * 400 + ", 0]}}"],
)  # fmt: skip
def test_forged_results_equal_nothing(text):
  for expected in (8, [8], {"a": 1, "b": 1}, "8"):
    assert cases.same_result(text, expected) is False


def collisions(n):
  """Returns integers of one hash; a set takes quadratic time for them."""
  return [i * ((1 << 61) - 1) for i in range(1, n // 20)]


# Of about n characters each.
RESULTS = [
  lambda n: {"set": collisions(n)},
  lambda n: {"dict": [[i, 0] for i in collisions(n)]},
  lambda n: {"dict": [["a", 1]] * (n // 10)},
  lambda n: {"int": "f" * n},
  lambda n: {"tuple": [[]] * (n // 4)},
  lambda n: [{}] * (n // 4),
  lambda n: "9" * n,
]
EXPECTED = [lambda n: 7, lambda n: [7], lambda n: {"a": 1}, lambda n: [[]] * (n // 4)]


@pytest.mark.parametrize("expected", EXPECTED)
@pytest.mark.parametrize("result", RESULTS)
def test_comparing_a_result_is_linear(result, expected):

  def make(n):
    return json.dumps({"value": result(n)}), expected(n)

  assert_linear(cases.same_result, make)


OUTPUTS = [
  *[lambda n, unit=unit: unit * n for unit in ("\n1", "1 \r", " 1", " ", "9")],
  lambda n: "1e" + "9" * n,
  lambda n: "9" * n + "e9",
]
PRINTED = [
  lambda n, output: "1",
  lambda n, output: output,
  lambda n, output: output + "2",
  lambda n, output: "1 " * n,
  lambda n, output: "9" * n + ".0",
]


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
@pytest.mark.parametrize("expected", PRINTED)
@pytest.mark.parametrize("output", OUTPUTS)
def test_comparing_an_output_is_linear(output, expected, tolerance):
  assert_linear(cases.same_text, lambda n: (output(n), expected(n, output(n)), tolerance))


@pytest.mark.parametrize("unit", ["def ", "async ", "async\n", "f ", "f\n", " a\ndef a\n", " \n"])
def test_seeing_whether_code_goes_on_is_linear(unit):
  tests = cases.Tests("check", function="f", preamble="def f():\n")
  assert_linear(extraction.completes, lambda n: (unit * n, tests))


@pytest.mark.parametrize(
  "program, continues",
  [
    ("  return x\n", True),
    ("  return x\n\nf(3)\n", True),  # a call is no definition
    ("def f(x):\n  return x\n", False),
    ("async def f (x):\n  return x\n", False),
    ("def f[T](x: T) -> T:\n  return x\n", False),
    ("f = lambda x: x", False),
    ("def f2(x):\n  return x\n", True),
    ("  return g(x)\n\ndef g(x):\n  return x\n", True),  # The body uses it.
    (
      "  return g(x)\n\n# Helper.\n@cache\ndef g(x):\n  return h(x)\n\ndef h(x):\n  return x\n",
      True,
    ),
    ("  return g(x)\n\nif True:\n  pass\ndef g(x):\n  return x\n", True),
    ("    # Solution\ndef f(x):\n  return x\n", False),
  ],
)
def test_what_does_not_define_the_function_continues_the_prompt(program, continues):
  tests = cases.Tests("check", function="f", preamble="def f(x):\n")
  assert extraction.completes(program, tests) == "def f(x):\n" * continues + program


@pytest.mark.parametrize(
  "rest",
  [
    *("def", "class", "#", "if", "print", "print(f("),
    *("def f(x):\n  return 2\n", "def h(x):\n  re", "if __name__ == '__main__':\n  f(1)"),
  ],
)
def test_a_body_ends_where_humaneval_ends_it(rest):
  """With the stop string at its end, or cut off anywhere."""
  tests = cases.Tests("check", function="f", preamble="def f(x):\n")
  body = "\n  return g(x) if f else x\n\ndef g(x):\n  return x\n"
  assert extraction.completes(f"{body}{rest}", tests) == f"def f(x):\n{body}"


def test_what_a_large_output_takes_of_memory():
  tracemalloc.start()
  for text, expected in (("1 " * 500_000, "1"), ("1\n" * 500_000, "1"), ("1 " * 500_000, "2 2")):
    assert not cases.same_text(text, expected)
  assert tracemalloc.get_traced_memory()[1] < 8 << 20
  tracemalloc.stop()


def test_nothing_right_is_longer_than_the_bound():
  for expected in (0, "", "é" * 1000, 1e308, [1e22] * 1000, [[]] * 1000, {"": {}}, [True] * 1000):
    assert len(json.dumps({"value": wire.encode(expected)})) <= cases.most_bytes(expected)
  assert len(json.dumps(wire.encode([10**22] * 1000))) <= cases.most_bytes([1e22] * 1000)


def test_values_survive_the_wire():
  counter, big = collections.Counter("aab"), 7**9000
  values = [
    None, True, 0, -big, 1.5, float("inf"), "é\ud800", b"\0", 1j, [], (), {}, set(), {1: (2,)},
  ]  # fmt: skip
  for value in [*values, values, counter, frozenset({1, (2, 3)}), {(1, 2): [{3}]}]:
    again = wire.decode(json.loads(json.dumps(wire.encode(value))))
    assert again == value and (type(again) is type(value) or isinstance(value, dict | frozenset))
  assert wire.encode(True) is True and wire.encode(1) is not True

  class Odd(int):
    def __eq__(self, other):
      return True

    __hash__ = int.__hash__

  assert type(wire.encode(Odd(3))) is int and wire.decode(wire.encode([Odd(3)])) != [7]
  for value in (object(), [iter([])], {1: print}):
    with pytest.raises(TypeError, match="cannot be compared"):
      wire.encode(value)
  for forged in ({"os": 1}, {"int": "1", "set": []}, {"set": [[1]]}, {}):
    with pytest.raises((ValueError, TypeError)):
      wire.decode(forged)


FENCED = "Sure.\n```{}\nprint(1)\n```\nDone."


@pytest.mark.parametrize(
  "response, program",
  [
    (FENCED.format("python"), "print(1)"),
    (FENCED.format("Python"), "print(1)"),
    (FENCED.format("py"), "print(1)"),
    (FENCED.format("py3"), "print(1)"),
    (FENCED.format(""), "print(1)"),
    (FENCED.format("{.python}"), "print(1)"),
    (FENCED.format("cpp"), None),
    (FENCED.format("python") + FENCED.format("python").replace("1", "2"), "print(2)"),
    (FENCED.format("python") + "\nOutput:\n```\n1\n```", "print(1)"),
    (FENCED.format("") + "\n```text\n1\n```", "print(1)"),
    ("```python\nprint(1)\n```\n```python\nprint(", "print(1)"),  # cut off
    ("```python\nprint(1)", None),
    ("print(1)", None),
    ("```python\n\n```", None),
    ("<think>\n```python\nprint(0)\n```\n</think>\n```python\nprint(1)\n```", "print(1)"),
    ("```python\nprint(0)\n```\n</think>\nNo.", None),
    ("  ```python\n  x = 1\n  ```", "x = 1"),
    ("1. So:\n   ```py\n   if x:\n     y\n\n  z\nw\n   ```", "if x:\n  y\n\nz\nw"),
    ("\t```py\n\tx\n\t\ty\n\t```", "x\n\ty"),
    ("```py\n  x\n  ```", "  x"),
    ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
    ("~~~\nprint(1)\n~~~", "print(1)"),
    ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r"),
    ("", None),
  ],
)
def test_extraction(response, program):
  assert extraction.extract(response) == program


def test_base_models_answer_with_bare_code():
  assert extraction.extract("    return 1\n", fences=False) == "    return 1\n"
  assert extraction.extract(FENCED.format("python"), fences=False) == "print(1)"
  assert extraction.extract("```python\nprint(", fences=False) is None


@pytest.mark.parametrize("unit", ["```\n", "```python\n", "`", "</think>"])
def test_extraction_is_linear(unit):
  assert_linear(extraction.extract, lambda n: (unit * n,))
