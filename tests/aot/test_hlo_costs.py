"""Counting, against programs whose traffic is known by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.aot import needs_libtpu

from gspo_jax.aot import explain, hlo, hlo_costs
from gspo_jax.aot.compiler import devices_of
from gspo_jax.learner import programs
from gspo_jax.system import accelerators

MIB = 2**20


def test_arrays_count_with_the_padding_of_their_layout_and_by_memory():
  plain, padded, near, scalar = hlo.arrays(
    "(bf16[3,5]{1,0}, bf16[3,5]{1,0:T(8,128)(2,1)}, f32[8,128]{0,1:T(8,128)S(1)}, s32[]{:T(128)})"
  )
  assert (plain.hbm, padded.hbm, near.hbm, near.bytes) == (30, 8 * 128 * 2, 0, 128 * 128 * 4)
  assert plain.elements == padded.elements == 15 and scalar.dims == ()
  (turned,) = hlo.arrays("bf16[130,4]{0,1:T(8,128)(2,1)}")  # the first axis lies along the lanes
  assert turned.hbm == 256 * 8 * 2


LOOP = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %p = (s32[], f32[64,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64,256]{1,0} get-tuple-element(%p), index=1
  %start = (f32[64,256]{1,0:S(1)}, f32[64,256]{1,0}, u32[]) copy-start(%x)
  %near = f32[64,256]{1,0:S(1)} copy-done(%start)
  %y = f32[64,256]{1,0:S(1)} exponential(%near)
  %z = f32[64,256]{1,0} copy(%y)
  ROOT %t = (s32[], f32[64,256]) tuple(%i, %z)
}

%condition (p: (s32[], f32[64,256])) -> pred[] {
  %p = (s32[], f32[64,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%wrapped_body (q: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %q = (s32[], f32[64,256]) parameter(0)
  ROOT %inner = (s32[], f32[64,256]) while(%q), condition=%condition, body=%body, \
metadata={op_name="jit(f)/refill/while/body/while"}
}

%endless (q: (s32[], f32[64,256])) -> pred[] {
  %q = (s32[], f32[64,256]) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %a = (s32[], f32[64,256]) parameter(0)
  ROOT %w = (s32[], f32[64,256]) while(%a), condition=%endless, body=%wrapped_body, \
metadata={op_name="jit(f)/refill/while"}
}
"""


def test_copies_between_memories_count_once_and_what_stays_near_not_at_all():
  array = 64 * 256 * 4
  assert hlo_costs.costs(LOOP).memory == 5 * 2 * array  # In by the first copy, out by the last one.


def test_a_loop_that_depends_on_data_turns_once_or_as_it_is_told():
  array = 64 * 256 * 4
  costs = hlo_costs.costs(LOOP, dict(refill=1 / 8))
  assert costs.memory == 5 / 8 * 2 * array  # the loop in it is no other one
  assert hlo_costs.costs(LOOP, dict(fill=1 / 8)).memory == 5 * 2 * array


CONDITIONAL = """HloModule jit_f

%no (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %x = f32[64]{0} exponential(%p)
}

%yes (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  %x = f32[64]{0} exponential(%p)
  ROOT %y = f32[64]{0} exponential(%x)
}

ENTRY %main (a: f32[64], b: s32[]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = f32[64]{0} conditional(%b, %a, %a), BRANCHES
}
"""


@pytest.mark.parametrize(
  "branches",
  ["branch_computations={%no, %yes}", "true_computation=%yes, false_computation=%no"],
)
def test_a_conditional_counts_as_if_it_were_false(branches):
  assert hlo_costs.costs(CONDITIONAL.replace("BRANCHES", branches)).memory == 2 * 64 * 4


