"""Declarations of experiments: `EXPERIMENT` in experiments/*/conditions.py.

Conditions are differences from a configuration file of configs/, by the keys of the command
line: `{"objective.name": "grpo"}` is `--config.objective.name=grpo`.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
Changes = Mapping[str, Any]  # Dotted key of a configuration -> value.


@dataclasses.dataclass(frozen=True)
class Condition:
  """Changes of the base configuration.

  Conditions share one cold start per seed. A change in `model`, `sft`, `sft_optimizer` or
  `tokenizer` makes another cold start.
  """

  name: str
  changes: Changes = dataclasses.field(default_factory=dict)
  seeds: tuple[int, ...] | None = None  # None means the experiment's seeds.
  secondary: bool = False  # The verdict does not depend on it.
  measure: str = ""  # See Experiment. This function comes first.


@dataclasses.dataclass(frozen=True)
class Tuning:
  """A first stage: every condition with every setting of `grid`.

  It has its own seeds. The second stage uses the setting with the largest mean of `statistic`, the
  first of equal ones. A diverged run counts as 0.
  """

  grid: Mapping[str, Changes]  # Name of a setting -> changes.
  seeds: tuple[int, ...]
  statistic: str  # Column of results.csv.


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A question with its method. READMEs quote the texts."""

  question: str
  claim: str  # Tested claim and its source.
  hypothesis: str
  statistic: str  # Primary statistic.
  falsified: str  # Observation of the opposite.
  conditions: tuple[Condition, ...]
  seeds: tuple[int, ...]  # Seeds from 10 on: the base config was tuned on smaller ones.
  base: str = "configs/tiny_long.py"
  common: Changes = dataclasses.field(default_factory=dict)  # Changes of all conditions.
  tuning: Tuning | None = None
  minutes: float = 2.5  # Minutes of one run on one core, for estimates.
  start_minutes: float = 2.0  # Minutes of one cold start.
  columns: tuple[str, ...] = ()  # Regular expressions of further metrics.
  # "package.module:function ARGUMENT ..." takes the place of training. The function gets the open
  # run and the arguments, and writes rows of metrics (phase "rl").
  measure: str = ""
  pod: bool = True  # Whether the conditions apply to the flagship's configuration.

  def __post_init__(self):
    names = [c.name for c in self.conditions]
    if len({*names}) < len(names):
      raise ValueError(f"two conditions have the same name: {', '.join(names)}")
    if self.tuning and {*self.tuning.seeds} & {*self.seeds}:
      raise ValueError(
        "seeds and tuning.seeds overlap: a claim holds on seeds nothing was tuned on"
      )


def names() -> list[str]:
  """Returns folders of experiments, e.g. e2_clipped_fractions, by number."""
  folders = [path.parent.name for path in HERE.glob("e*_*/conditions.py")]
  return sorted(folders, key=lambda name: int(name.split("_")[0][1:]))


def find(name: str) -> str:
  """Returns the folder of `e2` or a whole name; raises ValueError."""
  matching = [full for full in names() if name in (full, full.split("_")[0])]
  if not matching:
    raise ValueError(f"there is no experiment {name!r}; there are {', '.join(names())}")
  return matching[0]


def load(folder: str) -> tuple[Experiment, ModuleType]:
  """Loads a folder's experiment, and its module with the function `report`."""
  module = importlib.import_module(f"experiments.{folder}.conditions")
  return module.EXPERIMENT, module
