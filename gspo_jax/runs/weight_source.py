"""Sources of weights named in a configuration: random, a published model, or another run.

A published model is a Hugging Face directory, local or in a bucket, or a repository of the hub.
The workdir of another run means its newest checkpoint: of RL if RL has one, else of the cold start.
A checkpoint directory also works: `DIR/checkpoints/sft` for a phase's newest checkpoint, or
`DIR/checkpoints/rl/30` for the checkpoint after iteration 30.
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

PHASES = ("rl", "sft")  # In order of preference for a workdir.
RANDOM = "random"


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
  """A checkpoint of another run."""

  path: epath.Path
  config: Mapping[str, Any]  # The other run's config.json; {} without this file.
  key: str = "weights"  # Configuration key with the checkpoint's name, for messages.

  @property
  def model(self) -> dict[str, Any]:
    """Section `model` of config.json; {} without this section."""
    return _with_tuples(self.config.get("model", {}))

  @property
  def adapters(self) -> LoraConfig:
    """Configuration of the adapters in the checkpoint."""
    values = self.config.get("lora", {}) if self.path.parent.name == "rl" else {}
    return LoraConfig(**_with_tuples(values))

  @property
  def tokenizer(self) -> str:
    """Name of the run's tokenizer, a value for the key `tokenizer`."""
    origin = self.config.get("provenance", {})
    return origin.get("tokenizer") or self.config.get("tokenizer") or "bytes"

  @property
  def about(self) -> dict[str, Any]:
    """JSON about this checkpoint, for the provenance of a run that uses it."""
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
      name: name in the message; "" for the path.
    """
    if int(self.path.name) in (steps := checkpoint.finished(self.path.parent)):
      return
    others = f"complete are steps {', '.join(map(str, steps))}" if steps else "there is none"
    raise ValueError(f"{self.key}={name or str(self.path)!r} is no complete checkpoint; {others}")

  def load(self, model: ModelConfig, mesh: jax.sharding.Mesh, dtype: Any) -> Any:
    """Loads the parameters in the training layout, with adapters merged.

    The merge is that of training: in bfloat16 the sum is rounded with dither.

    Args:
      model: configuration of the model.
      mesh: mesh of the parameters.
      dtype: compute dtype; some parameters are float32 for every compute dtype.

    Raises:
      ValueError: the checkpoint is incomplete or damaged, has other parameters, or values that are
        NaN or infinite.
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
    """Loads parameters and adapters unmerged, in stored dtypes. Raises ValueError as `load`."""
    dtype = self.config["compute"]["dtype"]
    return self.restore(abstract_params(model, mesh, sharding.TRAIN, dtype, self.adapters))

  def restore(self, like: Any) -> Any:
    """Loads the parameters alone. Raises ValueError as `load`.

    Args:
      like: abstract parameters, for the layout.
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
      before = f"; the previous one is {self.path.parent / str(steps[-1])}" if steps else ""
      raise ValueError(f"{self.key}={self.path} is damaged: {error.why}{before}") from error

  def _require_finite(self, params: Any) -> None:
    """Raises ValueError, naming a parameter with NaN or infinity."""
    arrays = integrity.named(params)
    for (name, array), count in zip(arrays.items(), finite.nonfinite(list(arrays.values()))):
      if count:
        raise ValueError(f"{self.key}={self.path}: {finite.describe(name, count, array.dtype)}")


@dataclasses.dataclass(frozen=True)
class WeightSource:
  """Resolved source of the weights named by a configuration key."""

  key: str
  name: str  # Configured name; a hub repository's name has its commit added.
  checkpoint: RunCheckpoint | None = None  # Checkpoint of another run; None for other sources.
  # JSON about the source, for the provenance; {} for random weights.
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def path(self) -> str:
    """Directory, repository or checkpoint with the weights."""
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
      named: key and name, for the message.
      alternatives: other valid values of the key, for the message.
    """
    from gspo_jax.models import hf  # Imported here: other sources do not need safetensors.

    self._require_config(named, alternatives)
    return hf.check(self.name)

  def _require_config(self, named: str, alternatives: str) -> None:
    """Raises ValueError without a config.json. Arguments as in `published_model`."""
    path = hub.directory(self.name)
    if not (path / "config.json").is_file():
      problem = "has no config.json" if path.is_dir() else "is not a directory"
      raise ValueError(
        f"{named} {problem}: set it to a Hugging Face directory (config.json and *.safetensors) or "
        f"repository (OWNER/NAME), {alternatives}"
      )

  @property
  def _named(self) -> tuple[str, str]:
    """Arguments of `published_model` for the policy's weights."""
    return f"--config.{self.key}={self.name}", "to the workdir of a run, or to random"

  def model(self, configured: ModelConfig) -> ModelConfig:
    """Returns the weights' model; `configured` if it agrees or none is named.

    Raises ValueError for a missing or unsupported config.json.
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
    """Raises ValueError unless the weights are a complete model of this shape.

    Args:
      model: expected model.
      configured: value of the key, for the message.
    """
    if self.name == RANDOM:
      return
    if self.checkpoint:
      stored = self.checkpoint.model
    else:
      stored = dataclasses.asdict(self.published_model(*self._named))
    if changed := differences(stored, model):
      raise ValueError(
        f"--config.{self.key}={configured} holds another model than the configuration, which has "
        f"{', '.join(changed)}: set these to the weights' values, or leave out "
        "--config.model.* and the configuration's variant to take the weights' model"
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
  """Resolves the name of weights. Collective: call it on all hosts.

  Args:
    key: configuration key with the name.
    name: configured name.
    recorded: `about` from the run's first start; {} for a new run. A resumed run keeps its
      checkpoint or commit, even if the named run or branch has a newer one.

  Raises:
    ValueError: the named run has no checkpoint, the checkpoint is incomplete, or the repository
      cannot be read.
  """
  newest = hosts.run_on_first_host(lambda: find(name, key))
  if newest is None:
    name = pin(key, name, recorded)
    return WeightSource(key, name, about={} if name == RANDOM else dict(directory=name))
  about = recorded if "checkpoint" in recorded else newest.about
  source = dataclasses.replace(newest, path=epath.Path(about["checkpoint"]))
  return WeightSource(key, name, source, about)


def find(name: str, key: str = "weights") -> RunCheckpoint | None:
  """Finds a run's checkpoint by name; None for other names.

  Args:
    name: workdir, directory of a phase's checkpoints, or checkpoint.
    key: configuration key with the name, for messages.

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
      raise ValueError(f"{key}={name!r} holds no checkpoint")
    path = path / str(max(steps))
  if not (path.name.isdigit() and path.parent.name in PHASES):
    return None
  phases = path.parent.parent
  # The config.json is in the workdir, or in the copy of the workdir in checkpoint.directory.
  homes = phases.parent, phases / mirror.FOLDER
  config = config or next((c for c in map(_read_config, homes) if c), {})
  named = RunCheckpoint(path, config, key)
  named.require_complete(name)
  return named


