"""Sums at a limited length: the accuracy rises while the mean response is held at 5.5 tokens.

The teacher writes half of his sums down without their work: shorter, and wrong wherever there is a
carry. So tokens buy accuracy, and a multiplier on the length finds their price.

Command:   python -m gspo_jax.main --config=configs/tiny_constrained.py --workdir=/tmp/constrained
Hardware:  any machine with two CPU cores; about two minutes
Expected:  eval/accuracy 0.27 -> 0.43 to 0.48 at 5.5 tokens, held within 5 % (seeds 17 to 19)
Paper:     arXiv:2602.05863
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny.get_config()
  config.update(
    # Without a carry no digit depends on another: half the layers of configs/tiny.py will do.
    model=dict(num_layers=2, hidden_size=48, num_heads=4, num_kv_heads=2),
    data=dict(digits=2, max_prompt_tokens=6, skipped_work=0.5),
    constraints=dict(costs=dict(length=dict(bound="at_most", limit=5.5))),
    sampling=dict(max_new_tokens=8),  # "031:130" and the end
    engine=dict(steps=4),
    objective=dict(volatility=False),
    sft=dict(steps=600, target_loss=0.25, batch=64),  # of which 0.19 nobody can know
    rl=dict(iterations=80, prompts=32),
    eval=dict(every=80, greedy=False),
    checkpoint=dict(every=100),
  )
  return config
