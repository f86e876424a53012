"""What an experiment says of results that were made up, so that the truth is known."""

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from experiments import definition
from experiments.report import Report, Results


def report(
  name: str,
  value: Callable[[definition.Condition, int], dict[str, Any]],
  curve: Callable[[definition.Condition, int, int], dict[str, Any]] | None = None,
  steps: Iterable[int] = range(1, 11),
) -> Report:
  """Reports on runs of all conditions and seeds.

  `value` gives the columns of a condition and seed, `curve` those of its steps.
  """
  experiment, module = definition.load(definition.find(name))
  runs, points = [], []
  pairs = ((c, seed) for c in experiment.conditions for seed in c.seeds or experiment.seeds)
  for c, seed in pairs:
    about = dict(condition=c.name, seed=seed, stage="final", status="done")
    runs.append(about | value(c, seed))
    if curve is not None:
      points += [about | dict(step=s) | curve(c, seed, s) for s in steps]
  columns = None if points else [*runs[0], "step"]
  return module.report(Results(pd.DataFrame(runs), pd.DataFrame(points, columns=columns)))
