"""Layers of linear attention: a gated delta rule after short causal convolutions.

Gated DeltaNet, arXiv:2412.06464, as in Qwen3-Next and Qwen3.5. A layer needs no cache of positions,
because its recurrent state (`States`) has a constant size. attention/delta_rule.py has the
equations and the letters R, J and C.
"""

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax import sharding
from gspo_jax.models.attention import delta_rule
from gspo_jax.models.attention.attention import Paths, Tree
from gspo_jax.models.attention.blocks import RESIDUAL, gather
from gspo_jax.models.attention.cache import States
from gspo_jax.models.attention.delta_rule import Inputs
from gspo_jax.models.int8 import project
from gspo_jax.models.layers import Norm, project_heads, rms_norm
from gspo_jax.models.weights import GatedDelta
from gspo_jax.settings.mesh import AXES
from gspo_jax.settings.model import ComputeConfig, Kind, ModelConfig
from gspo_jax.sharding import BATCH, P

HEADS = P(BATCH, None, "tensor")  # Layout of [B, T, K, ...].


def attend(
  x_BTD: jax.Array,
  w: GatedDelta,
  norm: Norm,
  kv: States | None,
  layer: Any,
  *,
  config: ModelConfig,
  compute: ComputeConfig,
  kind: Kind,
  positions_BT: jax.Array,
  segments_BT: jax.Array,
  tree: Tree | Paths | None,
  from_start: bool,
) -> tuple[jax.Array, Any]:
  """Computes linear attention with its projections, in place of `layers.attend`.

  Returns [B, T, D], and the updated states (None if `kv` is None).

  Args:
    x_BTD: the layer's input, normalised.
    kv: states of the layer's block before the first position. None means that sequences begin with
      zeros, and that no states are returned.
    layer: index of the layer in its block, and in `kv`.
    segments_BT: segment numbers, 0 for padding. Each new segment begins with a state of zeros, and
      padding does not change the state.
    tree: layout of sequences that share prefixes. None for plain rows.
    from_start: whether `kv` has no earlier tokens, so that it is written and not read.
    norm, compute, kind, positions_BT: unused. Tokens have no positions except their order.
  """
  q, k = (project("BTD,DKH->BTKH", x_BTD, matrix, HEADS) for matrix in (w.q, w.k))
  v, z = (project("BTD,DKRJ->BTKRJ", x_BTD, matrix, HEADS) for matrix in (w.v, w.z))
  x_float32 = x_BTD.astype(jnp.float32)
  a, b = (project("BTD,DKR->BTKR", x_float32, matrix, HEADS) for matrix in (w.a, w.b))
  weights = Weights(w.q_conv, w.k_conv, w.v_conv, w.log_decay, w.decay_bias)
  tree, paths = (None, tree) if isinstance(tree, Paths) else (tree, None)
  state_specs = jax.tree.map(lambda _: P(None, BATCH, "tensor"), kv)
  run = sharding.shard_map(
    functools.partial(_mix, tree=tree, from_start=from_start),
    in_specs=(HEADS, P("tensor"), state_specs, P(), P(BATCH), P(BATCH)),
    out_specs=(HEADS, state_specs),
    # Pallas kernels do not support this check.
    check=kv is None or sharding.platform() == "cpu",
  )
  y_BTKRJ, kv = run(Projections(q, k, v, a, b), weights, kv, layer, segments_BT, paths)
  y_BTKRJ = checkpoint_name(y_BTKRJ, RESIDUAL)
  y_BTKRJ = rms_norm(y_BTKRJ, w.norm, config.rms_norm_eps).astype(jnp.float32)
  y_BTKRJ = (y_BTKRJ * jax.nn.silu(z.astype(jnp.float32))).astype(x_BTD.dtype)
  return project_heads(y_BTKRJ, w.o), kv


class Projections(NamedTuple):
  """Projections of a layer's inputs."""

  q_BTKH: jax.Array
  k_BTKH: jax.Array
  v_BTKRJ: jax.Array
  a_BTKR: jax.Array  # float32
  b_BTKR: jax.Array  # float32


class Weights(NamedTuple):
  """Small weights of a layer, float32."""

  q_KHC: jax.Array
  k_KHC: jax.Array
  v_KRJC: jax.Array
  log_decay_KR: jax.Array
  decay_bias_KR: jax.Array


@flax.struct.dataclass
class Carry:
  """States of one layer, with the last inputs of its convolutions."""

  state_BKRHJ: jax.Array
  q_BCKH: jax.Array
  k_BCKH: jax.Array
  v_BCKRJ: jax.Array


