"""Finds the parts of a Hugging Face directory beside its language model.

The language model may be inside an outer model with a vision encoder, as in Gemma 3 from 4B on,
Mistral 3 and Qwen3.5. GLM-4.5 has further layers, for multi-token prediction, after the last
layer of the language model. Qwen3-Next and Qwen3.5 have such layers under names "mtp.*". `load`
ignores the tensors of these other parts, and `save` copies them (`convert`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gspo_jax.models.families.lookup import FAMILIES
from gspo_jax.models.hf.architectures import FAMILY_OF, FUSED, OUTER
from gspo_jax.models.hf.config import CheckpointError, read_json
from gspo_jax.models.hf.files import Entry, Files
from gspo_jax.system import hub

# Start of the names of the language model's tensors -> start of its head's name before "lm_head.".
PREFIXES = {"model.language_model.": "", "language_model.model.": "language_model."}
# First parts of the names of all tensors of a language model inside an outer model.
_INSIDE = ("lm_head.", "language_model.", "model.language_model.")

_FURTHER = "num_nextn_predict_layers"  # Key of config.json: number of further layers.
# Keys of config.json for further layers.
_KEYS = (_FURTHER, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")

_DTYPES = ("torch_dtype", "dtype")  # Keys of config.json.

Names = dict[str, tuple[str, str]]


class Other:
  """The other parts of a directory, beside the language model. Most directories have none."""

  def __init__(self, directory: str, files: Files | None = None):
    """Finds the other parts.

    Args:
      directory: a path or a repository, possibly without config.json. "" means no other parts.
      files: files of the directory. None opens them if needed.
    """
    self.raw: dict[str, Any] = {}  # config.json of the outer model, if there is one.
    self.keys: dict[str, Any] = {}  # Keys of config.json for further layers.
    self.names: list[str] = []  # Names of the tensors outside the language model.
    self._files = files
    path = hub.directory(directory) / "config.json" if directory else None
    raw = read_json(path) if path and path.is_file() else {}
    further = raw.get(_FURTHER) or 0
    family = FAMILIES.get(FAMILY_OF.get(raw.get("model_type")))
    prediction = family.prediction if family else ()
    if further or prediction:
      self._files = files or Files(directory)
      self.keys = {key: raw[key] for key in _KEYS if key in raw}
      layers = range(raw["num_hidden_layers"], raw["num_hidden_layers"] + further)
      starts = *prediction, *(f"model.layers.{layer}." for layer in layers)
      self.names = sorted(x for x in self._files.file_of if x.startswith(starts))
    elif raw.get("model_type") in OUTER:
      self.raw, self._files = raw, files or Files(directory)
      self.names = sorted(x for x in self._files.file_of if not x.startswith(_INSIDE))

  def rename(self, names: Names) -> Names:
    """Renames the language model's tensors as in the directory."""
    tensors = set(self._files.file_of if self._files else ()) - {*self.names}
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors)
    if fused and "{E}" in names["Moe.gate"][0]:
      # MiniMax-M2's bias on the choice has another parent in such files.
      renamed = {
        key: (x.replace("block_sparse_moe", "mlp"), axes) for key, (x, axes) in names.items()
      }
      names = renamed | FUSED
    # A text model that transformers saved from an outer model keeps the outer model's names.
    for prefix, outer in PREFIXES.items():
      if any(tensor.startswith(prefix) for tensor in tensors):
        starts = {"model.": prefix, "lm_head.": f"{outer}lm_head."}
        return {key: (_rename_start(name, starts), axes) for key, (name, axes) in names.items()}
    if not self.raw and "embed_tokens.weight" in tensors:  # Saved from the model without a head.
      return {key: (name.removeprefix("model."), axes) for key, (name, axes) in names.items()}
    if not self.raw:
      return names
    raise CheckpointError(
      f"{self._files.name}: no tensor's name begins with {' or '.join(PREFIXES)}, as names of "
      f"model_type={self.raw['model_type']!r} do"
    )

  def wrap_config(self, config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of the whole model.

    An outer model keeps its own config.json, except for its dtype and that of its language model.

    config: config.json of the language model.
    """
    if not self.raw:
      return config | self.keys

    def typed(raw: dict[str, Any]) -> dict[str, Any]:
      return raw | {key: config["torch_dtype"] for key in _DTYPES if key in raw}

    return typed(self.raw | dict(text_config=typed(self.raw["text_config"])))

  @property
  def entries(self) -> list[Entry]:
    """Describes the tensors outside the language model."""
    return [self._files.entry(name) for name in self.names]

  def tensors(self) -> Iterator[np.ndarray]:
    """Yields the tensors outside the language model, in the order of `entries`."""
    for entry in self.entries:
      yield self._files.read(entry.name, tuple(slice(0, size) for size in entry.shape))


def _rename_start(name: str, starts: dict[str, str]) -> str:
  """Replaces the first part of a name.

  starts: old first parts -> new ones.
  """
  start = next(start for start in starts if name.startswith(start))
  return starts[start] + name.removeprefix(start)
