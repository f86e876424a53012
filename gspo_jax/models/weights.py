"""Parameters of a model: one table declares each weight once, by the letters of its axes.

A table is a `Params` with a `Weight` in place of each array. The arrays' shapes, initial values,
shardings and compute dtypes derive from the table. `structs` defines the letters; O is an axis of
size 1.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models.int8 import Int8
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import Rules


@flax.struct.dataclass
class Params:
  """Parameters of a model, or any tree of their structure.

  A block has the weights of one `Stack`: layers of one kind, stacked on the axis l. The model's
  family defines the class of the blocks.
  """

  embed: Any  # V D
  blocks: tuple[Any, ...]
  final_norm: Any  # D
  head: Any  # D V. None means the transposed embedding.

  @property
  def depths(self) -> tuple[int, ...]:
    """Returns the number of layers of each block."""
    return tuple(jax.tree.leaves(block)[0].shape[0] for block in self.blocks)


@flax.struct.dataclass
class Attention:
  """Weights of grouped-query attention; norms and biases are None if their option is off."""

  q: Any  # l D N H
  k: Any  # l D K H
  v: Any  # l D K H
  o: Any  # l N H D
  q_norm: Any  # l H if each head is normalised, l N H if all together; option `qk_norm`
  k_norm: Any  # l H if each head is normalised, l K H if all together; option `qk_norm`
  q_bias: Any  # l N H; option `attention_bias`
  k_bias: Any  # l K H; option `attention_bias`
  v_bias: Any  # l K H; option `attention_bias`


@flax.struct.dataclass
class ExtendedAttention(Attention):
  """Attention with an output bias or sinks; either may be None."""

  o_bias: Any  # l D
  sink: Any  # l N, a further logit in each head's softmax; option `scores.sinks`


@flax.struct.dataclass
class GatedAttention(Attention):
  """Attention with a sigmoid gate on its outputs (Qwen3-Next)."""

  q_gate: Any  # l D N H


@flax.struct.dataclass
class GatedDelta:
  """Weights of a layer of linear attention (models/gated_delta.py).

  K key heads have R value heads each. Queries and keys have width H, values width J.
  """

  q: Any  # l D K H
  k: Any  # l D K H
  v: Any  # l D K R J
  z: Any  # l D K R J, gate of the output
  b: Any  # l D K R, from which the write strength is computed
  a: Any  # l D K R, from which the decay is computed
  q_conv: Any  # l K H C, a causal convolution of each channel over C positions
  k_conv: Any  # l K H C
  v_conv: Any  # l K R J C
  log_decay: Any  # l K R, logarithm of a decay rate per head
  decay_bias: Any  # l K R
  norm: Any  # l J, scale of the norm of each value head
  o: Any  # l K R J D


@flax.struct.dataclass
class Dense:
  """Weights of a gated feed-forward layer."""

  gate: Any  # l D F
  up: Any  # l D F
  down: Any  # l F D


@flax.struct.dataclass
class Moe:
  """Weights of a router and its gated experts."""

  router: Any  # l D E
  gate: Any  # l E D F
  up: Any  # l E D F
  down: Any  # l E F D


@flax.struct.dataclass
class BiasedMoe(Moe):
  """A mixture of experts with biases on all products (GPT-OSS)."""

  router_bias: Any  # l E
  gate_bias: Any  # l E F
  up_bias: Any  # l E F
  down_bias: Any  # l E D


@flax.struct.dataclass
class ExtendedMoe(Moe):
  """A mixture of experts with shared experts, a bias on the choice, or both.

  A missing part is None.
  """

  choice_bias: Any  # l E; option `router.choice_bias`
  shared: Dense | None  # Shared experts, for all tokens; option `router.shared_width`
  shared_gate: Any  # l D O; option `router.shared_gate`


class InStack(NamedTuple):
  """One layer's weight, as the stack of all layers and an index.

  Call `read` directly before the product, because XLA then fuses the slice into the product. On TPU
  an earlier slice would copy the weight at every decode step.
  """

  stack: jax.Array | Int8  # [l, ...]
  layer: Any  # Index on l, an int or an int32 array.

  def read(self, dtype: Any) -> jax.Array | Int8:
    """Slices the layer's weight, cast to `dtype` unless it is `Int8`."""
    w = jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), self.stack
    )
    return w if isinstance(w, Int8) else w.astype(dtype)


