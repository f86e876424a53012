"""Loads and saves Hugging Face directories: config.json and safetensors.

One table has the layout of each parameter in the files, for both `load` and `save`. To bound host
memory, `load` copies parameters to the devices shard by shard, and `save` writes tensor by tensor.

Architectures are those of `models/families`, as published and as written by transformers 5. A box
is a part of a parameter: a range of indices for each letter of its axes.
"""

import collections
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding

from gspo_jax import sharding
from gspo_jax.models import lora, transformer
from gspo_jax.models.hf import architectures, mxfp4, nested
from gspo_jax.models.hf import config as hf_config
from gspo_jax.models.hf import files as hf_files
from gspo_jax.models.hf.config import CheckpointError, load_config
from gspo_jax.models.hf.leaves import (
  Leaf,
  by_layer,
  leaves_of,
  require_finite,
  tensors_of,
  whole,
)
from gspo_jax.settings.model import ModelConfig
from gspo_jax.system import hosts, hub
from gspo_jax.system.transfer import Transfer

_SAVED = ("float32", "bfloat16", "float16")
_PARTIAL = ".partial"  # Suffix of files under construction.
_READ = 2**24  # Elements copied at once, to bound host memory beside that of the shard.
_ALIGN = 64  # Alignment in bytes with which JAX on CPU adopts a buffer instead of copying it.


def load(
  directory: str | os.PathLike,
  *,
  dtype: Any = jnp.float32,
  mesh: jax.sharding.Mesh | None = None,
  rules: sharding.Rules = sharding.TRAIN,
) -> tuple[transformer.Params, ModelConfig]:
  """Loads parameters and hyperparameters of a Hugging Face directory.

  Missing and superfluous tensors are errors. Only the constants inv_freq of old Llamas and tensors
  outside the language model (`nested`) are ignored. If embeddings are tied, the files may have the
  embedding, `lm_head.weight`, or both with equal values. (If the values differ, transformers warns
  and unties the two; `load` raises an error.)

  Args:
    directory: directory with config.json and safetensors files (`files.Files`). It is a local path,
      a path of a bucket (gs://...), or a repository of the Hugging Face hub, OWNER/NAME or
      OWNER/NAME@REVISION.
    dtype: dtype of the parameters (`_kinds`), or a tree of dtypes. Files may have float64, float32,
      float16, bfloat16 or MXFP4.
    mesh: mesh of the parameters. From local files, each host reads only the values of its own
      devices. The hosts divide remote files among themselves (`_reading`). None loads arrays to the
      default device.
    rules: sharding rules, letters -> mesh axes.

  Raises:
    FileNotFoundError: there is no config.json, or no safetensors file.
    CheckpointError: the model is not supported; tensors are missing, superfluous, of another shape
      or an unsupported type; or a value is NaN or infinite.
    ValueError: the mesh does not divide a parameter, or the repository or bucket is unreadable.
  """
  name = hub.pinned(os.fspath(directory))
  config, files, leaves, shapes, twin = _plan(name)
  layout = reading = [None] * len(leaves)
  if mesh is not None:
    layout = reading = jax.tree.leaves(transformer.shardings(config, rules, mesh))
    if files.remote:
      reading = [_reading(leaf, mesh) for leaf in leaves]
  # The headers of the needed files are checked first, so no values are read in vain if a header is
  # wrong.
  needed = files.in_files(_needed(leaves, reading, twin))
  files.check_headers(needed, shapes)
  files.fetch(needed)

  table = transformer.table(config)
  types = jax.tree.leaves(dtype) if isinstance(dtype, transformer.Params) else _kinds(table, dtype)
  arrays = []
  with Transfer(
    f"reading {files.name}", files.size_of(needed), active=hosts.is_first()
  ) as transfer:
    for leaf, split, target, kind in zip(leaves, reading, layout, types):
      copy = twin if leaf.key == "embed" else None
      part = functools.partial(
        read, files, leaf, dtype=jnp.dtype(kind), twin=copy, transfer=transfer
      )
      array = _array(leaf, split, part)
      arrays.append(jax.block_until_ready(jax.device_put(array, target)))
  require_finite(files.name, leaves, arrays)
  return jax.tree.unflatten(jax.tree.structure(table), arrays), config


