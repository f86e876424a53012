"""Parameters of a model: one table declares each weight once, by letters.

Shape, initialiser, sharding and compute dtype derive from it.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models.int8 import Int8
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import Rules


@flax.struct.dataclass
class Params:
  embed: Any  # V D
  blocks: tuple[Any, ...]  # One of the family's per run of equal layers, stacked on l.
  final_norm: Any  # D
  head: Any  # D V. None means the transposed embedding.

  @property
  def depths(self) -> tuple[int, ...]:
    """Returns the number of layers of each block."""
    return tuple(jax.tree.leaves(block)[0].shape[0] for block in self.blocks)


@flax.struct.dataclass
class Attention:
  q: Any  # l D N H
  k: Any  # l D K H
  v: Any  # l D K H
  o: Any  # l N H D
  q_norm: Any  # l H, or l N H over all heads, with qk_norm
  k_norm: Any  # l H, or l K H over all heads, with qk_norm
  q_bias: Any  # l N H, with attention_bias
  k_bias: Any  # l K H, with attention_bias
  v_bias: Any  # l K H, with attention_bias


@flax.struct.dataclass
class ExtendedAttention(Attention):
  """Attention with further parts, each None where it is absent."""

  o_bias: Any  # l D
  sink: Any  # l N, with `scores.sinks`


@flax.struct.dataclass
class Dense:
  gate: Any  # l D F
  up: Any  # l D F
  down: Any  # l F D


@flax.struct.dataclass
class Moe:
  router: Any  # l D E
  gate: Any  # l E D F
  up: Any  # l E D F
  down: Any  # l E F D


class InStack(NamedTuple):
  """A layer's weight, to be read in place from the stack of all layers.

  On TPU a slice outside a product is a copy at every step.
  """

  stack: jax.Array | Int8  # [l, ...]
  layer: Any

  def read(self, dtype: Any) -> jax.Array | Int8:
    """Returns the layer's weight; an array in `dtype`."""
    w = jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), self.stack
    )
    return w if isinstance(w, Int8) else w.astype(dtype)


class Weight:
  """One line of the table: letters, sizes, inputs, and dtype and sharding options.

  fan_in: letters of the inputs.
  wide: whether passes read it in float32 with any compute dtype (small, sensitive weights).
  whole: whether it is whole on every device except over D.
  dtype: dtype in passes. None depends on `wide`.
  """

  def __init__(
    self,
    letters: str,
    sizes: dict[str, int],
    fan_in: str = "",
    constant: float = 0.0,
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
    """Whether a part of it belongs to each expert, outside the router."""
    return self.letters.startswith("lE") and len(self.letters) > 2

  @property
  def is_expert(self) -> bool:
    return "E" in self.letters and not self.wide

  @property
  def is_matrix(self) -> bool:
    """Whether it is a matrix of attention, feed-forward or experts."""
    in_layer = self.letters.startswith("l") and not self.letters.endswith("O")  # Not of one output.
    return bool(self.fan_in) and not self.wide and in_layer

  def init(self, key: jax.Array, dtype: Any) -> jax.Array:
    """Draws from a normal of standard deviation fan_in^(-1/2), or fills a constant."""
    if self.fan_in is None:
      return jnp.full(self.shape, self.constant, dtype)
    return jax.random.normal(key, self.shape, dtype) * self.fan_in**-0.5

  def read_as(self, compute_dtype: Any) -> jnp.dtype:
    """Returns the weight's dtype in passes of trainer and sampler."""
    return jnp.dtype(self.dtype or (jnp.float32 if self.wide else compute_dtype))


def weight_factory(c: ModelConfig, **further: int) -> functools.partial:
  """Returns a constructor of `Weight` with the model's sizes and `further` ones."""
  sizes = dict(V=c.vocab_size, D=c.hidden_size, H=c.head_dim, E=c.num_experts)
  sizes |= dict(N=c.num_heads, K=c.num_kv_heads, O=1) | further
  return functools.partial(Weight, sizes=sizes)


def attention_table(
  c: ModelConfig,
  w: functools.partial,
  norm: float,
  wide_norm: bool = False,
  norm_heads: bool = False,
  o_bias: bool = False,
) -> Attention:
  """Declares projections of grouped-query attention; norm scales start at `norm`.

  wide_norm: whether passes read norm scales in float32.
  norm_heads: whether q/k norms are over all heads together.
  o_bias: whether the output projection has a bias.
  """

  def scale(heads: str) -> Weight | None:
    letters = f"l{heads}H" if norm_heads else "lH"
    return w(letters, constant=norm, wide=wide_norm) if c.qk_norm else None

  extended = o_bias or c.scores.sinks
  further = dict(o_bias=w("lD") if o_bias else None, sink=w("lN") if c.scores.sinks else None)
  return (ExtendedAttention if extended else Attention)(
    **further if extended else {},
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


def dense_table(w: functools.partial) -> Dense:
  """Declares a gated feed-forward layer."""
  return Dense(gate=w("lDF", fan_in="D"), up=w("lDF", fan_in="D"), down=w("lFD", fan_in="F"))


def moe_table(w: functools.partial) -> Moe:
  """Declares a router and gated experts."""
  return Moe(
    # Rounding would change the chosen experts; every device routes its own tokens.
    router=w("lDE", fan_in="D", wide=True, whole=True),
    gate=w("lEDF", fan_in="D"),
    up=w("lEDF", fan_in="D"),
    down=w("lEFD", fan_in="F"),
  )


def in_eight_bits(table: Params) -> Params:
  """Declares the layers' matrices as `Int8`."""

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
  """Returns NamedShardings of all parameters; ValueError names an indivisible weight."""

  def layout(path, w: Weight) -> NamedSharding:
    used = {letter: rules[letter] for letter in rules if letter == "D" or not w.whole}
    pspec = sharding.spec(w.letters, used)
    for letter, size, axes in zip(w.letters, w.shape, pspec):
      if size % (parts := sharding.parts(axes, mesh.shape)):
        named = " x ".join(f"mesh.{axis}" for axis in sharding.each(axes))
        raise ValueError(
          f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} "
          f"[{' '.join(w.letters)}] = {w.shape}: {letter}={size} is not divisible by "
          f"{named}={parts}"
        )
    return NamedSharding(mesh, pspec)

  return jax.tree.map_with_path(layout, table)


def dtypes(table: Params, compute_dtype: Any) -> Params:
  """Returns each parameter's dtype in `forward`, head and sampler."""
  return jax.tree.map(lambda w: w.read_as(compute_dtype), table)


def init(table: Params, key: jax.Array, dtype: Any) -> Params:
  """Initialises parameters, each weight from its own key."""
  leaves, treedef = jax.tree.flatten(table)
  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(treedef, [w.init(k, dtype) for w, k in zip(leaves, keys)])
