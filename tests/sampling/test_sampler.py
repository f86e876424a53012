"""The distribution that tokens are drawn from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.sampling import sampler

PLAIN = sampler.SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=4)


def config(**changes):
  return dataclasses.replace(PLAIN, **changes)


LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))


def distribution(**changes):
  """log-probabilities that tokens are drawn from."""
  kept = sampler.truncate(sampler.temper(LOGITS, config(**changes)), config(**changes))
  return np.asarray(jax.nn.log_softmax(kept))[0]


def probabilities(**changes):
  return np.exp(distribution(**changes))


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
  tokens, logp, full_logp = sampler.sample(
    jnp.broadcast_to(LOGITS, (rows, 4)), keys, jnp.zeros(rows, jnp.int32), config(top_k=3)
  )
  share = np.bincount(tokens, minlength=4) / rows
  np.testing.assert_allclose(share, np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.015)
  np.testing.assert_allclose(logp, distribution(top_k=3)[tokens], rtol=1e-5)
  np.testing.assert_allclose(full_logp, distribution()[tokens], rtol=1e-5)


def test_noise_depends_on_key_and_position_only():
  logits = jax.random.normal(jax.random.key(0), (6, 50))
  keys = row_keys(3, jnp.arange(6, dtype=jnp.uint32), jnp.zeros(6, jnp.int32))
  position = jnp.arange(6, dtype=jnp.int32)
  tokens, _, _ = sampler.sample(logits, keys, position, PLAIN)
  order = jnp.array([4, 2, 0])
  again, _, _ = sampler.sample(logits[order], keys[order], position[order], PLAIN)
  np.testing.assert_array_equal(again, tokens[order])
  other, _, _ = sampler.sample(logits, keys, position + 1, PLAIN)
  assert (other != tokens).any()


def test_greedy_is_the_argmax():
  logits = jax.random.normal(jax.random.key(0), (6, 50))
  keys = row_keys(3, jnp.arange(6, dtype=jnp.uint32), jnp.zeros(6, jnp.int32))
  tokens, _, _ = sampler.sample(logits, keys, jnp.zeros(6, jnp.int32), config(temperature=0.0))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize(
  "key, value",
  [("temperature", -1.0), ("top_k", -2), ("top_p", 0.0), ("min_p", 1.0), ("max_new_tokens", 0)],
)
def test_bad_settings_are_named(key, value):
  with pytest.raises(ValueError, match=f"sampling.{key}={value}"):
    config(**{key: value})
