"""An importance ratio for each segment of a response (GSsPO): for turns, steps or lines.

configs/tiny_segments.py        a segment is a turn of a conversation of configs/tiny_tools.py
configs/tiny_segments.py:steps  a segment of such a turn ends after *, + or ]
configs/tiny_segments.py:long   a segment is a line of a response of configs/tiny_long.py

The clip range of a segment of n tokens is proportional to 1/sqrt(n).

Command:   python -m gspo_jax.main --config=configs/tiny_segments.py --workdir=/tmp/segments
Hardware:  any machine with two CPU cores; two minutes of cold start and one minute of RL
Expected:  eval/accuracy 0.18 to 0.21 -> 0.81 to 0.88 with turns and with steps, and 0.28 to 0.29
           -> 0.37 to 0.53 with lines (seeds 17 to 19). With one ratio for the whole response,
           accuracy is as high as with turns and steps, and higher than with lines
           (benchmarks/results/objectives.md).
Paper:     arXiv:2602.01202
"""

from gspo_jax.configs import common, tiny_long, tiny_tools


def get_config(arg: str | None = None) -> common.ConfigDict:
  variant = common.variant(arg, "steps", "long")
  config = (tiny_long if variant == "long" else tiny_tools).get_config()
  # A segment of `clip_length` tokens, about a whole response, has GSPO's clip range.
  config.update(objective=dict(name="segment", clip_exponent=0.5))
  if variant == "long":
    config.update(
      objective=dict(segment_unit="line", clip_length=96.0),
      rl=dict(iterations=12),
      rl_optimizer=dict(learning_rate=2e-4),
      eval=dict(every=12),
    )
    return config
  config.update(
    objective=dict(clip_length=22.0),  # Length of two calls and the answer.
    rl=dict(iterations=6),
    eval=dict(every=6, problems=128, greedy=False),
    alarms=dict(ratio=0.0),
  )
  if variant == "steps":
    config.update(objective=dict(segment_unit="step", segment_delimiters=("*", "+", "]")))
  return config
