"""Plans the runs of an experiment: configurations, names and cold starts."""

import copy
import dataclasses
import functools
import hashlib
import json
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from configs import common
from experiments.definition import Changes, Condition, Experiment
from experiments.results import Store
from gspo_jax import main
from gspo_jax.settings.reading import from_dict, unknown_key_message

ROOT = Path(__file__).parents[1]
START, TUNING, FINAL = "start", "tuning", "final"  # Stages.
# Sections of the cold start alone, and all that it depends on.
START_SECTIONS = ("model", "tokenizer", "sft", "sft_optimizer")
READ_BY_START = (*START_SECTIONS, "compute", "data", "mesh", "seed")
# Sections without influence on a run's outcome, or covered by its cold start.
NOT_HASHED = ("job", "weights", "wandb", "resume", "profile", "alarms", "checkpoint")
NOT_HASHED += ("sft", "sft_optimizer")
DEFAULTS = {"rl.dump_every": 1_000_000, "checkpoint.keep": 1}


@dataclasses.dataclass(frozen=True)
class Job:
  """A cold start, or a condition with a seed."""

  condition: str
  stage: str
  seed: int
  changes: Changes  # Changes of the base in the results, without the seed.
  values: Mapping[str, Any]  # The whole configuration. `weights` is that of the cold start.
  base: str
  start: "Job | None" = None  # The cold start. That of a cold start is a shorter one, or None.
  measure: str = ""  # See Experiment.

  @property
  def key(self) -> tuple[str, str, int]:
    return self.stage, self.condition, self.seed

  @property
  def cold_start(self) -> "Job":
    """Returns the run's cold start; that of a cold start is itself."""
    return self if self.stage == START else self.start

  @functools.cached_property
  def run(self) -> str:
    """Hashes all settings with influence on the outcome.

    Keys with their value in `common.base()` do not count: a new key keeps earlier names.
    """
    values, defaults = flat(self.values), flat(_defaults())
    different = {k: v for k, v in values.items() if k not in defaults or defaults[k] != v}
    if self.stage == START:
      different = {k: v for k, v in different.items() if k.split(".")[0] in READ_BY_START}
    else:
      different = {k: v for k, v in different.items() if k.split(".")[0] not in NOT_HASHED}
      different["start"] = [self.start.run, ""]  # A pair, as in the hashes of recorded runs.
      different |= dict(measure=self.measure) if self.measure else {}
    text = json.dumps(different, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  def workdir(self, home: Path) -> Path:
    return home / ("starts" if self.stage == START else "runs") / self.run

  def weights(self, home: Path) -> str:
    """Returns the value of the key `weights`."""
    return self.values["weights"] if self.stage == START else str(self.start.workdir(home))

  def command(self, home: Path) -> str:
    """Returns the run's command line."""
    settings = {"job": self.values["job"], "seed": self.seed, "weights": self.weights(home)}
    settings = settings | dict(self.changes) | settings  # Without the weights of the cold start.
    line = command(self.base, self.workdir(home), settings)
    return f"# {self.measure} in the run that this opens:\n{line}" if self.measure else line


def command(base: str, workdir: Path | str, settings: Mapping[str, Any]) -> str:
  flags = [f"--config.{key}={value}" for key, value in settings.items()]
  words = ["python", "-m", "gspo_jax.main", f"--config={base}", f"--workdir={workdir}", *flags]
  return " ".join(word if "$" in word else shlex.quote(word) for word in words)


def format_changes(changes: Changes) -> str:
  """Formats changes as one line of results.csv."""
  return " ".join(f"{key}={_format(value)}" for key, value in changes.items())


def plan(experiment: Experiment, store: Store) -> list[Job]:
  """Plans runs, grouped by seed, each after its cold start.

  The second stage of a condition is planned once its first one is complete.
  """
  jobs: dict[tuple[str, str, int], Job] = {}
  if tuning := experiment.tuning:
    for seed in tuning.seeds:
      for c in experiment.conditions:
        for name, setting in tuning.grid.items():
          _add(jobs, experiment, c, TUNING, seed, f"{c.name}/{name}", setting)
  best = {c.name: tuned_setting(experiment, c, store, jobs) for c in experiment.conditions}
  for seed in dict.fromkeys(
    s for c in experiment.conditions for s in (c.seeds or experiment.seeds)
  ):
    for c in experiment.conditions:
      if seed in (c.seeds or experiment.seeds) and best[c.name] is not None:
        setting = tuning.grid[best[c.name]] if tuning else {}
        _add(jobs, experiment, c, FINAL, seed, c.name, setting)
  return list(jobs.values())


def tuned_setting(
  experiment: Experiment, condition: Condition, store: Store, jobs: Mapping[Any, Job]
) -> str | None:
  """Returns a condition's tuned setting.

  It is "" without tuning, and None if the first stage is not complete.
  """
  tuning = experiment.tuning
  if tuning is None:
    return ""
  means = {}
  for name in tuning.grid:
    stage = [jobs[TUNING, f"{condition.name}/{name}", seed] for seed in tuning.seeds]
    if not all(store.settled(job) for job in stage):
      return None
    means[name] = sum(store.outcome(job, tuning.statistic) for job in stage) / len(stage)
  return max(means, key=means.get)


def primary(experiment: Experiment) -> set[str]:
  """Returns the conditions of the verdict."""
  return {c.name for c in experiment.conditions if not c.secondary}


def condition_of(job: Job) -> str:
  """Returns the condition's name, without a first-stage setting."""
  return job.condition.split("/")[0]


def number(experiment: Experiment, names: Collection[str] | None = None) -> int:
  """Counts runs of all or the named conditions, without cold starts."""
  counted = [c for c in experiment.conditions if names is None or c.name in names]
  tuning = experiment.tuning
  first = len(tuning.grid) * len(tuning.seeds) * len(counted) if tuning else 0
  return first + sum(len(c.seeds or experiment.seeds) for c in counted)


def _add(
  jobs: dict,
  experiment: Experiment,
  condition: Condition,
  stage: str,
  seed: int,
  name: str,
  setting: Changes,
) -> None:
  changes = {**experiment.common, **condition.changes, **setting}
  start = _start(jobs, experiment, changes, seed)
  values = applied(experiment.base, DEFAULTS | changes | dict(job="rl", seed=seed))
  measure = condition.measure or experiment.measure
  job = Job(name, stage, seed, changes, values, experiment.base, start, measure)
  jobs[job.key] = job


def _start(jobs: dict, experiment: Experiment, changes: Changes, seed: int) -> Job:
  """Returns the cold start of a condition, common to equal settings."""
  relevant = {key: x for key, x in changes.items() if key.split(".")[0] in START_SECTIONS}
  changes = {**experiment.common, **relevant}
  values = applied(experiment.base, DEFAULTS | changes | dict(job="sft", seed=seed))
  if not values["sft"]["max_tokens"]:
    window = values["data"]["max_prompt_tokens"] + values["sampling"]["max_new_tokens"]
    values["sft"]["max_tokens"] = window
    changes["sft.max_tokens"] = window
  values["checkpoint"]["every"] = max(1, values["sft"]["steps"])  # A cold start is short.
  differing = {key: value for key, value in changes.items() if key not in experiment.common}
  differing.pop("sft.max_tokens", None)
  name = f"cold start {format_changes(differing)}".strip()
  job = Job(name, START, seed, changes, values, experiment.base, _shorter(jobs, values))
  return jobs.setdefault(job.key, job)


def _shorter(jobs: Mapping[Any, Job], values: Mapping[str, Any]) -> Job | None:
  """Returns the longest planned cold start with fewer updates, or None.

  With a constant learning rate, the longer cold start repeats these updates.
  """
  if values["sft_optimizer"]["schedule"] != "constant":
    return None
  steps = values["sft"]["steps"]

  def lengthened(job: Job) -> dict[str, Any]:
    return flat(job.values) | {"sft.steps": steps, "checkpoint.every": max(1, steps)}

  starts = [job for job in jobs.values() if job.stage == START]
  shorter = [job for job in starts if job.values["sft"]["steps"] < steps]
  continued = [job for job in shorter if lengthened(job) == flat(values)]
  return max(continued, key=lambda job: job.values["sft"]["steps"], default=None)


@functools.cache
def _file(base: str) -> dict[str, Any]:
  return main.read_config_file(str(ROOT / base))


@functools.cache
def _defaults() -> dict[str, Any]:
  return common.base().to_dict()


def applied(base: str, changes: Changes) -> dict[str, Any]:
  """Applies changes to a configuration file; ValueError for unknown keys or bad values."""
  values = copy.deepcopy(_file(base))
  for key, value in changes.items():
    *sections, last = key.split(".")
    place = values
    for part in sections:
      place = place.get(part)
      if not isinstance(place, dict):
        raise ValueError(f"{base}: {key!r} is no key of a configuration")
    if last not in place:
      message = unknown_key_message(".".join([*sections, ""]), last, place)
      raise ValueError(f"{base}: {message}")
    place[last] = value
  from_dict(values)
  return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens values to dotted keys; tuples become lists."""
  flattened = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      flattened |= flat(value, f"{prefix}{key}.")
    else:
      flattened[prefix + key] = list(value) if isinstance(value, tuple) else value
  return flattened


def _format(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:.6g}"
  return repr(tuple(value)) if isinstance(value, list | tuple) else str(value)
