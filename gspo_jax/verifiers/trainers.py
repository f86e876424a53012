"""Reward functions for mathematical answers in TRL and verl. They need no JAX."""

import numbers
from collections.abc import Sequence
from typing import Any

from gspo_jax.verifiers import math_answer
from gspo_jax.verifiers.math_answer import UNKNOWN, Outcome

Gold = str | float | None
Completion = str | Sequence[dict[str, Any]]  # A text, or a conversation as a list of messages.


def math_reward(
  prompts: Sequence[Any],
  completions: Sequence[Completion],
  answer: Sequence[Gold],
  time_limit_s: float = 5.0,
  **kwargs: Any,
) -> list[float | None]:
  """Rewards completions for TRL's GRPOTrainer: `reward_funcs=math_reward`.

  Args:
    prompts: unused.
    completions: texts, or conversations; the last message of a conversation is the response.
    answer: the column of gold answers in the data set, texts or numbers.
    time_limit_s: limit of one comparison, in seconds.
    **kwargs: unused; TRL passes all columns of the data set.

  Returns:
    A reward for each completion: 1 for a right answer, and 0 for a wrong or missing one. The reward
    is None if there is no readable gold answer, or if the verifier failed. TRL ignores None.
  """
  texts = [text if isinstance(text, str) else _content(text) for text in completions]
  golds = [_text(gold) for gold in answer]
  pairs = [(text, gold) for text, gold in zip(texts, golds, strict=True) if gold]
  outcomes = iter(math_answer.shared(time_limit_s).check(*zip(*pairs))) if pairs else iter(())
  return [_reward(next(outcomes)) if gold else None for gold in golds]


def compute_score(
  data_source: str,
  solution_str: str,
  ground_truth: Gold,
  extra_info: dict[str, Any] | None = None,
  time_limit_s: float = 5.0,
  **kwargs: Any,
) -> dict[str, float]:
  """Scores one response for verl: `reward.custom_reward_function.name=compute_score`.

  Args:
    data_source: unused.
    solution_str: text of the response.
    ground_truth: the gold answer.
    extra_info: unused.
    time_limit_s: limit of the comparison, in seconds.
    **kwargs: unused.

  Returns:
    A dict. "score" and "acc" are 1 for a right answer, else 0. "unknown" is 1 if there is no
    readable gold answer or the verifier failed, else 0. An unknown response has the score 0, since
    verl needs a number.
  """
  reward = None
  if gold := _text(ground_truth):
    reward = _reward(math_answer.verify(solution_str, gold, time_limit_s=time_limit_s))
  return dict(score=reward or 0.0, acc=reward or 0.0, unknown=float(reward is None))


def _reward(outcome: Outcome) -> float | None:
  """Returns 1 for a right answer, else 0; None if the outcome is no verdict."""
  return None if outcome in UNKNOWN else float(outcome == Outcome.RIGHT)


def _text(gold: Gold) -> str:
  """Returns the gold answer as a text; "" if there is none."""
  if gold is None or isinstance(gold, str):
    return (gold or "").strip()
  if isinstance(gold, numbers.Real):
    return str(gold)
  raise TypeError(f"a gold answer must be a text or a number, and not {gold!r:.60}")


def _content(conversation: Sequence[dict[str, Any]]) -> str:
  """Returns the text of a conversation's last message, without images and other parts."""
  content = conversation[-1].get("content") or ""
  if isinstance(content, str):
    return content
  return "".join(part.get("text", "") for part in content)
