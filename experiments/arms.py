"""The two losses that most experiments compare, with the ranges of §5.1: a run that two experiments
have in common is made once."""

GSPO = {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}
GRPO = {"objective.name": "grpo", "objective.clip_low": 0.2, "objective.clip_high": 0.27}
ARMS = {"gspo": GSPO, "grpo": GRPO}
