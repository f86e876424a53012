"""The calculator of configs/tiny_tools.py after a wasteful teacher: GSPO with a cost per question.

The teacher of the cold start asks three in five of his questions twice, and the calculator says the
same again. docs/multi_turn.md has what becomes of it with and without a cost.

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
    model=dict(moe_intermediate_size=64),  # copying takes no knowledge
    data=dict(checks=0.6),
    environment=dict(
      max_turns=6,  # two operations, each asked twice, and the answer, and one to spare
      call_cost=0.3,  # a right answer earns 1
      charge="right",  # where most answers are wrong, to give up at once would pay
    ),
    sampling=dict(max_new_tokens=64),  # five turns take 61, the calculator's answers included
    objective=dict(name="gspo"),
    sft=dict(
      batch=64,
      max_tokens=70,  # a demonstration has no turn to spare: it takes 70
    ),
    rl=dict(iterations=32, prompts=32),
    rl_optimizer=dict(learning_rate=4e-4),  # fewer responses than usual, and fewer iterations
    eval=dict(every=32, problems=128, greedy=False),
  )
  return config
