"""Compiling for TPUs without one: the parts that need no compiler, and with libtpu a small run."""

import dataclasses
import re

import pytest
from support.aot import SMALL, compiled, needs_libtpu, run

from gspo_jax.aot import chips, hlo_costs
from gspo_jax.models import flops, transformer
from gspo_jax.settings.sizes import PUBLISHED, tiny_moe

PROGRAM = """HloModule jit_f

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %g = f32[32,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %s = f32[8,4]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %s)
}

%all-reduce-scatter.1 (q: f32[32,4]) -> f32[8,4] {
  %q = f32[32,4] parameter(0)
  %r = f32[32,4] all-reduce(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %d = f32[8,4] slice(%r), slice={[0:8], [0:4]}
}

%condition (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %a = (s32[], f32[8,4]) parameter(0)
  ROOT %w = (s32[], f32[8,4]) while(%a), condition=%condition, body=%body
}
"""


def test_collectives_in_a_loop_count_as_often_as_it_runs():
  costs = hlo_costs.costs(PROGRAM)
  assert costs.count == {"all-gather": 5, "reduce-scatter": 5}
  assert costs.moved == {"all-gather": 5 * 512, "reduce-scatter": 5 * 512}
  assert costs.wire == 2 * 5 * 512 * 3 / 4  # three quarters of it come from the other three


def test_work_is_six_flops_per_active_parameter_and_token():
  config = PUBLISHED["Qwen3-30B-A3B-Base"]
  work = flops.work(config, sequences=1, queries=1024, keys=1024)
  without_scores = dataclasses.replace(work, attention=0.0)
  active = 3.35e9 - config.vocab_size * config.hidden_size  # looking up a row is no work
  assert without_scores.training() == pytest.approx(6 * active * 1024, rel=0.01)
  assert work.attention == 1024 * 4 * 48 * 32 * 128 * (1024 - 1023 / 2)
  assert work.executed("none") < work.executed("attention") < work.executed("full")


def test_the_slowest_resource_binds():
  chip, number = chips.parse("v5p:4x4x4")
  assert number == 64
  row = chips.bound(chip, number, flops=64 * 459e12, useful=32 * 459e12, hbm_bytes=0, ring_bytes=0)
  assert row["binds"] == "compute" and row["bound_s"] == 1 and row["mfu"] == 0.5
  row = chips.bound(chip, number, 64 * 459e12, 32 * 459e12, 0, ring_bytes=400e9)
  assert row["binds"] == "interconnect" and row["mfu"] == pytest.approx(0.25)


@pytest.mark.parametrize(
  "topology", ["v5q:4x4x4", "v5e:2x2x2", "v5p", "v5p:64", "h300:8", "h100", "h100:0"]
)
def test_a_topology_that_is_none_is_named(topology):
  with pytest.raises(
    ValueError, match=rf"--topology={topology}: .*(v6e.*h100|v5p:4x4x2|v5e:4x4|h100:2x8)"
  ):
    chips.parse(topology)


@pytest.mark.slow
@needs_libtpu
def test_every_program_compiles_for_a_pod(tmp_path):
  options = "--topology=v5p:2x2x1", "--sequences=8", "--length=256", "--explain=3"
  rows, printed = compiled(tmp_path, *options, *SMALL)
  assert list(rows) == ["train", "score", "publish", "prefill", "decode"]
  assert all(row["fits"] and 0 < row["peak_gib"] < 1 for row in rows.values())
  # Gradients are scattered where weights were gathered, and nothing else moves much.
  assert {"all-gather", "reduce-scatter"} <= rows["train"]["collectives"].keys()
  assert "all-gather" in rows["publish"]["collectives"]
  # What they move is no less than what they need, and is said to come from somewhere.
  assert all(row["moved_over_needed"] >= 1 for row in rows.values())
  assert "gspo_jax/models/" in printed and "GB" in printed
  actual = rows["decode"]["iteration"]
  assert {part["name"] for part in actual["parts"]} >= {"prefill", "decode", "train", "publish"}
  assert actual["seconds"] == pytest.approx(sum(part["seconds"] for part in actual["parts"]))
  assert "one iteration:" in printed and "tokens/s/chip" in printed
  work = flops.work(dataclasses.replace(tiny_moe(264), num_layers=2), 8, 256, 256)
  assert rows["train"]["model_flops"] == work.training()


