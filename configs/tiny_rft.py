"""Rejection sampling: the model of configs/tiny.py imitates the best of eight responses to a sum.

Command:   python -m gspo_jax.main --config=configs/tiny_rft.py --workdir=/tmp/rft
Hardware:  any machine with two CPU cores; about two minutes
Expected:  eval/accuracy 0.41 to 0.44 -> 0.96 to 0.99 (benchmarks/results/objectives.md)
Paper:     arXiv:2304.06767 (RAFT)
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = tiny.get_config(arg)
  config.update(
    objective=dict(
      name="rft",
      advantage="best",  # With "reward", the model imitates all right responses.
    ),
  )
  return config