class Weight:
  """Declaration of one weight.

  letters: axes, one letter each, such as "lDNH".
  sizes: dict, letter -> size of its axis.
  fan_in: letters of the input axes. "" for a weight initialised to `constant`.
  constant: initial value if `fan_in` is "", such as 1 for a norm's scale, or an array that is
    broadcast.
  wide: whether computations use the weight in float32, whatever the compute dtype; for small,
    sensitive weights.
  whole: whether a mesh may split only the axis D.
  dtype: dtype in computations. None means float32 if `wide`, else the compute dtype.
  """

  def __init__(
    self,
    letters: str,
    sizes: dict[str, int],
    fan_in: str = "",
    constant: float | np.ndarray = 0.0,
    wide: bool = False,
    whole: bool = False,
    dtype: Any = None,
  ):
    self.letters, self.constant, self.inputs = letters, constant, fan_in
    self.wide, self.whole, self.dtype = wide, whole, dtype
    self.shape = tuple(sizes[letter] for letter in letters)
    self.fan_in = math.prod(sizes[letter] for letter in fan_in) if fan_in else None

  @property
  def by_expert(self) -> bool:
    """Whether the weight has a slice for each expert; False for the router's weights."""
    return self.letters.startswith("lE") and len(self.letters) > 2

  @property
  def is_expert(self) -> bool:
    """Whether the weight is one of `ExpertWeights`."""
    return "E" in self.letters and not self.wide

  @property
  def is_matrix(self) -> bool:
    """Whether the weight is a matrix of attention, feed-forward layers or experts."""
    in_layer = self.letters.startswith("l") and not self.letters.endswith("O")  # O: one output.
    return bool(self.fan_in) and not self.wide and in_layer and self.dtype is None

  def init(self, key: jax.Array, dtype: Any) -> jax.Array:
    """Draws normal values of standard deviation fan_in^(-1/2), or fills in the constant."""
    if self.fan_in is None:
      return jnp.full(self.shape, self.constant, dtype)
    return jax.random.normal(key, self.shape, dtype) * self.fan_in**-0.5

  def read_as(self, compute_dtype: Any) -> jnp.dtype:
    """Returns the weight's dtype in computations of trainer and sampler."""
    return jnp.dtype(self.dtype or (jnp.float32 if self.wide else compute_dtype))


def weight_factory(c: ModelConfig, **further: int) -> functools.partial:
  """Returns a constructor of `Weight` with the model's sizes.

  further: sizes of further letters, such as F.
  """
  sizes = dict(V=c.vocab_size, D=c.hidden_size, H=c.head_dim, E=c.num_experts)
  sizes |= dict(N=c.num_heads, K=c.num_kv_heads, O=1) | further
  return functools.partial(Weight, sizes=sizes)


def attention_table(
  c: ModelConfig,
  w: functools.partial,
  norm: Mapping[str, Any],
  norm_heads: bool,
  o_bias: bool,
  gate: bool,
) -> Attention:
  """Declares the weights of grouped-query attention.

  w: constructor from `weight_factory`.
  norm: options of `Weight` for the scales of q/k norms.
  norm_heads: whether one norm is over all heads together, instead of one over each head.
  o_bias: whether the output projection has a bias.
  gate: whether outputs are multiplied by a gate. If so, there is no output bias and no sink.
  """

  def scale(heads: str) -> Weight | None:
    return w(f"l{heads}H" if norm_heads else "lH", **norm) if c.qk_norm else None

  kind, further = Attention, {}
  if gate:
    kind, further = GatedAttention, dict(q_gate=w("lDNH", fan_in="D"))
  elif o_bias or c.scores.sinks:
    kind = ExtendedAttention
    further = dict(o_bias=w("lD") if o_bias else None, sink=w("lN") if c.scores.sinks else None)
  return kind(
    **further,
    q=w("lDNH", fan_in="D"),
    k=w("lDKH", fan_in="D"),
    v=w("lDKH", fan_in="D"),
    o=w("lNHD", fan_in="NH"),
    q_norm=scale("N"),
    k_norm=scale("K"),
    q_bias=w("lNH") if c.attention_bias else None,
    k_bias=w("lKH") if c.attention_bias else None,
    v_bias=w("lKH") if c.attention_bias else None,
  )


