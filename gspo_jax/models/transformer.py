"""Qwen3 and Qwen3-MoE as pure functions over a pytree of parameters.

One table declares each weight once, by letters; its shape, initialiser and sharding derive from it.
One `forward` serves training, scoring, prefill and decoding.
"""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspo_jax import sharding
from gspo_jax.models import attention, moe
from gspo_jax.models.attention import Tree, rotate
from gspo_jax.models.cache import SPEC, Cache
from gspo_jax.models.head import embed, head_logits, token_logp  # noqa: F401 (what a model offers)
from gspo_jax.models.moe import ExpertWeights, RouterStats
from gspo_jax.models.sizes import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.sharding import BATCH, P, Rules


@flax.struct.dataclass
class Attention:
  q: Any  # l D N H
  k: Any  # l D K H
  v: Any  # l D K H
  o: Any  # l N H D
  q_norm: Any  # l H, Qwen3
  k_norm: Any  # l H, Qwen3
  q_bias: Any  # l N H, Qwen2
  k_bias: Any  # l K H, Qwen2
  v_bias: Any  # l K H, Qwen2


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


@flax.struct.dataclass
class Block:
  attention_norm: Any  # l D
  attention: Attention
  ffn_norm: Any  # l D
  ffn: Dense | Moe


@flax.struct.dataclass
class Params:
  embed: Any  # V D
  blocks: tuple[Block, ...]  # one per run of layers of one kind, stacked on l
  final_norm: Any  # D
  head: Any  # D V; None: the transposed embedding


class Weight:
  """One line of the table: letters, their sizes, and how many axes before the output are inputs."""

  def __init__(self, letters: str, sizes: dict[str, int], fan_in: str = "", constant: float = 0.0):
    self.letters, self.constant = letters, constant
    self.shape = tuple(sizes[letter] for letter in letters)
    self.fan_in = math.prod(sizes[letter] for letter in fan_in) if fan_in else None

  def init(self, key: jax.Array, dtype: Any) -> jax.Array:
    """Normal of standard deviation fan_in^(-1/2), or a constant where there is no fan-in."""
    if self.fan_in is None:
      return jnp.full(self.shape, self.constant, dtype)
    return jax.random.normal(key, self.shape, dtype) * self.fan_in**-0.5


def block_table(c: ModelConfig, is_moe: bool, layers: int) -> Block:
  """The weights of `layers` layers of one kind, stacked."""
  ffn = c.moe_intermediate_size if is_moe else c.intermediate_size
  w = functools.partial(Weight, sizes=_sizes(c) | dict(l=layers, F=ffn))
  dense = Dense(gate=w("lDF", fan_in="D"), up=w("lDF", fan_in="D"), down=w("lFD", fan_in="F"))
  sparse = Moe(
    router=w("lDE", fan_in="D"),
    gate=w("lEDF", fan_in="D"),
    up=w("lEDF", fan_in="D"),
    down=w("lEFD", fan_in="F"),
  )
  return Block(
    attention_norm=w("lD", constant=1.0),
    attention=Attention(
      q=w("lDNH", fan_in="D"),
      k=w("lDKH", fan_in="D"),
      v=w("lDKH", fan_in="D"),
      o=w("lNHD", fan_in="NH"),
      q_norm=w("lH", constant=1.0) if c.qk_norm else None,
      k_norm=w("lH", constant=1.0) if c.qk_norm else None,
      q_bias=w("lNH") if c.attention_bias else None,
      k_bias=w("lKH") if c.attention_bias else None,
      v_bias=w("lKH") if c.attention_bias else None,
    ),
    ffn_norm=w("lD", constant=1.0),
    ffn=sparse if is_moe else dense,
  )


def table(c: ModelConfig) -> Params:
  """Every weight of the model, declared once."""
  w = functools.partial(Weight, sizes=_sizes(c))
  return Params(
    embed=w("VD", fan_in="D"),
    blocks=tuple(block_table(c, *run) for run in c.runs()),
    final_norm=w("D", constant=1.0),
    head=None if c.tie_word_embeddings else w("DV", fan_in="D"),
  )


def _sizes(c: ModelConfig) -> dict[str, int]:
  return dict(
    V=c.vocab_size,
    D=c.hidden_size,
    N=c.num_heads,
    K=c.num_kv_heads,
    H=c.head_dim,
    E=c.num_experts,
  )