ASYNC = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[256,256], b: f32[256,256]) -> f32[1024,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %b = f32[256,256]{1,0} parameter(1)
  %s = (f32[256,256]{1,0}, f32[1024,256]{1,0}) all-gather-start(%a), \
replica_groups=[2,4]<=[8], dimensions={0}
  MIDDLE
  %g = f32[1024,256]{1,0} all-gather-done(%s)
  ROOT %h = f32[1024,256]{1,0} all-reduce(%g), replica_groups=[2,4]<=[8], to_apply=%add
}
"""


@pytest.mark.parametrize(
  "middle, hidden",
  [
    ("%y = f32[256,256]{1,0} fusion(%b), kind=kLoop, calls=%f", True),
    ("%y = f32[256,256]{1,0} bitcast(%b)", False),
  ],
)
def test_collectives_are_hidden_while_something_else_is_done(middle, hidden):
  costs = hlo_costs.costs(ASYNC.replace("MIDDLE", middle))
  gathered = 1024 * 256 * 4 * 3 / 4
  assert costs.wire == gathered + 2 * gathered
  assert costs.hidden == (gathered if hidden else 0)


SLICES = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[256,256], b: f32[256,256]) -> f32[256,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %b = f32[256,256]{1,0} parameter(1)
  %t = token[] after-all()
  %s = (f32[256,256]{1,0}, u32[], token[]) send(%a, %t), channel_id=2, is_host_transfer=true
  %r = (RESULT{1,0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target="{1,2,3,4}x{0:7}",_xla_megascale_transfer_type="KIND"}
  MIDDLE
  %sd = token[] send-done(%s), channel_id=2
  %rd = (RESULT{1,0}, token[]) recv-done(%r), channel_id=1
  ROOT %g = RESULT{1,0} get-tuple-element(%rd), index=0
}
"""


