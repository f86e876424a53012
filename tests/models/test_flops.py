"""Operations of a model, counted by hand."""

import dataclasses

import numpy as np
import pytest

from gspo_jax.models import flops
from gspo_jax.settings.model_groups import LinearConfig
from gspo_jax.settings.sizes import PUBLISHED, tiny_gemma


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


def test_lengths_of_a_rollout_do_not_overflow():
  config = PUBLISHED["Qwen3-8B"]
  prompt_B, end_B = np.full(8, 1024, np.int32), np.full(8, 20_000, np.int32)  # As in `Rollout`.
  prompt, response = flops.work(config, 1, 1024, 1024), flops.work(config, 1, 18_976, 20_000)
  expected = prompt.forward() - prompt.head + 8 * response.forward()
  assert flops.forward_flops(config, prompt_B[:1], prompt_B, end_B) == pytest.approx(expected)


def test_linear_layers_have_states_and_chunks_instead_of_pairs():
  sizes = dict(key_heads=2, value_heads=6, key_dim=16, value_dim=8)
  windows = dict(sliding_window=0, sliding_window_pattern=1)
  full = dataclasses.replace(tiny_gemma(64), num_layers=4, **windows)
  hybrid = dataclasses.replace(full, linear=LinearConfig(pattern=2, **sizes))
  full_work, hybrid_work = (flops.work(c, 3, 200, 200) for c in (full, hybrid))
  assert full_work.linear == 0 and hybrid_work.attention == full_work.attention / 2
  states, chunk = 3 * 6 * 16 * 8, 64 * (2 * 2 * 16 + 2 * 6 * 8)
  assert hybrid_work.linear == 2 * 2 * 3 * 200 * (states + chunk)
  assert flops.work(hybrid, 3, 16, 200).linear == 2 * 2 * 3 * 16 * (states + chunk / 4)
  decoding = flops.work(hybrid, 3, 16, 200, decoding=True)
  assert decoding.linear == 2 * 2 * 3 * 16 * states
  assert decoding.forward() == decoding.dense + decoding.attention + decoding.linear + decoding.head
  lengths = np.array([200, 16])
  assert list(flops.work(hybrid, 1, lengths, lengths).linear) == [
    4 * 200 * (states + chunk),
    4 * 16 * (states + chunk / 4),
  ]
