"""Qwen3.5: the layers of Qwen3-Next, with experts or without. https://qwen.ai/blog?id=qwen3.5"""

from gspo_jax.models.families import declaration as base
from gspo_jax.models.families.qwen3_next import HYBRID

FAMILY = base.Family({}, {}, **HYBRID)
