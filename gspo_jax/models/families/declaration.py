"""Types of a family's declaration, and the tables that most families share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax

from gspo_jax.models import layers, weights
from gspo_jax.models.experts.blocks import Activation, swiglu
from gspo_jax.models.layers import Norm, rms_norm
from gspo_jax.models.weights import Attention, Dense, GatedDelta, Moe
from gspo_jax.settings.model import Kind, ModelConfig


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A model class of transformers: how its config.json is read and written.

  name: name of the class.
  fields: dict, field of ModelConfig -> key of config.json. "group.field" is a field of a group.
  implied: dict, field without a key -> its value for every model of the class.
  fixed: dict, key -> its only supported value.
  defaults: dict, key -> its value if missing, from transformers' configuration class.
  pattern: n if every n-th layer is global and all other layers have the sliding window. 0 if all
    layers have the window, None if no layer may have it. Unless `pattern` is None,
    `sliding_window_pattern` and `layer_types` of config.json take precedence.
  ropes_by_kind: whether global and local layers have separate rotary parameters.
  quantised: quant_method of quantised files that can be read; "" for none.
  outer: model_type of the multimodal model with this class in its text_config; "" for none.
  read: (config.json) -> dict of further fields, which are computed from keys.
  write: (ModelConfig) -> dict of the keys that `read` reads.
  """

  name: str
  fields: Mapping[str, str]
  implied: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  pattern: int | None = None
  ropes_by_kind: bool = False
  quantised: str = ""
  outer: str = ""
  read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
  write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


