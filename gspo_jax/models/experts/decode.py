"""Experts while sampling: few tokens, no gradients, weights read in place.

The tokens of a decode step have far fewer bytes than the experts. So experts may be split over more
chips than in training, and the tokens are sent to the experts. `moe.experts` calls `experts_of_few`
if experts have at most `moe.FEW` assignments on average.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models.experts.blocks import ExpertWeights, add_bias
from gspo_jax.models.int8 import is_int8, matrix, multiply
from gspo_jax.models.weights import InStack
from gspo_jax.settings.mesh import AXES
from gspo_jax.sharding import BATCH, P

# An expert's rows in `apply_one_hot` are a multiple of `ROWS`, because fewer rows are not faster on
# TPU. If the batch has fewer tokens, their number is rounded up to a multiple of 8 instead.
ROWS = 64


def experts_of_few(
  x_BTD: jax.Array,
  gate_BTk: jax.Array,
  experts_BTk: jax.Array,
  weights: ExpertWeights,
  apply: Callable,
  check: bool = True,
) -> jax.Array:
  """Σ_k gate_k · expert_{index_k}(x), [B, T, D], for few tokens.

  Gathers the tokens of all chips over which the experts are split, applies each chip's local
  experts, and scatters the sums back.

  Args:
    weights: `InStack`s of the experts' weights, not split over D.
    apply: product with the local experts. Its arguments are those of `apply_one_hot` except `load`.
      Matrices in eight bits need `apply_one_hot`.
    check: argument of `sharding.shard_map`; False if `apply` is a Pallas kernel.
  """
  layer, over = weights.gate.layer, experts_over(weights.gate)
  # The axes are in the mesh's order; in any other order, XLA sends twice the bytes.
  chips = tuple(a for a in AXES if a in over)
  by_width = P(None, over, "tensor")
  split = weights.layout(P(None, over, None, "tensor"), by_width, by_width)
  stacks = map_in_stack(lambda w: w.stack, weights)
  split = jax.tree.map(
    lambda w, pspec: w.spec(pspec) if is_int8(w) else pspec, stacks, split, is_leaf=is_int8
  )
  stacks = jax.tree.map(sharding.reshard, stacks, split)

  def on_each_device(x_BTD, gate_BTk, experts_BTk, stacks, layer):
    num_local = matrix(stacks.gate).shape[1]
    tokens = [a.reshape(-1, a.shape[-1]) for a in (x_BTD, gate_BTk, experts_BTk)]
    x_XD, gate_Xk, experts_Xk = gather_tokens(*tokens, chips)
    local_Xk = experts_Xk - num_local * sharding.axis_index(over)
    local_Xk = jnp.where((local_Xk >= 0) & (local_Xk < num_local), local_Xk, num_local)
    tokens = sharding.vary((x_XD, gate_Xk, local_Xk), ("tensor",))

    def read():
      return jax.tree.map(lambda w: InStack(w, layer).read(x_XD.dtype), stacks, is_leaf=is_int8)

    y_XD = apply(*tokens, num_local, read)
    return sharding.psum(sharding.psum_scatter(y_XD, chips), "tensor").reshape(x_BTD.shape)

  batch = P(BATCH)
  run = sharding.shard_map(
    on_each_device, in_specs=(batch, batch, batch, split, P()), out_specs=batch, check=check
  )
  return run(x_BTD, gate_BTk.astype(x_BTD.dtype), experts_BTk, stacks, layer)


def map_in_stack(f: Callable[[InStack], jax.Array], weights: ExpertWeights) -> ExpertWeights:
  """Maps a function over the `InStack` weights."""
  return jax.tree.map(f, weights, is_leaf=lambda x: isinstance(x, InStack))


def experts_over(weight: InStack) -> tuple[str, ...]:
  """Returns the mesh axes of the experts' shards; ("expert",) for unsplit experts."""
  return sharding.each(sharding.spec_of(matrix(weight.stack))[1]) or ("expert",)


