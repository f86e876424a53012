"""Verifiers of responses, for any trainer. They import neither JAX nor the rest of gspo_jax."""