@flax.struct.dataclass
class Block:
  """Weights of a layer with norms before attention and feed-forward layer."""

  attention_norm: Any  # l D
  attention: Attention | GatedDelta
  ffn_norm: Any  # l D
  ffn: Dense | Moe


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models, declared by its differences from Llama.

  architectures: dict, model_type in config.json -> architecture.
  names: dict of the entries of NAMES that are different in the family's files.
  block: dataclass of a layer's weights. It has `attention`, `ffn`, and any of the norms before them
    (`attention_norm`, `ffn_norm`) and after them (`attention_post_norm`, `ffn_post_norm`).
  norm: norm of queries and keys, of each layer and of the last hidden states.
  norm_scale: options of `Weight` for the scales of these norms.
  norm_heads: whether q/k norms are over all heads together.
  biases: whether router and experts have biases. If so, `attention_bias` includes the output
    projection.
  attention_gate: whether outputs of full attention are multiplied by a gate.
  experts: "any" if each layer may have experts, "none" if no layer may, "all" if every layer must.
  dense_activation: activation of dense layers, a function of x gate.
  activation: activation of experts, a function of x gate and x up.
  embed_scale: (config) -> factor on rows of the embedding.
  prediction: first parts of the names of tensors for multi-token prediction.
  """

  architectures: Mapping[str, Architecture]
  names: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
  block: type = Block
  norm: Norm = rms_norm
  norm_scale: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(constant=1.0))
  norm_heads: bool = False
  biases: bool = False
  attention_gate: bool = False
  experts: str = "any"
  dense_activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
  activation: Activation = swiglu
  embed_scale: Callable[[ModelConfig], float] = lambda config: config.multipliers.embedding
  prediction: tuple[str, ...] = ()

  def final_norm(self, w: functools.partial) -> weights.Weight:
    """Declares the scale of the last norm."""
    return w("D", **self.norm_scale)

  def block_table(self, c: ModelConfig, kind: Kind, number: int) -> Any:
    """Declares the weights of `number` layers of one kind, stacked on l.

    Raises ValueError if the family has no layers of this kind.
    """
    if kind.moe and self.experts == "none":
      raise ValueError(
        f"model.num_experts={c.num_experts}: model.family={c.family!r} has no experts"
      )
    if not kind.moe and self.experts == "all":
      raise ValueError(f"model.family={c.family!r} has experts in every layer")
    width = c.moe_intermediate_size if kind.moe else c.intermediate_size
    w = weights.weight_factory(c, l=number, F=width)
    names = [field.name for field in dataclasses.fields(self.block)]
    o_bias = self.biases and c.attention_bias
    options = (self.norm_scale, self.norm_heads, o_bias, self.attention_gate)
    attention = (
      weights.gated_delta_table(c, number)
      if kind.linear
      else weights.attention_table(c, w, *options)
    )
    return self.block(
      attention=attention,
      ffn=weights.moe_table(c, w, number, self.biases) if kind.moe else weights.dense_table(w),
      **{name: w("lD", **self.norm_scale) for name in names if name.endswith("norm")},
    )

  def layer(
    self, x_BTD: jax.Array, block: Any, config: ModelConfig, attend: Callable, experts: Callable
  ) -> tuple[jax.Array, Any, jax.Array | None, Any]:
    """Computes x + m norm(attention(norm(x))), then x + m norm(ffn(norm(x))).

    Norms without a scale in `block` are omitted. m is `multipliers.residual`, usually 1.

    Args:
      block: weights of one layer.
      attend: (y_BTD, attention weights, norm) -> (y_BTD, cache).
      experts: (y_BTD, weights of a MoE layer) -> (y_BTD, chosen experts, router statistics).

    Returns:
      Hidden states, cache, chosen experts [B, T, k] and router statistics. In a dense layer, chosen
      experts and router statistics are None.
    """

    def norm(name: str, x_BTD: jax.Array) -> jax.Array:
      scale = getattr(block, name, None)
      return x_BTD if scale is None else self.norm(x_BTD, scale, config.rms_norm_eps)

    y_BTD, cache = attend(norm("attention_norm", x_BTD), block.attention, self.norm)
    x_BTD = layers.add(x_BTD, norm("attention_post_norm", y_BTD), config)
    y_BTD, ffn, experts_BTk, stats = norm("ffn_norm", x_BTD), block.ffn, None, None
    if isinstance(ffn, Dense):
      z_BTD = layers.feed_forward(y_BTD, ffn, self.dense_activation)
    else:
      z_BTD, experts_BTk, stats = experts(y_BTD, ffn)
      if getattr(ffn, "shared", None):
        z_BTD = z_BTD + layers.shared_experts(y_BTD, ffn)
    x_BTD = layers.add(x_BTD, norm("ffn_post_norm", z_BTD), config)
    return x_BTD, cache, experts_BTk, stats


def keys(alike: str, **renamed: str) -> dict[str, str]:
  """Returns a dict: field of ModelConfig -> key of config.json.

  alike: names of fields that are also their keys, separated by spaces.
  renamed: field=key for all other fields.
  """
  return dict(zip(alike.split(), alike.split())) | renamed


FIELDS = keys(
  "vocab_size hidden_size head_dim intermediate_size rope_theta rms_norm_eps tie_word_embeddings "
  "max_position_embeddings",
  num_layers="num_hidden_layers",
  num_heads="num_attention_heads",
  num_kv_heads="num_key_value_heads",
)
MOE_FIELDS = keys(
  "num_experts moe_intermediate_size norm_topk_prob", experts_per_token="num_experts_per_tok"
)
# Keys of models with experts in every layer: intermediate_size is the width of an expert.
LOCAL_EXPERTS = dict(
  num_experts="num_local_experts",
  experts_per_token="num_experts_per_tok",
  moe_intermediate_size="intermediate_size",
)
NO_BIAS = dict(attention_bias=False)

LAYER = "model.layers.{l}."  # Start of the names of a layer's tensors.


def shared_names(module: str) -> dict[str, tuple[str, str]]:
  """Returns the names of shared experts, in a module of `mlp`."""
  start = f"{LAYER}mlp.{module}."
  return {
    "Moe.shared.gate": (start + "gate_proj.weight", "F D"),
    "Moe.shared.up": (start + "up_proj.weight", "F D"),
    "Moe.shared.down": (start + "down_proj.weight", "D F"),
  }


# Parameter -> (name of its tensor in the files, axes of the tensor). The letters are those of
# `models/weights.py`. NH is one axis with the dimensions of all heads. A letter in braces is a
# number in the name: {E} means one tensor per expert. A "+" means that several parameters share the
# tensor (hf/leaves.py). The axis +F has all of gate, then all of up. On F+, gate and up alternate.
NAMES = {
  "embed": ("model.embed_tokens.weight", "V D"),
  "attention_norm": (LAYER + "input_layernorm.weight", "D"),
  "attention.q": (LAYER + "self_attn.q_proj.weight", "NH D"),
  "attention.k": (LAYER + "self_attn.k_proj.weight", "KH D"),
  "attention.v": (LAYER + "self_attn.v_proj.weight", "KH D"),
  "attention.o": (LAYER + "self_attn.o_proj.weight", "D NH"),
  "attention.q_norm": (LAYER + "self_attn.q_norm.weight", "H"),
  "attention.k_norm": (LAYER + "self_attn.k_norm.weight", "H"),
  "attention.q_bias": (LAYER + "self_attn.q_proj.bias", "NH"),
  "attention.k_bias": (LAYER + "self_attn.k_proj.bias", "KH"),
  "attention.v_bias": (LAYER + "self_attn.v_proj.bias", "KH"),
  "ffn_norm": (LAYER + "post_attention_layernorm.weight", "D"),
  "Dense.gate": (LAYER + "mlp.gate_proj.weight", "F D"),
  "Dense.up": (LAYER + "mlp.up_proj.weight", "F D"),
  "Dense.down": (LAYER + "mlp.down_proj.weight", "D F"),
  "Moe.router": (LAYER + "mlp.gate.weight", "E D"),
  "Moe.choice_bias": (LAYER + "mlp.gate.e_score_correction_bias", "E"),
  "Moe.gate": (LAYER + "mlp.experts.{E}.gate_proj.weight", "F D"),
  "Moe.up": (LAYER + "mlp.experts.{E}.up_proj.weight", "F D"),
  "Moe.down": (LAYER + "mlp.experts.{E}.down_proj.weight", "D F"),
  "final_norm": ("model.norm.weight", "D"),
  "head": ("lm_head.weight", "V D"),
}
WIDE_NORMS = {  # Scales of q/k norms with `Family.norm_heads`.
  "attention.q_norm": (LAYER + "self_attn.q_norm.weight", "NH"),
  "attention.k_norm": (LAYER + "self_attn.k_norm.weight", "KH"),
}
POST_NORMS = {  # Norms after attention and feed-forward layer.
  "attention_post_norm": (LAYER + "post_attention_layernorm.weight", "D"),
  "ffn_post_norm": (LAYER + "post_feedforward_layernorm.weight", "D"),
}
