"""Experts that are copies of a dense model, as files: the same function with the same tokenizer."""

import numpy as np
from support.small_models import DENSE, initial, logits

from experiments import smollm2
from gspo_jax.models import hf

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)


def test_a_directory_with_experts(tmp_path):
  dense, params = tmp_path / "dense", initial(DENSE)
  hf.save(dense, params, DENSE)
  (dense / "tokenizer_config.json").write_text("{}")
  expected = logits(params, DENSE, TOKENS)
  for noise in (0.0, 0.01):
    directory = smollm2.with_experts(dense, tmp_path / f"moe_{noise}", experts=3, noise=noise)
    sparse, config = hf.load(directory)
    assert (config.num_experts, config.experts_per_token) == (3, 2)
    assert (directory / "tokenizer_config.json").read_text() == "{}"
    away = np.abs(logits(sparse, config, TOKENS) - expected).max()
    assert (away < 1e-4) if not noise else (1e-4 < away < 0.1)
    experts_lE = np.asarray(sparse.blocks[0].ffn.gate)
    assert (experts_lE[:, 0] == experts_lE[:, 1]).all() == (not noise)
