"""Sources of weights named in a configuration: random, a published model, or another run.

A published model is a Hugging Face directory, local or in a bucket, or a repository of the hub.
The workdir of another run names its newest RL checkpoint or, before the first RL checkpoint, its
newest checkpoint of the cold start (SFT). `WORKDIR/checkpoints/sft` always names the newest SFT
checkpoint, and `WORKDIR/checkpoints/rl/30` names the checkpoint after RL iteration 30.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from gspo_jax import sharding
from gspo_jax.models import finite, lora, transformer
from gspo_jax.models.families.lookup import differences
from gspo_jax.models.params import abstract_params
from gspo_jax.runs import checkpoint, integrity, mirror, provenance
from gspo_jax.settings.model import ModelConfig, from_json
from gspo_jax.settings.training import LoraConfig
from gspo_jax.system import files, hosts, hub
from gspo_jax.system.text import near_path

PHASES = ("rl", "sft")  # A workdir names a checkpoint of the first of these phases with one.
RANDOM = "random"


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
  """A checkpoint of another run."""

  path: epath.Path
  config: Mapping[str, Any]  # The other run's config.json; {} if absent or unreadable.
  key: str = "weights"  # Configuration key that names the checkpoint, for error messages.

  @property
  def model(self) -> dict[str, Any]:
    """Section `model` of config.json; {} if it is absent."""
    return self.config.get("model", {})

  @property
  def adapters(self) -> LoraConfig:
    """Configuration of the LoRA adapters in the checkpoint. SFT checkpoints have no adapters."""
    values = self.config.get("lora", {}) if self.path.parent.name == "rl" else {}
    return LoraConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

  @property
  def tokenizer(self) -> str:
    """Name of the run's tokenizer: a value for the key `tokenizer`. The default is "bytes"."""
    recorded = self.config.get("provenance", {})
    return recorded.get("tokenizer") or self.config.get("tokenizer") or "bytes"

  @property
  def about(self) -> dict[str, Any]:
    """JSON for the config.json of runs that start from this checkpoint."""
    commit = self.config.get("provenance", {}).get("commit")
    about = dict(checkpoint=str(self.path), phase=self.path.parent.name, step=int(self.path.name))
    return about | dict(seed=self.config.get("seed"), commit=commit)

  def model_config(self) -> ModelConfig:
    """Returns the model's configuration. Raises ValueError if config.json has none."""
    try:
      return from_json(self.model)
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"{self.key}={self.path}: the config.json of that run has no valid section model: {error}"
      ) from error

  def require_complete(self, name: str = "") -> None:
    """Raises ValueError unless the checkpoint is complete.

    Args:
      name: configured name, for the error message; "" for the checkpoint's path.
    """
    if int(self.path.name) in (steps := checkpoint.finished(self.path.parent)):
      return
    listed = ", ".join(map(str, steps)) or "none"
    named = f"{self.key}={name or str(self.path)!r}"
    raise ValueError(f"{named} is not a complete checkpoint; complete steps: {listed}")

  def load(self, model: ModelConfig, mesh: jax.sharding.Mesh, dtype: Any) -> Any:
    """Loads the parameters in the training layout. Adapters are merged into the weights.

    Args:
      model: configuration of the model.
      mesh: mesh of the parameters.
      dtype: compute dtype; some parameters are float32 for every compute dtype.

    Raises:
      ValueError: the checkpoint is incomplete or damaged, its parameters have other names or
        shapes than the model's, or a value is NaN or infinite.
    """
    plain = abstract_params(model, mesh, sharding.TRAIN, dtype)
    if not self.adapters.rank:
      return self.restore(plain)

    @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, plain))
    def merge(params: Any) -> Any:
      merged = lora.materialize(params, jnp.dtype(dtype))
      return jax.tree.map(lambda x, like: x.astype(like.dtype), merged, plain)

    return jax.block_until_ready(merge(self.load_with_adapters(model, mesh)))

  def load_with_adapters(self, model: ModelConfig, mesh: jax.sharding.Mesh) -> Any:
    """Loads unmerged parameters and adapters in the other run's dtypes. Raises as `load` does."""
    dtype = self.config["compute"]["dtype"]
    return self.restore(abstract_params(model, mesh, sharding.TRAIN, dtype, self.adapters))

  def restore(self, like: Any) -> Any:
    """Loads the parameters, without optimizer state. Raises ValueError as `load` does.

    Args:
      like: abstract parameters, with the shapes, dtypes and shardings to restore.
    """
    reader, like = ocp.PyTreeCheckpointHandler(), dict(params=like)
    self.require_complete()
    try:
      stored = checkpoint.stored_shapes(self.path)
      stored = {name: shape for name, shape in stored.items() if name.startswith("params.")}
      checkpoint.require_shapes(f"{self.key}={self.path}", stored, checkpoint.shapes(like))
      arguments = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,  # The optimizer's moments are not read.
      )
      with checkpoint.readable(self.path):
        restored = jax.block_until_ready(reader.restore(self.path / "state", args=arguments))
      checkpoint.host_of(self.path, restored)  # Raises DamagedError on a wrong checksum.
      self._require_finite(restored["params"])
      return restored["params"]
    except checkpoint.DamagedError as error:
      steps = [s for s in checkpoint.finished(self.path.parent) if s < int(self.path.name)]
      before = f"; the previous checkpoint is {self.path.parent / str(steps[-1])}" if steps else ""
      raise ValueError(f"{self.key}={self.path} is damaged: {error.why}{before}") from error

  def _require_finite(self, params: Any) -> None:
    """Raises ValueError for the first parameter with NaN or infinity."""
    arrays = integrity.named(params)
    for (name, array), count in zip(arrays.items(), finite.nonfinite(list(arrays.values()))):
      if count:
        raise ValueError(f"{self.key}={self.path}: {finite.describe(name, count, array.dtype)}")


