"""Weights on their way to servers: directories that are complete or not there."""

import os
import shutil
from pathlib import Path
from typing import Any

from gspo_jax.sampling.engine import ServersGone
from gspo_jax.settings.model import ModelConfig
from gspo_jax.system import hosts

KEPT = 2  # a server that is being started may still read the last but one
# Of the tokenizer's directory; not generation_config.json, which changes how some servers sample.
TOKENIZER = (
  *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
  *("merges.txt", "added_tokens.json", "chat_template.jinja"),
)
_PARTIAL = ".partial"


def write(
  directory: Path, name: str, params: Any, model: ModelConfig, tokenizer: Path | None = None
) -> Path:
  """Writes a Hugging Face directory beside the others and moves it there when it is complete; the
  last `KEPT` stay. Every process calls this, and the first one writes.

  Raises:
    OSError: the directory cannot be written. Of several processes, the others raise ServersGone.
  """
  from gspo_jax.models import hf  # safetensors is only needed here

  target, partial = directory / name, directory / (name + _PARTIAL)

  def begin() -> None:
    for rest in directory.glob(f"weights_*{_PARTIAL}"):  # of publications that broke off
      shutil.rmtree(rest, ignore_errors=True)
    partial.mkdir(parents=True)

  def complete() -> None:
    for file in TOKENIZER if tokenizer else ():
      if (tokenizer / file).is_file():
        shutil.copyfile(tokenizer / file, partial / file)
    shutil.rmtree(target, ignore_errors=True)  # of a run that was resumed
    os.rename(partial, target)
    _remove_older(directory, target)

  hosts.of_first(begin, ServersGone)
  hf.save(partial, params, model)  # each tensor in the type that the trainer reads it in
  hosts.of_first(complete, ServersGone)
  return target


def _remove_older(directory: Path, newest: Path) -> None:
  """Leaves the last ones, by the time at which they came here; and what somebody else put here."""
  ours = [path for path in directory.glob("weights_*") if path.is_dir()]
  others = sorted((p for p in ours if p != newest), key=lambda p: p.stat().st_mtime)
  for path in others[: max(0, len(others) - (KEPT - 1))]:
    shutil.rmtree(path, ignore_errors=True)
