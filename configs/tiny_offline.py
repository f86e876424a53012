"""The model of configs/tiny.py learns from recorded responses, without sampling: SPO.

The responses are those recorded by a run of GSPO, or other files in this format (docs/data.md). The
initial weights are those of that run's cold start. They are also the reference policy.

Command:   python -m gspo_jax.main --config=configs/tiny.py --workdir=/tmp/tiny
           python -m gspo_jax.main --config=configs/tiny_offline.py --workdir=/tmp/offline
             --config.weights=/tmp/tiny/checkpoints/sft
             --config.offline.data='/tmp/tiny/rollouts/rl_*.jsonl'
Hardware:  any machine with two CPU cores; about a minute after the first run
Expected:  eval/accuracy 0.41 to 0.44 -> 0.63 to 0.75 (docs/objectives.md)
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
      # Soft value of the reference policy, right on 40 %: 0.3 log(1 + 0.4 (e^(1/0.3) - 1)). An
      # estimate from the groups would be that of the better policy that sampled them.
      tuned=dict(spo=dict(beta=0.3, soft_value=0.74)),
      volatility=False,  # The recorded responses have no experts.
    ),
    # Of 64 groups each. The logs of tiny.py have five times 64, so each group is used four times.
    rl=dict(iterations=20),
  )
  return config
