"""The language of code and pages: counts per room, held against ceilings that may only fall.

`python tests/test_words.py` prints the ceilings for the current counts.
"""

import ast
import collections
import io
import math
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Pronouns, participles and prepositions: no names for values or functions.
NOT_NAMES = set(
  "of by at on to than as so such those that what which where whose how when here there now then "
  "was were is are has have had told said asked made taken given found one own both begun seen "
  "left kept held wanted known put let goes".split()
)
OPENERS = ("What ", "Of ", "The same", "Those", "That ", "As ", "Where", "Whatever")
RELATIVE = re.compile(r"\b(?:that|which|what|those|whose|where)\b")
FRAGMENT = re.compile(
  r"(?:of|in|by|with|for|as|from|to|at|on|or|and|which|that|since|so|but|where|what)\b"
)

# Columns: names of NOT_NAMES in 1,000 lines; docstrings that begin with one of OPENERS (%); length
# in words, and relative pronouns in docstrings' first sentences; comments like FRAGMENT (%).
CODE = """
  benchmarks                 0.0       0    10.3    0.00       0
  experiments                0.0       0    10.0    0.04       0
  gspo_jax                   0.0       0     9.6    0.03       1
  gspo_jax/aot               0.0       0    10.0    0.00       0
  gspo_jax/cli               0.0       0     9.6    0.05       0
  gspo_jax/data              0.0       0     9.2    0.02       2
  gspo_jax/evaluation        0.0       0     9.2    0.00       0
  gspo_jax/inputs            0.0       0     8.0    0.05       0
  gspo_jax/learner           0.0       0    10.4    0.04       0
  gspo_jax/models            0.0       0    10.2    0.00       0
  gspo_jax/objectives        0.7       0     9.9    0.00       0
  gspo_jax/report            0.0       0    10.1    0.03       0
  gspo_jax/rewards           1.6       0     9.0    0.00       0
  gspo_jax/rollouts          0.0       0     9.9    0.05       2
  gspo_jax/runs              0.0       0     9.4    0.01       0
  gspo_jax/sampling          1.4       0    10.0    0.03       0
  gspo_jax/settings          0.0       0     9.1    0.00       0
  gspo_jax/system            0.0       0     9.9    0.09       2
  gspo_jax/tasks             0.0       0    10.7    0.05       0
  gspo_jax/verifiers         0.0       0    10.2    0.02       3
  tests                      0.9       2    11.3    0.17       5
"""
# Ceilings for a new room, without a line above.
GOAL = (4.0, 1, 10.0, 0.25, 3)

# Words in a sentence; sentences of more than 30 words (%); relative pronouns in a sentence; total
# words, tables and code included.
PAGES = """
  docs                      16.0       6    0.20   40000
  README.md                 15.0       5    0.15    1100
  benchmarks                16.5       5    0.15   20000
  experiments               16.0       5    0.15   22000
"""


def python_files() -> Iterator[tuple[str, Path]]:
  """Pairs of room and file; rooms of the package, and each other folder as one."""
  for folder in ("gspo_jax", "tests", "experiments", "benchmarks"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      inside = path.relative_to(ROOT / folder).parts
      if folder == "gspo_jax" and inside[0] != "configs":
        yield f"gspo_jax/{inside[0]}" if len(inside) > 1 else "gspo_jax", path
      elif folder != "gspo_jax":
        yield folder, path


def first_sentence(text: str) -> str:
  return re.split(r"(?<=[.!?])\s", text.split("\n\n")[0].replace("\n", " "))[0]


def count_code(paths: list[Path]) -> tuple[float, ...]:
  lines, names, docstrings, comments = 0, [], [], []
  for path in paths:
    text = path.read_text()
    lines += text.count("\n")
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.arg):
        names.append(node.arg)
      elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names.append(node.id)
      elif isinstance(node, ast.FunctionDef):
        names.append(node.name)
        if docstring := ast.get_docstring(node):
          docstrings.append(first_sentence(docstring))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
      if token.type == tokenize.COMMENT:
        comments.append(token.string.lstrip("# "))
  names = [name.lstrip("_") for name in names]
  return (
    1000 * sum(name in NOT_NAMES or name.startswith("of_") for name in names) / lines,
    100 * statistics.mean([doc.startswith(OPENERS) for doc in docstrings] or [0]),
    statistics.mean([len(doc.split()) for doc in docstrings] or [0]),
    statistics.mean([len(RELATIVE.findall(doc)) for doc in docstrings] or [0]),
    100 * statistics.mean([bool(FRAGMENT.match(x)) for x in comments] or [0]),
  )


def sentences(text: str) -> Iterator[str]:
  """Sentences of a page, without its code, tables, headings and targets of links."""
  text = re.sub(r"```.*?```", "", text, flags=re.S)
  prose = [x for x in text.splitlines() if not x.lstrip().startswith(("|", "#", "[", "<!--"))]
  prose = [line for line in prose if not line.startswith("    ")]
  for block in re.split(r"\n\s*\n", "\n".join(prose)):
    block = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", block):
      if len(sentence.split()) > 2:
        yield sentence


def count_pages(paths: list[Path]) -> tuple[float, ...]:
  texts = [path.read_text() for path in paths]
  prose = [sentence for text in texts for sentence in sentences(text)]
  lengths = [len(sentence.split()) for sentence in prose]
  return (
    statistics.mean(lengths),
    100 * statistics.mean([length > 30 for length in lengths]),
    statistics.mean([len(RELATIVE.findall(sentence)) for sentence in prose]),
    sum(len(text.split()) for text in texts),
  )


def all_counts() -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
  rooms = collections.defaultdict(list)
  for room, path in python_files():
    rooms[room].append(path)
  docs = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "keys.md"]
  pages = {"docs": count_pages(docs), "README.md": count_pages([ROOT / "README.md"])}
  pages |= {x: count_pages(sorted((ROOT / x).rglob("*.md"))) for x in ("benchmarks", "experiments")}
  return {room: count_code(paths) for room, paths in sorted(rooms.items())}, pages


def read_table(table: str) -> dict[str, tuple[float, ...]]:
  rows = [line.split() for line in table.strip().splitlines()]
  return {room: tuple(map(float, ceilings)) for room, *ceilings in rows}


@pytest.fixture(scope="module")
def counts():
  return all_counts()


def test_language_of_code(counts):
  ceilings = read_table(CODE)
  assert_below(counts[0], {room: ceilings.get(room, GOAL) for room in counts[0]})


def test_language_of_pages(counts):
  assert_below(counts[1], read_table(PAGES))


def test_rooms_exist(counts):
  assert read_table(CODE).keys() <= counts[0].keys()


def assert_below(counts, ceilings):
  high = [
    f"{room}: {[round(x, 3) for x in counts[room]]} above {list(ceilings[room])}"
    for room in counts
    if any(x > ceiling for x, ceiling in zip(counts[room], ceilings[room], strict=True))
  ]
  assert not high, "\n".join(["see the glossary in CONTRIBUTING.md", *high])


def print_tables():
  for table, digits in zip(all_counts(), ((1, 0, 1, 2, 0), (1, 0, 2, 0))):
    for room, values in table.items():
      cells = [f"{math.ceil(x * 10**d - 1e-9) / 10**d:8.{d}f}" for x, d in zip(values, digits)]
      sys.stdout.write(f"  {room:22}{''.join(cells)}\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
  print_tables()
