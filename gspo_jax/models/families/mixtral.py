"""Mixtral: experts in every layer. https://arxiv.org/abs/2401.04088"""

from gspo_jax.models.families import declaration as base

EXPERT = base.LAYER + "block_sparse_moe.experts.{E}."
NAMES = {
  "Moe.router": (base.LAYER + "block_sparse_moe.gate.weight", "E D"),
  "Moe.gate": (EXPERT + "w1.weight", "F D"),
  "Moe.up": (EXPERT + "w3.weight", "F D"),
  "Moe.down": (EXPERT + "w2.weight", "D F"),
}

FAMILY = base.Family(
  dict(
    mixtral=base.Architecture(
      "MixtralForCausalLM",
      base.FIELDS | base.LOCAL_EXPERTS,
      implied=dict(norm_topk_prob=True),
      fixed=dict(sliding_window=None, router_jitter_noise=0.0),
      defaults=dict(
        rope_theta=1e6, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
      ),
    )
  ),
  NAMES,
)