@dataclasses.dataclass(frozen=True)
class WeightSource:
  """Source of the weights that a configuration key names, at a fixed commit or checkpoint."""

  key: str  # Configuration key, such as "weights".
  name: str  # Configured name. The name of a hub repository includes the commit.
  checkpoint: RunCheckpoint | None = None  # Checkpoint of another run; None for other sources.
  # JSON about the source, for the provenance; {} for random weights.
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def path(self) -> str:
    """Path of the checkpoint. For other sources the name: a directory, repository or "random"."""
    return str(self.checkpoint.path) if self.checkpoint else self.name

  @property
  def has_tokenizer(self) -> bool:
    """Whether the source is a published model with a tokenizer.json."""
    if self.checkpoint or self.name == RANDOM:
      return False
    return (hub.directory(self.name) / "tokenizer.json").is_file()

  @property
  def tokenizer(self) -> str | None:
    """Name of the weights' tokenizer; None if unknown."""
    if self.checkpoint:
      return self.checkpoint.tokenizer if self.checkpoint.config else None
    return self.name if self.has_tokenizer else None

  def published_model(self, named: str, alternatives: str) -> ModelConfig:
    """Returns the configuration of a published model. Raises ValueError for an incomplete model.

    Args:
      named: the flag with its value, for the error message.
      alternatives: other valid values of the key, as the end of the error message's sentence.
    """
    from gspo_jax.models import hf  # Imported here: other sources do not need safetensors.

    self._require_config(named, alternatives)
    return hf.check(self.name)

  def _require_config(self, named: str, alternatives: str) -> None:
    """Raises ValueError if config.json is missing. Arguments as in `published_model`."""
    path = hub.directory(self.name)
    if not (path / "config.json").is_file():
      near = "" if path.exists() else near_path(self.name)
      problem = "has no config.json" if path.is_dir() else "is not a directory"
      raise ValueError(
        f"{named} {problem}: set it to a Hugging Face directory (config.json and *.safetensors) or "
        f"repository (OWNER/NAME), {alternatives}{near}"
      )

  @property
  def _named(self) -> tuple[str, str]:
    """Arguments of `published_model` for the key of the policy's weights."""
    return f"--config.{self.key}={self.name}", "to the workdir of a run, or to random"

  def model(self, configured: ModelConfig) -> ModelConfig:
    """Returns the configuration of the weights' model.

    Returns `configured` itself if that model equals it, if the weights are random or unnamed, or if
    their run recorded no model. Raises ValueError for a missing or invalid config.json.
    """
    if self.name in ("", RANDOM) or (self.checkpoint and not self.checkpoint.model):
      return configured
    if self.checkpoint:
      model = self.checkpoint.model_config()
    else:
      from gspo_jax.models import hf  # Imported here: other sources do not need safetensors.

      self._require_config(*self._named)
      model = hf.load_config(self.name)
    return model if differences(dataclasses.asdict(model), configured) else configured

  def check_model(self, model: ModelConfig, configured: str) -> None:
    """Raises ValueError if the weights' files are incomplete, or their model differs from `model`.

    Args:
      model: expected model.
      configured: value of the key, for the error message.
    """
    if self.name == RANDOM:
      return
    if self.checkpoint:
      stored = self.checkpoint.model
    else:
      stored = dataclasses.asdict(self.published_model(*self._named))
    if changed := differences(stored, model):
      raise ValueError(
        f"the weights of --config.{self.key}={configured} are another model than the configured "
        f"model: {', '.join(changed)}. Set these keys to the weights' values, or remove "
        "--config.model.* and the configuration's variant from the command to use the weights' "
        "model"
      )

  def load(self, model: ModelConfig, mesh: jax.sharding.Mesh, dtype: Any, seed: int = 0) -> Any:
    """Loads or initializes the parameters in the training layout.

    Args:
      model: configuration of the model.
      mesh: mesh of the parameters.
      dtype: compute dtype; some parameters are float32 for every compute dtype.
      seed: seed of random weights.

    Raises:
      ValueError: the weights are incomplete, damaged, or belong to another model.
    """
    if self.checkpoint:
      return self.checkpoint.load(model, mesh, dtype)
    if self.name == RANDOM:
      shardings = transformer.shardings(model, sharding.TRAIN, mesh)
      init = jax.jit(lambda key: transformer.init(model, key), out_shardings=shardings)
      return init(jax.random.key(seed))
    from gspo_jax.models import hf  # Imported here: other sources do not need safetensors.

    types = jax.tree.map(lambda x: x.dtype, abstract_params(model, mesh, sharding.TRAIN, dtype))
    return hf.load(self.name, dtype=types, mesh=mesh, rules=sharding.TRAIN)[0]


