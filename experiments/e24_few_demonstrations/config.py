"""configs/smollm2.py with two evaluations: on problems of the training texts, which choose the best
imitation, and on held-out texts."""

from gspo_jax.configs import common, smollm2


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = smollm2.get_config(arg)
  config.data.eval = "word_problems:train"
  config.eval.every = 1000  # Only the first and the last evaluation are made.
  config.eval.benchmarks.heldout = common.benchmark(
    8, pass_at=(8,), data="word_problems:heldout", problems=160
  )
  return config
