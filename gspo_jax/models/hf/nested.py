"""Directories of a language model inside another model, or with further layers.

Gemma 3 from 4B on and Mistral 3 are inside another model. GLM-4.5 has layers of multi-token
prediction after the last one. `load` ignores the tensors of these other parts, and `save` copies
them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gspo_jax.models.hf.architectures import OUTER
from gspo_jax.models.hf.config import CheckpointError, read_json
from gspo_jax.models.hf.files import Entry, Files
from gspo_jax.system import hub

# Start of the layers' names -> start of the head's name.
PREFIXES = {"model.language_model.": "", "language_model.model.": "language_model."}
_INSIDE = ("lm_head.", "language_model.", "model.language_model.")

_FURTHER = "num_nextn_predict_layers"

Names = dict[str, tuple[str, str]]


class Other:
  """The parts of a directory beside the language model; none in most directories."""

  def __init__(self, directory: str, files: Files | None = None):
    """Finds the other model.

    Args:
      directory: a path or a repository, possibly without config.json; "" for none.
      files: its files, if they are open.
    """
    self.raw: dict[str, Any] = {}
    self.keys: dict[str, Any] = {}  # Keys of config.json for the other tensors.
    self.names: list[str] = []
    path = hub.directory(directory) / "config.json" if directory else None
    raw = read_json(path) if path and path.is_file() else {}
    if further := raw.get(_FURTHER):
      self._files, self.keys = files or Files(directory), {_FURTHER: further}
      layers = range(raw["num_hidden_layers"], raw["num_hidden_layers"] + further)
      starts = tuple(f"model.layers.{layer}." for layer in layers)
      self.names = sorted(x for x in self._files.file_of if x.startswith(starts))
    if raw.get("model_type") not in OUTER:
      return
    self.raw, self._files = raw, files or Files(directory)
    self.names = sorted(x for x in self._files.file_of if not x.startswith(_INSIDE))

  def rename(self, names: Names) -> Names:
    """Returns the names of the language model's tensors in the directory."""
    if not self.raw:
      return names
    tensors = self._files.file_of
    for prefix, outer in PREFIXES.items():
      if any(tensor.startswith(prefix) for tensor in tensors):
        starts = {"model.": prefix, "lm_head.": f"{outer}lm_head."}
        return {key: (_rename_start(name, starts), axes) for key, (name, axes) in names.items()}
    raise CheckpointError(f"{self._files.name}: no tensor begins with {' or '.join(PREFIXES)}")

  def wrap_config(self, config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of the whole model."""
    if not self.raw:
      return config | self.keys
    dtype = config["torch_dtype"]
    return self.raw | {key: dtype for key in ("torch_dtype", "dtype") if key in self.raw}

  @property
  def entries(self) -> list[Entry]:
    return [self._files.entry(name) for name in self.names]

  def tensors(self) -> Iterator[np.ndarray]:
    """Yields the tensors outside the language model, in the order of `entries`."""
    for entry in self.entries:
      yield self._files.read(entry.name, tuple(slice(0, size) for size in entry.shape))


def _rename_start(name: str, starts: dict[str, str]) -> str:
  start = next(start for start in starts if name.startswith(start))
  return starts[start] + name.removeprefix(start)
