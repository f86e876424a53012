"""Three schedules: the length limit, the problems, or the group sizes change in a run.

:length   configs/tiny_long.py with a length limit of 48 tokens at first, then 96, then 192
:growing  RL of configs/tiny.py on a file of sums, to which you append lines during the run
:groups   RL of configs/tiny.py on a fixed file of sums, with smaller groups for easy problems

The files contain sums with answers, but no demonstrations. So :growing and :groups start from the
weights of a cold start of configs/tiny.py.

Command:   python -m gspo_jax.main --config=configs/tiny_schedules.py:length --workdir=/tmp/length
           python -m gspo_jax.main --config=configs/tiny.py --config.job=sft --workdir=/tmp/start
           python -m gspo_jax.tasks arithmetic:train --rows=256 > /tmp/sums.jsonl
           python -m gspo_jax.main --config=configs/tiny_schedules.py:groups --workdir=/tmp/groups
             --config.weights=/tmp/start/checkpoints/sft --config.data.train=/tmp/sums.jsonl
           For tiny_schedules.py:growing, replace "groups" in the last command by "growing".
Hardware:  any machine with two CPU cores; two to four minutes
Expected:  eval/accuracy, seeds 17 to 19 (benchmarks/results/objectives.md):
           :groups 0.39 to 0.44 -> 0.88 to 0.91, with 45 % fewer tokens than with groups of 8;
           :growing 0.39 to 0.44 -> 0.88 to 0.92, or 0.70 to 0.83 if no lines are appended;
           :length 0.26 to 0.29 -> 0.46 to 0.56
Paper:     arXiv:2507.18071, §5.1 mentions longer responses and updated query sets, without rules
"""

from gspo_jax.configs import common, tiny, tiny_long


def get_config(arg: str | None = None) -> common.ConfigDict:
  schedule = common.variant(arg, "length", "growing", "groups") or "length"
  if schedule == "length":
    config = tiny_long.get_config()
    config.schedule.new_tokens = "1:48,7:96,13:192"  # The lengths of 8, 16 and 32 lines.
    config.rl.iterations = 24
    return config
  config = tiny.get_config()
  config.update(job="rl", weights="", data=dict(train=""))  # Required: a file of JSON lines.
  config.update(rl=dict(iterations=24), eval=dict(every=12, greedy=False))
  if schedule == "growing":
    config.schedule.refresh_every = 2
  else:
    config.schedule.group_size_min = 2
    # Smaller groups leave rows of an update empty. Packing removes the empty rows.
    config.rl.update(packed=True, microbatches=4)
  return config
