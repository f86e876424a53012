"""Configurations and files of data for the tests."""

import json

from gspo_jax.data import sources, tokenizer
from gspo_jax.settings.data import DataConfig, QuerySetConfig

BYTES = tokenizer.ByteTokenizer()


def config(**changes) -> DataConfig:
  """A whole `data` section, with these keys changed."""
  values = dict(
    train="",
    eval="",
    question_field="question",
    answer_field="answer",
    answer_pattern="",
    demonstration_field="",
    prompt_template="{question}",
    max_prompt_tokens=64,
    on_error="raise",
    digits=2,
    lines=(8,),
    carry_errors=0.0,
    skipped_work=0.0,
    checks=0.0,
    query_set=QuerySetConfig(0, 0, 0),
  )
  return DataConfig(**values | changes)


def write(path, rows):
  """JSON lines; a row that is bytes is written as it is. Returns the path as text."""
  lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
  path.write_bytes(b"\n".join(lines) + b"\n")
  return str(path)


def load(spec, check=None, **changes):
  """The prompts of a source for training."""
  return sources.load_spec(config(**changes), BYTES, str(spec), "data.train", check)
