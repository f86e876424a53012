"""Both ends of the model: tokens to vectors, and vectors to logits, log-probs and values."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.models import weights
from gspo_jax.models.attention.blocks import softcap
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.sharding import BATCH, P

NO_TOKEN = -1  # Padding in lists of the tokens that top-k, top-p and min-p keep (supports).


def embed(params: Any, tokens_BT: jax.Array, dtype: Any) -> jax.Array:
  """Looks up rows of the embedding, [B, T, D].

  If the mesh axis "fsdp" splits D, each device gathers the tokens of all devices on this axis. It
  looks up its part of D for these tokens, and sends the parts to the tokens' devices. This moves
  fewer bytes than gathering a large table, and the table's gradient stays split.
  """

  def on_each_device(table_VD, tokens_BT):
    if "fsdp" in split:
      tokens_BT = sharding.all_gather(tokens_BT, "fsdp")
    table_VD = sharding.vary(table_VD, tuple(a for a in BATCH if a not in split))
    V = table_VD.shape[0]
    row_BT = tokens_BT
    if "tensor" in split:
      row_BT = row_BT - V * sharding.axis_index("tensor")
    x_BTD = jnp.asarray(table_VD).at[jnp.clip(row_BT, 0, V - 1)].get(mode="promise_in_bounds")
    if "tensor" in split:
      x_BTD = jnp.where(((row_BT >= 0) & (row_BT < V))[..., None], x_BTD, 0)
    x_BTD = x_BTD.astype(dtype)
    if "fsdp" in split:
      x_BTD = sharding.all_to_all(x_BTD, "fsdp", 0, 2)
    return sharding.psum(x_BTD, "tensor") if "tensor" in split else x_BTD

  split = sharding.spec_of(params.embed)
  run = sharding.shard_map(on_each_device, in_specs=(split, P(BATCH)), out_specs=P(BATCH))
  return run(params.embed, tokens_BT)


def head_weight(params: Any, compute: ComputeConfig) -> jax.Array:
  """Returns the head [D, V], or the transposed embedding, in the compute dtype.

  V is split over "tensor", and D as in the parameters.
  """
  head_DV = params.embed.T if params.head is None else params.head
  split = P(sharding.spec_of(head_DV)[0], "tensor")
  return sharding.reshard(head_DV.astype(jnp.dtype(compute.dtype)), split)


def head_logits(
  params: Any, config: ModelConfig, hidden_BTD: jax.Array, compute: ComputeConfig = REFERENCE
) -> jax.Array:
  """Computes float32 logits [B, T, V], split over V, of all time steps at once."""
  logits_BTV = sharding.einsum(
    "BTD,DV->BTV",
    hidden_BTD,
    sharding.gather(head_weight(params, compute), P(None, "tensor")),
    out=P(BATCH, None, "tensor"),
    dtype=jnp.float32,
  )
  return bounded(logits_BTV, config)


def bounded(logits_BTV: jax.Array, config: ModelConfig) -> jax.Array:
  """Divides logits by `multipliers.logits` and applies their soft bound."""
  divisor = config.multipliers.logits
  logits_BTV = logits_BTV if divisor == 1 else logits_BTV / divisor
  return softcap(logits_BTV, config.final_logit_softcapping)


def token_logp(
  params: Any,
  config: ModelConfig,
  hidden_BTD: jax.Array,
  targets_BT: jax.Array,
  *,
  temperature: float = 1.0,
  compute: ComputeConfig = REFERENCE,
  support_BTX: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """log softmax(logits / temperature) of targets, and entropy in nats, [B, T].

  A support S is the set of tokens left by the sampler's top-k, top-p and min-p. If there is a
  support, log-prob and entropy are those of the distribution renormalised over S:

  log π(y | S) = z_y − log Σ_{v∈S} exp z_v, with z = logits / temperature.

  In this case only the logits of S and y have a gradient. If y is outside of S, the result is no
  log-probability, and may be positive.

  To save memory, only the logits of `compute.logits_chunk` time steps (0: all) exist at once. The
  target's logit is a masked sum over V, so logits that are split over V are not gathered. Each
  device sums the head's gradient over chunks, in float32; one sum over devices follows.

  Args:
    targets_BT: int32 token ids.
    support_BTX: int32 ids of the support of each target, padded with NO_TOKEN. A support of
      padding alone means the whole vocabulary. None means the whole vocabulary for all targets.
  """

  def on_each_device(hidden_BTD, targets_BT, support_BTX, head_DV):
    head_DV = sharding.gather_whole(head_DV, split)
    hidden_BTD = sharding.vary(hidden_BTD, ("tensor",))
    head = jax.lax.stop_gradient(head_DV), head_DV.astype(jnp.float32)
    first = head_DV.shape[1] * sharding.axis_index("tensor")

    @jax.checkpoint
    def chunk(hidden_BtD, targets_Bt, support_BtX):
      logits_BtV = project(hidden_BtD, *head)
      logits_BtV = bounded(logits_BtV, config) / temperature
      return _logp_of_logits(logits_BtV, targets_Bt, support_BtX, first)

    return _over_chunks(chunk, (hidden_BTD, targets_BT, support_BTX), compute.logits_chunk)

  batch, head_DV = P(BATCH), head_weight(params, compute)
  split = sharding.spec_of(head_DV)
  hidden_BTD, targets_BT, support_BTX = jax.tree.map(
    lambda x: sharding.reshard(x, batch), (hidden_BTD, targets_BT, support_BTX)
  )
  run = sharding.shard_map(on_each_device, (batch, batch, batch, split), (batch, batch))
  return run(hidden_BTD, targets_BT, support_BTX, head_DV)


def _logp_of_logits(
  logits_BtV: jax.Array,
  targets_Bt: jax.Array,
  support_BtX: jax.Array | None,
  first: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs of targets, and entropies, [B, t].

  V may be split over devices; `first` is the token id of this device's first logit.
  """
  most_Bt = sharding.pmax(jax.lax.stop_gradient(logits_BtV.max(-1)), "tensor")

  def over_vocabulary(x_BtV):
    return sharding.psum(x_BtV.sum(-1), "tensor")

  lse_Bt = most_Bt + jnp.log(over_vocabulary(jnp.exp(logits_BtV - most_Bt[..., None])))
  vocab = first + jnp.arange(logits_BtV.shape[-1])[None, None]
  target_Bt = over_vocabulary(jnp.where(vocab == targets_Bt[..., None], logits_BtV, 0))
  p_BtV = jnp.exp(logits_BtV - lse_Bt[..., None])
  entropy_Bt = lse_Bt - over_vocabulary(p_BtV * logits_BtV)
  if support_BtX is None:
    return target_Bt - lse_Bt, entropy_Bt
  supported_Bt = (support_BtX != NO_TOKEN).any(-1)
  supported = _over_support(logits_BtV, support_BtX, first)
  lse_Bt, entropy_Bt = (
    jnp.where(supported_Bt, x, y) for x, y in zip(supported, (lse_Bt, entropy_Bt))
  )
  return target_Bt - lse_Bt, entropy_Bt


