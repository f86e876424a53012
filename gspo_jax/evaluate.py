"""Held-out accuracy: average Pass@1 over k samples per problem, and greedy."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_jax.models.sizes import ComputeConfig, ModelConfig
from gspo_jax.rewards import Scorer
from gspo_jax.sampling import generate
from gspo_jax.structs import Prompt, Rollout
from gspo_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  every: int  # iterations between evaluations while training
  problems: int  # held-out problems to use, evenly spread over the set; 0: all
  samples: int  # k, per problem
  temperature: float
  top_k: int  # 0: all tokens
  top_p: float  # 1: all tokens
  max_new_tokens: int
  greedy: bool  # one greedy response per problem as well
  batch: int  # problems sampled at once


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """What an evaluation needs besides parameters."""

  config: EvalConfig
  model: ModelConfig
  compute: ComputeConfig
  problems: Sequence[Prompt]
  tokenizer: Tokenizer
  score: Scorer
  prompt_length: int
  seed: int

  def __call__(self, params: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics by the names of metrics.jsonl, and a record of every sampled response.

    The same problems and the same random numbers at every call, so that what differs between two
    evaluations is the policy.
    """
    c = self.config
    right_PG, rollouts = self._pass(params, c.samples, c.temperature)
    accuracy_P = right_PG.mean(1)
    low, high = bootstrap(accuracy_P)
    row = {
      "eval/accuracy": float(accuracy_P.mean()),
      "eval/accuracy/low": low,
      "eval/accuracy/high": high,
      "eval/response_length/mean": float(np.mean([r.lengths.mean() for r in rollouts])),
      "eval/truncated_fraction": float(np.mean([1 - r.stopped.mean() for r in rollouts])),
    }
    if c.greedy:
      greedy_P1, _ = self._pass(params, 1, 0.0)
      row["eval/greedy"] = float(greedy_P1.mean())
    return row, list(self._records(right_PG, rollouts))

  def _pass(self, params, samples: int, temperature: float) -> tuple[np.ndarray, list[Rollout]]:
    """Whether each of `samples` responses per problem is right, [problems, samples]."""
    c, right, rollouts = self.config, [], []
    for start in range(0, len(self.problems), c.batch):
      chunk = list(self.problems[start : start + c.batch])
      # The last chunk is filled up, so that every chunk has the shape that is already compiled.
      full = chunk + [chunk[-1]] * (min(c.batch, len(self.problems)) - len(chunk))
      rollout = generate(
        params,
        self.model,
        [p.tokens for p in full],
        group_size=samples,
        max_new_tokens=c.max_new_tokens,
        temperature=temperature,
        top_k=c.top_k,
        top_p=c.top_p,
        stop_ids=self.tokenizer.stop_ids,
        seed=self.seed,
        pad_id=self.tokenizer.pad_id,
        prompt_length=self.prompt_length,
        compute=self.compute,
      )
      rows = len(chunk) * samples
      rollout = Rollout(**{f: getattr(rollout, f)[:rows] for f in Rollout.__dataclass_fields__})
      responses = [self.tokenizer.decode(rollout.response(row)) for row in range(rows)]
      answers = [p.answer for p in chunk for _ in range(samples)]
      right.append(self.score(responses, answers).reward.reshape(-1, samples))
      rollouts.append(rollout)
    return np.concatenate(right), rollouts

  def _records(self, right_PG, rollouts):
    k, row = self.config.samples, 0
    for rollout in rollouts:
      for i in range(len(rollout.lengths)):
        problem, sample = self.problems[row // k], row % k
        yield dict(
          prompt_id=problem.id,
          sample=sample,
          prompt=problem.question,
          response=self.tokenizer.decode(rollout.response(i)),
          answer=problem.answer,
          reward=float(right_PG[row // k, sample]),
          length=int(rollout.lengths[i]),
          truncated=not bool(rollout.stopped[i]),
          eval=True,
        )
        row += 1


def choose(source: Sequence[Prompt], problems: int) -> list[Prompt]:
  """`problems` of the held-out set, evenly spread over it; all of them for 0."""
  count = len(source) if problems == 0 else min(problems, len(source))
  return [source[i * len(source) // count] for i in range(count)]


def bootstrap(value_P: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
  """95 % interval of the mean by resampling problems (not samples: they share their problem)."""
  rng = np.random.default_rng(zlib.crc32(b"bootstrap"))
  picks = rng.integers(0, len(value_P), (resamples, len(value_P)))
  low, high = np.percentile(value_P[picks].mean(1), [2.5, 97.5])
  return float(low), float(high)
