r"""Throughput of the code verifier, and a check of it on HumanEval.

  python benchmarks/code_sandbox.py --workers=2                     programs per second
  python benchmarks/code_sandbox.py --workers=2 --data=FILE         canonical solutions and mutants

FILE is HumanEval as its publishers ship it (JSON lines with prompt, canonical_solution, test and
entry_point). Every canonical solution must pass and every mutant, whose body is `return None`, must
fail; the exit status is 1 if one does not.
"""

import argparse
import collections
import json
import pathlib
import sys
import time

from gspo_jax.verifiers.programs.verifier import CodeVerifier, Outcome


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--isolation", default="auto")
  parser.add_argument("--programs", type=int, default=200)
  parser.add_argument("--data", type=pathlib.Path)
  args = parser.parse_args()
  with CodeVerifier(args.workers, isolation=args.isolation) as verifier:
    print(f"isolation: {verifier.isolation}; {args.workers} workers")
    if not args.data:
      measure(verifier, args.programs)
      return 0
    return check(verifier, args.data)


def measure(verifier: CodeVerifier, count: int) -> None:
  """Prints programs and tests per second for short programs, each one new."""
  for tests in (1, 20):
    inputs = [f"{i} {i + 1}\n" for i in range(tests)]
    stdin = {"inputs": inputs, "outputs": [f"{2 * i + 1}\n" for i in range(tests)]}
    call = {"inputs": [text.replace(" ", "\n").strip() for text in inputs], "fn_name": "add"}
    call["outputs"] = stdin["outputs"]
    read = "a, b = map(int, input().split())\nprint(a + b)"
    method = "class Solution:\n  def add(self, a: int, b: int) -> int:\n    return a + b"
    for name, program, answer in ("stdin", read, stdin), ("call", method, call):
      number = count if tests == 1 else count // 10
      responses = [fenced(f"{program}  # {i}") for i in range(number)]
      start = time.perf_counter()
      outcomes = verifier.score(responses, [json.dumps(answer)] * number)
      elapsed = time.perf_counter() - start
      print(
        f"{name}, {tests} tests each: {number / elapsed:,.1f} programs/s, "
        f"{number * tests / elapsed:,.0f} tests/s ({tally(outcomes)})"
      )


def check(verifier: CodeVerifier, data: pathlib.Path) -> int:
  """Prints how many canonical solutions pass and how many mutants do."""
  rows = [json.loads(line) for line in data.read_text().splitlines()]
  fields = ("prompt", "test", "entry_point")
  answers = [json.dumps({field: row[field] for field in fields}) for row in rows]
  programs = {
    "canonical": [row["prompt"] + row["canonical_solution"] for row in rows],
    "mutant": [row["prompt"] + "    return None\n" for row in rows],
  }
  failures = 0
  for name, expected in ("canonical", True), ("mutant", False):
    start = time.perf_counter()
    outcomes = verifier.score(list(map(fenced, programs[name])), answers)
    elapsed = time.perf_counter() - start
    bad = [r["task_id"] for r, o in zip(rows, outcomes) if (o == Outcome.RIGHT) != expected]
    crashed = outcomes.count(Outcome.CRASH)
    failures += len(bad) + crashed
    print(
      f"{name}: {outcomes.count(Outcome.RIGHT)} of {len(rows)} pass ({tally(outcomes)}); "
      f"{elapsed:.1f} s, {len(rows) / elapsed:.1f} programs/s; unexpected: {bad or 'none'}"
    )
  return int(failures > 0)


def fenced(program: str) -> str:
  return f"Here it is.\n\n```python\n{program}\n```\n"


def tally(outcomes: list) -> str:
  return ", ".join(f"{n} {o}" for o, n in collections.Counter(map(str, outcomes)).items())


if __name__ == "__main__":
  sys.exit(main())
