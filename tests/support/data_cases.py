"""What the tests of data share."""

from gspo_jax.data import sources
from gspo_jax.data.prompt_filter import QuerySetConfig


def config(**changes) -> sources.DataConfig:
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
    carry_errors=0.0,
    query_set=QuerySetConfig(0, 0, 0),
  )
  return sources.DataConfig(**values | changes)
