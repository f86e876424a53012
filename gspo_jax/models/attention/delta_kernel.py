"""Pallas kernels: one position of the gated delta rule, with the states updated in place.

The kernels read and write each state once. XLA would read it twice: for the sums over the old
state, and for the new state.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from gspo_jax import sharding
from gspo_jax.models.attention import delta_rule
from gspo_jax.models.attention.delta_rule import Inputs

BLOCK = 2**21  # Maximum bytes of states in a grid step on TPU.
WIDTH = 32  # Maximum number of a state's J columns in one program on GPU.
LANES, SUBLANES = 128, 8  # Sides of a hardware tile on TPU.


def step(inputs: Inputs, state_lBKRHJ: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes one position, T = 1, as `delta_rule.step` does.

  Returns outputs [B, 1, K, R, J], and the states of all layers, with those of `layer` updated. If
  no kernel supports the platform and the sizes H and J, `delta_rule.step` computes the position.
  """
  *_, H, J = state_lBKRHJ.shape
  platform = sharding.platform()
  if platform == "tpu" and H % LANES == 0 and J % LANES == 0:
    y_BKRJ, state_lBKRHJ = step_tpu(inputs, state_lBKRHJ, layer)
  elif platform == "gpu" and H.bit_count() == 1 and math.gcd(J, WIDTH) >= 16:
    y_BKRJ, state_lBKRHJ = step_gpu(inputs, state_lBKRHJ, layer)
  else:
    y_B1KRJ, state_BKRHJ = delta_rule.step(inputs, state_lBKRHJ[layer])
    return y_B1KRJ, state_lBKRHJ.at[layer].set(state_BKRHJ)
  return y_BKRJ[:, None], state_lBKRHJ


def _update(state_HJ, q_H1, k_H1, v_1J, beta_1J, decay_1J, qk):
  """Returns output and new state of one head, from one read of the old state.

  For the old state S', the new state is S = e^g S' + k uᵀ, and the output is
  y = Sᵀq = e^g S'ᵀq + (k·q) u.

  qk: product k·q.
  """
  recalled_1J = decay_1J * jnp.sum(state_HJ * k_H1, axis=0, keepdims=True)
  read_1J = decay_1J * jnp.sum(state_HJ * q_H1, axis=0, keepdims=True)
  u_1J = beta_1J * (v_1J - recalled_1J)
  return read_1J + qk * u_1J, state_HJ * decay_1J + k_H1 * u_1J


def _arrays(inputs: Inputs) -> list[jax.Array]:
  """Returns queries, keys, values, strengths and decays of the position in float32.

  Strengths and decays are repeated over the width J, so that the kernels read no scalars.
  """
  q_BKH, k_BKH, v_BKRJ, g_BKR, beta_BKR = (x[:, 0].astype(jnp.float32) for x in inputs)
  repeated = (jnp.broadcast_to(x[..., None], v_BKRJ.shape) for x in (beta_BKR, jnp.exp(g_BKR)))
  return [q_BKH, k_BKH, v_BKRJ, *repeated]


def step_tpu(
  inputs: Inputs, state_lBKRHJ: jax.Array, layer: jax.Array, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Runs the kernel for TPU. A grid step has one row, and as many key heads as `BLOCK` permits.

  interpret: whether to run in Pallas' interpreter, without a TPU.
  """
  _, B, K, R, H, J = state_lBKRHJ.shape
  sizes = [k for k in range(1, K + 1) if K % k == 0 and (k == K or k % SUBLANES == 0)]
  k = max((k for k in sizes if 4 * k * R * H * J <= BLOCK), default=sizes[0])

  def kernel(_, q, key, v, beta, decay, state, y, new_state):
    q_kH, k_kH = q[0], key[0]
    qk_k1 = jnp.sum(q_kH * k_kH, axis=1, keepdims=True)
    q_Hk, k_Hk = q_kH.T, k_kH.T
    for i in range(k):
      for r in range(R):
        y[0, i, r : r + 1], new_state[0, 0, i, r] = _update(
          state[0, 0, i, r],
          q_Hk[:, i : i + 1],
          k_Hk[:, i : i + 1],
          *(x[0, i, r : r + 1] for x in (v, beta, decay)),
          qk_k1[i : i + 1],
        )

  key_spec = pl.BlockSpec((1, k, H), lambda b, i, _: (b, i, 0))
  value_spec = pl.BlockSpec((1, k, R, J), lambda b, i, _: (b, i, 0, 0))
  state_spec = pl.BlockSpec((1, 1, k, R, H, J), lambda b, i, layer: (layer[0], b, i, 0, 0, 0))
  arrays = _arrays(inputs)
  number = B * K * R * H * J
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B, K // k),
      in_specs=[key_spec, key_spec, value_spec, value_spec, value_spec, state_spec],
      out_specs=[value_spec, state_spec],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((B, K, R, J), jnp.float32),
      jax.ShapeDtypeStruct(state_lBKRHJ.shape, jnp.float32),
    ],
    input_output_aliases={1 + len(arrays): 1},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    cost_estimate=pl.CostEstimate(
      flops=7 * number,
      bytes_accessed=4 * (2 * number + sum(x.size for x in arrays) + B * K * R * J),
      transcendentals=0,
    ),
    interpret=interpret,
    name="delta_step",
  )(jnp.asarray(layer, jnp.int32).reshape(1), *arrays, state_lBKRHJ)


def step_gpu(
  inputs: Inputs, state_lBKRHJ: jax.Array, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Runs the kernel for NVIDIA GPUs. A program has some columns (J) of one value head's state."""
  _, B, K, R, H, J = state_lBKRHJ.shape
  width = math.gcd(J, WIDTH)

  def kernel(layer, q, key, v, beta, decay, state, y, new_state):
    b, head, columns = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * width, width)
    i, r = head // R, head % R
    q_H, k_H = q[b, i], key[b, i]
    place = layer[0], b, i, r, slice(None), columns
    y_1J, state_HJ = _update(
      state[place],
      q_H[:, None],
      k_H[:, None],
      *(x[b, i, r, columns][None] for x in (v, beta, decay)),
      jnp.sum(q_H * k_H),
    )
    new_state[place] = state_HJ
    y[b, i, r, columns] = y_1J[0]

  arrays = _arrays(inputs)
  number = B * K * R * H * J
  call = pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct((B, K, R, J), jnp.float32),
      jax.ShapeDtypeStruct(state_lBKRHJ.shape, jnp.float32),
    ],
    grid=(B, K * R, J // width),
    input_output_aliases={1 + len(arrays): 1},
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
    interpret=sharding.platform() != "gpu",
    name="delta_step",
  )
  moved = 4 * (2 * number + sum(x.size for x in arrays) + B * K * R * J)
  with jax.named_scope(f"hbm_bytes={moved}"):  # `aot` reads this name.
    return call(jnp.asarray(layer, jnp.int32).reshape(1), *arrays, state_lBKRHJ)
