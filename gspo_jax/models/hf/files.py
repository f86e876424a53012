"""Safetensors files of a Hugging Face directory: opened lazily, checked strictly, streamed.

A directory is local, in a bucket (gs://...), or a repository of the Hugging Face hub.
"""

import collections
import concurrent.futures
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from etils import epath

from gspo_jax.models.hf import mxfp4
from gspo_jax.models.hf.config import CheckpointError, read_json
from gspo_jax.models.hf.ranges import DTYPES, RangedFile
from gspo_jax.system import hub

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IGNORED = ".rotary_emb.inv_freq"  # Suffix of a constant's name in old Llama checkpoints.
_FLOATS = [tag for tag in DTYPES if tag != "U8"]
_TAGS = {np.dtype(kind).name: tag for tag, kind in DTYPES.items()}  # NumPy's -> safetensors' name.

AT_ONCE = 16  # Maximum number of concurrent reads of remote files.

Shapes = Mapping[str, tuple[int, ...]]  # Name of a tensor -> shape.


class Files:
  """The tensors of a directory, by name.

  Local files are memory-mapped on first use. Files of a bucket, and files of a repository that
  are not downloaded (`fetch`), are read in ranges.
  """

  def __init__(self, name: str, single: str = SINGLE):
    """Finds the files of all tensors.

    If the file `single` exists, all tensors are in it. Otherwise model.safetensors.index.json names
    the file of each tensor. If there is no index, all *.safetensors files are opened.

    Args:
      name: directory, bucket path or repository.
      single: name of a file with all tensors.

    Raises:
      FileNotFoundError: there is no safetensors file.
      CheckpointError: a file is unreadable, or two files have a tensor of the same name.
      ValueError: the repository or the bucket cannot be read.
    """
    self._repository = hub.Repository.from_name(name) if hub.is_id(name) else None
    self.name = self._repository.id if self._repository else name
    directory = self.directory = hub.directory(name)
    self.remote = self._repository is not None or "://" in name
    self.file_of: dict[str, epath.Path] = {}  # tensor name -> file
    self._handles: dict[epath.Path, Any] = {}
    names = [single] if (directory / single).is_file() else self._names()
    if INDEX in names and single not in names:
      index = read_json(directory / INDEX)
      files = index.get("weight_map")
      if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise CheckpointError(f"{directory / INDEX}: no weight_map from tensors to files")
      self.file_of = {name: directory / file for name, file in files.items()}
      return
    stems = [single] if single in names else sorted(n for n in names if n.endswith(".safetensors"))
    if not stems:
      raise FileNotFoundError(f"{name}: no *.safetensors file{_other_format(names)}")
    for path in (directory / stem for stem in stems):
      for tensor in self._open(path).keys():  # noqa: SIM118, not a mapping
        if tensor in self.file_of:
          raise CheckpointError(f"{tensor} is both in {self.file_of[tensor]} and in {path.name}")
        self.file_of[tensor] = path

  def _names(self) -> list[str]:
    """Returns names of the files in the directory."""
    if self._repository is not None:
      return self._repository.files
    return [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []

  def _open(self, path: epath.Path) -> Any:
    """Opens a file on first use. Raises as `__init__`."""
    if path not in self._handles:
      try:
        self._handles[path] = self._open_file(path)
      except (FileNotFoundError, hub.HubError):
        raise
      except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file: {error}") from error
    return self._handles[path]

  def _open_file(self, path: epath.Path) -> Any:
    """Opens a local file, or a remote one for reading ranges."""
    if self._repository is not None and not path.exists():
      return RangedFile(*self._repository.reader(path.name))
    if "://" not in str(path):
      return safetensors.safe_open(path, framework="numpy")
    return RangedFile(*hub.bucket_reader(path))

  def contains(self, name: str) -> bool:
    """Whether a file has a tensor. A false entry of the index is removed."""
    if name in self.file_of and name not in self._open(self.file_of[name]).keys():  # noqa: SIM118
      del self.file_of[name]
    return name in self.file_of

  def fetch(self, needed: Mapping[str, int]) -> None:
    """Downloads files of a repository, to be read locally.

    A file is downloaded if 90 % or more of its elements are in `needed`.

    needed: dict, tensor -> number of elements to read.

    Raises ValueError as `hub.Repository.download`.
    """
    if self._repository is None:
      return
    elements: dict[epath.Path, int] = collections.Counter()
    for tensor, count in needed.items():
      elements[self.file_of[tensor]] += count
    whole = []
    for path, count in elements.items():
      file = self._open(path)
      if isinstance(file, RangedFile) and count >= 0.9 * file.elements:
        whole.append(path)
        del self._handles[path]
    if whole:
      self._repository.download(path.name for path in whole)

  def entry(self, name: str) -> "Entry":
    """Returns name, shape and dtype of a tensor in the files."""
    header = self._open(self.file_of[name]).get_slice(name)
    return Entry(name, tuple(header.get_shape()), np.dtype(DTYPES[header.get_dtype()]))

  def size_of(self, needed: Mapping[str, int]) -> int:
    """Returns the total bytes of elements to read.

    needed: dict, tensor in the files -> number of elements to read.
    """
    return sum(count * self.entry(name).dtype.itemsize for name, count in needed.items())

  def each(self, work: Callable[..., None], arguments: Iterable[tuple]) -> None:
    """Calls `work(*arguments)` for each tuple of arguments, concurrently for remote files."""
    if not self.remote:
      collections.deque(itertools.starmap(work, arguments), maxlen=0)
      return
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
      collections.deque(pool.map(work, *zip(*arguments)), maxlen=0)

  def stored(self, name: str, shape: tuple[int, ...]) -> Shapes:
    """Returns names and shapes of a tensor's stored tensors: two for MXFP4, else one."""
    return mxfp4.stored(name, shape) if self._is_packed(name) else {name: shape}

  def _is_packed(self, name: str) -> bool:
    """Whether the files have a tensor in MXFP4."""
    return name not in self.file_of and f"{name}_blocks" in self.file_of

  def in_files(self, needed: Mapping[str, int]) -> dict[str, int]:
    """Returns a dict: stored tensor -> number of its elements to read.

    A tensor in MXFP4 is stored as two tensors (`stored`), each with fewer elements.

    needed: dict, tensor -> number of elements to read.
    """
    elements: dict[str, int] = collections.Counter()
    for name, count in needed.items():
      parts = mxfp4.PARTS if self._is_packed(name) else {"": 1}
      for part, values in parts.items():
        elements[name + part] += count // values
    return elements

  def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
    """Reads a slice of a tensor. From remote files, whole rows of the tensor are read."""
    if self._is_packed(name):
      return mxfp4.read(self.read, name, slices)
    return self._open(self.file_of[name]).get_slice(name)[slices]

  def check_names(self, shapes: Shapes, others: Iterable[str] = ()) -> None:
    """Raises CheckpointError for missing or superfluous tensors.

    The files must have all tensors of `shapes`. They may also have the tensors `others`, and
    tensors with names that end in `IGNORED`. Any other tensor is superfluous.

    others: names of further tensors, to be ignored.
    """
    missing = [name for name in shapes if name not in self.file_of]
    expected = {*shapes, *others}
    leftover = [
      f"{name} ({path.name})"
      for name, path in self.file_of.items()
      if name not in expected and not name.endswith(IGNORED)
    ]
    problems = []
    if missing:
      problems.append(f"{len(missing)} tensors are missing: {_enumerate(missing)}")
    if leftover:
      problems.append(f"{len(leftover)} tensors belong to no parameter: {_enumerate(leftover)}")
    if problems:
      raise CheckpointError(f"{self.directory}: {'; '.join(problems)}")

  def check_headers(self, names: Iterable[str], shapes: Shapes) -> None:
    """Checks the headers of the files with the tensors `names`.

    Raises CheckpointError if a file's tensors are not those of the index, or if a tensor has an
    unsupported type, or another shape than in `shapes`.
    """
    for path in sorted({self.file_of[name] for name in names}):
      inside = set(self._open(path).keys())
      indexed = {name for name, file in self.file_of.items() if file == path}
      if inside != indexed:
        raise CheckpointError(
          f"{path}: the file and {INDEX} disagree about {_enumerate(sorted(inside ^ indexed))}"
        )
      for name in sorted(inside & shapes.keys()):
        header = self._open(path).get_slice(name)
        if tuple(header.get_shape()) != shapes[name]:
          raise CheckpointError(
            f"{path}: {name} has shape {tuple(header.get_shape())}, but config.json asks for "
            f"{shapes[name]}"
          )
        packed = name.endswith(tuple(mxfp4.PARTS))
        if header.get_dtype() not in (["U8"] if packed else _FLOATS):
          raise CheckpointError(
            f"{path}: {name} is of type {header.get_dtype()}, not one of "
            f"{', '.join(_FLOATS)}; quantised checkpoints are not supported"
          )


def _other_format(names: Iterable[str]) -> str:
  """Returns advice for weights in another format, or ""."""
  endings = {Path(name).suffix for name in names}
  if ".gguf" in endings:
    return "; docs/running.md has a command that converts GGUF files"
  if {".bin", ".pt", ".pth"} & endings:
    return (
      ", only PyTorch's: load them with transformers' from_pretrained, write them with "
      "save_pretrained, and give the new directory"
    )
  return ""


def _enumerate(names: list[str]) -> str:
  return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


class Entry(NamedTuple):
  """Name, shape and dtype of a tensor in a file."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def shards(entries: Iterable[Entry], most_bytes: int) -> dict[str, list[Entry]]:
  """Distributes tensors to files of at most `most_bytes`.

  Returns a dict from names of files to their entries, in the order of `entries`. A tensor above
  `most_bytes` has a separate file.
  """
  parts: list[list[Entry]] = [[]]
  size = 0
  for entry in entries:
    if parts[-1] and size + entry.bytes > most_bytes:
      parts.append([])
      size = 0
    parts[-1].append(entry)
    size += entry.bytes
  if len(parts) == 1:
    return {SINGLE: parts[0]}
  return {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": p for i, p in enumerate(parts)}


def write(path: Path, entries: list[Entry], tensors: Iterator[np.ndarray]) -> None:
  """Writes a safetensors file.

  entries: tensors of the file.
  tensors: iterator over the values of tensors; the file takes one for each entry.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for entry in entries:
    start, end = end, end + entry.bytes
    tag = _TAGS[entry.dtype.name]
    header[entry.name] = dict(dtype=tag, shape=entry.shape, data_offsets=[start, end])
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # Data starts at a multiple of 8 bytes.
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for entry in entries:
      file.write(np.ascontiguousarray(next(tensors), entry.dtype).reshape(-1).view(np.uint8))


def finish(directory: Path, parts: dict[str, list[Entry]], suffix: str) -> None:
  """Renames complete files to their names without `suffix`, and writes the index.

  Files of an earlier save are deleted first. A single file has no index.

  parts: dict from names of files to their entries.
  """
  for stale in [directory / SINGLE, directory / INDEX, *directory.glob("model-*-of-*.safetensors")]:
    stale.unlink(missing_ok=True)
  for name in parts:
    (directory / (name + suffix)).rename(directory / name)
  if len(parts) > 1:
    weight_map = {entry.name: name for name, entries in parts.items() for entry in entries}
    total = sum(entry.bytes for entries in parts.values() for entry in entries)
    index = dict(metadata=dict(total_size=total), weight_map=weight_map)
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
