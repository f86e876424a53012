"""Declaration of a family of models, and the parts that most families share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax

from gspo_jax import sharding
from gspo_jax.models import layers, weights
from gspo_jax.models.experts.blocks import Activation, swiglu
from gspo_jax.models.layers import Norm, rms_norm
from gspo_jax.models.weights import Attention, Dense, Moe
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import BATCH, P


@dataclasses.dataclass(frozen=True)
class Architecture:
  """An architecture of transformers: keys of its config.json, and what its name implies.

  read, write: keys of config.json without an equal field -> fields of ModelConfig, and back.
  """

  name: str
  fields: Mapping[str, str]  # Field of ModelConfig, dotted in groups -> key of config.json.
  implied: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Fields without a key.
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Keys with one value.
  # Defaults of optional keys, from transformers' configuration class.
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Every n-th layer is global, without layer_types; 0: all are local. None: no windows.
  pattern: int | None = None
  ropes_by_kind: bool = False  # Local layers have separate rope_parameters.
  quantised: str = ""  # Quant_method of published files that are read.
  outer: str = ""  # Model_type of another model with this one in its text_config.
  read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
  write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


@flax.struct.dataclass
class ExtendedMoe(Moe):
  """A mixture of experts with further parts, each None where it is absent."""

  choice_bias: Any  # l E, with `router.choice_bias`
  shared: Dense | None  # Of every token, with `router.shared_width`
  shared_gate: Any  # l D 1


def moe_table(c: ModelConfig, w: functools.partial, number: int) -> Moe:
  """Declares a router, gated experts and the further parts of `model.router`."""
  moe, width = weights.moe_table(w), c.router.shared_width
  if c.router.choice_bias == "none" and not width:
    return moe
  parts = {field.name: getattr(moe, field.name) for field in dataclasses.fields(moe)}
  return ExtendedMoe(
    **parts,
    choice_bias=w("lE", wide=True, whole=True) if c.router.choice_bias != "none" else None,
    shared=weights.dense_table(weights.weight_factory(c, l=number, F=width)) if width else None,
    shared_gate=w("lDO", fan_in="D") if width and c.router.shared_gate else None,
  )


@flax.struct.dataclass
class Block:
  """A layer with norms before its parts."""

  attention_norm: Any  # l D
  attention: Attention
  ffn_norm: Any  # l D
  ffn: Dense | Moe


def pre_norm_table(
  c: ModelConfig,
  is_moe: bool,
  number: int,
  *,
  norm_heads: bool = False,
) -> Block:
  """Declares the weights of `number` layers of one kind, stacked.

  norm_heads: whether q/k norms are over all heads together.
  """
  width = c.moe_intermediate_size if is_moe else c.intermediate_size
  w = weights.weight_factory(c, l=number, F=width)
  return Block(
    attention_norm=w("lD", constant=1.0),
    attention=weights.attention_table(c, w, norm=1.0, norm_heads=norm_heads),
    ffn_norm=w("lD", constant=1.0),
    ffn=moe_table(c, w, number) if is_moe else weights.dense_table(w),
  )


def pre_norm(
  x_BTD: jax.Array, block: Any, config: ModelConfig, attend: Callable, experts: Callable
):
  """x + attention(norm(x)), then x + ffn(norm(x)); see `Family`."""
  y_BTD = rms_norm(x_BTD, block.attention_norm, config.rms_norm_eps)
  y_BTD, cache = attend(y_BTD, block.attention, rms_norm)
  x_BTD = layers.add(x_BTD, y_BTD, config)
  y_BTD = rms_norm(x_BTD, block.ffn_norm, config.rms_norm_eps)
  y_BTD, experts_BTk, stats = feed_forward(y_BTD, block.ffn, experts)
  return layers.add(x_BTD, y_BTD, config), cache, experts_BTk, stats


def feed_forward(y_BTD: jax.Array, ffn: Dense | Moe, experts: Callable):
  """SwiGLU of a dense layer or of experts; chosen experts, router statistics."""
  if isinstance(ffn, Dense):
    return layers.feed_forward(y_BTD, ffn, jax.nn.silu), None, None
  z_BTD, experts_BTk, stats = experts(y_BTD, ffn)
  if isinstance(ffn, ExtendedMoe) and ffn.shared:
    z_BTD = z_BTD + shared_experts(y_BTD, ffn)
  return z_BTD, experts_BTk, stats


def shared_experts(y_BTD: jax.Array, ffn: ExtendedMoe) -> jax.Array:
  """SwiGLU for every token, times a sigmoid gate if there is one."""
  z_BTD = layers.feed_forward(y_BTD, ffn.shared, jax.nn.silu)
  if ffn.shared_gate is None:
    return z_BTD
  gate_BT1 = sharding.project("BTD,DO->BTO", y_BTD, ffn.shared_gate, P(BATCH))
  return jax.nn.sigmoid(gate_BT1) * z_BTD


@dataclasses.dataclass(frozen=True)
class Family:
  """Functions and tables in which families differ; `transformer` has the rest.

  architectures: by their model_type in config.json.
  names: entries of NAMES under which its files differ.
  block_table: (config, whether the layers are MoE layers, their number) -> a dataclass of `Weight`
    for a run of layers, stacked on l.
  layer: (x_BTD, weights of one layer, config, attend, experts) -> (x_BTD, cache, experts chosen or
    None, router statistics or None). `attend(y_BTD, attention weights, norm)` and `experts(y_BTD,
    weights of a MoE layer)` are bound to the pass: positions, cache, precision.
  norm: norm of queries and keys, of each layer and of the last hidden states.
  final_norm: (weight factory) -> the weight of the last norm.
  embed_scale: (config) -> factor on rows of the embedding.
  activation: of experts.
  """

  architectures: Mapping[str, Architecture]
  names: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
  block_table: Callable[[ModelConfig, bool, int], Any] = pre_norm_table
  layer: Callable[..., tuple[jax.Array, Any, jax.Array | None, Any]] = pre_norm
  norm: Norm = rms_norm
  final_norm: Callable[[Any], weights.Weight] = lambda w: w("D", constant=1.0)
  embed_scale: Callable[[ModelConfig], float] = lambda config: config.multipliers.embedding
  activation: Activation = swiglu


def keys(alike: str, **renamed: str) -> dict[str, str]:
  """Maps ModelConfig fields to keys of config.json; `alike` names are equal."""
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
# Keys of Mixtral's kind, without a width of dense layers.
LOCAL_EXPERTS = dict(
  num_experts="num_local_experts",
  experts_per_token="num_experts_per_tok",
  moe_intermediate_size="intermediate_size",
)
SILU = dict(hidden_act="silu")
NO_BIAS = dict(attention_bias=False)

LAYER = "model.layers.{l}."


def shared_names(part: str) -> dict[str, tuple[str, str]]:
  """Returns names of shared experts, in the part `mlp.{part}` of a layer."""
  start = f"{LAYER}mlp.{part}."
  return {
    "Moe.shared.gate": (start + "gate_proj.weight", "F D"),
    "Moe.shared.up": (start + "up_proj.weight", "F D"),
    "Moe.shared.down": (start + "down_proj.weight", "D F"),
  }


def require_dense(c: ModelConfig, is_moe: bool) -> None:
  """Raises ValueError for experts."""
  if is_moe:
    raise ValueError(f"model.num_experts={c.num_experts}: model.family={c.family!r} has no experts")


# Parameter -> (name in the files, axes there). Letters of one axis are merged, such as N and H in
# q_proj; a letter in braces is part of the name: one tensor per layer and expert.
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
