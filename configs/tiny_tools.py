"""A small Qwen3-MoE learns to use a calculator over several turns: cold start, then GSPO-token.

A problem is `37*58+46=`, too hard for the model if it does not use the calculator. Only two in
five demonstrations of the cold start use it. docs/multi_turn.md shows a conversation.

Command:   python -m gspo_jax.main --config=configs/tiny_tools.py --workdir=/tmp/tools
Hardware:  any machine with two CPU cores; about 6 minutes
Expected:  eval/accuracy 0.23 -> 0.99, eval/tool_use 0.40 -> 1.00
Paper:     arXiv:2507.18071, §4.3
"""

from gspo_jax.configs import common, tiny


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = tiny.get_config(arg)
  config.update(
    model=dict(num_layers=2),  # The model mostly copies numbers.
    data=dict(
      train="calculator:train",
      eval="calculator:heldout",
      max_prompt_tokens=9,  # "99*99+99="
      digits=2,
    ),
    environment=dict(
      name="calculator",
      max_turns=4,  # Two operations, the answer, and a spare turn.
    ),
    sampling=dict(max_new_tokens=36),  # Three turns and two answers of the calculator take 33.
    engine=dict(steps=4),
    objective=dict(
      # Each turn has its own advantage. With "segment", each turn also has its own ratio. With
      # "gspo", all turns of a conversation share one advantage.
      name="gspo_token",
    ),
    sft=dict(
      steps=400,
      target_loss=0.0,  # 0: none, since the model never learns to calculate without the calculator.
      max_tokens=42,  # A prompt has up to 9 tokens, and a demonstration up to 33.
    ),
    rl=dict(iterations=40),
    eval=dict(every=5),
    alarms=dict(entropy=0.0005),
  )
  return config