def _mix(
  x: Projections,
  w: Weights,
  kv: States | None,
  layer: Any,
  segments_BT: jax.Array,
  paths: Paths | None,
  *,
  tree: Tree | None,
  from_start: bool,
) -> tuple[jax.Array, States | None]:
  """Runs convolutions and the rule on one device, for its rows and heads."""
  dtype = x.v_BTKRJ.dtype
  if paths is not None:
    gathered = Projections(*(gather(part, paths.read_RF) for part in x))
    y_RFKRJ, _ = _run(gathered, w, paths.segment_RF, _zeros(gathered, w))
    return gather(y_RFKRJ.astype(dtype), paths.back_RT), kv
  if tree is not None:
    parts = [tree.split(part) for part in x]
    segments_RS, segments_BU = tree.split(segments_BT)
    trunk, branches = (Projections(*side) for side in zip(*parts))
    y_RS, carry = _run(trunk, w, segments_RS, _zeros(trunk, w))
    carry = jax.tree.map(lambda part: jnp.repeat(part, tree.branches, axis=0), carry)
    y_BU, _ = _run(branches, w, segments_BU, carry)
    return tree.join(y_RS, y_BU).astype(dtype), kv
  if kv is not None and not from_start and segments_BT.shape[1] == 1:
    from gspo_jax.models.attention import delta_kernel  # Slow import.

    inputs, tails = _convolve(x, w, segments_BT, _read(kv, layer))
    inputs = inputs.masked(segments_BT > 0)
    y_BTKRJ, state_lBKRHJ = delta_kernel.step(inputs, kv.state_lBKRHJ, layer)  # In place.
    kv = _write(kv.replace(state_lBKRHJ=None), layer, Carry(None, *tails))
    return y_BTKRJ.astype(dtype), kv.replace(state_lBKRHJ=state_lBKRHJ)
  carry = _zeros(x, w) if kv is None or from_start else _read(kv, layer)
  y_BTKRJ, carry = _run(x, w, segments_BT, carry)
  return y_BTKRJ.astype(dtype), None if kv is None else _write(kv, layer, carry)


def _run(
  x: Projections, w: Weights, segments_BT: jax.Array, carry: Carry
) -> tuple[jax.Array, Carry]:
  """Runs convolutions and the rule over rows. `carry` has the states before the rows."""
  inputs, tails = _convolve(x, w, segments_BT, carry)
  y, state = delta_rule.chunked(inputs, segments_BT, carry.state_BKRHJ)
  return y, Carry(state, *tails)


def _convolve(
  x: Projections, w: Weights, segments_BT: jax.Array, carry: Carry
) -> tuple[Inputs, tuple[jax.Array, ...]]:
  """Computes the rule's inputs, and the tails: the last inputs of each convolution."""
  q, q_tail = delta_rule.convolve(x.q_BTKH, w.q_KHC, segments_BT, carry.q_BCKH)
  k, k_tail = delta_rule.convolve(x.k_BTKH, w.k_KHC, segments_BT, carry.k_BCKH)
  v, v_tail = delta_rule.convolve(x.v_BTKRJ, w.v_KRJC, segments_BT, carry.v_BCKRJ)
  dtype, H = x.v_BTKRJ.dtype, q.shape[-1]
  q, k, v = (part.astype(dtype) for part in (q, k, v))
  inputs = Inputs(
    q_BTKH=delta_rule.normalise(q) * H**-0.5,
    k_BTKH=delta_rule.normalise(k),
    v_BTKRJ=v,
    g_BTKR=-jnp.exp(w.log_decay_KR)[None, None]
    * jax.nn.softplus(x.a_BTKR + w.decay_bias_KR[None, None]),
    beta_BTKR=jax.nn.sigmoid(x.b_BTKR),
  )
  return inputs, (q_tail, k_tail, v_tail)


def _zeros(x: Projections, w: Weights) -> Carry:
  """Returns the state before the first position of a sequence."""
  B, _, K, H = x.q_BTKH.shape
  R, J = x.v_BTKRJ.shape[3:]
  C = w.q_KHC.shape[-1] - 1
  shapes = (B, K, R, H, J), (B, C, K, H), (B, C, K, H), (B, C, K, R, J)
  zeros = Carry(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
  return sharding.vary(zeros, AXES)


def _read(kv: States, layer: Any) -> Carry:
  """Reads the states of one layer."""
  state, *tails = (x[layer] for x in (kv.state_lBKRHJ, kv.q_lBKCH, kv.k_lBKCH, kv.v_lBKCRJ))
  return Carry(state, *(jnp.moveaxis(x, 2, 1) for x in tails))


def _write(kv: States, layer: Any, carry: Carry) -> States:
  """Writes the states of one layer."""
  tails = (jnp.moveaxis(x, 1, 2) for x in (carry.q_BCKH, carry.k_BCKH, carry.v_BCKRJ))
  new = States(carry.state_BKRHJ, *tails)
  return jax.tree.map(lambda x, y: x.at[layer].set(y.astype(x.dtype)), kv, new)
