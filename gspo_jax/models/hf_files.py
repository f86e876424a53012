"""The safetensors files of a Hugging Face directory: opened lazily, checked strictly, streamed."""

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from gspo_jax.models.hf_config import CheckpointError, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IGNORED = ".rotary_emb.inv_freq"  # a constant that old Llama checkpoints carry
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


class _Files:
  """The safetensors files of a directory, each opened when something in it is first needed."""

  def __init__(self, directory: Path):
    self.directory = directory
    self._open: dict[Path, Any] = {}
    self.file_of: dict[str, Path] = {}  # tensor name -> file
    self.indexed = False
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if index.exists() and not single.exists():
      self.indexed = True
      self.file_of = {n: directory / f for n, f in hf_config.read(index)["weight_map"].items()}
      return
    paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
      raise FileNotFoundError(f"{directory}: no *.safetensors file")
    for path in paths:
      for name in self.open(path).keys():  # noqa: SIM118
        if name in self.file_of:
          raise CheckpointError(f"{name} is both in {self.file_of[name]} and in {path.name}")
        self.file_of[name] = path

  def open(self, path: Path) -> Any:
    if path not in self._open:
      try:
        self._open[path] = safetensors.safe_open(path, framework="numpy")
      except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
    return self._open[path]

  def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
    return self.open(self.file_of[name]).get_slice(name)[slices]

  def check_names(self, shapes: dict[str, tuple[int, ...]]) -> None:
    """CheckpointError unless the files hold exactly these tensors, and ignored ones."""
    missing = [name for name in shapes if name not in self.file_of]
    leftover = [
      f"{name} ({path.name})"
      for name, path in self.file_of.items()
      if name not in shapes and not name.endswith(_IGNORED)
    ]
    problems = []
    if missing:
      problems.append(f"{len(missing)} tensors are missing: {_listed(missing)}")
    if leftover:
      problems.append(f"{len(leftover)} tensors belong to no parameter: {_listed(leftover)}")
    if problems:
      raise CheckpointError(f"{self.directory}: {'; '.join(problems)}")

  def check_headers(self, names: set[str], shapes: dict[str, tuple[int, ...]]) -> None:
    """CheckpointError if a file that holds one of `names` is not what the index and `shapes` say."""
    for path in sorted({self.file_of[name] for name in names}):
      inside = set(self.open(path).keys())
      expected = {name for name, file in self.file_of.items() if file == path}
      if inside != expected:
        raise CheckpointError(
          f"{path}: its tensors are not those that the index lists: "
          f"{_listed(sorted(inside ^ expected))}"
        )
      for name in sorted(inside & shapes.keys()):
        header = self.open(path).get_slice(name)
        if tuple(header.get_shape()) != shapes[name]:
          raise CheckpointError(
            f"{path}: {name} has shape {tuple(header.get_shape())}, but config.json asks for "
            f"{shapes[name]}"
          )
        if header.get_dtype() not in _TAGS.values():
          raise CheckpointError(f"{path}: {name} is of type {header.get_dtype()}: quantised?")


def _listed(names: list[str], most: int = 8) -> str:
  rest = f" and {len(names) - most} more" if len(names) > most else ""
  return ", ".join(names[:most]) + rest


def _write(path: Path, shard: list[tuple], tensors: Iterator[np.ndarray]) -> None:
  """One safetensors file: length of the header, header, data in its order."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for entry in shard:
    start, end = end, end + _bytes(entry)
    name, shape, dtype = entry
    header[name] = dict(dtype=_TAGS[dtype.name], shape=shape, data_offsets=[start, end])
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for _, _, dtype in shard:
      file.write(np.ascontiguousarray(next(tensors), dtype).reshape(-1).view(np.uint8))


def _write_json(path: Path, content: dict[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + "\n")