def specs(config: ModelConfig, rules: Rules) -> Params:
  """PartitionSpec of every parameter."""
  return jax.tree.map(lambda w: sharding.spec(w.letters, rules), table(config))


def shardings(config: ModelConfig, rules: Rules, mesh: jax.sharding.Mesh) -> Params:
  """NamedSharding of every parameter; ValueError names a weight that its axes do not divide."""

  def one(path, w: Weight) -> NamedSharding:
    pspec = sharding.spec(w.letters, rules)
    for letter, size, axis in zip(w.letters, w.shape, pspec):
      if axis and size % mesh.shape[axis]:
        raise ValueError(
          f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} "
          f"[{' '.join(w.letters)}] = {w.shape}: {letter}={size} is not divisible by "
          f"mesh.{axis}={mesh.shape[axis]}"
        )
    return NamedSharding(mesh, pspec)

  return jax.tree.map_with_path(one, table(config))


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
  """Random parameters. Jit it with `out_shardings=shardings(...)`: nothing exists unsharded."""
  leaves, treedef = jax.tree.flatten(table(config))
  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(treedef, [w.init(k, dtype) for w, k in zip(leaves, keys)])


def count(config: ModelConfig) -> tuple[int, int]:
  """Number of parameters: (all, active for one token)."""
  total = sum(math.prod(w.shape) for w in jax.tree.leaves(table(config)))
  expert = 3 * config.hidden_size * config.moe_intermediate_size
  unused = config.num_experts - config.experts_per_token
  moe_layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
  return total, total - moe_layers * unused * expert


def unstack(params: Params) -> Params:
  """The same parameters in blocks of one layer each.

  Where a loop over layers would copy the weights of each one out of the stack, as on CPU, decoding
  is faster without it.
  """
  split = lambda block, i: jax.tree.map(lambda x: x[i : i + 1], block)  # noqa: E731
  layers = [(block, i) for block in params.blocks for i in range(len(block.attention_norm))]
  return params.replace(blocks=tuple(split(block, i) for block, i in layers))


@flax.struct.dataclass
class Output:
  hidden_BTD: jax.Array  # after the final norm: what the head reads
  cache: Cache | None
  routing_lBTk: jax.Array | None  # int32, experts chosen, over the MoE layers
  stats: RouterStats | None  # stacked over the MoE layers


def forward(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  *,
  positions: jax.Array | None = None,
  segments: jax.Array | None = None,
  tree: Tree | None = None,
  cache: Cache | None = None,
  routing: jax.Array | None = None,
  compute: ComputeConfig = REFERENCE,
) -> Output:
  """Final hidden states of every position.

  Args:
    tokens_BT: int32 token ids.
    positions: int32 [B, T], default 0..T-1: the rotary position and, with a cache, the slot.
    segments: int32 [B, T], default 1: tokens attend to earlier ones of their own segment; 0 pads.
    tree: how the rows hold sequences that begin alike; needs `positions`.
    cache: keys and values of earlier positions; the new ones are written into it and returned.
    routing: int32 [l, B, T, k], experts to use instead of the router's choice; -1 leaves it.
    compute: precision and formulation.
  """
  B, T = tokens_BT.shape
  from_start = positions is None  # nothing in the cache is older than these tokens
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
  if segments is None:
    segments = jnp.ones((B, T), jnp.int32)
  positions, segments, tokens_BT = (
    sharding.reshard(x, P(BATCH)) for x in (positions, segments, tokens_BT)
  )
  dtype = jnp.dtype(compute.dtype)
  x_BTD = embed(params, tokens_BT, dtype)
  layer = functools.partial(
    _layer,
    config=config,
    compute=compute,
    positions_BT=positions,
    segments_BT=segments,
    tree=tree,
    from_start=from_start,
  )
  if compute.remat != "none" and cache is None:
    layer = jax.checkpoint(layer, policy=REMAT[compute.remat], prevent_cse=False)

  caches, routings, stats, moe_layer = [], [], [], 0
  for i, block in enumerate(params.blocks):
    layers = block.attention_norm.shape[0]
    replay = None
    if routing is not None and isinstance(block.ffn, Moe):
      replay = routing[moe_layer : moe_layer + layers]
      moe_layer += layers
    kv = None if cache is None else (cache.k_lBKHS[i], cache.v_lBKSH[i])
    # The cache of all layers is carried, and written in place: as an input and an output of the
    # scan it would exist twice.
    (x_BTD, kv), (chosen, stat) = _over_layers(
      lambda carry, inputs: layer(*carry, *inputs),
      (x_BTD, kv),
      (np.arange(layers), block, replay),
      compute.unroll,
    )
    caches.append(kv)
    if chosen is not None:
      routings.append(chosen)
      stats.append(stat)

  stack = lambda *xs: jnp.concatenate(xs)  # noqa: E731
  return Output(
    hidden_BTD=rms_norm(x_BTD, sharding.reshard(params.final_norm, P()), config.rms_norm_eps),
    cache=None if cache is None else Cache(*(tuple(side) for side in zip(*caches))),
    routing_lBTk=stack(*routings) if routings else None,
    stats=jax.tree.map(stack, *stats) if stats else None,
  )


