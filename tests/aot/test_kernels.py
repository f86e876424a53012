"""Bytes of Pallas kernels, against a walk over their grids."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from support.aot import needs_libtpu

from gspo_jax.aot import compiler, hlo_costs
from gspo_jax.models.experts import groups
from gspo_jax.system import accelerators

N, K, T, H = 4, 2, 4096, 128  # query heads, key heads, positions, width
Q, KV = 512, 1024  # blocks
WIDE, NARROW = (f"bf16[{heads},{T},{H}]{{2,1,0}}" for heads in (N, K))
SEGMENTS = f"s32[{T},128]{{1,0}}", f"s32[8,{T}]{{1,0}}"
MASK, MASK_BYTES = f"s8[1,{T // Q},{T // KV}]{{2,1,0}}", (T // Q) * (T // KV)


def program(name, operands, result, attributes=""):
  """A program of one kernel."""
  lines = "\n".join(f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands))
  names = ", ".join(f"%p{i}" for i in range(len(operands)))
  kernel = f'custom-call({names}), custom_call_target="tpu_custom_call"{attributes}'
  return (
    f"HloModule m\n\nENTRY %main () -> f32[] {{\n{lines}\n  ROOT %{name} = {result} {kernel}\n}}"
  )


def fetched(grid, size, index):
  """Bytes of a grid's blocks, read whenever the index changes.

  index: function of a grid point; None for a masked block, without a fetch.
  """
  total, last = 0, None
  for point in grid:
    block = index(*point)
    if block is not None and block != last:
      total, last = total + size, block
  return total


def visible(i, j):
  """Whether a block of queries sees anything of a block of keys."""
  return (i + 1) * Q > j * KV


def test_splash_reads_keys_again_for_every_block_of_queries():
  operands = [MASK, MASK, WIDE, NARROW, NARROW, *SEGMENTS]
  blocks = (
    f', frontend_attributes={{"block_q\\": {Q}, \\"block_kv\\": {KV}, \\"block_kv_compute\\": 512}}'
  )
  text = program("splash_mha_fwd_segmented_residuals.3", operands, WIDE, blocks)
  grid = [(h, i, j) for h in range(N) for i in range(T // Q) for j in range(T // KV)]
  keys = fetched(grid, KV * H * 2, lambda h, i, j: (h * K // N, j) if visible(i, j) else None)
  query_bytes = fetched(grid, Q * 128 * 4, lambda h, i, j: i)
  key_bytes = fetched(grid, KV * 8 * 4, lambda h, i, j: j if visible(i, j) else None)
  once = 2 * N * T * H * 2 + 2 * MASK_BYTES
  # Two blocks of queries that see no more than the first block of keys need it once.
  actual = hlo_costs.costs(text).memory
  assert actual == pytest.approx(once + 2 * keys + query_bytes + key_bytes, rel=0.1)
  assert actual >= once + 2 * keys + query_bytes + key_bytes
  assert keys > 4 * K * T * H * 2


def test_gradients_of_keys_read_queries_again_for_every_block_of_keys():
  row = f"f32[{N},8,{T}]{{2,1,0}}"
  operands = [MASK, WIDE, NARROW, NARROW, SEGMENTS[1], SEGMENTS[0], row, WIDE, row]
  blocks = f', frontend_attributes={{"block_q_dkv\\": {Q}, \\"block_kv_dkv\\": {KV}}}'
  text = program(
    "splash_mha_dkv_segmented_no_residuals.1", operands, f"({NARROW}, {NARROW})", blocks
  )
  grid = [(j, h, i) for j in range(T // KV) for h in range(N) for i in range(T // Q)]

  def read_block(j, h, i):
    return (h, i) if visible(i, j) else None

  queries = fetched(grid, Q * H * 2, read_block)  # Gradients as well.
  sums = fetched(grid, Q * 8 * 4, read_block)  # Logarithms as well.
  query_bytes = fetched(grid, Q * 8 * 4, lambda j, h, i: i if visible(i, j) else None)
  once = 4 * K * T * H * 2 + T * 128 * 4 + MASK_BYTES
  expected = once + 2 * queries + 2 * sums + query_bytes
  assert hlo_costs.costs(text).memory == pytest.approx(expected, rel=0.01)


def test_a_kernel_counts_as_it_states_and_its_caller_goes_first():
  operands = ["f32[1024,128]{1,0}", "f32[1024,128]{1,0:S(1)}"]
  size = 1024 * 128 * 4
  once = program("mine.1", operands, "f32[1024,128]{1,0}")
  assert hlo_costs.costs(once).memory == 2 * size  # the other operand is in vector memory
  stated = f', backend_config={{"cost_estimate":{{"flops":"1","bytes_accessed":"{9 * size}"}}}}'
  text = program("mine.1", operands, "f32[1024,128]{1,0}", stated)
  assert hlo_costs.costs(text).memory == 8 * size
  assert hlo_costs.costs(text, dict(mine=0.25)).memory == 2 * size
  assert hlo_costs.costs(text, dict(min=0.25)).memory == 8 * size
  scope = ', metadata={op_name="jit(f)/hbm_bytes=777/pallas_call"}' + stated
  caller = program("mine.1", operands, "f32[1024,128]{1,0}", scope)
  assert hlo_costs.costs(caller).memory == 777


@pytest.fixture(scope="module")
def on_chip():
  return jax.sharding.SingleDeviceSharding(compiler.devices_of("v5e:1x1")[0])


def compiled(f, on_chip, *shapes):
  """Compiles `f` on bfloat16 arrays, and int32 ones of one axis; returns the text."""
  arguments = [
    jax.ShapeDtypeStruct(s, jnp.int32 if len(s) == 1 else jnp.bfloat16, sharding=on_chip)
    for s in shapes
  ]
  return jax.jit(f).trace(*arguments).lower().compile().as_text()


@needs_libtpu
def test_scopes_around_kernels_reach_the_compiled_text(on_chip):
  def kernel(x, y):
    y[...] = x[...] * 2

  def f(x):
    call = pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      grid=(8,),
      in_specs=[pl.BlockSpec((1024, 1024), lambda i: (i, 0))],
      out_specs=pl.BlockSpec((1024, 1024), lambda i: (i, 0)),
      cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=12345, transcendentals=0),
      name="twice",
    )
    with jax.named_scope("hbm_bytes=54321"):
      return call(x)

  costs = hlo_costs.costs(compiled(f, on_chip, (8192, 1024)))
  assert [i.bytes for i in costs.items if i.instruction.kernel] == [54321]


@needs_libtpu
@pytest.mark.parametrize(
  "topology, kind, D, F",
  [
    ("v5e:1x1", "TPU v5e", 4096, 1536),  # Qwen3-235B-A22B
    ("v5e:1x1", "TPU v5e", 4096, 384),  # over tensor=4
    ("v5e:1x1", "TPU v5e", 2048, 768),  # Qwen3-30B-A3B
    ("v6e:1x1", "TPU v6e", 4096, 1536),
  ],
)
def test_tiles_of_published_models_fit_into_vector_memory(monkeypatch, topology, kind, D, F):
  """The compiler refuses larger ones."""
  monkeypatch.setattr(groups, "_interpreted", lambda: False)
  monkeypatch.setattr(groups, "_vector_memory", lambda: accelerators.vector_memory(kind))
  on_chip = jax.sharding.SingleDeviceSharding(compiler.devices_of(topology)[0])
  R, E = 81920, 32
  back = functools.partial(groups._megablox, transposed=True)
  compiled(groups._megablox, on_chip, (R, D), (E, D, 2 * F), (E,))
  compiled(back, on_chip, (R, 2 * F), (E, D, 2 * F), (E,))

  def outer(x_RD, y_RF, count_E, *total):
    return groups._megablox_outer(x_RD, y_RF, count_E, jnp.dtype("bfloat16"), *total)

  compiled(outer, on_chip, (R, D), (R, 2 * F), (E,))
  compiled(outer, on_chip, (R, D), (R, 2 * F), (E,), (E, D, 2 * F))


def test_what_a_compiler_had_too_little_of():
  kernel = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem "
    "while allocating on stack for %gmm.44 = bf16[81920,4096]{1,0:T(8,128)(2,1)} custom-call(%a), "
    "metadata={}. Scoped allocation with size 16.47M and limit 16.00M exceeded scoped vmem limit."
  )
  assert compiler.parse_memory_error(kernel) == dict(
    error="%gmm.44 = bf16[81920,4096]: Scoped allocation with size 16.47M and limit 16.00M "
    "exceeded scoped vmem limit.",
    of_kernel=True,
  )
  chip = "RESOURCE_EXHAUSTED: E1000:\nUsed 33.20G of 31.25G hbm. Exceeded hbm capacity by 1.95G."
  actual = compiler.parse_memory_error(chip)
  assert actual == dict(error=chip.splitlines()[1], of_kernel=False)
