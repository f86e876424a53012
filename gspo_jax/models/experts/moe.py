"""Mixture of experts: routing, and expert parallelism without dropped tokens.

The router is computed on global arrays, outside of `shard_map`. Inside `shard_map`, devices on the
mesh axis "expert" gather each other's tokens. Each device applies its local experts to the tokens
that chose them, and the sums over devices are scattered back. An assignment is a pair of a token
and an expert it chose. If a device has more assignments than rows in its buffers, the device fills
the buffers several times, so no assignment is dropped. The experts' matrix products have five
`IMPLEMENTATIONS`:

  blocks    a loop over blocks of rows, each block for one expert; for many tokens on CPU
  batched   one product, equally many rows per expert, then blocks; for few tokens, on CPU and GPU
  triton    Pallas kernels for NVIDIA GPUs, on rows sorted by expert (interpreted elsewhere)
  ragged    `lax.ragged_dot` on rows sorted by expert; on GPU XLA multiplies all rows by all experts
  megablox  JAX's Pallas grouped matmul for TPU (interpreted elsewhere)

An implementation's arguments are x [X, D] of X tokens, gate weights and expert indices [X, k], the
weights of n local experts, and `sink`. Index n means an expert of another device. The values of
`sink` are not read; the gradient of `sink` is that of the weights, in the dtype of `sink`. The
result is the sum over local experts, Σ_k gate_k · expert_{index_k}(x), [X, D] in x's dtype.
"""

import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax import sharding
from gspo_jax.models import layers
from gspo_jax.models.experts import routing
from gspo_jax.models.experts.blocks import (
  ExpertWeights,
  apply_batched,
  apply_blocks,
  multiply_batched,
)
from gspo_jax.models.experts.decode import (
  apply_one_hot,
  experts_of_few,
  experts_over,
  map_in_stack,
)
from gspo_jax.models.experts.groups import (
  GroupedWeights,
  apply_megablox,
  apply_ragged,
  apply_triton,
  joined,
  separate,
)
from gspo_jax.models.int8 import as_array, is_int8, matrix
from gspo_jax.models.weights import InStack
from gspo_jax.settings.model import ModelConfig
from gspo_jax.sharding import BATCH, P

IMPLEMENTATIONS = dict(
  blocks=apply_blocks,
  batched=apply_batched,
  ragged=apply_ragged,
  megablox=apply_megablox,
  triton=apply_triton,
)
KERNELS = (apply_megablox, apply_triton)
# Maximum mean number of assignments per expert for `batched` on CPU and for `experts_of_few`.
FEW = 256


@flax.struct.dataclass
class RouterStats:
  """Sums over the tokens of a batch except padding, for one layer or stacked by layer."""

  load_E: jax.Array  # Number of assignments to each expert.
  probability_E: jax.Array  # Router probability of each expert.
  entropy: jax.Array  # Entropy of the router's distribution, nats.
  z: jax.Array  # (log Σ_e exp logit_e)²; ST-MoE, arXiv:2202.08906, eq. 5.
  tokens: jax.Array  # Number of tokens.
  dropped: jax.Array  # Number of assignments to an index without an expert: always 0.
  # Share of a token's k chosen experts that replay replaces. None if there is no replay.
  overridden: jax.Array | None = None
  replayed_tokens: jax.Array | None = None  # Number of tokens with replayed experts, or None.


def _router_logits(x_BTD: jax.Array, router_DE: jax.Array) -> jax.Array:
  """Computes the router's logits [B, T, E] in float32.

  With the default precision, TPUs would round the factors to bfloat16, and GPUs to TF32.
  """
  x_BTD, router_DE = x_BTD.astype(jnp.float32), router_DE.astype(jnp.float32)
  with jax.default_matmul_precision("highest"):
    return sharding.einsum("BTD,DE->BTE", x_BTD, router_DE, out=P(BATCH))