def _phase_directory(workdir: epath.Path, config: Mapping[str, Any], named: str) -> epath.Path:
  """Returns the directory of a run's last phase with checkpoints, or raises ValueError."""
  try:
    home = epath.Path(config["checkpoint"]["directory"] or workdir / "checkpoints")
  except (KeyError, TypeError) as error:
    raise ValueError(f"{named}: {workdir / provenance.FILE} has no checkpoint.directory") from error
  for phase in PHASES:
    if checkpoint.finished(home / phase):
      return home / phase
  raise ValueError(f"{named} is a run without a checkpoint, in {home}; wait for its first one")


def pin(key: str, name: str, recorded: Mapping[str, Any], file: str = "config.json") -> str:
  """Adds the commit to the name of a hub repository. Collective: call it on all hosts.

  Other names are returned unchanged. A recorded commit is kept, with a warning if the branch has a
  newer commit.

  Args:
    key: configuration key with the name.
    name: configured name.
    recorded: JSON with the name from the run's first start, as `directory`; {} for a new run.
    file: file of the repository to read.

  Raises:
    ValueError: the repository cannot be read; the message names the key.
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
    sys.stderr.write(f"warning: {key}={name} is now {new}; this run keeps {old}\n")
  return old


def resolve_tokenizer(name: str, source: WeightSource, recorded: Mapping[str, Any]) -> str:
  """Returns the tokenizer's name; the weights' tokenizer for name "". Collective.

  Raises:
    ValueError: the repository cannot be read.
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


def _with_tuples(section: Mapping[str, Any]) -> dict[str, Any]:
  """Converts lists in a section from JSON back to tuples."""
  return {key: tuple(v) if isinstance(v, list) else v for key, v in section.items()}
