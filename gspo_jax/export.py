"""Writes the weights of a run as a Hugging Face directory.

  python -m gspo_jax.export RUN DIR [--dtype=bfloat16] [--tokenizer=DIR] [--adapters [--base=BASE]]

RUN is a checkpoint or a workdir. If RUN is a workdir, its newest checkpoint of RL is exported, or
of the cold start if there is none of RL. Adapters are merged into the weights. transformers, vLLM
and `--config.weights=DIR` can read DIR. With --adapters, DIR has only the adapters, in PEFT's
format. The command runs on the CPU, and needs memory for one copy of the weights.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.begin_command("train")

import jax
from etils import epath

from gspo_jax import sharding
from gspo_jax.data import tokenizer as tokenizers
from gspo_jax.models import hf
from gspo_jax.models.hf import peft
from gspo_jax.runs import weight_source
from gspo_jax.runs.weight_source import RunCheckpoint
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.passes import sampler_types
from gspo_jax.system import files, hub, jsons
from gspo_jax.system.arguments import Parser, local_path

# Files of image and video processors, which servers of multimodal models read.
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Defaults of Llama's tokenizer classes in transformers. The generic class has other ones.
LLAMA_DEFAULTS = dict(
  model_input_names=["input_ids", "attention_mask"],
  padding_side="left",
  clean_up_tokenization_spaces=False,
)


def export(
  run: str,
  directory: Path,
  dtype: str = "bfloat16",
  tokenizer: str = "",
  adapters: bool = False,
  base: str = "",
) -> RunCheckpoint:
  """Writes a model directory: config, weights, stop tokens and tokenizer.

  Args:
    run: workdir or checkpoint, as in the key `weights`.
    directory: new or empty directory.
    dtype: dtype of the written weights. Adapters are always float32.
    tokenizer: name of the tokenizer; "" for the tokenizer recorded in the run.
    adapters: whether to write PEFT's two files instead of config and weights.
    base: name of the adapters' base model. "" means the published model that the run started from.
      If there is no such model, or if a cold start changed its weights, no base is written.

  Returns:
    The exported checkpoint.

  Raises:
    ValueError: the checkpoint does not exist, is damaged, or has no model configuration; the
      tokenizer is missing; the directory is not empty; there are no adapters to write, or PEFT
      cannot read them; or a value is NaN or exceeds the range of `dtype`.
    WriteError: the directory cannot be written, for example on a full disk.
  """
  checkpoint = weight_source.find(run, "RUN")
  if checkpoint is None:
    raise ValueError(f"RUN={run} is neither the workdir nor a checkpoint of a run")
  model = checkpoint.model_config()
  if adapters and not checkpoint.adapters.rank:
    raise ValueError(f"RUN={run}: {checkpoint.path} has no adapters: leave out --adapters")
  if adapters:
    peft.check_readable(model, checkpoint.adapters, _base(checkpoint, base))
  if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
    raise ValueError(f"DIR={directory} exists and is not empty: give a new name")
  tokenizer = tokenizer or checkpoint.tokenizer
  try:
    tok = tokenizers.load_for(tokenizer, model.vocab_size)
  except tokenizers.TokenizerError as error:
    raise ValueError(
      f"{error}: set --tokenizer=DIR to the directory of the tokenizer of RUN={run}"
    ) from error
  ids = dict(bos_token_id=tok.bos_id, eos_token_id=list(tok.stop_ids), pad_token_id=tok.pad_id)
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    if adapters:
      params = checkpoint.load_with_adapters(model, mesh)
    else:
      # Float32 keeps values above 65504, the largest float16, so that `save` can refuse them.
      params = checkpoint.load(model, mesh, "float32" if dtype == "float16" else dtype)
    with _writing(directory):
      if adapters:
        peft.save(directory, params, model, checkpoint.adapters, _base(checkpoint, base))
      else:
        hf.save(directory, params, model, dtype=dtype, more=ids, like=_origin(checkpoint))
      _save_tokenizer(directory, tokenizer, ids, "" if adapters else _origin(checkpoint))
  return checkpoint


def _save_tokenizer(directory: Path, tokenizer: str, ids: Mapping[str, Any], like: str) -> None:
  """Copies the files of tokenizer and processors, and adds ids to generation_config.json.

  like: published model with processors' files; "" copies none.
  """
  if like:
    tokenizers.copy(hub.directory(like), directory, PROCESSOR)
  if tokenizer != "bytes":
    tokenizers.copy(hub.directory(tokenizer), directory)
    _make_generic(directory / "tokenizer_config.json")
  generation = directory / "generation_config.json"
  sampling = jsons.read_object(generation) if generation.exists() else {}
  generation.write_text(json.dumps(sampling | dict(ids), indent=2) + "\n")


def _make_generic(file: Path) -> None:
  """Replaces Llama's tokenizer class in tokenizer_config.json by the generic one.

  In transformers 5, Llama's class ignores parts of tokenizer.json, so some ids would differ.
  """
  config = jsons.read_object(file) if file.exists() else {}
  if config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast"):
    config = LLAMA_DEFAULTS | config | dict(tokenizer_class="PreTrainedTokenizerFast")
    file.write_text(json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
  """Removes the new directory if the block fails. Converts an OSError to a WriteError."""
  try:
    with files.writing(directory):
      yield
  except BaseException:
    shutil.rmtree(directory, ignore_errors=True)  # The same command must work again.
    raise


def _base(checkpoint: RunCheckpoint, name: str = "") -> str:
  """Returns the name of the adapters' base model; "" if unknown.

  After a cold start (job sft+rl) the base is a checkpoint of this run, and has no name.
  """
  if name or checkpoint.config["job"] != "sft+rl":
    return _absolute(name) or _published(checkpoint)
  return ""


def _unpublished_base(checkpoint: RunCheckpoint) -> str:
  """Returns the checkpoint of the adapters' base model; "" if the base is no checkpoint."""
  if checkpoint.config["job"] == "sft+rl":
    return str(checkpoint.path.parent.parent / "sft")
  return checkpoint.config.get("provenance", {}).get("start", {}).get("checkpoint", "")