def route(
  x_BTD: jax.Array,
  router_DE: jax.Array,
  config: ModelConfig,
  valid_BT: jax.Array,
  replayed_experts_BTk: jax.Array | None = None,
  choice_bias_E: jax.Array | None = None,
  bias_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, RouterStats]:
  """Returns gate weights and expert indices [B, T, k], -1 on padding, and router statistics.

  Computes scores of all experts in float32, and chooses k (`choose_experts`). Gate weights are the
  chosen scores times `router.scale`. `norm_topk_prob` first divides the chosen scores by their sum.
  For softmax scores, this gives a softmax over the chosen logits alone, as in Granite and GPT-OSS.

  valid_BT: mask of tokens; 0 on padding, which has no experts and is in no statistic.
  replayed_experts_BTk: indices in place of the router's choice. -1 keeps a token's choice, and None
    all choices. Gate weights are still the current router's scores, with a gradient. (Routing
    Replay, arXiv:2507.18071, §5.3; R2 and R3 of arXiv:2512.01374)
  choice_bias_E, bias_E: bias on scores for the choice alone, and bias on logits. None means 0.
  """
  logit_BTE = _router_logits(x_BTD, router_DE)
  logit_BTE = checkpoint_name(logit_BTE, sharding.PRODUCT)
  if bias_E is not None:
    logit_BTE = layers.with_each_token(jnp.add, logit_BTE, bias_E[None, None])
  score_BTE = SCORES[config.router.scores](logit_BTE)
  valid_BT = valid_BT.astype(jnp.float32)
  experts_BTk = choose_experts(score_BTE, config, choice_bias_E)
  replay_stats = {}
  if replayed_experts_BTk is not None:
    overridden_BT, replayed_BT = routing.changed(experts_BTk, replayed_experts_BTk)
    recorded_BT1 = routing.recorded(replayed_experts_BTk)[..., None]
    experts_BTk = jnp.where(recorded_BT1, replayed_experts_BTk, experts_BTk)
    replay_stats = dict(
      overridden=(overridden_BT * valid_BT).sum(), replayed_tokens=(replayed_BT * valid_BT).sum()
    )
  one_hot_BTkE = jax.nn.one_hot(experts_BTk, config.num_experts, dtype=jnp.float32)
  gate_BTk = jnp.einsum("BTkE,BTE->BTk", one_hot_BTkE, score_BTE)
  if config.norm_topk_prob:
    gate_BTk = normalize(gate_BTk)
  if config.router.scale != 1:
    gate_BTk = gate_BTk * config.router.scale
  p_BTE = score_BTE
  if config.router.scores != "softmax":
    p_BTE = score_BTE / score_BTE.sum(-1, keepdims=True)
  z_BT = jax.nn.logsumexp(logit_BTE, axis=-1) ** 2
  entropy_BT = -jnp.sum(p_BTE * jnp.log(jnp.maximum(p_BTE, 1e-30)), axis=-1)
  stats = RouterStats(
    load_E=(one_hot_BTkE * valid_BT[..., None, None]).sum((0, 1, 2)),
    probability_E=(p_BTE * valid_BT[..., None]).sum((0, 1)),
    entropy=(entropy_BT * valid_BT).sum(),
    z=(z_BT * valid_BT).sum(),
    tokens=valid_BT.sum(),
    dropped=((1 - one_hot_BTkE.sum(-1)) * valid_BT[..., None]).sum(),
    **replay_stats,
  )
  experts_BTk = jnp.where(valid_BT[..., None] > 0, experts_BTk, routing.NO_EXPERT)
  return gate_BTk, experts_BTk.astype(jnp.int32), stats


def normalize(gate_BTk: jax.Array) -> jax.Array:
  """Divides by the sum over k; zeros stay 0.

  The current router's scores of replayed experts may be tiny, and the gradient would then divide by
  the square of their sum, which rounds to 0. So they are first divided by the largest one. If this
  one is below the smallest normal number, gates and gradient are 0.
  """
  largest_BT1 = jax.lax.stop_gradient(gate_BTk.max(-1, keepdims=True))
  tiny = jnp.finfo(jnp.float32).tiny
  gate_BTk = jnp.where(largest_BT1 < tiny, 0, gate_BTk) / jnp.maximum(largest_BT1, tiny)
  return gate_BTk / jnp.maximum(gate_BTk.sum(-1, keepdims=True), 0.5)


