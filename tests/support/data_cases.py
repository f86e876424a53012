"""Configurations and files of data for the tests."""

import json

from gspo_jax.data import sources, tokenizer
from gspo_jax.settings.data import DataConfig

BYTES = tokenizer.ByteTokenizer()


def config(**changes) -> DataConfig:
  """A `data` section for small problems, with these keys changed."""
  values = dict(train="", eval="", max_prompt_tokens=64, digits=2, lines=(8,), carry_errors=0.0)
  return DataConfig(**values | changes)


def write(path, rows):
  """Writes JSON lines, bytes unchanged; returns the path as text."""
  lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
  path.write_bytes(b"\n".join(lines) + b"\n")
  return str(path)


def load(spec, check=None, **changes):
  """The prompts of a source for training."""
  return sources.load_spec(config(**changes), BYTES, str(spec), "data.train", check)
