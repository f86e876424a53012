"""What experiments have in common: the two losses that most compare, with the ranges of §5.1, and
short problems, which deep models learn in minutes. A run that two of them share is made once."""

GSPO = {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}
GRPO = {"objective.name": "grpo", "objective.clip_low": 0.2, "objective.clip_high": 0.27}
ARMS = {"gspo": GSPO, "grpo": GRPO}
SHORT = {"data.lines": (8,), "sampling.max_new_tokens": 48, "sft.batch": 32}
# A control that only has a cold start. The rate is too small to matter in its only iteration.
COLD_START_ALONE = {"rl.iterations": 1, "rl_optimizer.learning_rate": 1e-12}
LEARNED = 0.15  # Held-out accuracy: a cold start with less has not learned the task.
