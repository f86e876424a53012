"""GPT-OSS: attention sinks, sliding windows, biases, a clamped activation in experts.

https://arxiv.org/abs/2508.10925
"""

import jax
import jax.numpy as jnp

from gspo_jax.models.families import declaration as base
from gspo_jax.models.families.mistral import WINDOWED
from gspo_jax.models.layers import rms_norm_rounded_once

ALPHA, LIMIT = 1.702, 7.0  # Constants of `activation`.


def activation(a: jax.Array, u: jax.Array) -> jax.Array:
  """(u + 1) a σ(1.702 a), with a at most 7 and u between -7 and 7."""
  a, u = jnp.minimum(a, LIMIT), jnp.clip(u, -LIMIT, LIMIT)
  return (u + 1) * (a * jax.nn.sigmoid(ALPHA * a))


# Rotary parameters of a config.json without any.
YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False) | dict(
  original_max_position_embeddings=4096
)
ATTENTION, MLP = base.LAYER + "self_attn.", base.LAYER + "mlp."

FAMILY = base.Family(
  dict(
    gpt_oss=base.Architecture(
      "GptOssForCausalLM",
      WINDOWED | base.LOCAL_EXPERTS | base.keys("attention_bias"),
      # A softmax over the chosen experts' logits is a renormalised softmax over all experts.
      implied={"norm_topk_prob": True, "scores.sinks": True, "rope.local": True},
      fixed=dict(swiglu_alpha=ALPHA, swiglu_limit=LIMIT),
      defaults=dict(num_key_value_heads=8, head_dim=64, attention_bias=True, sliding_window=128)
      | dict(rope_theta=1.5e5, rms_norm_eps=1e-5, rope_parameters=YARN),
      pattern=2,
      quantised="mxfp4",
    )
  ),
  {
    "attention.o_bias": (ATTENTION + "o_proj.bias", "D"),
    "attention.sink": (ATTENTION + "sinks", "N"),
    "Moe.router": (MLP + "router.weight", "E D"),
    "Moe.router_bias": (MLP + "router.bias", "E"),
    "Moe.gate": (MLP + "experts.gate_up_proj", "E D F+"),
    "Moe.up": (MLP + "experts.gate_up_proj", "E D F+"),
    "Moe.down": (MLP + "experts.down_proj", "E F D"),
    "Moe.gate_bias": (MLP + "experts.gate_up_proj_bias", "E F+"),
    "Moe.up_bias": (MLP + "experts.gate_up_proj_bias", "E F+"),
    "Moe.down_bias": (MLP + "experts.down_proj_bias", "E D"),
  },
  norm=rms_norm_rounded_once,
  biases=True,
  experts="all",
  activation=activation,
)
