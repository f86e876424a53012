"""Experts that are copies compute what the dense layer did, and noise tells them apart."""

import chex
import jax
import numpy as np
import pytest
from support.small_models import DENSE, GEMMA, HYBRID, MOE, initial, logits

from gspo_jax.models import transformer
from gspo_jax.models.upcycle import upcycle

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)


@pytest.mark.parametrize(
  "experts, per_token",
  [(4, 2), *(pytest.param(*x, marks=pytest.mark.long) for x in ((3, 1), (2, 2)))],
)
def test_without_noise_it_is_the_same_function(experts, per_token):
  params, key = initial(DENSE), jax.random.key(1)
  sparse, config = upcycle(params, DENSE, key, experts=experts, per_token=per_token)
  expected = jax.tree.map(lambda w: w.shape, transformer.table(config))
  assert jax.tree.map(lambda w: w.shape, sparse) == expected
  chex.assert_trees_all_close(
    logits(sparse, config, TOKENS), logits(params, DENSE, TOKENS), atol=1e-4
  )
  router = np.asarray(sparse.blocks[0].ffn.router)
  assert 0.5 < router.std() * DENSE.hidden_size**0.5 < 2, "it chooses, each token otherwise"


def test_noise_is_relative_and_differs_between_experts_and_matrices():
  params = initial(DENSE)
  sparse, _ = upcycle(params, DENSE, jax.random.key(1), experts=4, noise=0.1)
  for name in ("gate", "up", "down"):
    w_lE = np.asarray(getattr(sparse.blocks[0].ffn, name))
    w_l = np.asarray(getattr(params.blocks[0].ffn, name))[:, None]
    noise_lE = (w_lE / w_l - 1) / 0.1
    assert 0.9 < noise_lE.std() < 1.1 and abs(noise_lE.mean()) < 0.1
    assert np.abs(np.corrcoef(noise_lE[0].reshape(4, -1))[~np.eye(4, dtype=bool)]).max() < 0.2


@pytest.mark.parametrize("config", [MOE, GEMMA, HYBRID], ids=["moe", "gemma", "hybrid"])
def test_other_models_are_refused(config):
  with pytest.raises(
    ValueError, match="only a dense model with full attention and norms of inputs alone"
  ):
    upcycle(initial(config), config, jax.random.key(0))