def gather_tokens(x_XD: jax.Array, gate_Xk: jax.Array, experts_Xk: jax.Array, over: sharding.Axes):
  """Gathers tokens over the mesh axes `over`.

  The bits of all three arrays are packed in one array, because the time of small collectives
  depends more on their number than on their bytes. For use inside `shard_map`.
  """
  if sharding.axis_size(over) == 1:
    return x_XD, gate_Xk, experts_Xk
  dtype, (D, k) = x_XD.dtype, (x_XD.shape[1], experts_Xk.shape[1])
  word = jnp.dtype(f"uint{8 * dtype.itemsize}")
  bits = [jax.lax.bitcast_convert_type(a, word) for a in (x_XD, gate_Xk)]
  gathered = sharding.all_gather(jnp.concatenate([*bits, experts_Xk.astype(word)], axis=1), over)
  x_XD, gate_Xk, experts_Xk = jnp.split(gathered, [D, D + k], axis=1)
  x_XD, gate_Xk = (jax.lax.bitcast_convert_type(a, dtype) for a in (x_XD, gate_Xk))
  return x_XD, gate_Xk, experts_Xk.astype(jnp.int32)


def apply_one_hot(
  x_XD: jax.Array,
  gate_Xk: jax.Array,
  experts_Xk: jax.Array,
  num_local: int,
  read: Callable[[], ExpertWeights],
  load: float,
) -> jax.Array:
  """Applies all local experts, each to the same number C of rows, gathered by one-hot products.

  Meant for TPUs, where sorting and scattering are slow. If an expert has more than C tokens,
  further rounds compute the next C tokens of each expert, and read the weights again.

  Args:
    experts_Xk: expert indices; `num_local` means an expert of another device.
    num_local: E, number of this device's experts.
    read: returns the weights of these experts.
    load: mean number of assignments per expert. C is 2 · load, rounded up to a multiple of `ROWS`,
      but not more than X rounded up to a multiple of 8.

  Returns:
    Σ_k gate_k · expert_{index_k}(x) over the local experts, [X, D].
  """
  X, dtype = len(x_XD), x_XD.dtype
  chosen_XkE = experts_Xk[..., None] == jnp.arange(num_local)[None, None]
  gate_EX = jnp.where(chosen_XkE, gate_Xk[..., None], 0).sum(1).T
  local_XE = chosen_XkE.any(1)
  rank_XE = jnp.cumsum(local_XE, axis=0, dtype=jnp.int32)
  rank_EX = jnp.where(local_XE, rank_XE - 1, -1).T
  C = min(-(-X // 8) * 8, ROWS * max(1, math.ceil(2 * load / ROWS)))
  exact = dict(precision=jax.lax.Precision.HIGHEST)  # Makes one-hot products exact for float32.

  def one_round(i, result=dtype):
    w = read()
    pick_ECX = rank_EX[:, None] == (i * C + jnp.arange(C))[None, :, None]
    one_hot_ECX = pick_ECX.astype(dtype)
    x_ECD = jnp.einsum("ECX,XD->ECD", one_hot_ECX, x_XD, **exact)
    gate_EC = jnp.where(pick_ECX, gate_EX[:, None], 0).sum(-1)
    a_ECF = add_bias(multiply(x_ECD, w.gate), w.gate_bias)
    u_ECF = add_bias(multiply(x_ECD, w.up), w.up_bias)
    y_ECD = multiply(w.activation(a_ECF, u_ECF) * gate_EC[..., None], w.down)
    return jnp.einsum("ECX,ECD->XD", one_hot_ECX, y_ECD, preferred_element_type=result, **exact)

  def all_rounds():
    y_XD = sharding.vary(jnp.zeros(x_XD.shape, jnp.float32), AXES)
    y_XD = jax.lax.fori_loop(0, rounds, lambda i, y_XD: y_XD + one_round(i, jnp.float32), y_XD)
    return y_XD.astype(dtype)

  if C >= X:
    return one_round(0)
  rounds = -(-rank_XE[-1].max() // C)
  # A single round is a separate branch, because it needs no float32 sum in memory.
  return jax.lax.cond(rounds > 1, all_rounds, lambda: one_round(0))
