"""What changes while a run goes on, one at a time: length of responses, problems, sizes of groups.

:length   configs/tiny_long.py whose responses may have 48 tokens at first, then 96, then 192
:growing  configs/tiny.py after its cold start, on a file of sums to which another process appends
:groups   the same on a file that stays, with fewer responses to what is often solved

The files have sums and their answers, and no demonstrations: the last two begin with the weights of
a cold start of configs/tiny.py.

Command:   python -m gspo_jax.main --config=configs/tiny_schedules.py:length --workdir=/tmp/length
           python -m gspo_jax.main --config=configs/tiny.py --config.job=sft --workdir=/tmp/start
           python -m gspo_jax.tasks arithmetic:train --rows=256 > /tmp/sums.jsonl
           python -m gspo_jax.main --config=configs/tiny_schedules.py:groups --workdir=/tmp/groups
             --config.weights=/tmp/start/checkpoints/sft --config.data.train=/tmp/sums.jsonl
           configs/tiny_schedules.py:growing in the same way, while lines are appended to its file
Hardware:  any machine with two CPU cores; two to four minutes
Expected:  eval/accuracy 0.39 to 0.44 -> 0.88 to 0.91 by :groups, with 45 % fewer tokens than with
           whole groups; 0.88 to 0.92 by :growing, 0.70 to 0.83 without what is appended;
           :length 0.26 to 0.29 -> 0.46 to 0.56, seeds 17 to 19 (docs/objectives.md)
Paper:     arXiv:2507.18071, §5.1 (longer responses, updated query sets; the rules are ours)
"""

from gspo_jax.configs import common, tiny, tiny_long


def get_config(arg: str | None = None) -> common.ConfigDict:
  which = common.variant(arg, "length", "growing", "groups") or "length"
  if which == "length":
    config = tiny_long.get_config()
    config.schedule.new_tokens = "1:48,7:96,13:192"  # all of 8 lines, of 16, of 32
    config.rl.iterations = 24
    return config
  config = tiny.get_config()
  config.update(job="rl", weights="", data=dict(train=""))  # the file: JSON lines
  config.update(rl=dict(iterations=24), eval=dict(every=12, greedy=False))
  if which == "growing":
    config.schedule.refresh_every = 2
  else:
    config.schedule.group_size_min = 2
    # Rows of the update that a smaller group leaves empty cost nothing.
    config.rl.update(packed=True, microbatches=4)
  return config
