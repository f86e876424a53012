"""The dense cache in 16 bits costs what it should: half the bytes, none of them widened."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.models import cache

l, B, K, H, S = 2, 4, 2, 8, 24


def block(dtype):
  return jnp.zeros((l, B, K, H, S), dtype), jnp.zeros((l, B, K, S, H), dtype)


def step(k, v, new_B1KH, position_B1):
  return cache.write((k, v), jnp.int32(1), new_B1KH, new_B1KH, position_B1)


def insert(k, v, new_lrKTH, index_r):
  rows = cache.Cache((jnp.swapaxes(new_lrKTH, 3, 4),), (new_lrKTH,))
  out = cache.insert(cache.Cache((k,), (v,)), rows, index_r)
  return out.k_lBKHS, out.v_lBKSH


def arguments(write, dtype):
  random = np.random.default_rng(0)
  if write is step:
    return random.normal(size=(B, 1, K, H)).astype(dtype), np.arange(B, dtype=np.int32)[:, None] * 3
  return random.normal(size=(l, 2, K, 5, H)).astype(dtype), np.array([2, B], np.int32)


@pytest.mark.parametrize("write", [step, insert])
def test_a_write_does_not_widen_the_cache(write):
  compiled = jax.jit(write).lower(*block(jnp.bfloat16), *arguments(write, jnp.bfloat16)).compile()
  whole = rf"f32\[{l},{B},{K},({H},{S}|{S},{H})\]"
  assert not re.search(whole, compiled.as_text())


@pytest.mark.parametrize("write", [step, insert])
def test_what_is_written_is_the_rounded_number(write):
  new, where = arguments(write, jnp.bfloat16)
  narrow = write(*block(jnp.bfloat16), new, where)
  wide = write(*block(jnp.float32), new.astype(np.float32), where)
  for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide)):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    assert np.any(b)