@needs_libtpu
@pytest.mark.slow
def test_slices_send_each_other_the_gradients_and_nothing_of_the_weights(tmp_path):
  mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.mesh.expert=2")
  sizes = dict(num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=128)
  model = (
    f"--config.model.{key}={value}" for key, value in sizes.items()
  )  # Rounded to whole tiles.
  options = "--topology=v5p:2x2x2", "--slices=2", "--config.rl.microbatches=2"
  names = "--programs=train,publish,decode"
  rows, printed = compiled(tmp_path, *options, names, *mesh, *model)
  config = dataclasses.replace(tiny_moe(264), **sizes)
  gradients = 4 * transformer.count(config)[0] / 8  # Bytes of a chip, in float32.
  # A host has four chips; each of two sends its half and gets one back.
  assert gradients * 4 <= rows["train"]["network_bytes"] < 1.1 * gradients * 4
  assert rows["train"]["network_s"] == pytest.approx(rows["train"]["network_bytes"] / 25e9)
  assert rows["publish"]["network_bytes"] == 0
  assert rows["decode"]["network_bytes"] < 0.01 * gradients
  assert "2 slices of v5p:2x2x2" in printed and "DCN GB" in printed


@needs_libtpu
@pytest.mark.slow
def test_a_critic_is_part_of_the_update_and_held_meanwhile(tmp_path):
  rows = {}
  for name, flags in ("none", []), ("model", ["--config.objective.name=ppo_clip"]):
    options = "--topology=v5p:2x2x1", "--sequences=8", "--length=256", "--programs=train,publish"
    rows[name], _ = compiled(tmp_path, *options, f"--config.critic.name={name}", *flags, *SMALL)
  train = {name: row["train"] for name, row in rows.items()}
  assert train["model"]["model_flops"] == 2 * train["none"]["model_flops"]
  # Weights, moments and gradients of a second model, over the four chips.
  extra = train["model"]["peak_gib"] - train["none"]["peak_gib"]
  resident = rows["model"]["publish"]["held_gib"] - rows["none"]["publish"]["held_gib"]
  assert extra >= resident > 0 and train["model"]["moved_over_needed"] >= 1


@pytest.mark.slow
@needs_libtpu
def test_a_search_recommends_what_it_compiled(tmp_path):
  options = "--search", "--programs=train", "--tries=1", "--topology=v5p:2x2x1"
  model = "--config.model.num_layers=2", "--config.mesh.expert=4"
  rows, printed = compiled(tmp_path, *options, "--sequences=8", "--length=256", *model)
  assert "recommended:\ncompute=dict(expert_chunk=8192" in printed
  assert "mesh=dict(data=1, fsdp=1, expert=4, tensor=1)" in printed
  ((name, row),) = rows.items()
  assert row["fits"] and name == "1x1x4x1, 1 micro, auto 8192/16, sparsecore"


@needs_libtpu
def test_what_does_not_fit_is_an_error_that_says_so():
  done = run(
    "--topology=v5e:2x2",
    "--programs=train",
    "--sequences=4096",
    "--length=2048",
    "--config.compute.logits_chunk=0",
    *SMALL,
  )
  assert done.returncode == 1
  assert "does not fit v5e:2x2: train" in done.stderr and "15.75G" in done.stderr


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.long
def test_the_cache_is_read_where_it_lies_and_never_copied(topology, tmp_path):
  shape = dict(head_dim=128, num_heads=4, num_kv_heads=2, num_layers=2)
  model = [f"--config.model.{key}={value}" for key, value in shape.items()]
  sampler = ("--slots=32", "--config.engine.cache_tokens=65536", "--config.engine.page_tokens=128")
  out = (f"--topology={topology}", "--programs=decode", f"--text={tmp_path}")
  done = run(*out, *SMALL, *model, *sampler, "--config.sampling.max_new_tokens=2000")
  assert done.returncode == 0, done.stdout + done.stderr
  text = (tmp_path / "decode.txt").read_text()
  actual = re.findall(r"= .*bf16\[(?:2,\d+|\d+),2,2,128,128\]\S* ([a-z][\w-]*)\(", text)
  pool = re.search(r"bf16\[2,(\d+),2,2,128,128\]", text)[1]
  assert int(pool) * 128 * 4 <= 65536 < (int(pool) + 8) * 128 * 4
  assert "custom-call" in actual  # the kernel, which writes in place
  assert {"copy", "copy-start", "transpose", "convert", "gather", "scatter"}.isdisjoint(actual)
