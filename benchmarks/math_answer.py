r"""Throughput of the math verifier, and a check of it on real gold answers.

  python benchmarks/math_answer.py --workers=2                     answers per second
  python benchmarks/math_answer.py --workers=2 --data=DIR          gold answers against themselves

DIR holds any of gsm8k/{train,test}.jsonl, svamp/test.jsonl and aime24/test.jsonl as their
publishers ship them. Every gold answer must verify in every written form below and no perturbed
answer may; the exit status is 1 if one does not. Numbers are compared without the symbolic library,
so with --symbolic the same is checked once more through the symbolic comparison alone.
"""

import argparse
import collections
import decimal
import json
import pathlib
import random
import sys
import time

from gspo_jax.verifiers.math_answer import MathVerifier, Outcome, extract

FORMS = {
  "boxed": lambda plain, grouped: rf"Adding up, we get \boxed{{{plain}}}.",
  "plain": lambda plain, grouped: plain,
  "sentence": lambda plain, grouped: f"There are 2 cases, so the answer is {plain}.",
  "last number": lambda plain, grouped: f"First 7 + 5 = 12.\nIn all that makes {plain} dollars.",
  "units": lambda plain, grouped: rf"\[ \boxed{{{plain} \text{{ apples}}}} \]",
  "latex": lambda plain, grouped: rf"Therefore $x = {plain}$ metres in all.",
  "currency": lambda plain, grouped: rf"**Answer:** \${plain}",
  "thousands": lambda plain, grouped: rf"\boxed{{{grouped}}}",
  "thousands in text": lambda plain, grouped: f"#### {grouped}",
  "typeset thousands": lambda plain, grouped: rf"$\boxed{{{grouped.replace(',', '{,}')}}}$",
  "decimals": lambda plain, grouped: rf"\boxed{{{plain if '.' in plain else plain + '.00'}}}",
}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--time_limit_s", type=float, default=5.0)
  parser.add_argument("--answers", type=int, default=20_000)
  parser.add_argument("--data", type=pathlib.Path)
  parser.add_argument("--symbolic", action="store_true")
  args = parser.parse_args()
  start = time.perf_counter()
  with MathVerifier(args.workers, args.time_limit_s) as verifier:
    print(f"start of {args.workers} workers: {time.perf_counter() - start:.2f} s")
    if not args.data:
      measure(verifier, args.answers)
      return 0
    return check(verifier, args.data, args.symbolic)


def measure(verifier: MathVerifier, count: int) -> None:
  """Prints answers per second for three mixtures of short answers; none repeats."""
  rng = random.Random(0)
  forms = list(FORMS.values())
  numbers = rng.sample(range(10_000_000), count)
  plain = [(forms[n % len(forms)](str(n), f"{n:,}"), str(n + (n % 3 == 0))) for n in numbers]
  symbolic = []
  for n in numbers:
    a, b, c = n % 97 + 2, n // 97 % 89 + 2, n // 8633 + 2
    symbolic.append(
      [
        (rf"\boxed{{\frac{{{a}\sqrt{{{c}}}}}{{{b}}}}}", rf"\frac{{{a}}}{{{b}}}\sqrt{{{c}}}"),
        (rf"\boxed{{\frac{{{n}\pi}}{{{b}}}}}", rf"\frac{{{n}}}{{{b}}}\pi"),
        (rf"\boxed{{{a}\sqrt{{{n}}}}}", rf"{a + 1}\sqrt{{{n}}}"),
        (rf"\boxed{{x^2 + {n}x}}", rf"x(x + {n})"),
      ][n % 4]
    )
  mixed = [(symbolic if i % 10 == 0 else plain)[i] for i in range(count)]
  tenth = count // 10
  for name, pairs in [
    ("plain numbers", plain),
    ("nine plain numbers to one symbolic answer", mixed),
    ("symbolic answers only, each one new", symbolic[:tenth]),
  ]:
    verifier.score(*zip(*pairs[: max(1, tenth // 10)]))  # warm-up
    start = time.perf_counter()
    outcomes = verifier.score(*zip(*pairs))
    elapsed = time.perf_counter() - start
    tally = dict(collections.Counter(str(o) for o in outcomes))
    print(
      f"{name}: {len(pairs) / elapsed:,.0f} answers/s ({len(pairs)} in {elapsed:.2f} s; {tally})"
    )


def check(verifier: MathVerifier, data: pathlib.Path, symbolic: bool) -> int:
  """Prints how many gold answers verify in each form, and how many perturbed ones do."""
  failures = 0
  for name, golds in read_golds(data):
    start = time.perf_counter()
    cases = []  # (form, response, gold, is right)
    for gold in golds:
      value = decimal.Decimal(gold.replace(",", ""))
      for form, write in FORMS.items():
        cases.append((form, write(f"{value:f}", f"{value:,f}"), gold, True))
        wrong = {value + 1, value - 1, value * 10 + 3, value + decimal.Decimal("0.5"), -value - 2}
        cases += [(form, write(f"{w:f}", f"{w:,f}"), gold, False) for w in wrong]
    failures += report(name, cases, verifier.score([c[1] for c in cases], [c[2] for c in cases]))
    if symbolic:
      unique = list({(extract(r), g): right for _, r, g, right in cases}.items())
      # The verifier's own pool, past the comparison of plain numbers.
      results = verifier._pool.map([list(pair) for pair, _ in unique])
      rows = [("through SymPy", *pair, right) for pair, right in unique]
      failures += report(f"{name}, symbolic", rows, results)
    print(f"  {time.perf_counter() - start:.1f} s")
  return int(failures > 0)


def report(name: str, cases: list[tuple], outcomes: list) -> int:
  """Prints one line per form and the first failures; returns how many there were."""
  bad = [(c, o) for c, o in zip(cases, outcomes) if (o == Outcome.RIGHT) != c[3]]
  print(f"{name}: {len({c[2] for c in cases})} different gold answers")
  for form in dict.fromkeys(case[0] for case in cases):
    for right in (True, False):
      chosen = [o for c, o in zip(cases, outcomes) if c[0] == form and c[3] == right]
      verified = sum(o == Outcome.RIGHT for o in chosen)
      kind = "gold" if right else "perturbed"
      print(f"  {form:>20} {kind:>10}: {verified:6d} of {len(chosen):6d} verify")
  for (form, response, gold, _), outcome in bad[:10]:
    print(f"  FAILED ({form}): {response!r} for {gold!r} is {outcome}")
  return len(bad)


def read_golds(data: pathlib.Path):
  """Yields (data set, gold answers) for every available data set."""
  for file, read in [
    ("gsm8k/train.jsonl", lambda row: row["answer"].rpartition("####")[2].strip()),
    ("gsm8k/test.jsonl", lambda row: row["answer"].rpartition("####")[2].strip()),
    ("svamp/test.jsonl", lambda row: str(row["Answer"])),
    ("aime24/test.jsonl", lambda row: str(row["answer"])),
  ]:
    if (data / file).exists():
      lines = (data / file).read_text().splitlines()
      yield file, [read(json.loads(line)) for line in lines]


if __name__ == "__main__":
  sys.exit(main())
