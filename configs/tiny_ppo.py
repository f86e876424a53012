"""PPO on the task of configs/tiny.py, with a separate critic and an advantage for each token.

Command:   python -m gspo_jax.main --config=configs/tiny_ppo.py --workdir=/tmp/tiny_ppo
Hardware:  any machine with two CPU cores; RL takes 1.8 times the operations of configs/tiny.py
Expected:  eval/accuracy 0.43 -> 0.97 (benchmarks/results/objectives.md compares PPO with GSPO)
Paper:     arXiv:1707.06347, arXiv:1506.02438
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny.get_config()
  config.update(
    objective=dict(name="ppo_clip", tuned=dict(ppo_clip=dict(aggregate="token"))),
    # The critic starts from the policy after the cold start. This policy adds some numbers right.
    critic=dict(name="model", warmup_iterations=2),
    critic_optimizer=dict(learning_rate=1e-3, schedule="linear"),
  )
  return config
