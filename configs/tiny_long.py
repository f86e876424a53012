"""A small Qwen3-MoE writes long responses: cold start from a forgetful pupil, then GSPO.

The base of the experiments (experiments/): the ratio of a sequence is a mean over tokens, and the
tasks of configs/tiny.py have ten to a response. Here they are 48, 96 or 192 (docs/data.md); with
configs/tiny_long.py:long 192, 384 or 768.

Command:   python -m gspo_jax.main --config=configs/tiny_long.py --workdir=/tmp/long
Hardware:  any machine with two CPU cores
Paper:     arXiv:2507.18071
"""

from configs import common


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  lines = (32, 64, 128) if common.variant(arg, "long") else (8, 16, 32)
  config.update(
    job="sft+rl",
    model=dict(
      hidden_size=96,
      num_layers=2,
      num_heads=8,  # more of them begin near the lines to add
      num_kv_heads=4,
      moe_intermediate_size=128,
      # What a line needs stands 5 to 12 tokens back. With a base of 30 all frequencies tell these
      # apart, and the slowest goes round once in 150 tokens.
      rope_theta=30.0,
    ),
    mesh=dict(data=-1, fsdp=1),  # so small a model is not split
    data=dict(
      train="recurrence:train",
      eval="recurrence:heldout",
      max_prompt_tokens=12,  # two lines
      lines=lines,
      carry_errors=0.06,
    ),
    reward=dict(name="recurrence"),
    sampling=dict(max_new_tokens=6 * max(lines)),
    engine=dict(steps=48),  # the shortest response
    objective=dict(volatility=True),
    sft=dict(
      steps=600,
      batch=32,
      load_balance_coef=0.01,
    ),
    sft_optimizer=dict(learning_rate=3e-3, schedule="cosine", warmup_steps=30),
    rl=dict(iterations=40, prompts=16, dump_every=1000),
    rl_optimizer=dict(learning_rate=5e-5),
    eval=dict(every=10, problems=192, batch=192, greedy=False),
    checkpoint=dict(every=100),
    alarms=dict(entropy=0.001),
  )
  return config
