"""avg@k counts what it says, in chunks as at once."""

import dataclasses

import jax
import numpy as np
import pytest

from gspo_jax import evaluate, rewards, tokenizer
from gspo_jax.models import transformer
from gspo_jax.models.sizes import REFERENCE, tiny_dense
from gspo_jax.structs import Prompt

MODEL = dataclasses.replace(
  tiny_dense(264), hidden_size=32, num_layers=2, num_heads=2, head_dim=16, intermediate_size=48
)
CONFIG = evaluate.EvalConfig(
  every=1,
  problems=0,
  samples=3,
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  max_new_tokens=3,
  greedy=True,
  batch=8,
)
PROBLEMS = [Prompt(str(i), f"q{i}", "a", (ord("q"), ord(str(i)))) for i in range(5)]


def evaluator(score, **changes):
  return evaluate.Evaluator(
    config=dataclasses.replace(CONFIG, **changes),
    model=MODEL,
    compute=REFERENCE,
    problems=PROBLEMS,
    tokenizer=tokenizer.load("bytes"),
    score=score,
    prompt_length=4,
    seed=0,
  )


@pytest.fixture(scope="module")
def params():
  return transformer.init(MODEL, jax.random.key(0))


def test_accuracy_is_the_mean_over_samples_and_problems(params):
  seen = []

  def score(responses, answers):  # problem 0 always right, problem 1 right on its first sample
    seen.append(responses)
    reward = np.zeros(len(responses), np.float32)
    samples = len(responses) // 5
    reward[:samples] = 1
    reward[samples] = 1
    return rewards.Scores(reward, {})

  row, records = evaluator(score)(params)
  assert row["eval/accuracy"] == pytest.approx((3 + 1) / 15)
  assert row["eval/greedy"] == pytest.approx(2 / 5)
  assert row["eval/accuracy/low"] <= row["eval/accuracy"] <= row["eval/accuracy/high"]
  assert [r["reward"] for r in records] == [1, 1, 1, 1] + [0] * 11
  assert [r["prompt_id"] for r in records] == [str(i // 3) for i in range(15)]
  assert [len(s) for s in seen] == [15, 5]


def test_chunks_change_nothing(params):
  def score(responses, answers):
    return rewards.Scores(np.array([len(r) % 2 for r in responses], np.float32), {})

  whole, records = evaluator(score)(params)
  parts, again = evaluator(score, batch=2)(params)  # the last chunk is filled up
  assert [r["response"] for r in again] == [r["response"] for r in records]
  for name, value in whole.items():
    assert parts[name] == pytest.approx(value), name


def test_problems_are_chosen_all_over_the_set():
  assert [p.id for p in evaluate.choose(PROBLEMS, 2)] == ["0", "2"]
  assert len(evaluate.choose(PROBLEMS, 0)) == len(evaluate.choose(PROBLEMS, 99)) == 5


def test_bootstrap_interval_shrinks_with_problems():
  width = lambda n: np.ptp(evaluate.bootstrap(np.arange(n) % 2))  # noqa: E731
  assert width(400) < width(40) and width(40) > 0.2
  assert evaluate.bootstrap(np.ones(10)) == (1.0, 1.0)
