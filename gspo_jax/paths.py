"""Checks of what a configuration names outside of itself: files, directories, modules."""

import dataclasses
from pathlib import Path
from typing import Any

from etils import epath

from gspo_jax import rewards
from gspo_jax.rollouts import multipliers
from gspo_jax.runs import start
from gspo_jax.settings.run import RunConfig


def check(config: RunConfig, workdir: Path | None = None) -> None:
  """Names every path that is still to be set, all at once."""
  paths = {
    "weights": (config.weights, "a Hugging Face directory (config.json, *.safetensors), or random"),
    "tokenizer": (config.tokenizer, "a Hugging Face directory (tokenizer.json), or bytes"),
    "data.train": (config.data.train, "problems with answers: *.jsonl, *.parquet, tfds:name/split"),
    "data.eval": (
      config.data.eval,
      "held-out problems, in one of the same forms, or else eval.benchmarks.NAME.data",
    ),
  }
  if not config.samples_prompts:
    del paths["data.train"]
  if config.job == "offline":
    what = "recorded responses: RUN/rollouts/rl_*.jsonl of a run, or files like them"
    paths["offline.data"] = config.offline.data, what
  if config.benchmarks():
    del paths["data.eval"]
  missing = [f"--config.{key}= ({what})" for key, (path, what) in paths.items() if not path]
  if missing:
    raise ValueError("this configuration needs paths of yours: " + "; ".join(missing))
  if config.rl.replay and not Path(config.rl.replay).is_dir():
    raise ValueError(
      f"--config.rl.replay={config.rl.replay} is not a directory: set it to WORKDIR/batches of "
      "a run with rl.record=True"
    )
  if config.checkpoint.directory:
    _check_checkpoints(config.checkpoint.directory, workdir)
  for name in {config.reward.name, *(b.reward for _, b, _ in config.benchmarks())} - {""}:
    rewards.check_importable(name)
  multipliers.check_importable(config.constraints)
  check_weights(config)


def _check_checkpoints(directory: str, workdir: Path | None) -> None:
  what, path = f"--config.checkpoint.directory={directory}", epath.Path(directory)
  if "://" not in directory:
    if not path.is_absolute():
      raise ValueError(f"{what}: write the whole path, from / on")
    if workdir is not None and Path(directory).resolve().is_relative_to(workdir.resolve()):
      raise ValueError(
        f"{what} lies in the workdir, of which a copy is kept there: name a directory elsewhere, "
        "or leave it unset for WORKDIR/checkpoints"
      )
  try:
    usable = path.is_dir() or not path.exists()
  except Exception as error:  # of a file system
    raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
  if not usable:
    raise ValueError(f"{what} is a file: set it to a directory, or to a new name")


def check_weights(config: RunConfig) -> None:
  """ValueError unless `weights` names a complete model of the configured shape."""
  if config.weights == "random":
    return
  if origin := start.find(config.weights):
    had = {
      k: tuple(v) if isinstance(v, list) else v for k, v in origin.config.get("model", {}).items()
    }
    if changed := _differences(config, had):
      raise ValueError(_other_model(config, changed))
    return
  start.check_published("--config.weights", config.weights, "to the workdir of a run, or to random")
  from gspo_jax.models import hf  # safetensors is only needed here

  if (found := hf.check(config.weights)) != config.model:
    raise ValueError(_other_model(config, _differences(config, dataclasses.asdict(found))))


def _differences(config: RunConfig, had: dict[str, Any]) -> list[str]:
  asked = dataclasses.asdict(config.model)
  return [
    f"model.{key}={asked[key]!r} and not {had[key]!r}"
    for key in had
    if key in asked and had[key] != asked[key]
  ]


def _other_model(config: RunConfig, differences: list[str]) -> str:
  return (
    f"--config.weights={config.weights} holds another model than the configuration, which has "
    f"{', '.join(differences)}: set these, or name a configuration of this model"
  )
