"""The task of configs/tiny_tools.py with a cost per tool call: GSPO removes useless calls.

In the demonstrations of the cold start, three in five calls of the calculator are repeated. The
calculator then gives the same answer again. docs/multi_turn.md compares runs with and without the
cost.

Command:   python -m gspo_jax.main --config=configs/tiny_agents.py --workdir=/tmp/tiny_agents
Hardware:  any machine with two CPU cores; about seven minutes
Expected:  eval/accuracy 0.06 to 0.12 -> 0.95 to 0.98 (seeds 19, 20 and 21). At the end
           eval/tool_calls is 2.0. If calls cost nothing, it is 3.0 to 3.5.
Paper:     arXiv:2510.22477
"""

from gspo_jax.configs import common, tiny_tools


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  config = tiny_tools.get_config()
  config.update(
    model=dict(moe_intermediate_size=64),  # The model mostly copies numbers.
    data=dict(checks=0.6),
    environment=dict(
      max_turns=6,  # Two calls, both repeated, then the answer, and a spare turn.
      call_cost=0.3,  # The reward of a right answer is 1.
      # Only right conversations have costs. At first, most conversations are wrong. If these had
      # costs too, the best policy at first would be to answer without a call.
      charge="right",
    ),
    sampling=dict(max_new_tokens=64),  # Five turns and four answers of the calculator take 61.
    objective=dict(name="gspo"),
    sft=dict(
      batch=64,
      max_tokens=70,  # Length of the longest prompt with its demonstration.
    ),
    rl=dict(iterations=32, prompts=32),
    # Twice the rate of tiny.py, since batches are fewer and smaller.
    rl_optimizer=dict(learning_rate=4e-4),
    eval=dict(every=32, problems=128, greedy=False),
  )
  return config
