"""Rows of programming contests that an exact comparison would judge wrongly."""

import json

import pytest
from support.data_cases import load, write
from support.sandboxes import LIMITS, needs_namespaces

from gspo_jax import rewards
from gspo_jax.data import sources
from gspo_jax.verifiers.programs.verifier import CodeVerifier

CHECK = rewards.answer_check("code")
PROBLEM = dict(
  id="1/A", rating=1000, description="Double it.", input_format="A number.",
  output_format="A number.", note=None, interaction_format=None, generated_checker=None,
  input_mode="stdio", executable=True, official_tests_complete=True,
  official_tests=[dict(input="1\n", output="2\n"), dict(input="4\n", output="8\n")],
)  # fmt: skip
FILES = "Read the number from input.txt and write the answer to output.txt."


def read(tmp_path, form, row):
  path = write(tmp_path / "rows.jsonl", [row])
  (prompt,) = load(f"{form}@{path}", CHECK, max_prompt_tokens=2000)
  return prompt.answer


UNJUDGEABLE = {
  "a checker": (dict(generated_checker="import sys"), "generated_checker is set"),
  "a conversation": (dict(interaction_format="Print queries."), "it is interactive"),
  "a conversation, in the text": (dict(note="This is an interactive problem."), "interactive"),
  "a conversation, by its tag": (dict(tags=["interactive", "math"]), "interactive"),
  "not executable": (dict(executable=False), "executable is false"),
  "any answer": (dict(output_format="If there are several answers, print any."), "several answers"),
  "any of them": (
    dict(output_format="If there are multiple solutions, you can output any of them."), "several"
  ),
  "any, by the description": (dict(description="Print any two numbers with the sum n."), "several"),
  "any, by the note": (dict(note="Any valid answer will be accepted."), "several answers"),
  "one of them": (dict(note="If there are many optimal sets, print one of them."), "several"),
  "whichever": (
    dict(note="If there are multiple sets, you may print whichever you like."), "several answers"
  ),
  "no order": (dict(output_format="The order of the output does not matter."), "several answers"),
  "any order": (dict(output_format="Print the numbers in any order."), "several answers"),
  "input that is cut off": (dict(official_tests=[dict(input="9\n1 2 3...", output="2")]), "test 1"),
  "output that is cut off": (
    dict(official_tests=[dict(input="1", output="2"), dict(input="1", output="0.5 12...\n")]),
    r"test 2 is truncated",
  ),
  "no output": (dict(official_tests=[dict(input="1", output="")]), "`pass` would be right"),
  "null output": (dict(official_tests=[dict(input="1", output=None)]), "is null"),
  "no tests": (dict(official_tests=[]), "is empty or not a list"),
  "tests that are null": (dict(official_tests=None), "is empty or not a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNJUDGEABLE)
def test_problems_that_tests_alone_cannot_judge_are_bad_rows(name, tmp_path):
  changes, reason = UNJUDGEABLE[name]
  with pytest.raises(sources.DataError, match=rf"line 1: .*{reason}"):
    read(tmp_path, "codeforces", PROBLEM | changes)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    dict(output_format="Do not print any extra spaces."),
    dict(description="In how many ways can you choose any two of them?"),
    dict(description="In one operation you may choose any two numbers."),
    dict(output_format="If there are several answers, print the smallest one."),
    dict(description="If there are several such cells, he chooses one of them."),
    dict(official_tests=[dict(input="2\n#..\n...", output="..#\n...")]),  # a grid
    dict(official_tests_complete=False),
    dict(generated_checker="", interaction_format=" "),
  ],
)
def test_others_are_not(changes, tmp_path):
  assert json.loads(read(tmp_path, "codeforces", PROBLEM | changes)).keys() == {"inputs", "outputs"}


def test_statements_of_apps_count_too(tmp_path):
  row = dict(problem_id=1, question="Print any divisor of n.", starter_code="")
  row["input_output"] = json.dumps(dict(inputs=["4"], outputs=["2"]))
  with pytest.raises(sources.DataError, match=r"line 1: several answers are right \('Print any'\)"):
    read(tmp_path, "apps", row)


READS = "n = int(open('{0}').read())\n"
PROGRAMS = {
  "closed": READS + "with open('{1}', 'w') as f: f.write(str(2 * n))",
  "open at the end": READS + "f = open('{1}', 'w')\nprint(2 * n, file=f)",
  "redirected": "import sys\nsys.stdin = open('{0}')\nsys.stdout = open('{1}', 'w')\n"
  "print(2 * int(input()))",
  "debugging": READS + "print('n is', n)\nopen('{1}', 'w').write(str(2 * n))",
  "standard": "print(2 * int(input()))",
  "from the future": "from __future__ import annotations\nprint(2 * int(input()))",
  "half": READS + "print(2 * n)",
  "wrong": READS + "open('{1}', 'w').write(str(2 * n + 1))",
  "nothing": READS,
}


@needs_namespaces
@pytest.mark.parametrize(
  "changes, names",
  [
    pytest.param(dict(input_mode="file"), ("input.txt", "output.txt"), marks=pytest.mark.long),
    pytest.param(
      dict(input_mode="file", description=FILES),
      ("input.txt", "output.txt"),
      marks=pytest.mark.long,
    ),
    (dict(input_mode=None, description=FILES), ("input.txt", "output.txt")),
    (dict(input_mode="file", description="Read sum.in and write sum.out."), ("sum.in", "sum.out")),
  ],
)
def test_programs_may_use_files(changes, names, tmp_path):
  answer = read(tmp_path, "codeforces", PROBLEM | changes)
  responses = [f"```python\n{program.format(*names)}\n```" for program in PROGRAMS.values()]
  with CodeVerifier(1, LIMITS) as verifier:
    outcomes = verifier.score(responses, [answer] * len(responses))
  expected = ["right"] * 7 + ["wrong"] * 2
  assert dict(zip(PROGRAMS, outcomes)) == dict(zip(PROGRAMS, expected))


CALLS = {
  "keys of a result": ([[1, 1, 2]], {"1": 2, "2": 1}, "return {1: 2, 2: 1}", "return {1: 2, 2: 2}"),
  "keys of an argument": ([{"1": 10, "2": 20}], 30, "return x[1] + x[2]", "return x[1]"),
  "texts as keys": ([{"1": 10, "2": 20}], 30, "return x['1'] + x['2']", "return x['1']"),
  "tuples": ([[7, 9]], [[3, 1], [4, 1]], "return [(3, 1), (4, 1)]", "return [(3, 1), (4, 2)]"),
  "deep tuples": ([1], {"a": [[1, [2]]]}, "return {'a': ((1, (2,)),)}", "return {'a': ((1, 2),)}"),
}


@needs_namespaces
@pytest.mark.parametrize("name", CALLS)
def test_values_that_json_has_changed(name, tmp_path):
  arguments, expected, *bodies = CALLS[name]
  tests = dict(fn_name="f", inputs=[arguments], outputs=[[expected]])
  row = dict(problem_id=1, question="Do it.", starter_code="", input_output=json.dumps(tests))
  answer = read(tmp_path, "apps", row)
  responses = [f"```python\ndef f(x):\n  {body}\n```" for body in bodies]
  with CodeVerifier(1, LIMITS) as verifier:
    right, other = verifier.score(responses, [answer] * 2)
  assert right == "right" and other in ("wrong", "error")
