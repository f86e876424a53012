"""Small models and their weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax.models import transformer
from gspo_jax.models.experts.blocks import ExpertWeights
from gspo_jax.settings.model import LinearConfig, ModelConfig, RopeConfig
from gspo_jax.settings.sizes import tiny_dense, tiny_gemma, tiny_moe

SMALL = dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
DENSE = dataclasses.replace(tiny_dense(64), intermediate_size=48, **SMALL)
# Layers are unrolled on CPU: where they are not the question, one compiles faster.
SHALLOW = dataclasses.replace(DENSE, num_layers=1)
GEMMA = dataclasses.replace(
  tiny_gemma(64), intermediate_size=48, sliding_window=4, sliding_window_pattern=2, **SMALL
)
MOE = dataclasses.replace(tiny_moe(64), moe_intermediate_size=16, **SMALL)
SHALLOW_MOE = dataclasses.replace(MOE, num_layers=1)
# Two layers of linear attention in one stack, then one of full attention.
LINEAR = dict(
  family="qwen3_5",
  num_layers=3,
  linear=LinearConfig(pattern=3, key_heads=2, value_heads=4, key_dim=8, value_dim=12),
  rope=RopeConfig(share=0.25),
)
HYBRID = dataclasses.replace(DENSE, **LINEAR)
HYBRID_MOE = dataclasses.replace(MOE, **LINEAR)
# One layer of linear attention, and one of full attention.
SHALLOW_HYBRID = dataclasses.replace(
  HYBRID, num_layers=2, linear=dataclasses.replace(HYBRID.linear, pattern=2)
)
MODELS = dict(dense=DENSE, gemma=GEMMA, moe=MOE)

SMALLER = dict(hidden_size=16, head_dim=8)
SMALLER_DENSE = dataclasses.replace(
  DENSE, vocab_size=32, num_layers=1, intermediate_size=16, **SMALLER
)
SMALLER_MOE = dataclasses.replace(MOE, vocab_size=32, moe_intermediate_size=8, **SMALLER)


@functools.cache
def on_host(model: ModelConfig, seed: int = 0) -> transformer.Params:
  return jax.device_get(transformer.init(model, jax.random.key(seed)))


def initial(model: ModelConfig, seed: int = 0) -> transformer.Params:
  """Random weights in new arrays: updates donate them."""
  return jax.tree.map(jnp.array, on_host(model, seed))


def expert_inputs(tokens=37, E=8, k=2, D=16, F=12, experts=None, activation=None):
  """x [X, D], gate weights and experts [X, k], random ones if there are none, and weights.

  With an activation the experts have biases.
  """
  keys = iter(jax.random.split(jax.random.key(0), 6))
  experts_Xk = jax.random.randint(next(keys), (tokens, k), 0, E) if experts is None else experts
  shapes = (E, D, F), (E, D, F), (E, F, D)
  w = ExpertWeights(*[jax.random.normal(next(keys), s) / s[1] ** 0.5 for s in shapes])
  if activation:
    gate_bias, up_bias = jax.random.normal(jax.random.key(1), (2, E, F))
    w = w.replace(gate_bias=gate_bias, up_bias=up_bias, activation=activation)
  x_XD, gate_Xk = (
    jax.random.normal(next(keys), (tokens, D)),
    jax.random.uniform(next(keys), (tokens, k)),
  )
  return x_XD, gate_Xk, experts_Xk, w


def plain_experts(x_XD, gate_Xk, experts_Xk, w):
  """Every expert on every token, then the choice."""
  a_XEF, u_XEF = (jnp.einsum("XD,EDF->XEF", x_XD, m) for m in (w.gate, w.up))
  if w.gate_bias is not None:
    a_XEF, u_XEF = a_XEF + w.gate_bias[None], u_XEF + w.up_bias[None]
  y_XED = jnp.einsum("XEF,EFD->XED", w.activation(a_XEF, u_XEF), w.down)
  return jnp.einsum("XkE,XED,Xk->XD", jax.nn.one_hot(experts_Xk, len(w.gate)), y_XED, gate_Xk)


# The model by itself, compiled once for all tests of a process.
forward = jax.jit(transformer.forward, static_argnums=1)
logits = jax.jit(transformer.logits, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1, static_argnames="temperature")
def next_logp(params, model, tokens_BT, temperature=1.0):
  """Log-probabilities of all tokens but the first, [B, T - 1], as the trainer finds them."""
  hidden_BTD = transformer.forward(params, model, tokens_BT).hidden_BTD[:, :-1]
  targets = tokens_BT[:, 1:]
  return transformer.token_logp(params, model, hidden_BTD, targets, temperature=temperature)[0]