def _over_layers(layer, carry, inputs, unroll):
  """`jax.lax.scan`; a single layer is called as it is, with its weights where they lie.

  All or nothing is unrolled: of several turns of several layers, on a mesh, JAX has no gradient.
  """
  if len(inputs[0]) > 1:
    return jax.lax.scan(layer, carry, inputs, unroll=unroll)
  carry, outputs = layer(carry, jax.tree.map(lambda x: x[0], inputs))
  return carry, jax.tree.map(lambda x: x[None], outputs)


# What the backward pass keeps of a layer besides its input; it recomputes the rest.
REMAT = dict(
  full=None,  # nothing
  attention=jax.checkpoint_policies.save_only_these_names(attention.RESIDUAL),  # what costs T²
  dots=jax.checkpoint_policies.save_from_both_policies(  # every product with a weight
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(sharding.PRODUCT),
  ),
)


def _layer(
  x_BTD,
  kv,
  layer,
  block,
  replay_BTk,
  *,
  config,
  compute,
  positions_BT,
  segments_BT,
  tree,
  from_start,
):
  """One Transformer layer: x + attention(norm(x)), then x + ffn(norm(x))."""
  # Without the barrier, XLA casts the weights of all layers ahead of the loop and keeps them.
  block = gather(jax.lax.optimization_barrier(block), config, x_BTD.dtype)
  y_BTD = rms_norm(x_BTD, block.attention_norm, config.rms_norm_eps)
  attend = _attend(compute, kv, layer, positions_BT, segments_BT, tree, from_start)
  y_BTD, kv = _attention(y_BTD, block.attention, config, positions_BT, attend)
  x_BTD = x_BTD + y_BTD
  y_BTD = rms_norm(x_BTD, block.ffn_norm, config.rms_norm_eps)
  if isinstance(block.ffn, Dense):
    return (x_BTD + _dense(y_BTD, block.ffn), kv), (None, None)
  valid_BT = segments_BT > 0
  gate_BTk, index_BTk, stats = moe.route(y_BTD, block.ffn.router, config, valid_BT, replay_BTk)
  weights = ExpertWeights(block.ffn.gate, block.ffn.up, block.ffn.down)
  y_BTD = moe.experts(y_BTD, gate_BTk, index_BTk, weights, compute.experts, compute.expert_chunk)
  return (x_BTD + y_BTD, kv), (index_BTk, stats)


def gather(block: Block, config: ModelConfig, dtype: Any) -> Block:
  """FSDP: the weights of one layer, cast and gathered over D just before they are used.

  They stay split over heads and F; the transpose reduces and scatters their gradients. The router
  is small: it keeps its float32. Experts gather theirs where they multiply.
  """

  def one(path, weight: Weight, w: jax.Array) -> jax.Array:
    if path[-1].name == "router":
      return sharding.reshard(w, P())
    if "E" in weight.letters:
      return w.astype(dtype)
    together = sharding.spec(weight.letters[1:], sharding.ROLLOUT)
    collect = sharding.gather if weight.fan_in else sharding.reshard  # not for norms and biases
    return collect(w.astype(dtype), together)

  return jax.tree.map_with_path(one, block_table(config, isinstance(block.ffn, Moe), 1), block)


