"""The dense cache in 16 and 8 bits: half and a quarter of the bytes, none of them widened."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long

from gspo_jax.models.attention import attention, cache, triton
from gspo_jax.models.attention.blocks import Scores
from gspo_jax.settings.sizes import tiny_moe

l, B, K, H, S = 2, 4, 2, 8, 24
MODEL = dataclasses.replace(tiny_moe(32), num_layers=l, num_kv_heads=K, head_dim=H)
allocate = functools.partial(cache.allocate, MODEL, layers=[l])


def step(target, new_B1KH, position_B1):
  return target.with_blocks(
    [cache.write(target.block(0), jnp.int32(1), new_B1KH, new_B1KH, position_B1)[0]]
  )


def rows_of(target, new_lrTKH):
  rows = allocate(new_lrTKH.shape[1], new_lrTKH.shape[2], target.dtype)
  for layer, new_rTKH in enumerate(new_lrTKH):
    block, *_ = cache.write(rows.block(0), layer, new_rTKH, new_rTKH, jnp.zeros((2, 1), jnp.int32))
    rows = rows.with_blocks([block])
  return rows


def insert(target, new_lrTKH, index_r):
  return cache.insert(target, rows_of(target, new_lrTKH), index_r)


def copy_row(target, new_lrTKH, index_r):
  return cache.copy_row(target, index_r[0], rows_of(target, new_lrTKH), 1)


def arguments(write):
  random = np.random.default_rng(0)
  if write is step:
    return random.normal(size=(B, 1, K, H)), np.arange(B, dtype=np.int32)[:, None] * 3
  return random.normal(size=(l, 2, 5, K, H)), np.array([2, B], np.int32)


@pytest.mark.parametrize("write", [step, insert, copy_row])
def test_a_write_does_not_widen_the_cache(write):
  compiled = jax.jit(write).lower(allocate(B, S, jnp.bfloat16), *arguments(write)).compile()
  whole = rf"(f32|bf16)\[{l},{B},{K},({H},{S}|{S},{H})\]"
  assert not re.search(whole, compiled.as_text())


@pytest.mark.parametrize("write", [pytest.param(step, marks=pytest.mark.long), insert, copy_row])
def test_what_is_written_is_the_rounded_number(write):
  new, positions = arguments(write)
  narrow = write(allocate(B, S, jnp.bfloat16), new, positions)
  wide = write(allocate(B, S, jnp.float32), new.astype(jnp.bfloat16).astype(np.float32), positions)
  assert narrow.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
  for layer in range(l):
    ours = cache.read(narrow.block(0), layer, jnp.float32)
    for a, b in zip(ours, cache.read(wide.block(0), layer, jnp.float32)):
      np.testing.assert_array_equal(a, b)
  assert np.any(b)


@pytest.mark.parametrize(
  "programs, n, window, cap, sinks",
  [  # Whole rows, and parts of a single tile.
    (1, 2, 0, 0.0, True),
    (64, 4, 70, 0.0, False),
    (64, 20, 0, 5.0, False),
    pytest.param(1, 4, 70, 0.0, False, marks=pytest.mark.long),
    pytest.param(1, 20, 0, 5.0, False, marks=pytest.mark.long),
    pytest.param(64, 2, 0, 0.0, True, marks=pytest.mark.long),
  ],
)
def test_a_gpus_kernel_reads_the_positions_of_each_row(
  programs, n, window, cap, sinks, monkeypatch
):
  monkeypatch.setattr(triton, "PROGRAMS", programs)
  B, K, S, H = 4, 2, 160, 16  # Tiles of 32 positions.
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (B, 1, K * n, H), (B, K, H, S), (B, K, S, H)
  q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
  position, scores = jnp.array([0, 31, 100, S - 1]), Scores(H**-0.5, window, cap)
  scores = scores._replace(sink_N=jnp.linspace(-1, 3, K * n)) if sinks else scores
  expected = attention.attend_cache(q, k, v, position[:, None], scores)
  beyond = jnp.arange(S)[None] > (position | 31)[:, None]  # Keys in tiles without a position.
  k, v = (
    jnp.where(jnp.expand_dims(beyond, at), jnp.nan, x) for at, x in (((1, 2), k), ((1, 3), v))
  )
  actual = triton.attend(q[:, 0], k, v, position, scores)
  np.testing.assert_allclose(actual, expected[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("write", [step, *long((insert, copy_row))])
def test_int8_is_off_by_half_a_step_of_its_scale(write):
  new, positions = arguments(write)
  new = new.astype(np.float32)
  narrow, wide = (write(allocate(B, S, dtype), new, positions) for dtype in (jnp.int8, jnp.float32))
  assert narrow.dtype == jnp.int8 and narrow.positions.scale_lBK2S.any()
  for layer in range(l):
    ours, exact = (cache.read(x.block(0), layer, jnp.float32) for x in (narrow, wide))
    for axis, a, b in zip((2, 3), ours, exact):
      assert (abs(a - b).max(axis) <= abs(b).max(axis) / 254 * (1 + 1e-5)).all()
      assert np.any(a) == np.any(b) == np.any(a != b)


def test_a_write_returns_what_is_read():
  new_BTKH, position_BT = np.random.default_rng(1).normal(size=(B, 5, K, H)), np.zeros((B, 5), int)
  new_BTKH[0, 0] = 0  # A scale of 0.
  block, k_BTKH, v_BTKH = cache.write(
    allocate(B, S, jnp.int8).block(0), 1, jnp.float32(new_BTKH), jnp.float32(new_BTKH), position_BT
  )
  k_BKHS, v_BKSH = cache.read(block, 1, jnp.float32)
  np.testing.assert_array_equal(np.moveaxis(k_BKHS[..., :5], 3, 1), k_BTKH)
  np.testing.assert_array_equal(np.swapaxes(v_BKSH[:, :, :5], 1, 2), v_BTKH)
  assert not k_BTKH[0, 0].any()
