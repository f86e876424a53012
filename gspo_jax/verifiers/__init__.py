"""Verifiers of responses, for any trainer. Nothing here imports JAX or another part of gspo_jax."""
