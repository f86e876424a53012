"""Checks of a configuration's paths: are they set, existing or writable, outside the workdir?"""

import dataclasses
from pathlib import Path

from gspo_jax.data import files as data_files
from gspo_jax.data import sources
from gspo_jax.data.embedded import TASKS
from gspo_jax.runs import checkpoint, provenance
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import files, hub


def batch_file(directory: Path, step: int) -> Path:
  """Returns the file of an iteration's batch, for `rl.record` and `rl.replay`."""
  return directory / f"{step:06d}.json"


def check_paths(config: RunConfig, workdir: Path | None = None) -> None:
  """Checks paths of a configuration. Raises ValueError; the message names the keys to change.

  Args:
    config: configuration of the run.
    workdir: directory of the run; None to skip the checks that need it.
  """
  _check_required(config)
  _check_data_files(config)
  if config.rl.replay:
    _check_replay(config.rl.replay, config.rl.iterations)
  if workdir is not None and config.resume != "force":
    _check_apart(config, workdir)
  if config.checkpoint.directory:
    _check_checkpoints(config.checkpoint.directory, workdir)
  if workdir is not None:
    _check_moved(config.checkpoint, workdir)
  if config.engine.name == "server" and (directory := config.engine.server.directory):
    named = f"--config.engine.server.directory={directory}"
    if not Path(directory).is_absolute():
      raise ValueError(
        f"{named}: servers read it as a local directory; write an absolute path that all servers "
        "can read"
      )
    files.check_writable(named, directory)


def _check_required(config: RunConfig) -> None:
  """Raises ValueError if required paths are unset. The message names all of them."""
  paths = {
    "weights": (
      config.weights,
      "a Hugging Face directory (config.json, *.safetensors) or repository, or random",
    ),
    "data.train": (config.data.train, "problems with answers: *.jsonl, *.parquet, tfds:name/split"),
    "data.eval": (
      config.data.eval,
      "held-out problems: *.jsonl, *.parquet, tfds:name/split; or set eval.benchmarks.NAME.data",
    ),
  }
  if not config.samples_prompts:
    del paths["data.train"]
  if config.job == "offline":
    description = "recorded responses: RUN/rollouts/rl_*.jsonl, or other files of this format"
    paths["offline.data"] = config.offline.data, description
  if config.benchmarks() or config.job == "sft":
    del paths["data.eval"]
  missing = [f"--config.{key}= ({form})" for key, (path, form) in paths.items() if not path]
  if missing:
    raise ValueError("this configuration needs paths: set " + "; ".join(missing))


def _check_data_files(config: RunConfig) -> None:
  """Raises DataError if a file of problems does not exist. Reads no rows."""
  # Growing files (data.growing) are excluded, since only the first host needs them.
  trains = config.samples_prompts and not config.schedule.refresh_every
  specs = {"data.train": config.data.train} if trains else {}
  for key, spec in (specs | {key: b.data for _, b, key in config.benchmarks()}).items():
    for path in (part["path"] for part in sources.parts_of(spec, key)):
      if path.partition(":")[0] not in (*TASKS, "tfds"):
        data_files.named(path, key)


def _check_replay(directory: str, iterations: int) -> None:
  """Raises ValueError unless the directory has recorded batches of all iterations."""
  if not Path(directory).is_dir():
    raise ValueError(
      f"--config.rl.replay={directory} is not a directory: set it to WORKDIR/batches of a run with "
      "rl.record=True"
    )
  for step in range(1, iterations + 1):
    path = batch_file(Path(directory), step)
    if not path.exists():
      raise ValueError(
        f"--config.rl.replay={directory} has no file {path.name}: lower rl.iterations from "
        f"{iterations} to {step - 1}, the number of batches before it"
      )


def _check_apart(config: RunConfig, workdir: Path) -> None:
  """Raises ValueError if weights, teacher, batches or recorded responses are in the workdir."""
  read = [("distillation.teacher", config.distillation.teacher), ("rl.replay", config.rl.replay)]
  read += [("weights", config.weights)] if config.weights != "random" else []
  read += [("offline.data", path.strip()) for path in config.offline.data.split(",")]
  for key, path in read:
    elsewhere = not path or "://" in path or hub.is_id(path)
    if not elsewhere and Path(path).resolve().is_relative_to(workdir.resolve()):
      raise ValueError(
        f"--config.{key}={path} lies in the workdir, which this run writes: use another --workdir"
      )


def _check_moved(config: CheckpointConfig, workdir: Path) -> None:
  """Raises ValueError if the run's checkpoints are in an earlier `checkpoint.directory` alone."""
  recorded = provenance.read(workdir).get("checkpoint", {}).get("directory", config.directory)
  if recorded == config.directory:
    return
  earlier = dataclasses.replace(config, directory=recorded)
  for phase in ("rl", "sft"):
    old, new = (c.phase_directory(workdir, phase) for c in (earlier, config))
    if checkpoint.finished(new):  # RL needs no checkpoints of the cold start.
      return
    if recorded:
      files.located(recorded, "the earlier --config.checkpoint.directory")
    if checkpoint.finished(old):
      raise ValueError(
        f"--config.checkpoint.directory={config.directory} has no checkpoints of this run: copy "
        f"{old} to {new}, or leave the key at {recorded!r}"
      )


def _check_checkpoints(directory: str, workdir: Path | None) -> None:
  """Raises ValueError unless checkpoints can be written to `directory`."""
  named = f"--config.checkpoint.directory={directory}"
  path = files.located(directory, "--config.checkpoint.directory")
  if "://" not in directory:
    if not Path(directory).is_absolute():
      raise ValueError(f"{named}: write an absolute path")
    files.check_writable(named, directory)
    if workdir is not None and Path(directory).resolve().is_relative_to(workdir.resolve()):
      raise ValueError(
        f"{named} lies in the workdir, and would contain a copy of the workdir: set a directory "
        "outside it, or leave the key unset for WORKDIR/checkpoints"
      )
  elif path.exists() and not path.is_dir():
    raise ValueError(f"{named} is a file: set a directory, which need not exist")
