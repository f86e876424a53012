"""An importance ratio for each segment of a response (GSsPO): turns, steps, lines, so many tokens.

Conversations with a calculator, those of configs/tiny_tools.py, by turn; by step, an operand each,
with configs/tiny_segments.py:steps; and the responses of configs/tiny_long.py by line, with
configs/tiny_segments.py:long. Ranges are those of the sequence by the rule c/sqrt(length).

Command:   python -m gspo_jax.main --config=configs/tiny_segments.py --workdir=/tmp/segments
Hardware:  any machine with two CPU cores; a cold start of two minutes and one of RL
Expected:  eval/accuracy 0.18 to 0.21 -> 0.81 to 0.88 by turn and by step, 0.28 to 0.29 ->
           0.37 to 0.53 by line in :long, seeds 17 to 19; whole responses are no worse
           (docs/objectives.md)
Paper:     arXiv:2602.01202
"""

from gspo_jax.configs import common, tiny_long, tiny_tools


def get_config(arg: str | None = None) -> common.ConfigDict:
  variant = common.variant(arg, "steps", "long")
  config = (tiny_long if variant == "long" else tiny_tools).get_config()
  # Ranges of GSPO there, for about so many sampled tokens: |z| of them have c/sqrt(|z|).
  config.update(objective=dict(name="segment", clip_exponent=0.5))
  if variant == "long":
    config.update(
      objective=dict(segment_unit="line", clip_length=96.0),  # or tokens, and segment_tokens
      rl=dict(iterations=12),
      rl_optimizer=dict(learning_rate=2e-4),
      eval=dict(every=12),
    )
    return config
  config.update(
    objective=dict(clip_length=22.0),  # two questions and the answer
    rl=dict(iterations=6),
    eval=dict(every=6, problems=128, greedy=False),
    alarms=dict(ratio=0.0),
  )
  if variant == "steps":
    config.update(objective=dict(segment_unit="step", segment_delimiters=("*", "+", "]")))
  return config