def _over_chunks(function: Callable, arrays: Any, size: int) -> tuple[jax.Array, ...]:
  """Applies a function of [B, t, ...] arrays to chunks of `size` time steps.

  If `size` is 0, all time steps are one chunk.
  """
  B, T = arrays[0].shape[:2]
  size = size or T
  if size >= T:
    return function(*arrays)
  padding = -T % size

  def cut(x_BT):
    x_BT = jnp.pad(x_BT, ((0, 0), (0, padding), *((0, 0),) * (x_BT.ndim - 2)))
    return jnp.moveaxis(x_BT.reshape(B, -1, size, *x_BT.shape[2:]), 1, 0)

  chunks = jax.tree.map(cut, arrays)
  _, results = jax.lax.scan(lambda _, xs: (None, function(*xs)), None, chunks)
  return tuple(jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T] for x in results)


def _over_support(
  logits_BtV: jax.Array, support_BtX: jax.Array, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
  """Returns log Σ exp of a support's logits, and its entropy, [B, t].

  V may be split over devices; `first` is the token id of this device's first logit. For a support
  of padding alone the results are meaningless, but finite.
  """
  V = logits_BtV.shape[-1]
  place_BtX = support_BtX - first
  local_BtX = (support_BtX != NO_TOKEN) & (place_BtX >= 0) & (place_BtX < V)
  logit_BtX = jnp.take_along_axis(logits_BtV, jnp.clip(place_BtX, 0, V - 1), axis=-1)

  def over_support(x_BtX):
    return sharding.psum(jnp.where(local_BtX, x_BtX, 0).sum(-1), "tensor")

  most_Bt = jax.lax.stop_gradient(jnp.where(local_BtX, logit_BtX, -jnp.inf).max(-1))
  most_Bt = sharding.pmax(most_Bt, "tensor")
  most_Bt = jnp.where(jnp.isfinite(most_Bt), most_Bt, 0)
  # At padding and tokens of other devices, `logit_BtX` is arbitrary and may exceed `most_Bt`. The
  # difference is 0 there: otherwise exp may overflow, and infinity times 0 is NaN in the gradient.
  shifted_BtX = jnp.where(local_BtX, logit_BtX - most_Bt[..., None], 0)
  mass_Bt = over_support(jnp.exp(shifted_BtX))
  lse_Bt = jnp.log(jnp.where(mass_Bt > 0, mass_Bt, 1))
  p_BtX = jnp.exp(shifted_BtX - lse_Bt[..., None])
  return most_Bt + lse_Bt, lse_Bt - over_support(p_BtX * shifted_BtX)


@jax.custom_vjp
def project(x_BtD: jax.Array, head_DV: jax.Array, sink_DV: jax.Array) -> jax.Array:
  """Computes float32 logits [B, t, V].

  The backward pass gives the head's gradient to `sink_DV`, a float32 array whose values are not
  read. In JAX a gradient has the dtype of its input, so a bfloat16 head would have a bfloat16
  gradient. Sums over chunks need float32.
  """
  return jnp.einsum("BtD,DV->BtV", x_BtD, head_DV, preferred_element_type=jnp.float32)


def _project_forward(x_BtD, head_DV, sink_DV):
  return project(x_BtD, head_DV, sink_DV), (x_BtD, head_DV)


def _project_backward(residuals, dy_BtV):
  x_BtD, head_DV = residuals
  dy_BtV = dy_BtV.astype(x_BtD.dtype)
  dx_BtD = sharding.product("BtV,DV->BtD", dy_BtV, head_DV)
  dhead_DV = jnp.einsum("BtD,BtV->DV", x_BtD, dy_BtV, preferred_element_type=jnp.float32)
  return dx_BtD, None, dhead_DV


project.defvjp(_project_forward, _project_backward)


@flax.struct.dataclass
class Critic:
  """A value head, and its trunk: the embedding and the layers below the head."""

  trunk: Any  # Params without a head. None means that the policy's layers are the trunk.
  weight: Any  # D
  bias: Any  # []


def critic_table(config: ModelConfig, trunk: Any = None) -> Critic:
  """Declares every weight of a critic. The head starts at 0, so the first values are 0.

  trunk: table of weights of a separate model. None means that the policy's layers are the trunk.
  """
  w = weights.weight_factory(config)
  return Critic(trunk and trunk.replace(head=None), w("D", wide=True), w("", wide=True))


def values(critic: Critic, hidden_BTD: jax.Array) -> jax.Array:
  """Computes values w · h + b of hidden states h, float32 [B, T]."""
  weight_D = sharding.reshard(critic.weight.astype(jnp.float32), P())
  hidden_BTD = hidden_BTD.astype(jnp.float32)
  value_BT = sharding.einsum("BTD,D->BT", hidden_BTD, weight_D, out=P(BATCH, None))
  return value_BT + critic.bias.astype(jnp.float32)
