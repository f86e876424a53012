"""A small Qwen3-MoE learns a task with longer responses: cold start, then GSPO.

Most experiments (experiments/) start from this configuration. A sequence's ratio averages over its
tokens, and responses of configs/tiny.py have only ten tokens. Responses of this configuration have
48, 96 or 192 tokens (docs/data.md). Responses of configs/tiny_long.py:long have 192, 384 or 768.

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
      num_heads=8,  # Among more heads, one is likelier to look at the right lines from the start.
      num_kv_heads=4,
      moe_intermediate_size=128,
      # The digits that a token depends on are 5 to 12 tokens before it. With base 10, all
      # frequencies distinguish these distances. With base 30, a run with the same seed needed twice
      # as many updates as with base 10.
      rope_theta=10.0,
    ),
    mesh=dict(data=-1, fsdp=1),  # Splitting such a small model gains nothing.
    data=dict(
      train="recurrence:train",
      eval="recurrence:heldout",
      max_prompt_tokens=12,  # A prompt has two lines of six tokens.
      lines=lines,
      # Of the demonstrations with 8 lines, 69 % are right; with 16 lines 51 %, with 32 lines 30 %.
      carry_errors=0.1,
    ),
    reward=dict(name="recurrence"),
    sampling=dict(max_new_tokens=6 * max(lines)),
    engine=dict(steps=48),  # Length of the shortest response.
    objective=dict(volatility=True),
    sft=dict(
      steps=1600,
      target_loss=0.04,  # Forgotten carries are random, so no model has a loss below 0.024.
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
