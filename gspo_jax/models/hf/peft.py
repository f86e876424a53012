"""Reads and writes adapters in PEFT's files, adapter_config.json and adapter_model.safetensors.

A matrix W of Hugging Face, [outputs, inputs], has lora_A.weight [r, inputs] and lora_B.weight
[outputs, r] there, and is W + lora_alpha / r · lora_B lora_A. Format:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspo_jax.models import lora, transformer
from gspo_jax.models.hf import convert, files
from gspo_jax.models.hf.architectures import names
from gspo_jax.models.hf.config import CheckpointError, read_json
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.training import LoraConfig
from gspo_jax.system import hub

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Keys of calculation or storage, with the only supported value.
FIXED = dict(
  peft_type="LORA", bias="none", fan_in_fan_out=False, use_rslora=False, use_dora=False,
  lora_bias=False, modules_to_save=None, rank_pattern={}, alpha_pattern={}, megatron_config=None,
)  # fmt: skip


def load(directory: str | os.PathLike, params: Any, model: ModelConfig, config: LoraConfig) -> Any:
  """Loads the adapters of a directory into the parameters, in their layout.

  Raises:
    FileNotFoundError, CheckpointError, ValueError: as `check`.
  """
  opened, leaves = check(directory, model, config), _leaves(model, config)
  opened.fetch({entry.name: math.prod(entry.shape) for entry in _entries(leaves)[0]})
  trained, frozen = lora.split(params)

  def read(leaf: convert.Leaf, like: jax.Array) -> jax.Array:
    whole = convert.read(opened, leaf, convert.whole(leaf), np.dtype("float32"))
    return jax.make_array_from_callback(whole.shape, like.sharding, whole.__getitem__)

  arrays, treedef = jax.tree.flatten(trained)
  arrays = [read(leaf, like) for leaf, like in zip(leaves, arrays, strict=True)]
  return lora.join(jax.tree.unflatten(treedef, arrays), frozen)


def check(directory: str | os.PathLike, model: ModelConfig, config: LoraConfig) -> files.Files:
  """Opens and checks adapters of a path, bucket or hub repository.

  Raises:
    FileNotFoundError: one of the two files is missing.
    CheckpointError: adapters of another kind, rank or alpha, of other matrices or another model.
    ValueError: a bucket or a repository cannot be read.
  """
  name = hub.pinned(os.fspath(directory), CONFIG)
  path = hub.directory(name) / CONFIG
  settings = read_json(path)
  for key, value in FIXED.items():
    if (actual := settings.get(key) or value) != value:
      raise CheckpointError(f"{path}: {key}={actual!r}, and only {value!r} is read")
  opened = files.Files(name, TENSORS)
  matrices = {name.split(".")[-3] for name in opened.file_of if ".lora_" in name}
  stored = dict(rank=settings.get("r"), alpha=settings.get("lora_alpha"), matrices=sorted(matrices))
  expected = dataclasses.asdict(config) | dict(matrices=sorted(config.matrices))
  if wrong := [f"lora.{key}={value}" for key, value in stored.items() if value != expected[key]]:
    raise CheckpointError(f"lora.adapter={name} has other adapters: set {', '.join(wrong)}")
  entries, _ = _entries(_leaves(model, config))
  shapes = {entry.name: entry.shape for entry in entries}
  opened.check_names(shapes)
  opened.check_headers(shapes, shapes)
  return opened


def save(
  directory: str | os.PathLike, params: Any, model: ModelConfig, config: LoraConfig, base: str = ""
) -> None:
  """Writes both files in float32, for `PeftModel.from_pretrained`.

  Every process calls this, and the first one writes.

  Args:
    base: public name of the adapted model.
  """
  directory, leaves = Path(directory), _leaves(model, config)
  entries, plan = _entries(leaves)
  tensors = convert.tensors_of(leaves, jax.tree.leaves(lora.split(params)[0]), plan)
  writes = jax.process_index() == 0  # The others take part in gathering.
  if writes:
    directory.mkdir(parents=True, exist_ok=True)
  files.write(directory / TENSORS if writes else Path(os.devnull), entries, tensors)
  described = FIXED | dict(
    task_type="CAUSAL_LM",
    base_model_name_or_path=base or None,
    r=config.rank,
    lora_alpha=config.alpha,
    lora_dropout=0.0,
    target_modules=list(config.matrices),
    inference_mode=True,
  )
  if writes:
    (directory / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def _entries(leaves: list[convert.Leaf]) -> tuple[list[files.Entry], list]:
  """The tensors, and `by_layer` of them."""
  plan, float32 = convert.by_layer(leaves), np.dtype("float32")
  entries = [files.Entry(leaves[i].tensor(p), leaves[i].tensor_shape, float32) for _, i, p in plan]
  return entries, plan


def _leaves(model: ModelConfig, config: LoraConfig) -> list[convert.Leaf]:
  """Returns every A and B, in the order of the flattened pytree."""
  adapters = lora.table(transformer.table(model), config)
  weights = jax.tree.leaves(adapters, is_leaf=lora.is_adapted)
  leaves = []
  for leaf, w in zip(convert.leaves_of(model, names(model)), weights, strict=True):
    if lora.is_adapted(w):
      stem, (outputs, inputs) = leaf.name.removesuffix(".weight"), leaf.axes
      for side, part, axes in (("A", w.a, ("r", inputs)), ("B", w.b, (outputs, "r"))):
        name = f"base_model.model.{stem}.lora_{side}.weight"
        changed = dict(letters=part.letters, shape=part.shape, name=name, axes=axes)
        leaves.append(dataclasses.replace(leaf, **changed))
  return leaves
