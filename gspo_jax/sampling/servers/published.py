"""Weights on their way to servers: directories that are complete or not there."""

import os
import shutil
from pathlib import Path
from typing import Any

from etils import epath

from gspo_jax.data import tokenizer as tokenizers
from gspo_jax.sampling.engine import ServersGone
from gspo_jax.settings.model import ModelConfig
from gspo_jax.system import hosts

KEPT = 2  # a server that is being started may still read the last but one
_PARTIAL = ".partial"


def write(
  target: Path, params: Any, model: ModelConfig, tokenizer: epath.Path | None = None
) -> Path:
  """Writes a Hugging Face directory, with the files of a tokenizer's directory, beside its place
  and moves it there when it is complete; the last `KEPT` of its parent stay. Every process calls
  this, and the first one writes.

  Raises:
    OSError: the directory cannot be written. Of several processes, the others raise ServersGone.
  """
  from gspo_jax.models import hf  # safetensors is only needed here

  partial = target.with_name(target.name + _PARTIAL)

  def begin() -> None:
    for broken_off in target.parent.glob(f"weights_*{_PARTIAL}"):
      shutil.rmtree(broken_off, ignore_errors=True)
    partial.mkdir(parents=True)

  def complete() -> None:
    if tokenizer:  # without what changes how some servers sample
      tokenizers.copy(tokenizer, partial, tokenizers.FILES)
    shutil.rmtree(target, ignore_errors=True)  # of a run that was resumed
    os.rename(partial, target)
    # By the time at which they came here; what somebody else has put here stays.
    earlier = [path for path in target.parent.glob("weights_*") if path.is_dir() and path != target]
    earlier.sort(key=lambda path: path.stat().st_mtime)
    for path in earlier[: -(KEPT - 1)]:
      shutil.rmtree(path, ignore_errors=True)

  hosts.run_on_first_host(begin, ServersGone)
  hf.save(partial, params, model)  # each tensor in the type that the trainer reads it in
  hosts.run_on_first_host(complete, ServersGone)
  return target
