"""SPO: the model of configs/tiny.py learns from recorded responses, and samples none.

The first command below records the responses. Other files of this format are possible too
(docs/data.md). The weights after the first command's cold start are the initial weights and the
reference policy.

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
      # The loss "rft" is possible too. It imitates the best response of each group; with
      # advantage="reward", it imitates all right responses.
      name="spo",
      # The reference policy is right on 40 % of the problems. So its soft value is
      # 0.3 log(1 + 0.4 (e^(1/0.3) - 1)) = 0.74. An estimate from the recorded groups would be too
      # high, since policies better than the reference sampled most of them.
      tuned=dict(spo=dict(beta=0.3, soft_value=0.74)),
      volatility=False,  # The recorded responses do not include the chosen experts.
    ),
    # An iteration takes 64 groups. A run of tiny.py records 5 x 64. So 20 iterations use each group
    # four times.
    rl=dict(iterations=20),
  )
  return config
