"""Rewards of responses from a verifier's verdicts. Imports no JAX."""

from gspo_jax.rewards.scorer import (
  NoVerdictError,
  Scorer,
  Scores,
  answer_check,
  check_importable,
  check_lines,
  frequent_word,
  open_scorer,
  open_scorers,
  require_verdicts,
  try_out,
)

__all__ = [
  "NoVerdictError", "Scorer", "Scores", "answer_check", "check_importable",
  "check_lines", "frequent_word", "open_scorer", "open_scorers", "require_verdicts",
  "try_out",
]  # fmt: skip
