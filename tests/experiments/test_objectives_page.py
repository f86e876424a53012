"""The table that docs/objectives.md begins with: a row for every objective, its figures E17's."""

import re

import pytest

pytest.importorskip("pandas")
pytest.importorskip("scipy")

from experiments.definition import HERE, find, load
from experiments.results import Store
from experiments.runs import plan
from gspo_jax import objectives as O

PAGE = (HERE.parent / "docs" / "objectives.md").read_text()
ROW = re.compile(r"\| \[?`(\w+)`.*?\|.*\| (?:(0\.\d\d) → (0\.\d\d)|—) \|")


@pytest.fixture(scope="module")
def e17():
  experiment, _ = load(find("e17"))
  store = Store(HERE / find("e17"))
  return experiment, store.results(plan(experiment, store))


def rows():
  """Before and after of each objective, None without runs, by the names of E17's conditions."""
  lines = PAGE[: PAGE.index("Around any of them")].splitlines()
  table = {}
  for line in lines:
    if match := ROW.match(line):
      table[match[1] + " with a critic" * ("with a critic" in line)] = match[2], match[3]
  return table


def test_every_objective_has_a_row(e17):
  table = rows()
  assert {name.split()[0] for name in table} == {*O.POLICY_LOSSES}
  experiment, results = e17
  names = [condition.name for condition in experiment.conditions if not condition.secondary]
  assert {*table} == {name for name in names if len(results.values(name, "eval/final"))}


def test_the_figures_are_those_of_e17(e17):
  """The page has means over available seeds of all objectives with runs."""
  (_, results), shown = e17, rows()
  without = {name for name, figures in shown.items() if figures == (None, None)}
  assert without == {name for name in shown if results.values(name, "eval/final").empty}
  shown = {name: figures for name, figures in shown.items() if name not in without}
  seeds = set.intersection(*({*results.values(name, "eval/final").index} for name in shown))
  named = re.search(r"over seeds? ([\d, and]+)", PAGE)[1]
  assert {*map(int, re.findall(r"\d+", named))} == seeds
  for name, figures in shown.items():
    columns = [results.values(name, column) for column in ("eval/start", "eval/final")]
    means = [column[column.index.isin(seeds)].mean() for column in columns]
    assert figures == tuple(f"{mean:.2f}" for mean in means), name