@pytest.mark.parametrize(
  "kind, rows, times",
  [("ALL_REDUCE", 256, 6 / 4), ("ALL_GATHER", 1024, 3), ("REDUCE_SCATTER", 64, 3 / 4)],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_what_is_sent_to_other_slices(kind, rows, times, hidden):
  middle = "%y = f32[256,256]{1,0} fusion(%b), kind=kLoop, calls=%f" if hidden else ""
  text = SLICES.replace("KIND", kind).replace("RESULT", f"f32[{rows},256]")
  costs = hlo_costs.costs(text.replace("MIDDLE", middle))
  array = 256 * 256 * 4
  assert costs.network == times * array  # each of four slices has one
  assert costs.network_hidden == (costs.network if hidden else 0)
  assert costs.memory == array + rows * 256 * 4 + (2 * array if hidden else 0)
  assert costs.wire == 0  # the links of a slice have no part in it
  chip = accelerators.CHIPS["v5p"]
  costs = hlo_costs.costs(text.replace("MIDDLE", middle), chip=chip)
  share = (2 * array / chip.hbm_speed) / (times * array / chip.network)
  assert costs.network_hidden == pytest.approx(costs.network * share if hidden else 0)


FUSED = """HloModule jit_f, is_scheduled=true

%begin (p: bf16[256,512]) -> (bf16[256,512], bf16[1024,512], u32[]) {
  %p = bf16[256,512]{1,0} parameter(0)
  %g = bf16[1024,512]{1,0} all-gather(%p), channel_id=5, replica_groups=[2,4]<=[8], \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = (bf16[256,512]{1,0}, bf16[1024,512]{1,0}, u32[]{:S(2)}) custom-call(%p, %g)
}

%along (p: bf16[256,512], q: bf16[1024,512], x: f32[64,64]) -> (f32[64,64], bf16[256,512], \
bf16[1024,512]) {
  %p = bf16[256,512]{1,0} parameter(0)
  %q = bf16[1024,512]{1,0} parameter(1)
  %x = f32[64,64]{1,0} parameter(2)
  %y = f32[64,64]{1,0} exponential(%x)
  %g = bf16[1024,512]{1,0} all-gather(%p), channel_id=5, replica_groups=[2,4]<=[8], \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %t = (f32[64,64]{1,0}, bf16[256,512]{1,0}, bf16[1024,512]{1,0}) tuple(%y, %p, %g)
}

%end (p: bf16[256,512], q: bf16[1024,512]) -> bf16[1024,512] {
  %p = bf16[256,512]{1,0} parameter(0)
  %q = bf16[1024,512]{1,0} parameter(1)
  %g = bf16[1024,512]{1,0} all-gather(%p), channel_id=5, replica_groups=[2,4]<=[8], \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = bf16[1024,512]{1,0} custom-call(%p, %q, %g)
}

ENTRY %main (a: bf16[256,512], b: f32[64,64]) -> (bf16[1024,512], f32[64,64]) {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = f32[64,64]{1,0} parameter(1)
  %async-collective-start.1 = (bf16[256,512]{1,0}, bf16[1024,512]{1,0}, u32[]{:S(2)}) fusion(%a), \
kind=kCustom, calls=%begin
  %s0 = bf16[256,512]{1,0} get-tuple-element(%async-collective-start.1), index=0
  %s1 = bf16[1024,512]{1,0} get-tuple-element(%async-collective-start.1), index=1
  %fusion.4 = (f32[64,64]{1,0}, bf16[256,512]{1,0}, bf16[1024,512]{1,0}) fusion(%s0, %s1, %b), \
kind=kOutput, calls=%along
  %m0 = f32[64,64]{1,0} get-tuple-element(%fusion.4), index=0
  %m1 = bf16[256,512]{1,0} get-tuple-element(%fusion.4), index=1
  %m2 = bf16[1024,512]{1,0} get-tuple-element(%fusion.4), index=2
  %async-collective-done.1 = bf16[1024,512]{1,0} fusion(%m1, %m2), kind=kCustom, calls=%end
  ROOT %t = (bf16[1024,512]{1,0}, f32[64,64]{1,0}) tuple(%async-collective-done.1, %m0)
}
"""


def test_a_collective_that_fusions_carry_along_counts_once():
  costs = hlo_costs.costs(FUSED)
  part, whole, beside = 256 * 512 * 2, 1024 * 512 * 2, 64 * 64 * 4
  assert costs.count == {"all-gather": 1} and costs.moved == {"all-gather": whole}
  assert costs.wire == costs.hidden == whole * 3 / 4
  assert costs.memory == part + whole + 2 * beside


SPARSECORE = """HloModule jit_f, is_scheduled=true

%called_computation (p: bf16[1024,2048], t: token[]) -> bf16[4096,2048] {
  %t = token[] parameter(1)
  %p = bf16[1024,2048]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %g = bf16[4096,2048]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, \
replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[1024,2048], b: f32[64,64]) -> (bf16[4096,2048], f32[64,64]) {
  %a = bf16[1024,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[64,64]{1,0} parameter(1)
  %prepare.1 = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %ready.1 = token[] custom-call(%prepare.1), custom_call_target="PrepareAsyncCallDone"
  %g.call-start = ((bf16[1024,2048]{1,0:T(8,128)(2,1)}, token[]), \
bf16[4096,2048]{1,0:T(8,128)(2,1)}) call-start(%a, %ready.1), async_execution_thread="sparsecore", \
to_apply=%called_computation
  %prepare.2 = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  MIDDLE
  %g.call-done = bf16[4096,2048]{1,0:T(8,128)(2,1)} call-done(%g.call-start)
  ROOT %t = (bf16[4096,2048]{1,0:T(8,128)(2,1)}, f32[64,64]{1,0}) tuple(%g.call-done, %y)
}
"""
V5P = accelerators.CHIPS["v5p"]  # sends 200 GB/s on an axis, makes 1.75e9 cycles a second
WORK = "%y = f32[64,64]{1,0} fusion(%b), kind=kLoop, calls=%f"
WHOLE = 4096 * 2048 * 2 * 3 / 4  # bytes sent


@pytest.mark.parametrize(
  "middle, chip, hidden",
  [
    ("%y = f32[64,64]{1,0} bitcast(%b)", None, 0),
    (WORK, None, WHOLE),
    (f'{WORK}, backend_config={{"estimated_cycles":"35000"}}', V5P, 20e-6 * 200e9),
    (f'{WORK}, backend_config={{"estimated_cycles":"350000"}}', V5P, WHOLE),
    ("%y = f32[64,64]{1,0} all-reduce(%b), replica_groups={{0,1,2,3}}, to_apply=%add", V5P, 0),
  ],
)
def test_what_runs_beside_a_collective_of_the_sparsecore_hides_it_for_as_long(middle, chip, hidden):
  costs = hlo_costs.costs(SPARSECORE.replace("MIDDLE", middle), chip=chip)
  assert costs.count["all-gather"] == 1 and costs.moved["all-gather"] == WHOLE * 4 / 3
  assert costs.hidden == costs.ring_hidden == pytest.approx(hidden)


def test_a_collective_of_the_sparsecore_may_be_called_by_what_is_started():
  wrapped = SPARSECORE.replace(
    "ENTRY",
    """%wrapper (p: bf16[1024,2048], t: token[]) -> bf16[4096,2048] {
  %p = bf16[1024,2048]{1,0} parameter(0)
  %t = token[] parameter(1)
  ROOT %c = bf16[4096,2048]{1,0} call(%p, %t), to_apply=%called_computation
}

ENTRY""",
  ).replace("call-start(%a, %ready.1)", "async-start(%a, %ready.1)")
  started, end = wrapped.rsplit("to_apply=%called_computation", 1)
  costs = hlo_costs.costs(f"{started}calls=%wrapper{end}".replace("MIDDLE", WORK))
  assert costs.count["all-gather"] == 1 and costs.hidden == WHOLE


def test_what_runs_beside_two_collectives_hides_one_after_the_other():
  second = SPARSECORE.replace(
    "MIDDLE",
    "%h.call-start = (bf16[1024,2048]{1,0}, bf16[4096,2048]) \
call-start(%a), to_apply=%called_computation\n  MIDDLE",
  )
  work = f'{WORK}, backend_config={{"estimated_cycles":"140000"}}'  # 80 us, and each takes 63
  costs = hlo_costs.costs(second.replace("MIDDLE", work), chip=V5P)
  assert costs.count["all-gather"] == 2
  assert costs.hidden == pytest.approx(80e-6 * 200e9)


# Programs that XLA compiles. The arrays are too large for vector memory, so that all go through
# HBM; update and slices are small against them.
BIG, SMALL = (64, 1024, 1024), (1024, 1024)  # float32: 256 MiB and 4 MiB


def update_in_place(big, small, i):
  return jax.lax.dynamic_update_index_in_dim(big, small, i, 0)


def add_in_place(big, small, i):
  return big.at[i].add(small)


def update_in_a_loop(big, small, i):
  def body(j, big):
    return jax.lax.dynamic_update_index_in_dim(big, small * j, i + j, 0)

  return jax.lax.fori_loop(0, 10, body, big)


def take_rows(big, small, i):
  return big.reshape(-1, SMALL[1])[i + 5 * jnp.arange(SMALL[0])] + small


def whole_sum(big, small, i):
  return jnp.sum(big, 0) + small


def update_of_a_copy(big, small, i):
  return jax.lax.dynamic_update_index_in_dim(big, small, i, 0)


SMALL_MIB, BIG_MIB = 4, 256
PROGRAMS = {  # function: (is the large array donated, MiB at least, MiB at most)
  update_in_place: (True, 2 * SMALL_MIB, 2 * SMALL_MIB),
  add_in_place: (True, 3 * SMALL_MIB, 3 * SMALL_MIB),
  # the update stays near, is made from what stays near, or is read and written each time
  update_in_a_loop: (True, 10 * SMALL_MIB, 41 * SMALL_MIB),
  take_rows: (False, 3 * SMALL_MIB, 5 * SMALL_MIB),
  whole_sum: (False, BIG_MIB + 2 * SMALL_MIB, BIG_MIB + 4 * SMALL_MIB),
  update_of_a_copy: (False, 2 * BIG_MIB, 2 * BIG_MIB + 2 * SMALL_MIB),
}


def mib(function, donated, device=None):
  """MiB through memory, as counted, of `function` compiled for one device."""
  shaped = functools.partial(
    jax.ShapeDtypeStruct, sharding=device and jax.sharding.SingleDeviceSharding(device)
  )
  arguments = shaped(BIG, jnp.float32), shaped(SMALL, jnp.float32), shaped((), jnp.int32)
  jitted = jax.jit(function, donate_argnums=0 if donated else ())
  return hlo_costs.costs(jitted.trace(*arguments).lower().compile().as_text()).memory / MIB


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_traffic_of_known_programs_on_cpu(function):
  donated, least, most = PROGRAMS[function]
  assert least <= mib(function, donated) <= most + 0.01


@pytest.fixture(scope="module")
def chip():
  return devices_of("v5e:1x1")[0]


@needs_libtpu
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_traffic_of_known_programs_on_tpu(function, chip):
  donated, least, most = PROGRAMS[function]
  assert least <= mib(function, donated, chip) <= most + 0.1


@needs_libtpu
def test_what_stays_in_vector_memory_is_no_traffic(chip):
  """Ten products of one small matrix: it comes in once, and the last result goes out."""

  def f(x):
    for _ in range(10):
      x = jnp.tanh(x @ x)
    return x

  x = jax.ShapeDtypeStruct(
    (512, 512), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(chip)
  )
  costs = hlo_costs.costs(jax.jit(f).trace(x).lower().compile().as_text())
  assert costs.memory == 2 * 512 * 512 * 4


@needs_libtpu
def test_a_product_reads_the_layer_that_it_slices_out_of_a_stack(chip):
  """Like a model's layers: 12 of 32 MiB, once each, copied or not."""

  def f(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

  shaped = functools.partial(
    jax.ShapeDtypeStruct,
    dtype=jnp.bfloat16,
    sharding=jax.sharding.SingleDeviceSharding(chip),
  )
  text = jax.jit(f).trace(shaped((8, 4096)), shaped((12, 4096, 4096))).lower().compile().as_text()
  costs = hlo_costs.costs(text)
  weights = 12 * 4096 * 4096 * 2
  assert weights <= costs.memory <= 3.05 * weights
  assert any("test_hlo_costs.py:" in line for line in explain.lines(costs, 2))


@needs_libtpu
def test_the_collectives_of_a_program_are_overlapped_or_not(chip):
  mesh = jax.make_mesh((4,), ("x",), devices=devices_of("v5p:2x2x1"))
  split = NamedSharding(mesh, P("x"))

  x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=split)
  f = jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, P()))
  costs = hlo_costs.costs(f.trace(x).lower().compile().as_text())
  assert costs.wire == 4096 * 1024 * 4 * 3 / 4
  assert costs.hidden == 0  # there is nothing else to do


@needs_libtpu
def test_a_gather_on_the_sparsecores_hides_behind_a_product(chip):
  """Compiled with `compute.xla=sparsecore`: 12.6 MB at 200 GB/s, beside 300 us of products."""
  mesh = jax.make_mesh((4,), ("x",), devices=devices_of("v5p:2x2x1"))

  def f(x, y):
    return jax.lax.all_gather(x, "x", tiled=True), jnp.tanh(y @ y)

  @functools.partial(jax.jit, compiler_options=programs.OPTIONS["sparsecore"])
  def mapped(x, y):
    specs = dict(in_specs=(P("x"), P()), out_specs=(P(), P()))
    return jax.shard_map(f, mesh=mesh, check_vma=False, **specs)(x, y)

  def shaped(rows, columns, split):
    split = NamedSharding(mesh, split)
    return jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16, sharding=split)

  traced = mapped.trace(shaped(4096, 2048, P("x")), shaped(4096, 4096, P()))
  text = traced.lower().compile().as_text()
  assert 'execution_thread="sparsecore"' in text
  costs = hlo_costs.costs(text, chip=V5P)
  assert costs.hidden == costs.wire == WHOLE
