"""The task of configs/tiny_tools.py with a cost per tool call: GSPO removes useless calls.

The demonstrations of the cold start repeat three in five calls of the calculator, which gives the
same answer again. docs/multi_turn.md compares runs with and without the cost.

Command:   python -m gspo_jax.main --config=configs/tiny_agents.py --workdir=/tmp/tiny_agents
Hardware:  any machine with two CPU cores; about seven minutes
Expected:  eval/accuracy 0.06 to 0.12 -> 0.95 to 0.98, eval/tool_calls 2.0; without the cost 3.0 to
           3.5 calls (seeds 19, 20 and 21)
Paper:     arXiv:2510.22477
"""

from gspo_jax.configs import common, tiny_tools


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny_tools.get_config()
  config.update(
    model=dict(moe_intermediate_size=64),  # Enough for copying.
    data=dict(checks=0.6),
    environment=dict(
      max_turns=6,  # Two operations, each asked twice, the answer, and a spare turn.
      call_cost=0.3,  # A right answer is worth 1.
      # As long as most answers are wrong, costs for wrong answers would reward giving up at once.
      charge="right",
    ),
    sampling=dict(max_new_tokens=64),  # Five turns take 61, with the calculator's answers.
    objective=dict(name="gspo"),
    sft=dict(
      batch=64,
      max_tokens=70,  # The longest demonstration.
    ),
    rl=dict(iterations=32, prompts=32),
    rl_optimizer=dict(learning_rate=4e-4),  # Twice that of tiny.py, for fewer and smaller batches.
    eval=dict(every=32, problems=128, greedy=False),
  )
  return config
