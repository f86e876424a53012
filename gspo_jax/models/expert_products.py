"""Expert products: SwiGLU experts applied to the rows that chose them, in four formulations.

  blocks    a loop over blocks of rows that share an expert: on CPU for many tokens
  batched   one batched product with some rows of every expert: the fastest on CPU for few tokens
  ragged    `lax.ragged_dot` on rows sorted by expert
  megablox  JAX's Pallas grouped matmul for TPU (interpreted elsewhere)

All take x [X, D], gate weights and expert indices [X, k], and the weights of the E experts that
this device holds; index E means: held by another device. They return, in x's dtype, [X, D]:
Σ_k gate_k · expert_{index_k}(x) over the held experts. No buffer depends on the routing.
"""

import math

from gspo_jax import sharding
from gspo_jax.models.expert_blocks import ExpertWeights, apply_batched, apply_blocks, share
from gspo_jax.models.expert_groups import apply_megablox, apply_ragged

__all__ = ["FORMS", "PALLAS", "ExpertWeights", "choose", "share"]

FORMS = dict(
  blocks=apply_blocks, batched=apply_batched, ragged=apply_ragged, megablox=apply_megablox
)
PALLAS = (apply_megablox,)
FEW = 256  # assignments per expert up to which `batched` is faster than `blocks` on CPU


def choose(implementation: str, share: float = math.inf):
  """The named form, or for "auto" what suits the platform of the mesh and the load: `share`
  assignments per expert."""
  if implementation == "auto":
    on_cpu = "batched" if share <= FEW else "blocks"
    implementation = dict(cpu=on_cpu, tpu="megablox").get(sharding.platform(), "ragged")
  return FORMS[implementation]