def gated_delta_table(c: ModelConfig, number: int) -> GatedDelta:
  """Declares the weights of linear attention in `number` stacked layers.

  Convolutions, decays and write strengths are computed in float32. Before training, at positions
  where the projection `a` gives 0, a head's decay is exp(-r). The rates r of the heads are spread
  geometrically from 0.001 to 0.1, as in Mamba 2 (arXiv:2405.21060).
  """
  s = c.linear
  K, R = s.key_heads, s.value_heads // s.key_heads
  w = weight_factory(c, l=number, K=K, R=R, H=s.key_dim, J=s.value_dim, C=s.kernel)
  rates_KR = np.geomspace(1e-3, 1e-1, K * R).reshape(K, R)
  single = dict(dtype=jnp.float32)
  return GatedDelta(
    q=w("lDKH", fan_in="D"),
    k=w("lDKH", fan_in="D"),
    v=w("lDKRJ", fan_in="D"),
    z=w("lDKRJ", fan_in="D"),
    b=w("lDKR", fan_in="D", **single),
    a=w("lDKR", fan_in="D", **single),
    q_conv=w("lKHC", fan_in="C", **single),
    k_conv=w("lKHC", fan_in="C", **single),
    v_conv=w("lKRJC", fan_in="C", **single),
    log_decay=w("lKR", **single),
    decay_bias=w("lKR", constant=np.log(np.expm1(rates_KR)), **single),
    norm=w("lJ", constant=1.0, **single),
    o=w("lKRJD", fan_in="KRJ"),
  )


def dense_table(w: functools.partial) -> Dense:
  """Declares a gated feed-forward layer."""
  return Dense(gate=w("lDF", fan_in="D"), up=w("lDF", fan_in="D"), down=w("lFD", fan_in="F"))


def moe_table(c: ModelConfig, w: functools.partial, number: int, biases: bool) -> Moe:
  """Declares a router, gated experts, and optional parts enabled by `model.router`.

  w: constructor from `weight_factory`.
  number: number of layers in the stack.
  biases: whether the products of router and experts have biases.
  """
  # The router is wide, since rounding would change the chosen experts. It is whole, since each
  # device routes its own tokens over all experts.
  whole = dict(wide=True, whole=True)
  parts = dict(
    router=w("lDE", fan_in="D", **whole),
    gate=w("lEDF", fan_in="D"),
    up=w("lEDF", fan_in="D"),
    down=w("lEFD", fan_in="F"),
  )
  if biases:
    # The bias `down_bias` is not split by expert: it is added outside the experts' products.
    matrices = dict(gate_bias=w("lEF"), up_bias=w("lEF"), down_bias=w("lED", **whole))
    return BiasedMoe(**parts, router_bias=w("lE", **whole), **matrices)
  has_bias, width = c.router.choice_bias != "none", c.router.shared_width
  if not has_bias and not width:
    return Moe(**parts)
  return ExtendedMoe(
    **parts,
    choice_bias=w("lE", dtype=jnp.float32, **whole) if has_bias else None,
    shared=dense_table(weight_factory(c, l=number, F=width)) if width else None,
    shared_gate=w("lDO", fan_in="D") if width and c.router.shared_gate else None,
  )


def in_eight_bits(table: Params) -> Params:
  """Declares the layers' matrices as `Int8`, and leaves other weights unchanged."""

  def narrow(w: Weight) -> Weight | Int8:
    if not w.is_matrix:
      return w
    sizes = dict(zip(w.letters, w.shape))
    outputs = "".join(letter for letter in w.letters if letter not in w.inputs)
    return Int8(
      values=Weight(w.letters, sizes, w.inputs, dtype=jnp.int8),
      scale=Weight(outputs, sizes, wide=True),
      inputs=tuple(w.letters.index(letter) - len(w.letters) for letter in w.inputs),
    )

  return table.replace(blocks=jax.tree.map(narrow, table.blocks))


def shardings(table: Params, rules: Rules, mesh: jax.sharding.Mesh) -> Params:
  """Returns the NamedShardings of all parameters.

  Raises ValueError, naming the weight, if a mesh axis does not divide a dimension.
  """

  def layout(path, w: Weight) -> NamedSharding:
    used = {letter: rules[letter] for letter in rules if letter == "D" or not w.whole}
    pspec = sharding.spec(w.letters, used)
    for letter, size, axes in zip(w.letters, w.shape, pspec):
      if size % (parts := sharding.parts(axes, mesh.shape)):
        named = " x ".join(f"mesh.{axis}" for axis in sharding.each(axes))
        raise ValueError(
          f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} "
          f"[{' '.join(w.letters)}] = {w.shape}: {letter}={size} is not divisible by "
          f"{named}={parts}: make this number a divisor of {size}"
        )
    return NamedSharding(mesh, pspec)

  return jax.tree.map_with_path(layout, table)


def dtypes(table: Params, compute_dtype: Any) -> Params:
  """Returns the dtype of each parameter in computations."""
  return jax.tree.map(lambda w: w.read_as(compute_dtype), table)


def init(table: Params, key: jax.Array, dtype: Any) -> Params:
  """Initialises parameters; each weight has a separate random key."""
  leaves, treedef = jax.tree.flatten(table)
  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(treedef, [w.init(k, dtype) for w, k in zip(leaves, keys)])
