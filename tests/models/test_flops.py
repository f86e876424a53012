"""Operations of a model, counted by hand."""

import dataclasses

import numpy as np

from gspo_jax.models import flops
from gspo_jax.settings.model import tiny_gemma


def test_local_layers_see_their_window_and_no_more():
  config = dataclasses.replace(tiny_gemma(64), num_layers=5, sliding_window=7)  # four are local
  pairs = np.minimum(np.arange(20) + 1, 7).sum() * 4 + (np.arange(20) + 1).sum()
  products = 4 * config.num_heads * config.head_dim
  assert flops.work(config, 3, 20, 20).attention == 3 * products * pairs
  last = 4 * np.minimum(np.arange(14, 20) + 1, 7).sum() + (np.arange(14, 20) + 1).sum()
  assert flops.work(config, 1, 6, 20).attention == products * last
  # As utilisation asks: of many lengths at once.
  lengths = np.array([20, 3])
  assert flops.work(config, 1, lengths, lengths).attention[0] == products * pairs