SCORES = dict(softmax=functools.partial(jax.nn.softmax, axis=-1), sigmoid=jax.nn.sigmoid)


def choose_experts(
  score_BTE: jax.Array, config: ModelConfig, bias_E: jax.Array | None = None
) -> jax.Array:
  """Returns the k experts with the highest scores, int32 [B, T, k].

  If `router.groups_per_token` < `router.groups`, only experts of the best groups are candidates.
  A group's score is the sum of its two highest biased scores. Axes: g groups, e experts of a group,
  j chosen groups.

  bias_E: bias on scores; it does not affect gate weights (DeepSeek-V3, arXiv:2412.19437, eq. 16).
    None means 0.
  """
  router = config.router
  choice_BTE = score_BTE
  if bias_E is not None:
    choice_BTE = layers.with_each_token(jnp.add, score_BTE, bias_E[None, None])
  if router.groups_per_token < router.groups:
    B, T, E = choice_BTE.shape
    choice_BTge = choice_BTE.reshape(B, T, router.groups, E // router.groups)
    group_BTg = jax.lax.top_k(choice_BTge, 2)[0].sum(-1)
    _, best_BTj = jax.lax.top_k(group_BTg, router.groups_per_token)
    allowed_BTg = jax.nn.one_hot(best_BTj, router.groups).sum(2) > 0
    choice_BTE = jnp.where(allowed_BTg[..., None], choice_BTge, -jnp.inf).reshape(B, T, E)
  return jax.lax.top_k(choice_BTE, config.experts_per_token)[1]


def load_balance(stats: RouterStats, config: ModelConfig) -> jax.Array:
  """Returns E · Σ_e f_e P_e, averaged over layers; 1 if the load is balanced.

  f_e is the share of all assignments that go to expert e, and P_e the mean router probability of
  expert e. Switch Transformer, arXiv:2101.03961, eq. 4.
  """
  tokens = jnp.maximum(stats.tokens, 1)[..., None]
  f = stats.load_E / (tokens * config.experts_per_token)
  return jnp.mean(config.num_experts * jnp.sum(f * stats.probability_E / tokens, axis=-1))


def choose(implementation: str, load: float = math.inf):
  """Returns the named implementation; "auto" depends on platform and load.

  load: mean number of assignments per expert.
  """
  if implementation == "auto":
    on_cpu = "batched" if load <= FEW else "blocks"
    implementation = dict(cpu=on_cpu, tpu="megablox").get(sharding.platform(), "triton")
  return IMPLEMENTATIONS[implementation]


def choose_for_few(implementation: str, load: float) -> Callable:
  """Returns the argument `apply` of `experts_of_few`, a product with local experts."""
  if implementation == "auto" and sharding.platform() == "tpu":
    return functools.partial(apply_one_hot, load=load)
  if implementation in ("auto", "batched"):
    return lambda x_XD, gate_Xk, experts_Xk, num_local, read: multiply_batched(
      x_XD, gate_Xk, experts_Xk, read(), load
    )
  apply = choose(implementation)

  def apply_to_read(x_XD, gate_Xk, experts_Xk, num_local, read):
    weights = read()
    return apply(x_XD, gate_Xk, experts_Xk, weights, weights)

  return apply_to_read


@flax.struct.dataclass
class Gathered:
  """Experts' weights after gathering over D, [copies, E, ...].

  The first axis has one copy for each pair of positions on the mesh axes "data" and "fsdp". So each
  pair has a separate gradient.
  """

  weights: ExpertWeights | GroupedWeights


def gather(weights: ExpertWeights, implementation: str) -> Gathered:
  """Gathers weights over D ahead of `experts`, for prefetching.

  The backward pass scatters their gradients.
  """
  split, joins = _layout(weights, implementation)
  layout = _joined_layout(split) if joins else split

  def on_each_device(weights: ExpertWeights) -> ExpertWeights | GroupedWeights:
    weights = _gathered(weights, split, joins)
    return jax.tree.map(lambda w: w[None], weights)

  def copies(pspec: P) -> P:
    return P(("data", "fsdp"), *(None if axes == "fsdp" else axes for axes in pspec))

  run = sharding.shard_map(on_each_device, (split,), jax.tree.map(copies, layout))
  return Gathered(run(jax.tree.map(sharding.reshard, weights, split)))


def _layout(weights: ExpertWeights, implementation: str) -> tuple[ExpertWeights, bool]:
  """Returns each weight's sharding, and whether to join gate and up."""
  expert_axis, width_axis, _ = sharding.spec_of(weights.gate)  # Only training splits D.
  if expert_axis in (None, "fsdp"):  # The sampler may split experts over "fsdp".
    expert_axis = "expert"
  gate, down = P(expert_axis, width_axis, "tensor"), P(expert_axis, "tensor", width_axis)
  split = weights.layout(gate, down, P(expert_axis, "tensor"))
  return split, width_axis is not None and choose(implementation) in (apply_ragged, *KERNELS)


def _joined_layout(split: ExpertWeights) -> GroupedWeights:
  """Returns the shardings for gate and up as one matrix."""
  split = separate(split)
  return split.replace(gate_up=split.gate_up[:1], biases=split.biases[:1])


def _gathered(weights: ExpertWeights, split: ExpertWeights, joins: bool):
  """Gathers the weights of a device's experts, inside `shard_map`."""
  if joins:  # Joining local shards copies less than joining whole matrices.
    return jax.tree.map(sharding.gather_whole, joined(weights), _joined_layout(split))
  return jax.tree.map(sharding.gather_whole, weights, split)


def experts(
  x_BTD: jax.Array,
  gate_BTk: jax.Array,
  experts_BTk: jax.Array,
  weights: ExpertWeights | Gathered,
  implementation: str,
  chunk: int = 0,
) -> jax.Array:
  """Σ_k gate_k · expert_{index_k}(x), [B, T, D], over a mesh.

  In training, this function gathers weights that are split over D, and scatters their gradients.
  `Gathered` weights are gathered already.

  While sampling, the fields of `weights` are `InStack`, and experts may be split over more axes
  than in training. If experts have at most `FEW` assignments on average, tokens are sent to the
  experts (`experts_of_few`). Otherwise the weights are gathered over the additional axes.

  implementation: value of `ComputeConfig.experts`.
  chunk: number of a device's tokens to gather and compute at a time, 0 for all. To bound memory,
    the backward pass recomputes each chunk.
  """
  check_vma = choose(implementation) not in KERNELS  # Pallas kernels do not support the check.
  if isinstance(weights, ExpertWeights) and isinstance(weights.gate, InStack):
    chips = sharding.axis_size(experts_over(weights.gate))
    num_experts = matrix(weights.gate.stack).shape[1]
    load = sharding.rows_per_device(gate_BTk.size) * chips / num_experts
    if load <= FEW:
      apply = choose_for_few(implementation, load)
      if is_int8(weights.gate.stack):
        apply = functools.partial(apply_one_hot, load=load)
      return experts_of_few(x_BTD, gate_BTk, experts_BTk, weights, apply, check_vma)
    weights = map_in_stack(lambda w: as_array(w.read(x_BTD.dtype), x_BTD.dtype), weights)

  def on_each_device(x_BTD, gate_BTk, experts_BTk, weights):
    B, T, D = x_BTD.shape
    if isinstance(weights, Gathered):
      weights = jax.tree.map(lambda w: w[0], weights.weights)
    else:
      weights = _gathered(weights, split, joins)
    # Gradients of the weights have the dtype of `sink`. Sums over chunks or blocks need float32. If
    # gate and up are joined, and there is one chunk, the grouped kernel itself sums in float32.
    in_kernel = joins and not 0 < chunk < B * T
    sink = weights if in_kernel else jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    weights = jax.lax.stop_gradient(weights)

    def apply(x_XD, gate_Xk, experts_Xk):
      return _gather_and_apply(x_XD, gate_Xk, experts_Xk, weights, sink, implementation)

    tokens = [a.reshape(B * T, -1) for a in (x_BTD, gate_BTk, experts_BTk)]
    return _over_chunks(apply, tokens, chunk).reshape(B, T, D)

  batch = P(BATCH)
  if isinstance(weights, Gathered):
    split = jax.tree.map(sharding.spec_of, weights)
    joins = isinstance(weights.weights, GroupedWeights)
  else:
    split, joins = _layout(weights, implementation)
    weights = jax.tree.map(sharding.reshard, weights, split)
  run = sharding.shard_map(on_each_device, (batch, batch, batch, split), batch, check_vma)
  return run(x_BTD, gate_BTk.astype(x_BTD.dtype), experts_BTk, weights)


def output_biases(gate_BTk: jax.Array, experts_BTk: jax.Array, bias_ED: jax.Array) -> jax.Array:
  """Σ_k gate_k · bias_{index_k}, [B, T, D], for GPT-OSS."""
  one_hot_BTkE = jax.nn.one_hot(experts_BTk, len(bias_ED), dtype=bias_ED.dtype)
  gate_BTE = jnp.einsum("BTkE,BTk->BTE", one_hot_BTkE, gate_BTk)
  add_up = functools.partial(sharding.product, "BTE,ED->BTD")
  split = P(BATCH), sharding.spec_of(bias_ED)
  return sharding.shard_map(add_up, split, P(BATCH))(gate_BTE, bias_ED)


def _gather_and_apply(
  x_XD: jax.Array,
  gate_Xk: jax.Array,
  experts_Xk: jax.Array,
  weights: ExpertWeights | GroupedWeights,
  sink: ExpertWeights | GroupedWeights,
  implementation: str,
) -> jax.Array:
  """Gathers tokens, applies local experts, and scatters the sums.

  For use inside `shard_map`. The gradient of `sink` is that of the weights.
  """
  num_local = len(weights.down)
  x_XD, gate_Xk, experts_Xk = (
    sharding.all_gather(a, "expert") for a in (x_XD, gate_Xk, experts_Xk)
  )
  local_Xk = experts_Xk - num_local * sharding.axis_index("expert")
  local_Xk = jnp.where((local_Xk >= 0) & (local_Xk < num_local), local_Xk, num_local)
  tokens = sharding.vary((x_XD, gate_Xk, local_Xk), ("tensor",))
  apply = choose(implementation, experts_Xk.size / (num_local * sharding.axis_size("expert")))
  y_XD = apply(*tokens, weights, sink)
  return sharding.psum(sharding.psum_scatter(y_XD, "expert"), "tensor")


def _over_chunks(apply: Callable, tokens: list[jax.Array], chunk: int) -> jax.Array:
  """Applies experts to `chunk` tokens at a time; 0 means all.

  tokens: x [X, D], gate weights [X, k] and expert indices [X, k].
  """
  X, D = tokens[0].shape
  if not 0 < chunk < X:
    return apply(*tokens)
  padding = -X % chunk
  parts = [
    jnp.pad(a, ((0, padding), (0, 0)), constant_values=value).reshape(-1, chunk, a.shape[1])
    for a, value in zip(tokens, (0, 0, -1))  # Padding has no expert.
  ]
  apply = jax.checkpoint(apply, prevent_cse=False)
  _, y = jax.lax.scan(lambda _, part: (None, apply(*part)), None, tuple(parts))
  return y.reshape(-1, D)[:X]
