"""PPO on the task of configs/tiny.py: a critic of its own gives each token its advantage.

Command:   python -m gspo_jax.main --config=configs/tiny_ppo.py --workdir=/tmp/tiny_ppo
Hardware:  any machine with two CPU cores; its RL costs 1.8 times that of configs/tiny.py
Expected:  eval/accuracy 0.43 -> 0.97, three seeds beside GSPO's in docs/objectives.md
Paper:     arXiv:1707.06347, arXiv:1506.02438
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny.get_config()
  config.update(
    objective=dict(name="ppo_clip", tuned=dict(ppo_clip=dict(aggregate="token"))),
    # Its weights are those of the policy after the cold start, which knows digits and carries.
    critic=dict(name="model", warmup_iterations=2),
    critic_optimizer=dict(learning_rate=1e-3, schedule="linear"),
  )
  return config
