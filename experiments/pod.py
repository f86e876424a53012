"""Commands of an experiment's conditions with the flagship's configuration."""

from experiments import runs
from experiments.definition import Experiment
from experiments.results import Store

CONFIG = "configs/moe_aime.py"
# Keys that carry over. Other keys describe the toy.
SHARED = ("objective.", "engine.", "compute.", "reward.false_")
SHARED += ("rl.minibatches", "rl.group_size", "rl.epochs", "rl_optimizer.learning_rate")
RATE = "rl_optimizer.learning_rate"
PATHS = {
  "weights": "$WEIGHTS",
  "tokenizer": "$WEIGHTS",
  "data.train": "$TRAIN",
  "data.eval": "$AIME",
}


def commands(experiment: Experiment, store: Store) -> str:
  """Returns one command per run; learning rates scale with the file's as with the toy's."""
  if not experiment.pod:
    return "# This experiment is about toy models or toy tasks: it has no runs at the pod's scale"
  lines = [
    "# WEIGHTS: a cold-start model in Hugging Face's format; TRAIN, AIME: problems with answers.",
    "# Each command goes to all hosts; docs/running.md",
  ]
  rate = runs.applied(CONFIG, {})["rl_optimizer"]["learning_rate"]
  toy = runs.applied(experiment.base, experiment.common)["rl_optimizer"]["learning_rate"]
  for job in runs.plan(experiment, store):
    if job.stage == runs.START:
      continue
    settings = {"job": "rl", "seed": job.seed} | PATHS
    settings |= {key: v for key, v in job.changes.items() if key.startswith(SHARED)}
    if RATE in settings:
      settings[RATE] = rate * settings[RATE] / toy
    # Raises for unknown keys.
    runs.applied(CONFIG, {k: v for k, v in settings.items() if k not in PATHS})
    workdir = f"$WORKDIR/{job.condition.replace('/', '_')}_{job.seed}"
    lines.append(runs.command(CONFIG, workdir, settings))
  if later := runs.number(experiment) - sum(not line.startswith("#") for line in lines):
    lines.append(f"# and {later} runs whose settings the first stage decides on")
  return "\n".join(lines)
