"""Hyperparameters of a model, its precision and formulations."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from gspo_jax.settings import ranges
from gspo_jax.settings.model_groups import (
  LinearConfig,
  MultipliersConfig,
  RopeConfig,
  RouterConfig,
  ScoresConfig,
)
from gspo_jax.settings.ranges import (
  INT32,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveInt,
  Range,
  key,
  required,
)

Width = Annotated[int, Range(1, 65_536)]
Theta = Annotated[float, Range(1, 1e12)]


class Kind(NamedTuple):
  """Kind of a layer: its properties that differ between layers."""

  moe: bool  # Experts instead of a dense feed-forward layer.
  local: bool  # Attention with a sliding window.
  rotary: bool  # Rotary positions.
  linear: bool  # Linear attention with a recurrent state, instead of a softmax over positions.


class Stack(NamedTuple):
  """Layers of one kind with stacked weights."""

  kind: Kind
  layers: tuple[int, ...]  # Indices of the layers.


class Scan(NamedTuple):
  """A loop over consecutive layers.

  Each step applies the next layers of each stack. For example, a scan of ten steps has a stack of
  thirty linear layers and a stack of ten full ones. Each step applies three linear layers, and then
  a full one.
  """

  steps: int
  stacks: list[Stack]


@ranges.section("model", kw_only=True)
class ModelConfig:
  """Hyperparameters of a Transformer. Most of them have their names in Hugging Face's config.json.
  In a configuration file, `common.model(common.size(NAME))` returns this section for a named size.

  The default model of a run is `tiny_moe` of settings/sizes.py.
  """

  family: Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "gemma",
    "smollm3",
    "granite",
    "olmo",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "qwen3_5",
    "qwen3_next",
  ] = required("name of a file of gspo_jax/models/families")
  vocab_size: Annotated[int, Range(1, 4_194_304)] = required(
    "number of token ids. The tokenizer `bytes` has 259 ids, and 264 is the next multiple of 8."
  )
  hidden_size: Width = required("D, width of the model")
  num_layers: Annotated[int, Range(1, 1024)] = required("l, number of layers")
  num_heads: Width = required("N, number of query heads")
  num_kv_heads: Width = required("K, number of heads of keys and of values; divides N")
  head_dim: Annotated[int, Range(2, 65_536)] = required(
    "H, width of a head; even, since RoPE rotates pairs"
  )
  intermediate_size: PositiveInt = required("F, width of a dense feed-forward layer")
  num_experts: Annotated[int, Range(0, 65_536)] = key(
    0, "E, number of experts of a layer; 0: all layers are dense"
  )
  experts_per_token: NonNegativeInt = key(0, "k, number of experts chosen per token")
  moe_intermediate_size: NonNegativeInt = key(0, "F, width of an expert")
  norm_topk_prob: bool = key(
    True, "True: normalise the gate weights of a token's chosen experts to the sum 1"
  )
  decoder_sparse_step: PositiveInt = key(1, "n, if only every n-th layer has experts")
  mlp_only_layers: tuple[NonNegativeInt, ...] = key(
    (), "indices, from 0, of dense layers that decoder_sparse_step would give experts"
  )
  rope_theta: Theta = required("base of the rotary positions' wavelengths")
  rms_norm_eps: ranges.Fraction = required("ε of RMSNorm, added to the mean square")
  qk_norm: bool = required("True: RMSNorm of q and k, over each head (Qwen3) or all heads (OLMo)")
  attention_bias: bool = key(False, "True: biases of projections q, k, v (Qwen2), and o (GPT-OSS)")
  tie_word_embeddings: bool = key(False, "True: the embedding is also the output head")
  max_position_embeddings: Annotated[int, Range(1, INT32)] = required(
    "largest number of tokens of a prompt and its response together"
  )
  query_pre_attn_scalar: NonNegativeInt = key(0, "d in the scores q kᵀ / √d; 0: head_dim")
  attn_logit_softcapping: NonNegativeFloat = key(
    0.0, "c of the soft cap c · tanh(x / c) on attention scores x; 0: no cap"
  )
  final_logit_softcapping: NonNegativeFloat = key(
    0.0, "c of the soft cap c · tanh(x / c) on logits x; 0: no cap"
  )
  sliding_window: NonNegativeInt = key(
    0, "number of positions to which a local layer attends; 0: all positions"
  )
  sliding_window_pattern: PositiveInt = key(
    1, "n, if every n-th layer attends to all positions, and all other layers are local"
  )
  local_rope_theta: Theta = key(1e4, "rope_theta of local layers")
  rope: RopeConfig = RopeConfig()
  router: RouterConfig = RouterConfig()
  scores: ScoresConfig = ScoresConfig()
  multipliers: MultipliersConfig = MultipliersConfig()
  linear: LinearConfig = LinearConfig()

  def __post_init__(self):
    experts, dense = self.num_experts, max(self.mlp_only_layers, default=0)
    by_pattern = not self.scores.local_layers
    wrong = [
      (self.num_heads % self.num_kv_heads, "{num_heads} is not a multiple of {num_kv_heads}"),
      (self.head_dim % 2, "{head_dim} must be even: RoPE rotates pairs"),
      (
        self.linear.pattern > self.num_layers,
        "{linear.pattern}, {num_layers}: no layer has full attention",
      ),
      (
        self.linear.pattern > 1 and self.sliding_window,
        "{sliding_window}, {linear.pattern}: linear attention has no window; set the window to 0, "
        "or the pattern to 1",
      ),
      (dense >= self.num_layers, f"model.mlp_only_layers={dense} must be below {{num_layers}}"),
      (
        by_pattern and (self.sliding_window > 0) != (self.sliding_window_pattern > 1),
        "{sliding_window}, {sliding_window_pattern}: a window needs a pattern of 2 or more (every "
        "n-th layer is global), and a window of 0 needs a pattern of 1",
      ),
    ]
    if experts:
      wrong += [
        (
          not (0 < self.experts_per_token <= experts),
          "{experts_per_token} must be between 1 and {num_experts}",
        ),
        (
          not self.moe_intermediate_size,
          "{moe_intermediate_size}, {num_experts}: set the experts' width",
        ),
        (
          experts % (groups := self.router.groups) or groups > max(1, experts // 2),
          "{num_experts}, {router.groups}: groups must have equal sizes of at least two experts",
        ),
        (
          not self.num_moe_layers,
          "{num_experts}: no layer has experts with {num_layers}, {decoder_sparse_step} and "
          "{mlp_only_layers}",
        ),
      ]
    ranges.refuse(self, "model", wrong)

  @property
  def num_moe_layers(self) -> int:
    """Number of layers with experts."""
    return sum(map(self.is_moe, range(self.num_layers)))

  def is_moe(self, layer: int) -> bool:
    """Whether a layer has experts, by Hugging Face's rule."""
    sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
    return sparse and layer not in self.mlp_only_layers

  def is_local(self, layer: int) -> bool:
    """Whether a layer has the sliding window."""
    if self.scores.local_layers:
      return self.sliding_window > 0 and layer in self.scores.local_layers
    return self.sliding_window > 0 and (layer + 1) % self.sliding_window_pattern != 0

  def is_linear(self, layer: int) -> bool:
    """Whether a layer has linear attention."""
    return (layer + 1) % self.linear.pattern != 0

  def kind(self, layer: int) -> Kind:
    """Returns the kind of a layer."""
    moe, linear = self.is_moe(layer), self.is_linear(layer)
    if linear:
      return Kind(moe, local=False, rotary=False, linear=True)
    rotary = layer not in self.rope.layers_without
    return Kind(moe, self.is_local(layer), rotary, linear=False)

  def scans(self, depths: Sequence[int] | None = None) -> list[Scan]:
    """Splits the layers into scans.

    Each scan covers as many layers as possible. The kinds of its layers repeat at each step.

    depths: number of layers of each block of the parameters. If each block has one layer, each
      layer is a scan. None means one block for each stack, as in `transformer.table`.
    """
    kinds, scans, first = [self.kind(layer) for layer in range(self.num_layers)], [], 0
    while first < len(kinds):
      period, steps = (1, 1) if depths and len(depths) == len(kinds) else _period(kinds[first:])
      stacks, start = [], first
      for kind, run in itertools.groupby(kinds[first : first + period]):
        end = start + len(list(run))
        layers = (step * period + i for step in range(steps) for i in range(start, end))
        stacks.append(Stack(kind, tuple(layers)))
        start = end
      scans.append(Scan(steps, stacks))
      first += period * steps
    return scans

  def stacks(self, depths: Sequence[int] | None = None) -> list[Stack]:
    """Returns the stacks of all scans.

    Each stack has one block of the parameters.
    """
    return [stack for scan in self.scans(depths) for stack in scan.stacks]