def resolve(key: str, name: str, recorded: Mapping[str, Any]) -> WeightSource:
  """Resolves the configured name of weights to a checkpoint or a commit.

  Collective: call it on all hosts.

  Args:
    key: configuration key with the name.
    name: configured name.
    recorded: `WeightSource.about` of the run's first start; {} for a new run. A resumed run keeps
      its checkpoint or commit, even if the named run or branch has a newer one.

  Raises:
    ValueError: the named run has no checkpoint, or the checkpoint is incomplete; or the repository
      cannot be read, and `recorded` has no commit.
  """
  newest = hosts.run_on_first_host(lambda: find(name, key))
  if newest is None:
    name = pin(key, name, recorded)
    return WeightSource(key, name, about={} if name == RANDOM else dict(directory=name))
  about = recorded if "checkpoint" in recorded else newest.about
  source = dataclasses.replace(newest, path=epath.Path(about["checkpoint"]))
  return WeightSource(key, name, source, about)


def find(name: str, key: str = "weights") -> RunCheckpoint | None:
  """Finds a run's checkpoint by name.

  Returns None for other names, such as those of random weights and published models.

  Args:
    name: workdir, directory of a phase's checkpoints, or checkpoint.
    key: configuration key with the name, for error messages.

  Raises:
    ValueError: the run has no checkpoint, or the checkpoint is incomplete.
  """
  if name in ("", RANDOM) or hub.is_id(name):
    return None
  path = files.located(name, key)
  if "://" not in name:
    path = epath.Path(os.path.abspath(path))
  config = _read_config(path)
  if "provenance" in config:
    path = _phase_directory(path, config, f"{key}={name!r}")
  elif config:
    return None  # A Hugging Face directory.
  if path.name in PHASES and path.is_dir():
    if not (steps := checkpoint.finished(path)):
      raise ValueError(f"{key}={name!r} contains no complete checkpoint")
    path = path / str(max(steps))
  if not (path.name.isdigit() and path.parent.name in PHASES):
    return None
  phases = path.parent.parent
  # The run's config.json is in its workdir, or in the workdir's copy beside the phases (mirror.py).
  homes = phases.parent, phases / mirror.FOLDER
  config = config or next((c for c in map(_read_config, homes) if c), {})
  named = RunCheckpoint(path, config, key)
  named.require_complete(name)
  return named


def _phase_directory(workdir: epath.Path, config: Mapping[str, Any], named: str) -> epath.Path:
  """Finds RL checkpoints, or else SFT checkpoints. Raises ValueError if a run has neither."""
  try:
    home = epath.Path(config["checkpoint"]["directory"] or workdir / "checkpoints")
  except (KeyError, TypeError) as error:
    raise ValueError(f"{named}: {workdir / provenance.FILE} has no checkpoint.directory") from error
  for phase in PHASES:
    if checkpoint.finished(home / phase):
      return home / phase
  raise ValueError(
    f"{named} is a run without a checkpoint in {home}; wait for its first checkpoint"
  )


def pin(key: str, name: str, recorded: Mapping[str, Any], file: str = "config.json") -> str:
  """Adds the commit to the name of a hub repository. Collective: call it on all hosts.

  Other names are returned unchanged. A resumed run keeps its recorded commit, and warns if the
  branch has a newer one.

  Args:
    key: configuration key with the name.
    name: configured name.
    recorded: dict whose `directory` is the name pinned at the run's first start; {} for a new run.
    file: a file that the repository must have.

  Raises:
    ValueError: the repository cannot be read, and `recorded` has no commit.
  """
  old = recorded.get("directory")
  try:
    new = hub.pinned(name, file)
  except ValueError as error:
    if old:
      return old
    raise ValueError(f"--config.{key}={name}: {error}") from error
  if new == name or old in (None, new):
    return new
  if hosts.is_first():
    sys.stderr.write(f"warning: {key}={name} is now {new}; this run still uses {old}\n")
  return old


def resolve_tokenizer(name: str, source: WeightSource, recorded: Mapping[str, Any]) -> str:
  """Returns the tokenizer's name, with a hub repository's commit. Collective: call it on all hosts.

  Args:
    name: configured name; "" means the tokenizer of the weights, or "bytes" if they are random.
    source: source of the weights.
    recorded: as in `pin`.

  Raises ValueError as `pin` does.
  """
  if name or source.name == RANDOM:
    return pin("tokenizer", name or "bytes", recorded, "tokenizer.json")
  return source.checkpoint.tokenizer if source.checkpoint else source.name


def _read_config(directory: epath.Path) -> dict[str, Any]:
  """Reads config.json; {} for an absent or unreadable file."""
  try:
    return provenance.read(directory)
  except ValueError:
    return {}
