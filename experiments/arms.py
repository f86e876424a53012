"""Settings common to experiments: two losses (§5.1) and short problems.

Deep models learn the short problems in minutes. Experiments share equal runs.
"""

GSPO = {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}
GRPO = {"objective.name": "grpo", "objective.clip_low": 0.2, "objective.clip_high": 0.27}
ARMS = {"gspo": GSPO, "grpo": GRPO}
SHORT = {"data.lines": (8,), "sampling.max_new_tokens": 48, "sft.batch": 32}
# A control without RL: the learning rate of its only iteration is negligible.
COLD_START_ALONE = {"rl.iterations": 1, "rl_optimizer.learning_rate": 1e-12}
LEARNED = 0.15  # Least held-out accuracy of a cold start that has learned the task.
