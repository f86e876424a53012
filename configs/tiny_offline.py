"""The model of configs/tiny.py learns from recorded responses, without sampling: SPO.

The responses are those that a run of GSPO has dumped, or any file like it (docs/data.md); the
weights to begin with those of its cold start, which is the reference policy.

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
      name="spo",  # | rft: imitates the best of each group, or with advantage=reward all right ones
      # The value is 0.3 log(1 + 0.4 (e^(1/0.3) - 1)), of a reference that is right on 40 %, as cold
      # starts of tiny.py are. A group's own would be that of the better policy that sampled it.
      tuned=dict(spo=dict(beta=0.3, soft_value=0.74)),
      volatility=False,  # no experts are on record
    ),
    rl=dict(iterations=20),  # of 64 groups: a run of tiny.py has dumped five times as many
  )
  return config
