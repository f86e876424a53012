"""GSPO and related policy losses, as pure functions of arrays. The package imports only jax.

  from gspo_jax import objectives as O
  loss, metrics = O.gspo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT)

The letters at the end of an array's name are its axes. Axes B, T are B responses of T tokens. Axes
P, G are P prompts with G responses each. mask_BT is 1 on the tokens that the policy sampled, and 0
on all other tokens. docs/objectives.md compares the losses.
"""

# In other projects, type checkers take a name as public only if it is imported with "as".
from gspo_jax.objectives.advantages import constrained_advantages as constrained_advantages
from gspo_jax.objectives.advantages import gdpo_advantages as gdpo_advantages
from gspo_jax.objectives.advantages import group_advantages as group_advantages
from gspo_jax.objectives.advantages import selection_weights as selection_weights
from gspo_jax.objectives.advantages import soft_advantages as soft_advantages
from gspo_jax.objectives.advantages import soft_value as soft_value
from gspo_jax.objectives.advantages import turn_advantages as turn_advantages
from gspo_jax.objectives.clip_ranges import adapted_factor as adapted_factor
from gspo_jax.objectives.clip_ranges import effective_length as effective_length
from gspo_jax.objectives.clip_ranges import length_factor as length_factor
from gspo_jax.objectives.corrections import masked_weight as masked_weight
from gspo_jax.objectives.corrections import mismatch as mismatch
from gspo_jax.objectives.corrections import off_policy_mask as off_policy_mask
from gspo_jax.objectives.corrections import truncated_weight as truncated_weight
from gspo_jax.objectives.critic import explained_variance as explained_variance
from gspo_jax.objectives.critic import value_loss as value_loss
from gspo_jax.objectives.distillation import distillation_advantages as distillation_advantages
from gspo_jax.objectives.distillation import reverse_kl as reverse_kl
from gspo_jax.objectives.estimators import ESTIMATORS as ESTIMATORS
from gspo_jax.objectives.estimators import Estimator as Estimator
from gspo_jax.objectives.gae import gae as gae
from gspo_jax.objectives.gae import turn_gae as turn_gae
from gspo_jax.objectives.kl import kl_k1 as kl_k1
from gspo_jax.objectives.kl import kl_k2 as kl_k2
from gspo_jax.objectives.kl import kl_k3 as kl_k3
from gspo_jax.objectives.kl import kl_k3_weighted as kl_k3_weighted
from gspo_jax.objectives.length_penalty import overlong_penalty as overlong_penalty
from gspo_jax.objectives.length_penalty import token_cost as token_cost
from gspo_jax.objectives.losses import dapo_loss as dapo_loss
from gspo_jax.objectives.losses import dr_grpo_loss as dr_grpo_loss
from gspo_jax.objectives.losses import grpo_loss as grpo_loss
from gspo_jax.objectives.losses import ppo_loss as ppo_loss
from gspo_jax.objectives.other_losses import cispo_loss as cispo_loss
from gspo_jax.objectives.other_losses import dppo_loss as dppo_loss
from gspo_jax.objectives.other_losses import gmpo_loss as gmpo_loss
from gspo_jax.objectives.other_losses import opmd_loss as opmd_loss
from gspo_jax.objectives.other_losses import sapo_loss as sapo_loss
from gspo_jax.objectives.other_losses import vespo_loss as vespo_loss
from gspo_jax.objectives.ratios import gspo_token_ratio as gspo_token_ratio
from gspo_jax.objectives.ratios import segment_ratio as segment_ratio
from gspo_jax.objectives.ratios import sequence_ratio as sequence_ratio
from gspo_jax.objectives.ratios import token_ratio as token_ratio
from gspo_jax.objectives.recorded_losses import rft_loss as rft_loss
from gspo_jax.objectives.recorded_losses import soft_loss as soft_loss
from gspo_jax.objectives.recorded_losses import spo_loss as spo_loss
from gspo_jax.objectives.reductions import EffectiveSize as EffectiveSize
from gspo_jax.objectives.reductions import Explained as Explained
from gspo_jax.objectives.reductions import Last as Last
from gspo_jax.objectives.reductions import Max as Max
from gspo_jax.objectives.reductions import Mean as Mean
from gspo_jax.objectives.reductions import Min as Min
from gspo_jax.objectives.reductions import Std as Std
from gspo_jax.objectives.reductions import collapse as collapse
from gspo_jax.objectives.reductions import compute as compute
from gspo_jax.objectives.reductions import merge as merge
from gspo_jax.objectives.reductions import psum as psum
from gspo_jax.objectives.reductions import reduced as reduced
from gspo_jax.objectives.sequence_losses import gspo_loss as gspo_loss
from gspo_jax.objectives.sequence_losses import gspo_token_loss as gspo_token_loss
from gspo_jax.objectives.sequence_losses import luspo_loss as luspo_loss
from gspo_jax.objectives.sequence_losses import segment_loss as segment_loss
from gspo_jax.objectives.terms import PolicyLoss as PolicyLoss
from gspo_jax.objectives.terms import policy_loss as policy_loss

# Policy losses by their name in a configuration. Each declares its options (terms.policy_loss).
POLICY_LOSSES = dict(
  gspo=gspo_loss,
  gspo_token=gspo_token_loss,
  segment=segment_loss,
  luspo=luspo_loss,
  grpo=grpo_loss,
  ppo_clip=ppo_loss,  # If the run has no critic, advantages are relative to a group.
  dapo=dapo_loss,
  dr_grpo=dr_grpo_loss,
  cispo=cispo_loss,
  gmpo=gmpo_loss,
  sapo=sapo_loss,
  dppo=dppo_loss,
  vespo=vespo_loss,
  opmd=opmd_loss,
  spo=soft_loss,
  rft=rft_loss,
)
