"""The distribution that tokens are drawn from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long

from gspo_jax.sampling import sampler
from gspo_jax.settings.sampling import SamplingConfig

PLAIN = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=4)


def config(**changes):
  return dataclasses.replace(PLAIN, **changes)


LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))


def distribution(**changes):
  """log-probabilities that tokens are drawn from."""
  rest = sampler.truncate(sampler.temper(LOGITS, config(**changes)), config(**changes))
  return np.asarray(jax.nn.log_softmax(rest))[0]


def probabilities(**changes):
  return np.exp(distribution(**changes))


def normal(*shape):
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


# One program in the place of many small ones.
sample = jax.jit(sampler.sample, static_argnums=3, static_argnames="vocabulary")


@jax.jit
def row_keys(seed, prompts, samples):
  return jax.vmap(sampler.row_key, (None, 0, 0))(seed, prompts, samples)


def test_truncation_renormalises():
  np.testing.assert_allclose(probabilities(top_k=2), [2 / 3, 1 / 3, 0, 0], rtol=1e-5)
  np.testing.assert_allclose(probabilities(top_p=0.7), [2 / 3, 1 / 3, 0, 0], rtol=1e-5)
  np.testing.assert_allclose(probabilities(top_p=0.01), [1, 0, 0, 0], rtol=1e-5)
  np.testing.assert_allclose(probabilities(top_p=1.0), [0.5, 0.25, 0.15, 0.1], rtol=1e-5)
  np.testing.assert_allclose(probabilities(min_p=0.29), [5 / 9, 2.5 / 9, 1.5 / 9, 0], rtol=1e-5)
  np.testing.assert_allclose(probabilities(min_p=0.31), [2 / 3, 1 / 3, 0, 0], rtol=1e-5)
  np.testing.assert_allclose(probabilities(top_k=3, min_p=0.31), [2 / 3, 1 / 3, 0, 0], rtol=1e-5)


def test_temperature_sharpens():
  expected = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
  np.testing.assert_allclose(probabilities(temperature=0.5), expected / expected.sum(), rtol=1e-5)


def test_tokens_come_at_their_probability():
  rows = 20_000
  keys = row_keys(0, jnp.zeros(rows, jnp.uint32), jnp.arange(rows))
  tokens, logp, full_logp = sample(
    jnp.broadcast_to(LOGITS, (rows, 4)), keys, jnp.zeros(rows, jnp.int32), config(top_k=3)
  )
  share = np.bincount(tokens, minlength=4) / rows
  np.testing.assert_allclose(share, np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.015)
  np.testing.assert_allclose(logp, distribution(top_k=3)[tokens], rtol=1e-5)
  np.testing.assert_allclose(full_logp, distribution()[tokens], rtol=1e-5)


@pytest.mark.parametrize("size", [*long((5, 64)), 1000])
def test_every_token_of_a_vocabulary_comes_at_its_probability(size):
  """Chi-square over blocks of any size, with one that is not full."""
  rows, logits = 20_000, np.random.default_rng(size).normal(size=size)
  keys = row_keys(1, jnp.zeros(rows, jnp.uint32), jnp.arange(rows))
  tokens, logp, _ = sample(
    jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, size)), keys, jnp.arange(rows), PLAIN
  )
  p = np.exp(logits) / np.exp(logits).sum()
  np.testing.assert_allclose(logp, np.log(p)[tokens], atol=1e-5)
  expected = rows * p
  chi_square = ((np.bincount(tokens, minlength=size) - expected) ** 2 / expected).sum()
  assert abs(chi_square - (size - 1)) < 4 * np.sqrt(2 * (size - 1))


def test_tokens_that_noise_of_23_bits_cannot_reach_are_drawn():
  """1 % of the probability, spread over the vocabulary of Qwen3: 6.6e-8 for a token."""
  vocabulary, rows, batches = 151_936, 32, 192
  logits_V = jnp.full(vocabulary, jnp.log(0.01 / (vocabulary - 1))).at[7].set(jnp.log(0.99))

  @jax.jit
  def draw(first):
    keys = row_keys(2, jnp.zeros(rows, jnp.uint32), first + jnp.arange(rows))
    logits_BV = jnp.broadcast_to(logits_V, (rows, vocabulary))
    return sampler.sample(logits_BV, keys, jnp.zeros(rows, jnp.int32), PLAIN)[:2]

  tokens, logp = (np.concatenate(x) for x in zip(*(draw(rows * i) for i in range(batches))))
  rare = tokens != 7
  assert 42 < rare.sum() < 80  # 61 are due, give or take 8; 27 come with noise of 23 bits
  np.testing.assert_allclose(logp[rare], np.log(0.01 / (vocabulary - 1)), atol=1e-3)
  assert np.ptp(tokens[rare]) > vocabulary / 2


def test_noise_depends_on_key_and_position_only():
  logits = normal(6, 50)
  keys = row_keys(3, jnp.arange(6, dtype=jnp.uint32), jnp.zeros(6, jnp.int32))
  position = jnp.arange(6, dtype=jnp.int32)
  tokens, _, _ = sample(logits, keys, position, PLAIN)
  order = jnp.array([4, 2, 0])
  again, _, _ = sample(logits[order], keys[order], position[order], PLAIN)
  np.testing.assert_array_equal(again, tokens[order])
  other, _, _ = sample(logits, keys, position + 1, PLAIN)
  assert (other != tokens).any()


def test_greedy_is_the_argmax():
  logits = normal(6, 50)
  keys = row_keys(3, jnp.arange(6, dtype=jnp.uint32), jnp.zeros(6, jnp.int32))
  tokens, _, _ = sample(logits, keys, jnp.zeros(6, jnp.int32), config(temperature=0.0))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize(
  "changes",
  [{}, dict(top_k=3), pytest.param(dict(top_p=0.9), marks=pytest.mark.long), dict(temperature=0.0)],
)
def test_ids_beyond_the_tokenizers_are_not_drawn(changes):
  """A padded vocabulary's: they stay in the distribution that the trainer has."""
  rows, likely = 500, jnp.concatenate([LOGITS, jnp.full((1, 60), 2.0)], axis=1)
  logits = jnp.broadcast_to(likely, (rows, 64))
  keys = row_keys(0, jnp.zeros(rows, jnp.uint32), jnp.arange(rows))
  arguments = logits, keys, jnp.zeros(rows, jnp.int32), config(**changes)
  assert (np.asarray(sample(*arguments)[0]) >= 4).mean() > 0.9
  tokens, logp, full_logp = sample(*arguments, vocabulary=4)
  assert max(tokens) < 4
  np.testing.assert_allclose(full_logp, jax.nn.log_softmax(likely)[0, tokens], rtol=1e-5)
  if config(**changes).untruncated:
    np.testing.assert_array_equal(logp, full_logp)
  if changes.get("top_k"):
    tempered = sampler.mask_beyond(sampler.temper(logits, config(**changes)), 4)
    support = sampler.support(tempered, config(**changes))
    assert support.max() < 4
    np.testing.assert_array_equal(sample(*arguments, support, vocabulary=4)[0], tokens)
