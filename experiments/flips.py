"""Flips recorded experts of an engine's responses."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engines import ChangedEngine
from experiments.noise import generator
from gspo_jax import main
from gspo_jax.models import transformer
from gspo_jax.models.experts.routing import NO_EXPERT
from gspo_jax.run import Run
from gspo_jax.sampling import Response
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig

PIECE = 64  # Lengths are padded to multiples of it, so that few programs are compiled.


def flip_experts(
  params: Any,
  response: Response,
  probability: float,
  model: ModelConfig,
  compute: ComputeConfig = REFERENCE,
) -> Response:
  """Replaces recorded experts by the router's next best.

  A flip replaces the token's expert of the lowest score in one layer. Whether a token after the
  prompt has a flip depends on the request's seed, the prompt, the sample number, the token's
  position and the layer alone.

  Args:
    params: the trainer's parameters.
    response: response with recorded experts. Without, as in evaluations, it is returned unchanged.
    probability: probability of a flip, per token and layer.
    model: configuration of the model.
    compute: dtype and implementations of the forward pass.
  """
  if response.experts is None:
    return response
  experts_Tlk, start = response.experts, len(response.request.prompt)
  T, layers, _ = experts_Tlk.shape
  flipped_Tl = np.zeros((T, layers), bool)
  rng = generator(response.request, response.sample)
  flipped_Tl[start:] = rng.random((T - start, layers)) < probability
  tokens_T = np.append(response.request.prefix, response.tokens)[:T].astype(np.int32)
  after = (0, -T % PIECE)
  padded_Tlk = np.pad(experts_Tlk, (after, (0, 0), (0, 0)), constant_values=NO_EXPERT)
  ranked_Tlj = rank_experts(params, np.pad(tokens_T, after), padded_Tlk, model, compute)
  changed_Tlk = with_next_best(experts_Tlk, ranked_Tlj[:T])
  experts = np.where(flipped_Tl[..., None], changed_Tlk, experts_Tlk)
  return dataclasses.replace(response, experts=experts)


def with_next_best(experts_Xk: np.ndarray, ranked_Xj: np.ndarray) -> np.ndarray:
  """Replaces the expert of the lowest score by the best expert without this token.

  Args:
    experts_Xk: chosen experts of X tokens, in any order.
    ranked_Xj: the k + 1 experts with the highest scores, by descending score.
  """
  same_Xkj = experts_Xk[..., :, None] == ranked_Xj[..., None, :]
  unused_Xj = ~same_Xkj.any(-2)
  best_X1 = np.take_along_axis(ranked_Xj, unused_Xj.argmax(-1)[..., None], -1)
  # An expert beyond the k + 1 has a lower score than any of them.
  rank_Xk = np.where(same_Xkj.any(-1), same_Xkj.argmax(-1), ranked_Xj.shape[-1])
  lowest_Xk = np.arange(experts_Xk.shape[-1]) == rank_Xk.argmax(-1)[..., None]
  return np.where(lowest_Xk, best_X1, experts_Xk).astype(experts_Xk.dtype)


def rank_experts(
  params: Any,
  tokens_T: np.ndarray,
  experts_Tlk: np.ndarray,
  model: ModelConfig,
  compute: ComputeConfig,
) -> np.ndarray:
  """Ranks the experts of each token and layer.

  Returns the k + 1 experts with the highest scores, int32 [T, l, k + 1], by descending score.
  """
  ranked_llTj = np.asarray(_rank_in_rows(params, tokens_T, experts_Tlk, model, compute))
  return np.moveaxis(np.diagonal(ranked_llTj), -1, 1)


@functools.partial(jax.jit, static_argnames=("model", "compute"))
def _rank_in_rows(
  params: Any,
  tokens_T: jax.Array,
  experts_Tlk: jax.Array,
  model: ModelConfig,
  compute: ComputeConfig,
) -> jax.Array:
  """Returns experts of all layers, one row per layer, int32 [l, rows, T, k + 1].

  The router of layer i chooses k + 1 experts in row i. All other layers of the row replay the
  recorded experts, with no expert beside them. So each router sees the sampler's hidden states.
  """
  T, layers, _ = experts_Tlk.shape
  no_more = jnp.full((T, layers, 1), model.num_experts, jnp.int32)
  experts_lTj = jnp.moveaxis(jnp.concatenate([experts_Tlk, no_more], axis=-1), 1, 0)
  own_ll = jnp.eye(layers, dtype=bool)
  return transformer.forward(
    params,
    dataclasses.replace(model, experts_per_token=model.experts_per_token + 1),
    jnp.broadcast_to(tokens_T, (layers, T)),
    routing=jnp.where(own_ll[..., None, None], NO_EXPERT, experts_lTj[:, None]),
    compute=compute,
  ).routing_lBTk


def train(run: Run, probability: str) -> None:
  """Trains with flipped experts in the sampler's records."""
  c = run.config
  change = functools.partial(
    flip_experts, probability=float(probability), model=c.model, compute=c.compute
  )
  main.run_job(dataclasses.replace(run, engine=ChangedEngine(run.engine, change)))
