"""Compiling for NVIDIA GPUs without one: what needs no compiler, and with it a small run."""

import contextlib
import functools

import jax
import pytest
from jax.experimental import topologies
from support.aot import compiled, needs_cuda, run

from gspo_jax import sharding
from gspo_jax.aot import chips, cuda, hlo_costs, links
from gspo_jax.aot.compiler import devices_of, examine
from gspo_jax.aot.programs import Program
from gspo_jax.models import remat
from gspo_jax.models.attention import attention
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import ComputeConfig
from gspo_jax.settings.sizes import PUBLISHED
from gspo_jax.sharding import AXES
from gspo_jax.system import accelerators
from gspo_jax.system.accelerators import GPUS


@pytest.fixture(params=["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"])
def kind(request):
  """Names a GPU; programs are traced for one of it."""
  device = jax.sharding.AbstractDevice(device_kind=request.param, num_cores=132, platform="gpu")
  types = (jax.sharding.AxisType.Explicit,) * len(AXES)
  mesh = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, types, abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    yield request.param


def test_attention_on_a_gpu_is_cudnns_as_far_as_its_heads_go(kind):
  assert attention.choose("auto", 1024, "bfloat16") == "cudnn"
  assert attention.choose("auto", 1024, "float32") == "blockwise"
  assert attention.choose("auto", 1, "bfloat16") == "plain"
  widest = {"NVIDIA A100-SXM4-80GB": "blockwise", "NVIDIA H100 80GB HBM3": "cudnn"}
  assert attention.choose("auto", 1024, "bfloat16", width=256) == widest[kind]


@needs_cuda
@pytest.mark.parametrize(
  "card, width, fits", [("h100", 256, True), ("a100", 128, True), ("a100", 256, False)]
)
def test_attention_is_traced_for_the_target_not_for_this_machine(card, width, fits):
  q = jax.ShapeDtypeStruct((1, 256, 2, width), "bfloat16")
  fused = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
  refused = contextlib.nullcontext() if fits else pytest.raises(NotImplementedError, match="head")
  with cuda.tracing_for(GPUS[card]), refused:
    assert jax.eval_shape(fused, q, q, q).shape == q.shape


def test_remat_auto_knows_the_memory_of_a_gpu(kind):
  model, compute = PUBLISHED["Qwen3-1.7B"], ComputeConfig(remat="auto")
  parameters = 1.72e9  # 26 GiB of state; 60 % of the memory is 43.
  assert remat.choose(model, compute, 2048, parameters) == "both"
  assert remat.choose(model, compute, 8 * 2048, parameters) == "attention"
  assert remat.choose(model, compute, 64 * 2048, parameters) == "full"


def test_a_card_has_one_memory_for_all_who_ask():
  h100 = GPUS["h100"]
  assert accelerators.memory("NVIDIA H100 80GB HBM3") == h100.usable == 0.92 * h100.hbm
  assert accelerators.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
  assert accelerators.peak_flops("NVIDIA H100 PCIe") == 989e12
  assert accelerators.memory("NVIDIA H100 PCIe") is None


def test_a_topology_is_gpus_or_hosts_of_gpus():
  assert chips.parse("h100:8") == (GPUS["h100"], 8)
  assert chips.parse("a100-40:2x8") == (GPUS["a100-40"], 16)


def test_without_the_compiler_the_extra_is_named(monkeypatch):
  def missing(**_):
    raise NotImplementedError("topology not implemented for cuda")

  monkeypatch.setattr(topologies, "get_topology_desc", missing)
  with pytest.raises(ValueError, match=r"^--topology=h100:8: .*pip install -e '.\[aot-cuda\]'$"):
    devices_of("h100:8")


def test_attention_without_cudnn_names_the_extra():
  class Unavailable:
    def trace(self):
      raise RuntimeError("cuDNN not found.")

  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"cuDNN not found\. .*'\.\[aot-cuda\]'"):
    examine(Program(Unavailable(), (), None), "h100:1", "full")


def test_flags_of_the_other_kind_of_chip_are_refused():
  with pytest.raises(ValueError, match=r"--slices=2 is for TPUs: .*h100:2x8"):
    devices_of("h100:8", slices=2)
  with pytest.raises(ValueError, match=r"v5e:1x1: --target describes GPUs"):
    devices_of("v5e:1x1", target="gpu_device_info {}")


@pytest.mark.parametrize(
  "kind, members, share",
  [
    ("all-gather", range(8), 0),
    ("all-gather", range(16), 1 / 16),  # Half of it arrives by eight adapters.
    ("all-reduce", range(16), 1 / 8),
    ("all-to-all", range(16), 1 / 2),
    ("reduce-scatter", (0, 8), 1 / 2),
    ("collective-permute", (7, 8), 1),
  ],
)
def test_bytes_for_other_hosts_are_shared_by_the_gpus_of_a_host(kind, members, share):
  hosts = links.Switches((0,) * 8 + (1,) * 8)
  assert hosts.network(kind, [*members]) == share


