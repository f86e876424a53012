"""Weights to start from that another run left in its checkpoints: the key `weights`, and that of a
teacher.

A run is named by its workdir, which means its newest checkpoint, of RL if it has come so far and of
the cold start otherwise; or by a directory of its checkpoints: `DIR/checkpoints/sft` for the newest
of a phase, `DIR/checkpoints/rl/30` for the one after iteration 30.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from gspo_jax.runs import checkpoint, mirror, provenance
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.training import LoraConfig
from gspo_jax.system import files, hosts, hub

PHASES = ("rl", "sft")  # which one a workdir stands for, first


@dataclasses.dataclass(frozen=True)
class Start:
  """A checkpoint of another run."""

  path: epath.Path
  config: Mapping[str, Any]  # of that run, and its provenance; {} where there is no config.json

  @property
  def model(self) -> dict[str, Any]:
    """Section `model` of that run's configuration, as far as it is known."""
    return _with_tuples(self.config.get("model", {}))

  @property
  def adapters(self) -> LoraConfig:
    """Those that its parameters have."""
    values = self.config.get("lora", {}) if self.path.parent.name == "rl" else {}
    return LoraConfig(**_with_tuples(values))

  @property
  def tokenizer(self) -> str:
    """That of the run, as the key `tokenizer`."""
    made_with = self.config.get("provenance", {})
    return made_with.get("tokenizer") or self.config.get("tokenizer") or "bytes"

  @property
  def about(self) -> dict[str, Any]:
    """JSON for the provenance of the run that starts here."""
    made_with = self.config.get("provenance", {})
    about = dict(checkpoint=str(self.path), phase=self.path.parent.name, step=int(self.path.name))
    return about | dict(seed=self.config.get("seed"), commit=made_with.get("commit"))


def _with_tuples(section: Mapping[str, Any]) -> dict[str, Any]:
  """A section of a configuration as it was before JSON made lists of its tuples."""
  return {key: tuple(v) if isinstance(v, list) else v for key, v in section.items()}


def model(origin: Start, named: str) -> ModelConfig:
  """The model of a checkpoint. ValueError, with how it is `named`: its config.json does not say."""
  try:
    return ModelConfig(**origin.model)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{named}: the config.json of that run does not say of which model it is: {error}"
    ) from error


def find(weights: str, key: str = "weights") -> Start | None:
  """The checkpoint that `weights` names; None if it names none of a run. Messages name `key`.

  Raises:
    ValueError: a run without a checkpoint, or one that is not complete; says what to name.
  """
  if weights in ("", "random") or hub.is_id(weights):
    return None
  path = files.located(weights, key)
  if "://" not in weights:
    path = epath.Path(os.path.abspath(path))
  config = _config(path)
  if "provenance" in config:
    try:
      home = epath.Path(config["checkpoint"]["directory"] or path / "checkpoints")
    except (KeyError, TypeError) as error:
      what = path / provenance.FILE
      raise ValueError(f"{key}={weights!r}: {what} has no checkpoint.directory") from error
    path = next((home / phase for phase in PHASES if checkpoint.finished(home / phase)), None)
    if path is None:
      raise ValueError(f"{key}={weights!r} is a run that has no checkpoint yet, in {home}")
  elif config:
    return None  # a Hugging Face directory
  if path.name in PHASES and path.is_dir():
    if not (steps := checkpoint.finished(path)):
      raise ValueError(f"{key}={weights!r} holds no checkpoint")
    path = path / str(max(steps))
  if not (path.name.isdigit() and path.parent.name in PHASES):
    return None
  if int(path.name) not in (steps := checkpoint.finished(path.parent)):
    there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none"
    raise ValueError(f"{key}={weights!r} is no complete checkpoint; {there}")
  of_phases = path.parent.parent
  # In a workdir's checkpoints/, or in checkpoint.directory, where the workdir has a copy.
  above = of_phases.parent, of_phases / mirror.FOLDER
  return Start(path, config or next((c for c in map(_config, above) if c), {}))


def check_published(key: str, name: str, else_to: str) -> None:
  """ValueError if `name`, which is no run, can be no Hugging Face directory; `else_to` says what
  else `key` may be set to."""
  files.located(name, key)  # or there is no such file system
  path = hub.directory(name)
  if not (path / "config.json").is_file():
    what = "has no config.json" if path.is_dir() else "is not a directory"
    raise ValueError(
      f"{key}={name} {what}: set it to a Hugging Face directory (config.json and *.safetensors) or "
      f"repository (OWNER/NAME), {else_to}"
    )


def pinned(key: str, name: str, began_with: Mapping[str, Any], file: str = "config.json") -> str:
  """`name`, of a repository of the hub with its commit: the one that a run began with, as its
  provenance tells, even if the branch has moved on, of which there is a warning then. All processes
  call this. Raises ValueError, with `key`, as `hub.pinned` does."""
  before = began_with.get("directory")
  try:
    now = hub.pinned(name, file)
  except ValueError as error:
    if before:
      return before
    raise ValueError(f"--config.{key}={name}: {error}") from error
  if now == name or before in (None, now):
    return now
  if hosts.is_first():
    sys.stderr.write(f"warning: {key}={name} is {now} by now; this run goes on with {before}\n")
  return before


def tokenizer(config: RunConfig, weights: str, began_with: Mapping[str, Any]) -> str:
  """The tokenizer as `data.tokenizer.load` takes it: the key, or that of the weights, both names
  `pinned`; of random ones bytes. All processes call this. Raises ValueError as `pinned` does."""
  if config.tokenizer or weights == "random":
    return pinned("tokenizer", config.tokenizer or "bytes", began_with, "tokenizer.json")
  origin = hosts.run_on_first_host(lambda: find(weights))
  return origin.tokenizer if origin else weights


def restore(start: Start, like: Any, key: str = "weights") -> Any:
  """The parameters alone, laid out as the abstract parameters `like` say, with adapters if
  `start.adapters` has any.

  Raises:
    ValueError: the checkpoint is damaged, or holds other parameters.
  """
  reader, like = ocp.PyTreeCheckpointHandler(), dict(params=like)
  try:
    with checkpoint.readable(start.path):
      stored = checkpoint.shapes(reader.metadata(start.path / "state"))
    stored = {name: shape for name, shape in stored.items() if name.startswith("params.")}
    checkpoint.require_shapes(f"{key}={start.path}", stored, checkpoint.shapes(like))
    arguments = ocp.args.PyTreeRestore(
      item=like,
      restore_args=ocp.checkpoint_utils.construct_restore_args(like),
      partial_restore=True,  # the optimizer's moments stay where they are
    )
    with checkpoint.readable(start.path):
      restored = jax.block_until_ready(reader.restore(start.path / "state", args=arguments))
    checkpoint.host_of(start.path, restored)
    return restored["params"]
  except checkpoint.DamagedError as error:
    steps = [s for s in checkpoint.finished(start.path.parent) if s < int(start.path.name)]
    before = f"; the one before is {start.path.parent / str(steps[-1])}" if steps else ""
    raise ValueError(f"{key}={start.path} is damaged: {error.why}{before}") from error


def _config(directory: epath.Path) -> dict[str, Any]:
  """The config.json there; {} if there is none, or none that can be read."""
  try:
    return provenance.begun(directory)
  except ValueError:
    return {}
