"""Prompts that tests make up."""

from gspo_jax.structs import Prompt


def prompts(answers):
  """One for each gold answer; the questions do not matter."""
  return [Prompt(str(i), f"question {i}", answer, (1,)) for i, answer in enumerate(answers)]