def _period(kinds: Sequence[Kind]) -> tuple[int, int]:
  """Returns length and number of equal periods at the start of `kinds`.

  These periods cover as many layers as possible. If no period is repeated, the result is (1, 1).
  """

  def repeats(period: int) -> int:
    ends = range(period, len(kinds) + 1, period)
    equal = (kinds[end - period : end] == kinds[:period] for end in ends)
    return sum(itertools.takewhile(bool, equal))

  repeated = [(p, repeats(p)) for p in range(1, len(kinds) // 2 + 1)]
  return max([(1, 1), *((p, n) for p, n in repeated if n > 1)], key=lambda x: x[0] * x[1])


def from_json(values: Mapping[str, Any]) -> ModelConfig:
  """Builds a model's configuration from section `model` of a run's config.json.

  Keys absent from the section have their defaults.
  """
  kinds = ranges.kinds(ModelConfig)

  def convert(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and name in kinds:
      return kinds[name](**{key: convert("", entry) for key, entry in value.items()})
    return tuple(value) if isinstance(value, list) else value

  return ModelConfig(**{name: convert(name, value) for name, value in values.items()})


@ranges.section("compute")
class ComputeConfig:
  """Precision and implementations of the model. They change results by round-off alone."""

  dtype: Literal["float32", "bfloat16"] = key(
    "float32", "dtype of activations and of inputs of matrix products"
  )
  attention: Literal["auto", "plain", "blockwise", "splash", "cudnn"] = key(
    "auto", "implementation of attention; auto: chosen by length and platform"
  )
  experts: Literal["auto", "blocks", "batched", "ragged", "megablox", "triton"] = key(
    "auto",
    "implementation of the experts' matrix products; auto: chosen by platform and mean number of "
    "tokens per expert",
  )
  expert_chunk: NonNegativeInt = key(
    0, "number of tokens per device that are sent to the experts at once; 0: all"
  )
  remat: Literal["none", "full", "attention", "dots", "both", "auto"] = key(
    "none",
    "activations of a layer that are kept for the backward pass, which recomputes the rest "
    "(models/remat.py). none: keep all | full: keep none | attention: keep outputs of attention | "
    "dots: keep products with weights outside the experts, and with experts=triton also products "
    "with gate and up | both: keep those of attention and of dots | auto: the first of `both` and "
    "`attention` that fits into the devices' memory, else `full`",
  )
  logits_chunk: NonNegativeInt = key(
    0, "number of positions whose logits are in memory at once; 0: all"
  )
  prefetch: bool = key(
    False,
    "True: gather the experts' weights of a layer during the previous layer, and keep the "
    "gathered weights of all layers for the backward pass. This has no effect on layers that "
    "alternate with dense layers.",
  )
  xla: Literal["none", "sparsecore", "fusion"] = key(
    "none",
    "options of XLA for overlapping collectives with compute, in updates and passes on TPU "
    "(learner/programs.py, docs/sharding.md)",
  )


REFERENCE = ComputeConfig()