PROGRAM = """HloModule jit_f, is_scheduled=true

%product (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %dot = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {
  ROOT %p = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %x = bf16[64,32]{1,0} get-tuple-element(%p), index=1
  %y = bf16[32,16]{1,0} get-tuple-element(%p), index=2
  %start = ((bf16[64,32]{1,0}, bf16[32,16]{1,0}), bf16[64,16]{1,0}) fusion-start(%x, %y), \
kind=kCustom, calls=%product
  %done = bf16[64,16]{1,0} fusion-done(%start)
}

%and (i: s32[], n: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %most = s32[] constant(16)
  %lt = pred[] compare(%i, %most), direction=LT
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %gt = pred[] compare(%n, %zero), direction=GT
  ROOT %both = pred[] and(%lt, %gt)
}

%condition (p: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {
  %p = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %and_fusion = pred[] fusion(%i, %i), kind=kLoop, calls=%and
}

%blockwise (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {
  ROOT %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)
}

%fused (q: bf16[2,64,4,16]) -> bf16[2,64,4,16] {
  %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)
  %y = (bf16[2,4,64,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "64", "64"]}, \
"mask_type": "CAUSAL"}}
  ROOT %z = bf16[2,64,4,16]{3,2,1,0} get-tuple-element(%y), index=0
}

ENTRY %main (a: (s32[], bf16[64,32], bf16[32,16]), c: pred[], q: bf16[2,64,4,16]) -> f32[64,8] {
  %a = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %c = pred[] parameter(1)
  %q = bf16[2,64,4,16]{3,2,1,0} parameter(2)
  %w = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) while(%a), condition=%condition, body=%body
  %attend = bf16[2,64,4,16]{3,2,1,0} conditional(%c, %q, %q), BRANCHES
  %x = bf16[64,32]{1,0} get-tuple-element(%w), index=1
  ROOT %g = (f32[64,8]{1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""


@pytest.mark.parametrize(
  "branches",
  [
    "true_computation=%fused, false_computation=%blockwise",
    "branch_computations={%blockwise, %fused}",
  ],
)
def test_work_of_a_gpus_program(branches):
  costs = hlo_costs.costs(PROGRAM.replace("BRANCHES", branches))
  dot, product = 2 * 64 * 16 * 32, 2 * 64 * 8 * 32
  attended = 2 * 2 * 2 * 4 * 16 * (64 * 65 / 2)  # Two products of the visible pairs.
  assert costs.products == 16 * dot + attended + product
  rows = 2 * 64 * 4 * 16 * 2
  turn = 2 * (64 * 32 + 32 * 16 + 64 * 16)
  assert costs.memory == 16 * turn + 4 * rows + 2 * 64 * 32 * 2 + 4 * 64 * 8 + 64


@needs_cuda
@pytest.mark.parametrize("card", GPUS)
def test_every_card_is_taken_by_the_compiler(card):
  devices = devices_of(f"{card}:2x2")
  assert [device.process_index for device in devices] == [0, 0, 1, 1]
  assert {device.device_kind for device in devices} == {GPUS[card].kinds[0]}
  assert {device.platform for device in devices} == {"gpu"}


@needs_cuda
def test_an_unknown_field_of_a_target_is_named():
  text = cuda.target_text(GPUS["h100"]).replace("core_count", "cores")
  with pytest.raises(ValueError, match=r'^--topology=h100:1: .*no field named "cores"\.$'):
    devices_of("h100:1", target=text)


MESHES = {1: (), 8: ("--config.mesh.fsdp=2", "--config.mesh.expert=2", "--config.mesh.tensor=2")}


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("number", MESHES)
def test_every_program_compiles_for_gpus(number, tmp_path):
  topology = f"--topology=h100:{number}"
  rows, printed = compiled(tmp_path, topology, *MESHES[number], config="configs/tiny.py")
  assert list(rows) == ["train", "score", "publish", "prefill", "decode"]
  assert all(row["fits"] and 0 < row["peak_gib"] < 1 for row in rows.values())
  assert "bound_s" not in rows["train"] and "Times are unknown" in printed
  assert (rows["train"]["wire_bytes"] > 0) == (number > 1)
  assert all(row["network_bytes"] == 0 for row in rows.values())


@needs_cuda
@pytest.mark.slow
def test_a_dense_update_multiplies_no_more_than_it_needs(tmp_path):
  sizes = dict(num_experts=0, experts_per_token=0, num_layers=2, hidden_size=256, head_dim=128)
  model = (f"--config.model.{key}={value}" for key, value in sizes.items())
  options = "--programs=train,decode", "--sequences=8", "--length=512"
  compute = "--config.compute.dtype=bfloat16", f"--text={tmp_path}"
  rows, _ = compiled(
    tmp_path, "--topology=h100:1", *options, *compute, *model, config="configs/tiny.py"
  )
  assert "__cudnn$fmhaSoftmaxBackward" in (tmp_path / "train.txt").read_text()
  assert rows["train"]["product_flops"] <= 1.1 * rows["train"]["executed_flops"]
  assert rows["decode"]["product_flops"] == pytest.approx(rows["decode"]["model_flops"], rel=0.2)


@pytest.mark.slow
def test_time_is_not_searched_on_a_gpu():
  done = run("--topology=h100:1", "--search")
  assert done.returncode == 2
  assert "--search ranks settings by time, which is unknown for GPUs" in done.stderr
