"""The cache in pages: its kernel, interpreted, and its tables, against plain forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import DENSE, GEMMA, initial

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.attention import pages
from gspo_jax.models.attention.blocks import Scores
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE
from gspo_jax.sharding import P

RNG = np.random.default_rng(0)
B, N, K, H, S, WIDTH, LAYERS, POOL = 4, 8, 4, 128, 16, 3, 2, 13


def filled(dtype):
  """Pages with numbers, owned by rows in any order."""
  slots = 32 if dtype == "int8" else S
  arrays = kv_cache.encode(
    jnp.asarray(RNG.normal(size=(LAYERS, POOL, K, 2, slots, H))), jnp.dtype(dtype)
  )
  table = jnp.asarray(RNG.permutation(POOL)[: B * WIDTH].reshape(B, WIDTH), jnp.int32)
  table = table.at[1].set(pages.NONE)
  return pages.Block(arrays[0], *arrays[1:] or [None], table)


def new(dtype):
  dtype = "float32" if dtype == "int8" else dtype
  return [jnp.asarray(RNG.normal(size=(B, 1, n, H)), dtype) for n in (N, K, K)]


SCORES = {  # And the dtype that is not long.
  "float32": Scores(0.1, 0, 5.0),
  "bfloat16": Scores(0.1, 20),
  "int8": Scores(0.1, 20, sink_N=np.arange(8.0) / 4),
  "": Scores(0.1),
}


@pytest.mark.parametrize(
  "scores, dtype",
  [
    pytest.param(
      scores, dtype, id=f"{scores}-{dtype}", marks=() if dtype == short else pytest.mark.long
    )
    for short, scores in SCORES.items()
    for dtype in ("float32", "bfloat16", "int8")
  ],
)
def test_the_kernel_reads_and_writes_what_the_plain_form_does(scores, dtype):
  position = jnp.array([[0], [5], [32], [47]], jnp.int32)  # the second row has no pages
  arguments = (*new(dtype), filled(dtype), jnp.int32(1), position, scores)
  y, cache = pages.attend(*arguments, "kernel")
  expected, plain = pages.attend(*arguments, "plain")
  rows = np.array([0, 2, 3])
  atol = 2e-2 if dtype == "bfloat16" else 1e-5
  np.testing.assert_allclose(
    np.asarray(y, np.float32)[rows], np.asarray(expected, np.float32)[rows], atol=atol
  )
  for written, by_plain in zip(cache.arrays, plain.arrays, strict=True):
    np.testing.assert_array_equal(written, by_plain)
  changed = np.asarray(cache.kv_lpK2SH != arguments[3].kv_lpK2SH).any((2, 3, 5))
  assert changed.sum() == 3 and not changed[0].any()


@pytest.mark.long
def test_a_model_decodes_with_the_kernel_as_without_a_cache():
  """Gemma: local layers and global ones, soft bounds; heads are split over `tensor`."""
  model = dataclasses.replace(GEMMA, head_dim=128, sliding_window=20)
  tokens = RNG.integers(0, model.vocab_size, (4, 36), np.int32)
  start = 31
  params = initial(model)
  expected = transformer.forward(params, model, jnp.asarray(tokens)).hidden_BTD
  mesh = sharding.make_mesh(MeshConfig(2, 1, 2, 2))

  @jax.jit
  def decode(params, tokens):
    rows = kv_cache.allocate(model, 4, start, jnp.float32)
    out = transformer.forward(params, model, tokens[:, :start], cache=rows)
    cache = pages.allocate(model, 4, 48, 12, 16, jnp.float32)

    def fill(cache, rows, length):
      cache, table, _ = pages.insert(cache, rows, length)  # each device has one row, three pages
      return cache.replace(table_Bn=jnp.pad(table, ((0, 0), (0, 1)), constant_values=2))

    length = sharding.reshard(jnp.full(4, start, jnp.int32), P(sharding.BATCH))
    arguments = cache, out.cache, length
    specs = jax.tree.map(lambda x: kv_cache.spec(x) if x.ndim > 4 else P(sharding.BATCH), arguments)
    cache = sharding.shard_map(fill, specs, specs[0])(*arguments)
    compute = dataclasses.replace(REFERENCE, attention="splash")
    hidden = []
    for t in range(start, 36):
      position = jnp.full((4, 1), t, jnp.int32)
      out = transformer.forward(
        params, model, tokens[:, t : t + 1], positions=position, cache=cache, compute=compute
      )
      cache = out.cache
      hidden.append(sharding.reshard(out.hidden_BTD, P()))
    return jnp.concatenate(hidden, axis=1)

  with jax.set_mesh(mesh):
    layout = transformer.shardings(model, sharding.ROLLOUT, mesh)
    hidden = decode(jax.device_put(params, layout), tokens)
  np.testing.assert_allclose(hidden, expected[:, start:], atol=2e-4)


def small(rows=2, width=4, pool=8):
  cache = pages.allocate(DENSE, rows, 4 * width, pool, 4, jnp.float32)
  numbers = jnp.asarray(RNG.normal(size=cache.blocks[0].kv_lpK2SH.shape), jnp.float32)
  return cache.replace(blocks=(pages.Block(numbers),))


def test_a_page_that_no_table_names_is_free():
  cache = small()
  assert pages.free(cache).all()
  table = cache.table_Bn.at[0].set(jnp.array([6, 1, -1, -1]))
  waiting = jnp.array([[3, 6, -1]])
  free = pages.free(cache.replace(table_Bn=table), waiting)
  np.testing.assert_array_equal(np.flatnonzero(~free), [1, 3, 6])


def test_rows_get_pages_in_turn_until_there_are_none():
  cache = small().replace(table_Bn=jnp.array([[0, 2, 4, -1], [-1] * 4]))
  rows = kv_cache.allocate(DENSE, 3, 10, jnp.float32)
  rows = jax.tree.map(lambda x: jnp.asarray(RNG.normal(size=x.shape), jnp.float32), rows)
  length = jnp.array([9, 0, 10])
  got, table, fits = pages.insert(cache, rows, length)
  np.testing.assert_array_equal(table, [[1, 3, 5], [-1] * 3, [-1] * 3])  # five pages were free
  np.testing.assert_array_equal(fits, [True, True, False])
  kv_lpK2SH, block = got.blocks[0].kv_lpK2SH, rows.blocks[0]
  for position in range(9):
    page = kv_lpK2SH[:, table[0, position // 4], :, :, position % 4]
    np.testing.assert_array_equal(page[:, :, 0], block.k_lBKHS[:, 0, :, :, position])
    np.testing.assert_array_equal(page[:, :, 1], block.v_lBKSH[:, 0, :, position])
  rows_kept = np.array([0, 2, 4])
  before_lpK2SH = cache.blocks[0].kv_lpK2SH
  np.testing.assert_array_equal(kv_lpK2SH[:, rows_kept], before_lpK2SH[:, rows_kept])


@pytest.mark.parametrize("position, shared, copied", [(9, 2, True), (8, 2, False), (0, 0, False)])
def test_a_row_shares_whole_pages_and_copies_the_last(position, shared, copied):
  prefix = jnp.array([*[5, 1, 7][: -(-position // 4)], -1], jnp.int32)
  cache = small()
  got = pages.begin(cache, jnp.int32(1), prefix, jnp.int32(position), jnp.int32(2))
  table = [*[5, 1][:shared], 2]
  np.testing.assert_array_equal(got.table_Bn[1, : shared + 1], table)
  assert (got.table_Bn[1, shared + 1 :] == pages.NONE).all()
  source = 7 if copied else 2
  before, after = (x.blocks[0].kv_lpK2SH for x in (cache, got))
  np.testing.assert_array_equal(after[:, 2], before[:, source])


def test_pages_take_one_token_at_a_time():
  q, k, v = (jnp.zeros((B, 2, n, H)) for n in (N, K, K))
  with pytest.raises(ValueError, match="2 queries per row"):
    pages.attend(q, k, v, filled("float32"), 0, jnp.zeros((B, 2), int), Scores(1.0), "plain")
