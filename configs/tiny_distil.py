"""On-policy distillation: a small dense Qwen3 learns to add from a mixture of experts.

The teacher is a finished run of configs/tiny.py. The student has a tenth of the teacher's
parameters, and a separate cold start. The student samples responses. It learns from the
teacher's log-probs of the sampled tokens, and not from rewards. Verdicts are used in metrics only.

Command:   python -m gspo_jax.main --config=configs/tiny.py --workdir=/tmp/tiny
           python -m gspo_jax.main --config=configs/tiny_distil.py --workdir=/tmp/tiny_distil
Hardware:  any machine with two CPU cores; about two minutes after the first run
Expected:  eval/accuracy 0.36 to 0.41 -> 0.83 to 0.91 (seeds 17, 18 and 19). If the student learns
           from rewards instead, it reaches 0.86 to 0.94 (benchmarks/results/objectives.md).
Source:    K. Lu, On-Policy Distillation, Thinking Machines Lab, 2025
"""

from gspo_jax.configs import common, tiny
from gspo_jax.settings import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny.get_config()
  config.update(
    model=common.model(sizes.tiny_dense(vocab_size=264)),
    objective=dict(
      name="ppo_clip",  # This loss takes an advantage for each token.
      aggregate="token",  # All tokens have equal weight, since each has its own advantage.
      volatility=False,
    ),
    distillation=dict(teacher="/tmp/tiny", reward_weight=0.0),
  )
  config.update(
    model=dict(hidden_size=64, intermediate_size=256, num_heads=8, num_kv_heads=4, head_dim=16),
  )
  config.model.rope_theta = 10.0  # Equal to that of configs/tiny.py.
  return config
