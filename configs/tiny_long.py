"""A small Qwen3-MoE writes long responses: cold start from a forgetful pupil, then GSPO."""

from configs import common


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  long = common.variant(arg, "long")
  lines = (32, 64, 128) if long else (8, 16, 32)
  config.update(
    job="sft+rl",
    model=dict(
      num_layers=2,
      rope_theta=100.0,  # what a line needs stands within 12 tokens before it
      num_heads=8,
      num_kv_heads=4,
    ),
    mesh=dict(data=-1, fsdp=1),
    data=dict(
      train="recurrence:train",
      eval="recurrence:heldout",
      max_prompt_tokens=12,
      lines=lines,
      carry_errors=0.06,
    ),
    reward=dict(name="recurrence"),
    sampling=dict(max_new_tokens=6 * max(lines)),
    engine=dict(steps=48),
    objective=dict(old_logp="recompute", volatility=True),
    sft=dict(steps=600, batch=32, load_balance_coef=0.01, log_every=20),
    sft_optimizer=dict(learning_rate=2e-3, schedule="cosine", warmup_steps=30),
    rl=dict(iterations=40, prompts=16, group_size=8),
    rl_optimizer=dict(learning_rate=1e-4),
    eval=dict(every=20, problems=96, samples=4, greedy=False, batch=96),
    checkpoint=dict(every=1000),
    alarms=dict(entropy=0.001),
  )
  return config
