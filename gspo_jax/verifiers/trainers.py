"""Reward functions of mathematical answers for TRL and verl, whose processes need no JAX."""

from collections.abc import Sequence
from typing import Any

from gspo_jax.verifiers import math_answer
from gspo_jax.verifiers.math_answer import UNKNOWN, Outcome

Completion = str | Sequence[dict[str, Any]]  # a text, or a conversation


def math_reward(
  prompts: Sequence[Any],
  completions: Sequence[Completion],
  answer: Sequence[str | None],
  time_limit_s: float = 5.0,
  **kwargs: Any,
) -> list[float | None]:
  """Rewards completions for TRL's GRPOTrainer: `reward_funcs=math_reward`.

  Args:
    completions: texts, or conversations; the last message of a conversation is the response.
    answer: the column of gold answers in the data set.

  Returns:
    1 for a right answer and 0 for any other. None without a gold answer, or without a verdict of
    the verifier; TRL excludes None from the reward.
  """
  texts = [text if isinstance(text, str) else _content(text) for text in completions]
  pairs = [(text, gold) for text, gold in zip(texts, answer, strict=True) if _has_answer(gold)]
  outcomes = iter(math_answer.shared(time_limit_s).check(*zip(*pairs))) if pairs else iter(())
  return [_reward(next(outcomes)) if _has_answer(gold) else None for gold in answer]


def compute_score(
  data_source: str,
  solution_str: str,
  ground_truth: str,
  extra_info: dict[str, Any] | None = None,
  time_limit_s: float = 5.0,
  **kwargs: Any,
) -> dict[str, float]:
  """Scores one response for verl: `reward.custom_reward_function.name=compute_score`.

  Returns:
    "score" and "acc" are 1 for a right answer and 0 for any other. "unknown" is 1 without a gold
    answer or a verdict; the score is 0 then, since verl needs a number.
  """
  reward = None
  if _has_answer(ground_truth):
    reward = _reward(math_answer.verify(solution_str, ground_truth, time_limit_s=time_limit_s))
  return dict(score=reward or 0.0, acc=reward or 0.0, unknown=float(reward is None))


def _reward(outcome: Outcome) -> float | None:
  return None if outcome in UNKNOWN else float(outcome == Outcome.RIGHT)


def _has_answer(gold: str | None) -> bool:
  return bool(gold and gold.strip())


def _content(conversation: Sequence[dict[str, Any]]) -> str:
  """Returns the text of the last message. Parts without text (images) are omitted."""
  content = conversation[-1].get("content") or ""
  if isinstance(content, str):
    return content
  return "".join(part.get("text", "") for part in content)
