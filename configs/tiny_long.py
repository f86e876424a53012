"""A small Qwen3-MoE learns a task with longer responses: cold start, then GSPO.

Most experiments (experiments/) start from this configuration. A sequence's ratio averages over its
tokens, and responses of configs/tiny.py have only ten tokens. Responses of this configuration have
48, 96 or 192 tokens (docs/data.md), those of configs/tiny_long.py:long 192, 384 or 768.

Command:   python -m gspo_jax.main --config=configs/tiny_long.py --workdir=/tmp/long
Hardware:  any machine with two CPU cores; a cold start and 40 iterations in about three minutes
Expected:  eval/accuracy 0.20 to 0.27 -> 0.50 to 0.67, seeds 10, 11 and 12 (E2 of experiments/)
Paper:     arXiv:2507.18071
"""

from gspo_jax.configs import common


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  lines = (32, 64, 128) if common.variant(arg, "long") else (8, 16, 32)
  config.update(
    job="sft+rl",
    model=dict(
      hidden_size=96,
      num_layers=2,
      num_heads=8,  # With more heads, the initial attention of one is nearer to the right lines.
      num_kv_heads=4,
      moe_intermediate_size=128,
      # The operands of a line are 5 to 12 tokens before it. With base 10, all frequencies
      # distinguish these positions. With base 30, the same seed needed twice as many updates.
      rope_theta=10.0,
    ),
    mesh=dict(data=-1, fsdp=1),  # Splitting such a small model gains nothing.
    data=dict(
      train="recurrence:train",
      eval="recurrence:heldout",
      max_prompt_tokens=12,  # Two lines.
      lines=lines,
      carry_errors=0.1,  # Right demonstrations of 8, 16 and 32 lines: 69, 51 and 30 %.
    ),
    reward=dict(name="recurrence"),
    sampling=dict(max_new_tokens=6 * max(lines)),
    engine=dict(steps=48),  # The shortest response.
    objective=dict(volatility=True),
    sft=dict(
      steps=1600,
      target_loss=0.04,  # Forgotten carries are random: no model has less than 0.024.
      check_every=20,
      batch=16,
      log_every=50,
      load_balance_coef=0.01,
    ),
    sft_optimizer=dict(learning_rate=2e-3, schedule="cosine", warmup_steps=30),
    rl=dict(iterations=40, prompts=16, dump_every=40),
    rl_optimizer=dict(learning_rate=1e-4),  # Constant, so that a run can be extended.
    eval=dict(every=20, problems=192, batch=192, greedy=False),
    checkpoint=dict(every=100),
    alarms=dict(entropy=0.001),
  )
  return config
