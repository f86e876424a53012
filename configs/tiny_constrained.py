"""Sums under a constraint: accuracy rises, and the mean response length stays near 5.5 tokens.

Half of the demonstrations skip the work before the answer. Such a demonstration is shorter, and its
answer is wrong if there is a carry. So longer responses are right more often. A Lagrange multiplier
weighs length against accuracy.

Command:   python -m gspo_jax.main --config=configs/tiny_constrained.py --workdir=/tmp/constrained
Hardware:  any machine with two CPU cores; about two minutes
Expected:  eval/accuracy 0.27 to 0.29 -> 0.43 to 0.48 (seeds 17 to 19). At the end the mean length
           is within 5 % of 5.5 tokens.
Paper:     arXiv:2602.05863
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny.get_config()
  config.update(
    # Sums of two digits need only half the layers of configs/tiny.py, and narrower ones.
    model=dict(num_layers=2, hidden_size=48, num_heads=4, num_kv_heads=2),
    data=dict(digits=2, max_prompt_tokens=6, skipped_work=0.5),
    constraints=dict(costs=dict(length=dict(bound="at_most", limit=5.5))),
    sampling=dict(max_new_tokens=8),  # "031:130" and the stop token.
    engine=dict(steps=4),
    objective=dict(volatility=False),
    # Demonstrations are random, so no model has a loss below 0.19.
    sft=dict(steps=600, target_loss=0.25, batch=64),
    rl=dict(iterations=80, prompts=32),
    eval=dict(every=80, greedy=False),
    checkpoint=dict(every=100),
  )
  return config
