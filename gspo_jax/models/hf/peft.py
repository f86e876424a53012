"""Reads and writes adapters in PEFT's files, adapter_config.json and adapter_model.safetensors.

For a matrix W [outputs, inputs] of Hugging Face, the files have lora_A.weight [r, inputs] and
lora_B.weight [outputs, r]. The adapted matrix is W + lora_alpha / r · lora_B lora_A. Format:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from gspo_jax.models import lora, transformer
from gspo_jax.models.hf import convert, files
from gspo_jax.models.hf import leaves as hf_leaves
from gspo_jax.models.hf.architectures import OUTER, names
from gspo_jax.models.hf.config import CheckpointError, published, read_json
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.training import LoraConfig
from gspo_jax.system import hub

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json -> supported values, for which the adapted matrix is W + BA. Other
# values of init_lora_weights also change W.
_PLAIN = dict(
  peft_type=("LORA",),
  task_type=("CAUSAL_LM", None),
  bias=("none",),
  init_lora_weights=(True, False, "gaussian", "orthogonal", "eva", "mica"),
)
# Keys that may have any value, since they do not affect W + BA or are checked elsewhere.
_ANY = frozenset(
  """r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern
  base_model_name_or_path revision auto_mapping inference_mode peft_version megatron_core
  qalora_group_size loftq_config eva_config corda_config lora_ga_config""".split()
)
# Keys and values of a written adapter_config.json.
_WRITTEN = dict(
  peft_type="LORA", task_type="CAUSAL_LM", bias="none", init_lora_weights=True,
  fan_in_fan_out=False, use_rslora=False, use_dora=False, lora_bias=False, modules_to_save=None,
  rank_pattern={}, alpha_pattern={}, megatron_config=None, lora_dropout=0.0, inference_mode=True,
)  # fmt: skip
_APART = "qwen3_5", "qwen3_5_moe"  # AutoModelForCausalLM reads only the text model of these.
_MODULE = re.compile(r"\.([^.]+)\.lora_[AB]\.weight$")  # The group is a module, such as q_proj.


def load(directory: str | os.PathLike, params: Any, model: ModelConfig, config: LoraConfig) -> Any:
  """Returns `params` with the adapters of a directory, in the sharding of `params`.

  Raises:
    FileNotFoundError, CheckpointError, ValueError: as `check`.
    CheckpointError: a value is NaN or infinite.
  """
  opened, leaves = check(directory, model, config), _leaves(model, config)
  opened.fetch({entry.name: math.prod(entry.shape) for entry in _entries(leaves)[0]})
  trained, frozen = lora.split(params)

  def read(leaf: hf_leaves.Leaf, like: jax.Array) -> jax.Array:
    whole = convert.read(opened, leaf, hf_leaves.whole(leaf), np.dtype("float32"))
    return jax.make_array_from_callback(whole.shape, like.sharding, whole.__getitem__)

  arrays, treedef = jax.tree.flatten(trained)
  arrays = [read(leaf, like) for leaf, like in zip(leaves, arrays, strict=True)]
  hf_leaves.require_finite(directory, leaves, arrays)
  return lora.join(jax.tree.unflatten(treedef, arrays), frozen)


def check(directory: str | os.PathLike, model: ModelConfig, config: LoraConfig) -> files.Files:
  """Opens and checks adapters.

  directory: a local path, a path of a bucket (gs://...), or a repository of the hub.

  Raises:
    FileNotFoundError: one of the two files is missing.
    CheckpointError: the adapters are not plain LoRA, or differ from `config` in rank, alpha or
      matrices, or their tensors do not belong to `model`.
    ValueError: the bucket or the repository cannot be read.
  """
  name = hub.pinned(os.fspath(directory), CONFIG)
  path = hub.directory(name) / CONFIG
  settings = read_json(path)
  _require_plain(path, settings)
  opened = files.Files(name, TENSORS)
  matrix_of = _modules(model)
  modules = {match[1] for match in map(_MODULE.search, opened.file_of) if match}
  matrices = {matrix_of[module] for module in modules & matrix_of.keys()}
  stored = dict(rank=settings.get("r"), alpha=settings.get("lora_alpha"))
  stored |= dict(matrices=sorted(matrices)) if matrices else {}
  expected = dataclasses.asdict(config) | dict(matrices=sorted(config.matrices))
  if wrong := [f"lora.{key}={value}" for key, value in stored.items() if value != expected[key]]:
    raise CheckpointError(
      f"the adapters of lora.adapter={name} differ from this configuration: set {', '.join(wrong)}"
    )
  entries, _ = _entries(_leaves(model, config))
  shapes = {entry.name: entry.shape for entry in entries}
  opened.check_names(shapes)
  opened.check_headers(shapes, shapes)
  return opened


def _require_plain(path: epath.Path, settings: Mapping[str, Any]) -> None:
  """Raises CheckpointError unless the adapters are plain LoRA, W + BA.

  Keys without an entry in `_PLAIN` or `_ANY` must be off: null, false or empty.
  """
  for key, actual in settings.items():
    off = type(actual)() if isinstance(actual, bool | dict | list | str) else None
    allowed = _PLAIN.get(key, (off,))
    if key not in _ANY and actual not in allowed:
      supported = " or ".join(map(repr, allowed))
      raise CheckpointError(f"{path}: {key}={actual!r} is not supported, only {supported}")


def check_readable(model: ModelConfig, config: LoraConfig, base: str = "") -> None:
  """Raises ValueError if PEFT could not read the adapters.

  PEFT adapts modules by name. In transformers 5 the matrices of a dense layer are modules. The
  experts of a layer are parameters instead, with gate and up in one tensor. In Qwen3-Next and
  Qwen3.5, queries share a tensor with other projections.

  base: directory or repository of the adapted model. "" means a language model alone.
  """
  shared = {leaf.name for leaf, _ in _adapted(model, config) if "+" in "".join(leaf.axes)}
  dense = {f"{name}_proj" for name in ("gate", "up", "down")} & set(config.matrices)
  layers = {model.is_moe(layer) for layer in range(model.num_layers)}
  wrong = ""
  if outer := _outer_type(base):
    wrong = f"adapts the whole {outer} of {base}, whose modules have other names"
  elif shared:
    wrong = f"adapts {min(shared)} as a whole, not one of its matrices"
  elif dense and len(layers) > 1:
    wrong = "ignores adapters of dense layers in a model that also has layers with experts"
  elif True in layers and len(dense - {"down_proj"}) == 1:
    wrong = f"needs gate_proj and up_proj of experts together, not {min(dense - {'down_proj'})}"
  if wrong:
    raise ValueError(f"PEFT {wrong}: export the merged weights, without --adapters")


def _outer_type(base: str) -> str:
  """Returns the base's model_type if PEFT adapts an outer model there; "" otherwise."""
  try:
    path = hub.directory(base) / "config.json" if base else None
    kind = read_json(path).get("model_type", "") if path and path.is_file() else ""
  except ValueError:  # The base cannot be read at present.
    return ""
  return kind if kind in OUTER and kind not in _APART else ""


def save(
  directory: str | os.PathLike, params: Any, model: ModelConfig, config: LoraConfig, base: str = ""
) -> None:
  """Writes adapters in float32, for `PeftModel.from_pretrained`.

  All processes must call this; the first one writes. Raises CheckpointError for NaN and infinite
  values.

  Args:
    base: directory or repository of the adapted model, for adapter_config.json. "" for none.
  """
  directory, leaves = Path(directory), _leaves(model, config)
  entries, plan = _entries(leaves)
  arrays = jax.tree.leaves(lora.split(params)[0])
  hf_leaves.require_finite(directory, leaves, arrays)
  tensors = hf_leaves.tensors_of(leaves, arrays, plan)
  writes = jax.process_index() == 0  # Other processes only help to gather arrays.
  if writes:
    directory.mkdir(parents=True, exist_ok=True)
  files.write(directory / TENSORS if writes else Path(os.devnull), entries, tensors)
  name, _, revision = base.partition("@") if hub.is_id(base) else (base, "", "")
  modules = _modules(model).items()
  described = _WRITTEN | dict(
    base_model_name_or_path=name or None,
    revision=revision or None,
    r=config.rank,
    lora_alpha=config.alpha,
    target_modules=[module for module, matrix in modules if matrix in config.matrices],
  )
  if writes:
    (directory / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def _modules(model: ModelConfig) -> dict[str, str]:
  """Maps modules, such as w1, to names in `LoraConfig.matrices`."""
  return {
    leaf.name.split(".")[-2]: f"{leaf.key.split('.')[-1]}_proj"
    for leaf, _ in _adapted(model, LoraConfig(rank=1))
  }


def _entries(leaves: list[hf_leaves.Leaf]) -> tuple[list[files.Entry], list]:
  """Returns the tensors of the file, and their order in the form of `by_layer`."""
  plan, float32 = hf_leaves.by_layer(leaves), np.dtype("float32")
  entries = [files.Entry(leaves[i].tensor(p), leaves[i].tensor_shape, float32) for _, i, p in plan]
  return entries, plan


def _leaves(model: ModelConfig, config: LoraConfig) -> list[hf_leaves.Leaf]:
  """Returns the leaves of every A and B.

  Their order is that of the flattened parameters. Raises ValueError for tensors of several
  matrices, such as fused experts.
  """
  leaves = []
  for leaf, w in _adapted(model, config):
    if len(leaf.axes) != 2 or "+" in "".join(leaf.axes):
      raise ValueError(f"{leaf.name} has several matrices, and PEFT cannot adapt one of them")
    stem, (outputs, inputs) = leaf.name.removesuffix(".weight"), leaf.axes
    for side, part, axes in (("A", w.a, ("r", inputs)), ("B", w.b, (outputs, "r"))):
      name = f"base_model.model.{stem}.lora_{side}.weight"
      changed = dict(letters=part.letters, shape=part.shape, name=name, axes=axes)
      leaves.append(dataclasses.replace(leaf, **changed))
  return leaves


def _adapted(model: ModelConfig, config: LoraConfig) -> list[tuple[hf_leaves.Leaf, lora.Adapted]]:
  """Returns leaf and table entry of each adapted matrix."""
  table = transformer.table(model)
  weights = jax.tree.leaves(lora.table(table, config), is_leaf=lora.is_adapted)
  leaves = hf_leaves.leaves_of(model, table, names(published(model)))
  return [(leaf, w) for leaf, w in zip(leaves, weights, strict=True) if lora.is_adapted(w)]
