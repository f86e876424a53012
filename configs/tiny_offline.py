"""The model of configs/tiny.py learns from recorded responses, without sampling: SPO.

A run of configs/tiny.py has recorded the responses; other files in this format are possible too
(docs/data.md). The weights after that run's cold start are the initial weights and the reference
policy.

Command:   python -m gspo_jax.main --config=configs/tiny.py --workdir=/tmp/tiny
           python -m gspo_jax.main --config=configs/tiny_offline.py --workdir=/tmp/offline
             --config.weights=/tmp/tiny/checkpoints/sft
             --config.offline.data='/tmp/tiny/rollouts/rl_*.jsonl'
Hardware:  any machine with two CPU cores; about a minute after the first run
Expected:  eval/accuracy 0.41 to 0.44 -> 0.63 to 0.75 (benchmarks/results/objectives.md)
Paper:     arXiv:2503.05453
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = tiny.get_config(arg)
  config.update(
    job="offline",
    weights="",
    offline=dict(fresh=0.0),
    objective=dict(
      # Or "rft", to imitate the best response of each group, or with advantage="reward" all right
      # responses.
      name="spo",
      # Soft value of the reference policy, which is right on 40 % of the problems:
      # 0.3 log(1 + 0.4 (e^(1/0.3) - 1)). An estimate from the recorded groups would be too high,
      # since a better policy sampled them.
      tuned=dict(spo=dict(beta=0.3, soft_value=0.74)),
      volatility=False,  # The recorded responses do not include the chosen experts.
    ),
    # An iteration has 64 groups. The logs of tiny.py have 5 x 64, so each group is used four times.
    rl=dict(iterations=20),
  )
  return config