def check(directory: str | os.PathLike) -> ModelConfig:
  """Checks all headers of a Hugging Face directory; returns its hyperparameters.

  Raises FileNotFoundError, CheckpointError and ValueError as `load`; values are not read.
  """
  config, files, _, shapes, _ = _plan(hub.pinned(os.fspath(directory)))
  files.check_headers(shapes, shapes)
  return config


def _plan(
  name: str,
) -> tuple[ModelConfig, hf_files.Files, list[Leaf], dict[str, tuple[int, ...]], str | None]:
  """Compares config.json with the names of tensors.

  Returns hyperparameters, files, the parameters with their tensors, shapes of the tensors, and the
  name of the head's tensor if the files have it beside a tied embedding, else None.
  """
  config = load_config(name)
  files = hf_files.Files(name)
  other_model = nested.Other(name, files)
  names = other_model.rename(architectures.names(config))
  twin, (embed, head) = None, (names[key][0] for key in ("embed", "head"))
  if config.tie_word_embeddings and files.contains(head):
    if embed in files.file_of:
      twin = head  # Both tensors are read, and must be equal.
    else:
      names = names | {"embed": names["head"]}
  names = mxfp4.names_in(files.file_of, names)
  leaves = leaves_of(config, transformer.table(config), names)
  shapes: dict[str, tuple[int, ...]] = {}
  for leaf in leaves:
    for position in leaf.positions(whole(leaf)):
      shapes |= files.stored(leaf.tensor(position), leaf.tensor_shape)
  if twin:
    shapes[twin] = shapes[embed]
  files.check_names(shapes, other_model.names)
  return config, files, leaves, shapes, twin


def _boxes(leaf: Leaf, target) -> Iterator[tuple[dict[str, range], list]]:
  """Yields each box of this process's devices, and the devices with this box.

  target: sharding of the parameter.
  """
  devices_of: dict[tuple, list] = {}
  for device, index in target.addressable_devices_indices_map(leaf.shape).items():
    part = tuple(range(*s.indices(size)) for s, size in zip(index, leaf.shape))
    devices_of.setdefault(part, []).append(device)
  for part, devices in devices_of.items():
    yield dict(zip(leaf.letters, part)), devices


def _array(leaf: Leaf, layout: Any, read: Callable[[dict[str, range]], np.ndarray]) -> jax.Array:
  """Reads a parameter shard by shard into a layout.

  layout: sharding. None means the default device.
  read: returns the values of a box.
  """
  if layout is None:
    return jax.block_until_ready(jax.device_put(read(whole(leaf))))
  parts = []
  for box, devices in _boxes(leaf, layout):
    values = read(box)
    # Waiting for the copies to the devices keeps host memory at one shard.
    parts += jax.block_until_ready([jax.device_put(values, device) for device in devices])
  return jax.make_array_from_single_device_arrays(leaf.shape, layout, parts)


