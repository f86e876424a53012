"""Writes the weights of a run as a Hugging Face directory.

  python -m gspo_jax.export RUN DIR [--dtype=bfloat16] [--tokenizer=DIR] [--adapters]

RUN is named as in the key `weights`: a workdir for its newest checkpoint, or one of its
checkpoints. transformers, vLLM and `--config.weights=DIR` read DIR. Adapters are merged in float32,
and the sum is rounded once; with --adapters they alone are written, in PEFT's files. It runs on the
CPU, with memory for the weights once.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.command("train")

import jax

from gspo_jax import sharding
from gspo_jax.data import tokenizer as tokenizers
from gspo_jax.models import hf
from gspo_jax.models.hf import peft
from gspo_jax.runs import weight_source
from gspo_jax.runs.weight_source import RunCheckpoint
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.system import hub, jsons


def export(
  run: str, directory: Path, dtype: str = "bfloat16", tokenizer: str = "", adapters: bool = False
) -> RunCheckpoint:
  """Writes a model directory: config, weights of this type, stop tokens and tokenizer. With
  `adapters`, PEFT's two files stand in the place of the model's.

  Raises:
    ValueError: there is no such checkpoint, it is damaged, or its model is unknown; its tokenizer
      is gone; the directory is not empty; or there are no adapters.
  """
  checkpoint = weight_source.find(run, "RUN")
  if checkpoint is None:
    raise ValueError(f"RUN={run} is not the workdir of a run, nor one of its checkpoints")
  model = checkpoint.model_config()
  if adapters and not checkpoint.adapters.rank:
    raise ValueError(f"RUN={run}: {checkpoint.path} has no adapters: leave out --adapters")
  if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
    raise ValueError(f"DIR={directory} is there already: give a new name")
  tokenizer = tokenizer or checkpoint.tokenizer
  try:
    tok = tokenizers.load_for(tokenizer, model.vocab_size)
  except tokenizers.TokenizerError as error:
    raise ValueError(f"{error}: say by --tokenizer=DIR where that of RUN={run} is now") from error
  ids = dict(bos_token_id=tok.bos_id, eos_token_id=list(tok.stop_ids), pad_token_id=tok.pad_id)
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    if adapters:
      params = checkpoint.load_with_adapters(model, mesh)
      peft.save(directory, params, model, checkpoint.adapters, _base(checkpoint))
    else:
      hf.save(directory, checkpoint.load(model, mesh, dtype), model, dtype=dtype, more=ids)
  generation = directory / "generation_config.json"
  if tokenizer != "bytes":
    tokenizers.copy(hub.directory(tokenizer), directory)
  sampling = jsons.read_object(generation) if generation.exists() else {}
  generation.write_text(json.dumps(sampling | ids, indent=2) + "\n")
  return checkpoint


def _base(checkpoint: RunCheckpoint) -> str:
  """Returns the published model below the adapters; "" if there is none."""
  config = checkpoint.config
  starts_from_run = config["job"] == "sft+rl" or "start" in config["provenance"]
  return "" if starts_from_run or config["weights"] == "random" else config["weights"]


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m gspo_jax.export", description=__doc__.splitlines()[0]
  )
  parser.add_argument("run", metavar="RUN", help="a workdir, or one of its checkpoints")
  parser.add_argument("directory", metavar="DIR", type=Path, help="where to write it")
  parser.add_argument("--tokenizer", default="", help="where it is now; default: as in the run")
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
  parser.add_argument("--adapters", action="store_true", help="these alone, as PEFT reads them")
  options = parser.parse_args(arguments)
  jax.config.update("jax_platforms", "cpu")
  try:
    checkpoint = export(**vars(options))
  except (ValueError, OSError) as error:
    parser.error(str(error))
  sys.stdout.write(f"{options.directory}: the weights of {checkpoint.path}\n")


if __name__ == "__main__":
  main()