def _published(checkpoint: RunCheckpoint) -> str:
  """Returns the run's published initial model; "" for other initial weights."""
  return _absolute(checkpoint.config.get("provenance", {}).get("start", {}).get("directory", ""))


def _origin(checkpoint: RunCheckpoint) -> str:
  """Returns the published model of the first in a chain of runs; "" if it is unknown."""
  while name := checkpoint.config.get("provenance", {}).get("start", {}).get("checkpoint"):
    earlier = weight_source.find(name) if epath.Path(name).exists() else None
    if earlier is None:
      return ""
    checkpoint = earlier
  return _published(checkpoint)


def _absolute(name: str) -> str:
  """Returns a directory's absolute path; other names are unchanged."""
  return os.path.abspath(name) if os.path.isdir(name) else name


def main(arguments: Sequence[str] | None = None) -> None:
  """Exports the run of the command line."""
  parser = Parser(prog="python -m gspo_jax.export", description=__doc__.splitlines()[0])
  parser.add_argument("run", metavar="RUN", help="a workdir, or one of its checkpoints")
  parser.add_argument("directory", metavar="DIR", type=local_path, help="new local directory")
  parser.add_argument(
    "--tokenizer", default="", help="directory or repository of the tokenizer (default: as in RUN)"
  )
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
  parser.add_argument(
    "--adapters", action="store_true", help="write the adapters alone, in PEFT's format"
  )
  parser.add_argument(
    "--base", default="", help="base model of the adapters (default: RUN's published model)"
  )
  options = parser.parse_args(arguments)
  jax.config.update("jax_platforms", "cpu")
  try:
    checkpoint = export(**vars(options))
  except (ValueError, OSError, files.WriteError) as error:
    parser.error(str(error))
  origin = "" if options.base or not options.adapters else _unpublished_base(checkpoint)
  if origin:
    sys.stderr.write(
      f"{options.directory / peft.CONFIG} names no base model: the adapters belong to the "
      f"checkpoint {origin}. Export that checkpoint by `python -m gspo_jax.export {origin} BASE`, "
      "and repeat this command with a new DIR and --base=BASE\n"
    )
  config = checkpoint.config
  if types := sampler_types(config.get("engine", {}), config.get("compute", {}).get("dtype", "")):
    sys.stdout.write(f"the run sampled with other dtypes than it trained: {types}\n")
  if (options.tokenizer or checkpoint.tokenizer) == "bytes":
    sys.stdout.write(
      f"{options.directory} has no tokenizer files, since tokens are bytes: the ids of a text "
      f"are list(text.encode()), and id {tokenizers.ByteTokenizer.stop_ids[0]} ends a response\n"
    )
  dtype = "float32" if options.adapters else options.dtype
  sys.stdout.write(f"{options.directory}: the weights of {checkpoint.path} in {dtype}\n")


if __name__ == "__main__":
  main()
