"""Verifiers: responses and gold answers in, rewards out. Nothing here imports jax."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  name: str  # "arithmetic" (the embedded task) | "math" (math-verify in worker processes)
  workers: int  # processes that verify; the embedded task needs none
  time_limit_s: float  # seconds that one answer may take, without queueing

  def __post_init__(self):
    if self.name not in ("arithmetic", "math"):
      raise ValueError(f"reward.name={self.name!r} is not one of arithmetic, math")


class Scores(NamedTuple):
  reward: np.ndarray  # float32 [B]
  outcomes: dict[str, int]  # how many were right, wrong, unparsable, timeout, crash


Scorer = Callable[[Sequence[str], Sequence[str]], Scores]


@contextlib.contextmanager
def open_scorer(config: RewardConfig) -> Iterator[Scorer]:
  """The configured verifier, its processes alive inside the `with` block."""
  if config.name == "arithmetic":
    from gspo_jax.rewards import arithmetic

    def outcomes(responses: Sequence[str], answers: Sequence[str]) -> list[str]:
      right = map(arithmetic.verify, responses, answers)
      return ["right" if r else "wrong" for r in right]

    yield _scorer(outcomes)
  else:
    from gspo_jax.rewards.math_answer import MathVerifier

    with MathVerifier(config.workers, config.time_limit_s) as verifier:
      yield _scorer(verifier.score)


def _scorer(outcomes: Callable[[Sequence[str], Sequence[str]], list[str]]) -> Scorer:
  def score(responses: Sequence[str], answers: Sequence[str]) -> Scores:
    found = [str(outcome) for outcome in outcomes(responses, answers)]
    reward = np.array([outcome == "right" for outcome in found], np.float32)
    return Scores(reward, dict(collections.Counter(found)))

  return score
