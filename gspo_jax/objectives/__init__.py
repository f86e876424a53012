"""GSPO and its family as pure functions of arrays. Imports jax and nothing else.

  from gspo_jax import objectives as O
  loss, metrics = O.gspo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)

B responses of T tokens; P prompts with G responses each. mask_BT is 1 on the tokens that the policy
sampled. Formulas, when to use which, ranges, and what others do differently: docs/objectives.md.
"""

from gspo_jax.objectives.advantages import (
  constrained_advantages,
  gae,
  group_advantages,
  selection_weights,
  soft_advantages,
  soft_value,
  turn_advantages,
)
from gspo_jax.objectives.clip_ranges import adapted_factor, effective_length, length_factor
from gspo_jax.objectives.corrections import (
  masked_weight,
  mismatch,
  off_policy_mask,
  truncated_weight,
)
from gspo_jax.objectives.critic import explained_variance, value_loss
from gspo_jax.objectives.distillation import distillation_advantages, reverse_kl
from gspo_jax.objectives.estimators import ESTIMATORS, Estimator
from gspo_jax.objectives.kl import kl_k1, kl_k2, kl_k3
from gspo_jax.objectives.length_penalty import overlong_penalty, token_cost
from gspo_jax.objectives.losses import (
  dapo_loss,
  dr_grpo_loss,
  grpo_loss,
  gspo_loss,
  gspo_token_loss,
  ppo_loss,
  segment_loss,
)
from gspo_jax.objectives.other_losses import cispo_loss, dppo_loss, gmpo_loss, sapo_loss
from gspo_jax.objectives.ratios import gspo_token_ratio, segment_ratio, sequence_ratio, token_ratio
from gspo_jax.objectives.recorded_losses import rft_loss, soft_loss, spo_loss
from gspo_jax.objectives.reductions import (
  EffectiveSize,
  Explained,
  Last,
  Max,
  Mean,
  Min,
  Std,
  collapse,
  compute,
  merge,
  psum,
  reduced,
)

# Type checkers of other projects take nothing else as public.
__all__ = [
  "ESTIMATORS",
  "POLICY_LOSSES",
  "EffectiveSize",
  "Estimator",
  "Explained",
  "Last",
  "Max",
  "Mean",
  "Min",
  "Std",
  "adapted_factor",
  "cispo_loss",
  "collapse",
  "compute",
  "constrained_advantages",
  "dapo_loss",
  "distillation_advantages",
  "dppo_loss",
  "dr_grpo_loss",
  "effective_length",
  "explained_variance",
  "gae",
  "gmpo_loss",
  "group_advantages",
  "grpo_loss",
  "gspo_loss",
  "gspo_token_loss",
  "gspo_token_ratio",
  "kl_k1",
  "kl_k2",
  "kl_k3",
  "length_factor",
  "masked_weight",
  "merge",
  "mismatch",
  "off_policy_mask",
  "overlong_penalty",
  "ppo_loss",
  "psum",
  "reduced",
  "reverse_kl",
  "rft_loss",
  "sapo_loss",
  "segment_loss",
  "segment_ratio",
  "selection_weights",
  "sequence_ratio",
  "soft_advantages",
  "soft_loss",
  "soft_value",
  "spo_loss",
  "token_cost",
  "token_ratio",
  "truncated_weight",
  "turn_advantages",
  "value_loss",
]

# The name of each policy loss in a configuration. Each declares its options (terms.policy_loss).
POLICY_LOSSES = dict(
  gspo=gspo_loss,
  gspo_token=gspo_token_loss,
  segment=segment_loss,
  grpo=grpo_loss,
  ppo_clip=ppo_loss,  # its advantages are relative to a group where there is no critic
  dapo=dapo_loss,
  dr_grpo=dr_grpo_loss,
  cispo=cispo_loss,
  gmpo=gmpo_loss,
  sapo=sapo_loss,
  dppo=dppo_loss,
  spo=soft_loss,
  rft=rft_loss,
)