def _attention(x_BTD, w: Attention, config: ModelConfig, positions_BT, attend):
  heads = P(BATCH, None, "tensor", None)
  q = sharding.project("BTD,DNH->BTNH", x_BTD, w.q, heads)
  k = sharding.project("BTD,DKH->BTKH", x_BTD, w.k, heads)
  v = sharding.project("BTD,DKH->BTKH", x_BTD, w.v, heads)
  if w.q_bias is not None:
    q, k, v = q + w.q_bias[None, None], k + w.k_bias[None, None], v + w.v_bias[None, None]
  if w.q_norm is not None:
    q = rms_norm(q, w.q_norm, config.rms_norm_eps)
    k = rms_norm(k, w.k_norm, config.rms_norm_eps)
  q = rotate(q, positions_BT, config.rope_theta)
  k = rotate(k, positions_BT, config.rope_theta)
  y_BTNH, kv = attend(q, k, v)
  # Heads as one axis: left to itself, XLA may turn the weight around, at every step.
  B, T, N, H = y_BTNH.shape
  y_BTX = sharding.reshape(y_BTNH, (B, T, N * H), P(BATCH, None, "tensor"))
  o_XD = sharding.reshape(w.o, (N * H, w.o.shape[-1]), P("tensor"))
  return sharding.project("BTX,XD->BTD", y_BTX, o_XD, P(BATCH)), kv


def _attend(compute: ComputeConfig, kv, layer, positions_BT, segments_BT, tree, from_start):
  """Attention of new queries, keys and values [B, T, ...] as a function of them, per device.

  With a cache, `kv` of all layers [l, B, S, K, H], the new keys and values are written into it
  first. From position 0 on there is nothing else to look at, so prefilling reads none of it.
  """

  def on_each_device(q, k, v, kv, layer, positions_BT, segments_BT):
    length = q.shape[1]
    if tree is not None:
      length += tree.trunk - tree.trunk // tree.branches
    name = attention.choose(compute.attention, length, q.dtype)
    if kv is not None:
      row = jnp.arange(q.shape[0])[:, None]
      k_lBKHS, v_lBKSH = kv
      kv = (
        k_lBKHS.at[layer, row, :, :, positions_BT].set(k.astype(k_lBKHS.dtype)),
        v_lBKSH.at[layer, row, :, positions_BT].set(v.astype(v_lBKSH.dtype)),
      )
    if tree is not None:
      return attention.attend_tree(q, k, v, segments_BT, tree, name), kv
    if kv is None or from_start:
      return attention.attend_self(q, k, v, segments_BT, name), kv
    k_BKHS, v_BKSH = (c[layer].astype(q.dtype) for c in kv)
    return attention.attend_cache(q, k_BKHS, v_BKSH, positions_BT), kv

  heads = P(BATCH, None, "tensor", None)
  kv_specs = None if kv is None else (SPEC,) * 2
  run = sharding.shard_map(
    on_each_device,
    in_specs=(heads, heads, heads, kv_specs, P(), P(BATCH), P(BATCH)),
    out_specs=(heads, kv_specs),
    check=sharding.platform() != "tpu" and compute.attention != "splash",
  )
  return lambda q, k, v: run(q, k, v, kv, layer, positions_BT, segments_BT)


def _dense(x_BTD: jax.Array, w: Dense) -> jax.Array:
  split = P(BATCH, None, "tensor")
  a_BTF = sharding.project("BTD,DF->BTF", x_BTD, w.gate, split)
  u_BTF = sharding.project("BTD,DF->BTF", x_BTD, w.up, split)
  return sharding.project("BTF,FD->BTD", jax.nn.silu(a_BTF) * u_BTF, w.down, P(BATCH))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean x² + eps) · scale over the last axis, statistics in float32."""
  wide = x.astype(jnp.float32)
  wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return wide.astype(x.dtype) * scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def logits(params: Params, config: ModelConfig, tokens_BT: jax.Array) -> jax.Array:
  """Plain causal forward: float32 logits [B, T, V] of every position."""
  return head_logits(params, forward(params, config, jnp.asarray(tokens_BT)).hidden_BTD)


def example_tokens(config: ModelConfig, batch: int, length: int, seed: int = 0) -> np.ndarray:
  """Random token ids, for benchmarks and compile checks."""
  return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)
