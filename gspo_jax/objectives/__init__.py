"""GSPO and its family as pure functions of arrays. Imports jax and nothing else.

  from gspo_jax import objectives as O
  loss, metrics = O.gspo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)

Formulas, ranges and what other implementations do: docs/objectives.md.
"""

from gspo_jax.objectives.advantages import group_advantages
from gspo_jax.objectives.kl import kl_k1, kl_k2, kl_k3
from gspo_jax.objectives.losses import (
  gspo_loss,
  gspo_token_loss,
  grpo_loss,
  segment_loss,
)
from gspo_jax.objectives.reductions import Max, Mean, Min, Std
