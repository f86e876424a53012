"""What an experiment declares before it is run: `EXPERIMENT` in experiments/*/conditions.py.

Its conditions are differences from a configuration file of configs/, by the keys of the command
line: `{"objective.name": "grpo"}` is `--config.objective.name=grpo`.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
Changes = Mapping[str, Any]  # config key with dots -> value


@dataclasses.dataclass(frozen=True)
class Condition:
  """One way to train: what it changes in the base configuration.

  Conditions share one cold start per seed, but for those that change something in `model`, `sft`,
  `sft_optimizer` or `tokenizer`: such a change makes a cold start of its own.
  """

  name: str
  changes: Changes = dataclasses.field(default_factory=dict)
  seeds: tuple[int, ...] | None = None  # None: those of the experiment
  secondary: bool = False  # the verdict does not rest on it, nor wait for it
  measure: str = ""  # See Experiment. This function comes first.


@dataclasses.dataclass(frozen=True)
class Tuning:
  """A first stage: every condition with every setting of `grid`, on seeds that nothing else uses.

  The setting with the largest mean of `statistic` over `seeds` goes into the second stage; of equal
  ones the first. A run that diverged counts as 0.
  """

  grid: Mapping[str, Changes]  # name of a setting -> what it changes
  seeds: tuple[int, ...]
  statistic: str  # column of results.csv


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A question, and how it is to be answered; its texts are sentences of the READMEs."""

  question: str
  claim: str  # Tested claim and its source.
  hypothesis: str
  statistic: str  # the primary one
  falsified: str  # Observation of the opposite.
  conditions: tuple[Condition, ...]
  seeds: tuple[int, ...]  # Seeds from 10 on: the base config was tuned on smaller ones.
  base: str = "configs/tiny_long.py"
  common: Changes = dataclasses.field(default_factory=dict)  # changes of all conditions
  tuning: Tuning | None = None
  minutes: float = 2.5  # Minutes of one run on one core, for estimates.
  start_minutes: float = 2.0  # Minutes of one cold start.
  columns: tuple[str, ...] = ()  # regular expressions: more metrics for results.csv and curves.csv
  # "package.module:function ARGUMENT ..." is called with the open run and the arguments in the
  # place of training, and writes rows of metrics (phase "rl").
  measure: str = ""
  pod: bool = True  # whether its conditions make sense with the flagship's configuration

  def __post_init__(self):
    names = [c.name for c in self.conditions]
    if len({*names}) < len(names):
      raise ValueError(f"two conditions have the same name: {', '.join(names)}")
    if self.tuning and {*self.tuning.seeds} & {*self.seeds}:
      raise ValueError(
        "seeds and tuning.seeds overlap: a claim holds on seeds nothing was tuned on"
      )


def names() -> list[str]:
  """Folders of experiments, e.g. e2_clipped_fractions, by their numbers."""
  folders = [path.parent.name for path in HERE.glob("e*_*/conditions.py")]
  return sorted(folders, key=lambda name: int(name.split("_")[0][1:]))


def find(name: str) -> str:
  """The folder of an experiment: `e2` or the whole name. ValueError if there is none."""
  matching = [full for full in names() if name in (full, full.split("_")[0])]
  if not matching:
    raise ValueError(f"there is no experiment {name!r}; there are {', '.join(names())}")
  return matching[0]


def load(folder: str) -> tuple[Experiment, ModuleType]:
  """Loads a folder's experiment, and its module with the function `report`."""
  module = importlib.import_module(f"experiments.{folder}.conditions")
  return module.EXPERIMENT, module