def _reading(leaf: Leaf, mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns a sharding for reading a remote parameter.

  Hosts read different bytes if there are enough shards, and then the devices exchange the values:
  links between devices are faster than downloads. Only the stacked axes and the first axis of
  tensors are split, so that each shard of a tensor is one range of a file. If these axes give too
  few shards, several devices have the same shard.
  """
  parts, remaining = {}, mesh.devices.size
  for letter in (*leaf.stacked, leaf.parts[0].outer[0]):
    parts[letter] = math.gcd(leaf.sizes[letter], remaining)
    remaining //= parts[letter]
  devices = mesh.devices.reshape(*parts.values(), remaining)
  names = (*parts, "copies")
  spread = jax.sharding.Mesh(devices, names, axis_types=(AxisType.Explicit,) * len(names))
  return NamedSharding(spread, sharding.spec(leaf.letters, {letter: letter for letter in parts}))


def _needed(leaves: list[Leaf], layout: list, twin: str | None) -> dict[str, int]:
  """Counts the elements for this process to read, by tensor."""
  needed: dict[str, int] = collections.Counter()
  for leaf, target in zip(leaves, layout):
    first = leaf.parts[0].outer[0]
    row = leaf.size(leaf.letters[len(leaf.stacked) :]) // leaf.sizes[first]
    boxes = [whole(leaf)] if target is None else [box for box, _ in _boxes(leaf, target)]
    for box in boxes:
      for position in leaf.positions(box):
        needed[leaf.tensor(position)] += len(box[first]) * row
  embed = next(leaf.name for leaf in leaves if leaf.key == "embed")
  return needed | ({twin: needed[embed]} if twin else {})


def read(
  files: hf_files.Files,
  leaf: Leaf,
  box: dict[str, range],
  dtype: Any,
  twin: str | None = None,
  transfer: Transfer | None = None,
) -> np.ndarray:
  """Reads a box of a parameter, stacked, transposed and cast.

  twin: name of another tensor, whose values must be equal. None if there is none.
  transfer: counts the bytes read. None counts nothing.
  """
  out = _empty(tuple(len(box[x]) for x in leaf.letters), dtype)
  first = leaf.parts[0].outer[0]
  row = math.prod(leaf.tensor_shape) // leaf.sizes[first]
  step = max(1, _READ // row)

  def copy(position: tuple[int, ...], start: int) -> None:
    """Copies `step` rows of one tensor."""
    index = tuple(p - box[x].start for x, p in zip(leaf.stacked, position))
    target, name = out[index].transpose(leaf.order), leaf.tensor(position)
    rows = box[first][start : start + step]
    part = box | {first: rows}
    data = _slice(files, leaf, name, part)
    if twin and not np.array_equal(data, _slice(files, leaf, twin, part)):
      raise CheckpointError(
        f"{files.file_of[twin]}: tie_word_embeddings is true, but {twin} differs from {name}: set "
        "tie_word_embeddings to false in config.json to load both"
      )
    target[start : start + len(rows)] = data
    if transfer:
      transfer.add(files.size_of(files.in_files({name: data.size})) * (2 if twin else 1))

  starts = range(0, len(box[first]), step)
  files.each(copy, itertools.product(leaf.positions(box), starts))
  return out


def _slice(files: hf_files.Files, leaf: Leaf, name: str, part: dict[str, range]) -> np.ndarray:
  """Reads a box of one parameter from its tensor, with merged axes split."""
  rows, shape, outer_box, split, inner_box = [], [], [], [], []
  for outer, inner, offset, start, total in leaf.parts:
    first, merged = part.get(outer[:1], range(1)), outer[1:]
    width = leaf.size(merged) * total
    rows.append(slice(offset + first.start * width, offset + first.stop * width))
    box = [slice(part[x].start, part[x].stop) for x in merged]
    shape += [len(first), *(leaf.sizes[x] for x in merged), total]
    outer_box += [slice(None), *box, slice(start, start + leaf.size(inner))]
    split += [len(part[x]) for x in outer] + [leaf.sizes[x] for x in inner]
    inner_box += [slice(None)] * len(outer) + [slice(part[x].start, part[x].stop) for x in inner]
  data = files.read(name, tuple(rows)).reshape(shape)[tuple(outer_box)]
  return data.reshape(split)[tuple(inner_box)]


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Allocates an array, aligned to `_ALIGN` bytes."""
  size = math.prod(shape) * dtype.itemsize
  buffer = np.empty(size + _ALIGN, np.uint8)
  start = -buffer.ctypes.data % _ALIGN
  return buffer[start : start + size].view(dtype).reshape(shape)


def save(
  directory: str | os.PathLike,
  params: transformer.Params,
  model_config: ModelConfig,
  *,
  dtype: Any = None,
  shard_size_bytes: int = 5 * 10**9,
  more: Mapping[str, Any] | None = None,
  like: str = "",
) -> None:
  """Writes config.json and safetensors for transformers' `from_pretrained`.

  Names and shapes are those of published checkpoints, most of which have one tensor per expert. All
  processes must call this function; the first process writes. Files of a tokenizer are not written.
  An earlier save in the directory is replaced when the new files are complete. Adapters are merged;
  for files in bfloat16, the sums are dithered as in training.

  Args:
    dtype: dtype of the tensors (`_kinds`). None keeps each parameter's dtype.
    shard_size_bytes: maximum size of a file with several tensors.
    more: further keys of config.json, without effect on the model. None adds none.
    like: directory with this language model and other parts, such as a vision encoder (`nested`).
      The other parts are copied. "" copies none.

  Raises:
    ValueError: the parameters do not match `model_config`, no architecture of Hugging Face has its
      features, `like` has another language model, or a value is NaN or infinite in `dtype`.
  """
  directory = Path(directory)
  model_config = hf_config.published(model_config)
  names, other_model = architectures.names(model_config), nested.Other(like)
  if other_model.names and load_config(like) != model_config:
    raise ValueError(f"the language model of {like} differs from the model to save")
  table = transformer.table(model_config)
  leaves = leaves_of(model_config, table, other_model.rename(names))
  arrays = _check_shapes(_merge(params, dtype), model_config)
  kinds = [array.dtype for array in arrays] if dtype is None else _kinds(table, dtype)
  if unknown := {kind.name for kind in kinds} - set(_SAVED):
    raise ValueError(f"dtype={min(unknown)} is not one of {', '.join(_SAVED)}")
  config = hf_config.to_hf(model_config, jnp.dtype(dtype or _widest(table, kinds)).name)
  config = other_model.wrap_config(config) | dict(more or {})
  require_finite(directory, leaves, arrays, kinds)
  plan = by_layer(leaves)
  entries = [
    hf_files.Entry(leaves[i].tensor(p), leaves[i].tensor_shape, kinds[i]) for _, i, p in plan
  ]
  parts = hf_files.shards(entries + other_model.entries, shard_size_bytes)
  tensors = itertools.chain(tensors_of(leaves, arrays, plan), other_model.tensors())
  writes = jax.process_index() == 0  # Other processes only help to gather arrays.
  if writes:
    directory.mkdir(parents=True, exist_ok=True)
  for name, entries in parts.items():
    path = directory / (name + _PARTIAL) if writes else Path(os.devnull)
    hf_files.write(path, entries, tensors)
  if writes:
    hf_files.finish(directory, parts, _PARTIAL)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("hf.save")  # No process returns before files are complete.


def _kinds(table: transformer.Params, dtype: Any) -> list[jnp.dtype]:
  """Returns the weights' dtypes: `dtype`, but at least float32 for some, as in published files.

  These are biases on the choice of experts, and decays and norms of linear attention.
  """
  wide, other = jnp.promote_types(dtype, jnp.float32), jnp.dtype(dtype)
  return [wide if _is_exact(weight) else other for weight in jax.tree.leaves(table)]


def _widest(table: transformer.Params, kinds: Sequence[jnp.dtype]) -> jnp.dtype:
  """Returns the widest dtype of all weights but the exact ones (`_is_exact`)."""
  weights = zip(jax.tree.leaves(table), kinds, strict=True)
  return max((kind for w, kind in weights if not _is_exact(w)), key=lambda kind: kind.itemsize)


def _is_exact(weight: Any) -> bool:
  """Whether published files have the weight in float32, and others in any dtype."""
  return weight.dtype == jnp.float32 and not weight.inputs


def _merge(params: transformer.Params, dtype: Any) -> transformer.Params:
  """Merges adapters, in float32 for files in float32, else as in `lora.materialize`."""
  if dtype is not None and jnp.dtype(dtype) == jnp.float32:
    return lora.merged(params, jnp.float32)
  return lora.materialize(params, None if dtype is None else jnp.dtype(dtype))


def _check_shapes(params: transformer.Params, config: ModelConfig) -> list[jax.Array]:
  """Flattens the parameters; raises ValueError if they do not match `config`."""
  table = transformer.table(config)
  if jax.tree.structure(params) != jax.tree.structure(table):
    raise ValueError(
      "these are not the parameters of this model_config: they differ in layers, experts, biases, "
      "norms of queries and keys, or a tied head"
    )
  for (path, array), w in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(table)):
    if array.shape != w.shape:
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      raise ValueError(f"params.{name} has shape {array.shape}, but model_config needs {w.shape}")
  return jax.tree.leaves(params)
