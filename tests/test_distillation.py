"""On-policy distillation: the teacher that is meant, what it says, and whole runs."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy_qwen3
from support.command_line import SMALL_VALUES, figures, parameters, rows_of, told_to_go
from support.configs import config_of
from support.small_models import SMALLER_DENSE, SMALLER_MOE, initial, next_logp
from support.small_updates import T, learner, make_batch, with_inputs

from configs import tiny, tiny_distil
from gspo_jax import sharding, teacher, train
from gspo_jax.aot import estimate, plan, programs
from gspo_jax.aot.estimate import device_bytes
from gspo_jax.inputs import read_inputs
from gspo_jax.learner import packing
from gspo_jax.learner.advantages import teacher_advantages
from gspo_jax.models import hf, transformer
from gspo_jax.models.flops import forward_flops, iteration_flops
from gspo_jax.run import open_run
from gspo_jax.runs import provenance
from gspo_jax.runs.weight_source import WeightSource
from gspo_jax.settings.critic import DistillationConfig
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sizes import tiny_moe

SMALL = dict(
  job="rl", model__num_layers=1, sampling__max_new_tokens=4, rl__packed=False,
  rl__prompts=4, rl__group_size=4, rl__minibatches=2, rl__iterations=2,
  rl_optimizer__warmup_steps=0, rl_optimizer__schedule="constant",
  eval__problems=2, eval__every=100, eval__greedy=False, checkpoint__every=1,
)  # fmt: skip
STUDENT = SMALL_VALUES | SMALL | dict(model__moe_intermediate_size=0)  # it has no experts
ONE = MeshConfig(1, 1, 1, 1)


def student(path, **changes):
  return config_of(
    tiny_distil.get_config, **STUDENT | dict(distillation__teacher=str(path)) | changes
  )


def trained(config, workdir):
  with open_run(read_inputs(config, workdir)) as run:
    return run, jax.device_get(train.train(run, run.initial_params))


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
  """A run of an MoE with checkpoints after one and two iterations."""
  workdir = tmp_path_factory.mktemp("teacher")
  _, params = trained(config_of(tiny.get_config, **SMALL_VALUES | SMALL, seed=3), workdir)
  return workdir, params


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """A Hugging Face directory of a larger model with opinions, in float32."""
  path = tmp_path_factory.mktemp("hf") / "teacher"
  model = dataclasses.replace(tiny_moe(264), hidden_size=32, num_layers=1, moe_intermediate_size=16)
  params = initial(model, seed=7)
  params = params.replace(head=2 * params.head)
  hf.save(path, params, model)
  return path, params, model


# Advantages.


def batch(**changes):
  base = make_batch(SMALLER_DENSE)
  tokens_BT = base.inputs.tokens_BT % SMALLER_DENSE.vocab_size
  return with_inputs(base, tokens_BT=tokens_BT).with_fields(**changes)


@pytest.mark.parametrize("by_token", [False, True])
def test_the_teachers_advantage_is_added_to_that_of_rewards(by_token):
  config = DistillationConfig("t", coef=0.5, discount=0.25, reward_weight=2.0)
  rng = np.random.default_rng(0)
  advantage_BT = rng.normal(size=(16, T)).astype(np.float32) if by_token else None
  batches = [batch(advantage_BT=advantage_BT), batch(advantage_BT=advantage_BT)]
  teacher_logps = [np.where(b.mask_BT > 0, rng.normal(-3, 1, (16, T)), np.nan) for b in batches]
  teacher_logps = [np.float32(x) for x in teacher_logps]
  taught = [b.with_fields(teacher_logp_BT=x) for b, x in zip(batches, teacher_logps)]
  results, metrics = teacher_advantages(config)(taught)
  ratios, expected = [], []
  for part, teacher_BT in zip(batches, teacher_logps):
    mask_BT = part.mask_BT > 0
    gain_BT = np.where(mask_BT, np.nan_to_num(teacher_BT) - part.old_logp_BT, 0)
    ratios.append(-gain_BT[mask_BT])
    for t in range(T - 2, -1, -1):
      gain_BT[:, t] += 0.25 * gain_BT[:, t + 1] * mask_BT[:, t]
    reward_BT = advantage_BT if by_token else part.advantage_B[:, None]
    expected.append(np.where(mask_BT, 2.0 * reward_BT + 0.5 * gain_BT, 0))
  for part, advantage in zip(results, expected):
    np.testing.assert_allclose(part.advantage_BT, advantage, atol=1e-5)
  mean = np.concatenate(ratios).mean()
  assert float(metrics["distillation/reverse_kl"]) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
  "shape, packed",
  [
    pytest.param((1, 1, 1, 1), False, id="rows"),
    pytest.param((1, 1, 1, 1), True, marks=pytest.mark.long, id="packed"),
    pytest.param((1, 2, 2, 2), True, marks=pytest.mark.long, id="mesh"),
  ],
)
def test_a_teacher_scores_what_the_policy_sampled_at_its_temperature(shape, packed):
  """In rows of their own, packed, and on a mesh; with experts, which the policy does not have."""
  taught = teacher.Teacher(WeightSource(teacher.KEY, "t"), SMALLER_MOE)
  params, sampled = initial(SMALLER_MOE), batch()
  mask_BT = sampled.mask_BT[:, 1:] > 0
  wanted_BT = next_logp(params, SMALLER_MOE, jnp.asarray(sampled.inputs.tokens_BT), temperature=0.7)
  mesh = sharding.make_mesh(MeshConfig(*shape), jax.devices()[: np.prod(shape)])
  score = teacher.scoring(taught, learner(SMALLER_DENSE, microbatches=4, temperature=0.7))
  with jax.set_mesh(mesh):
    layout = transformer.shardings(SMALLER_MOE, sharding.TRAIN, mesh)
    placed = packing.plan(sampled, sharding.batch_shards(mesh)) if packed else sampled
    logp_BT = score(jax.device_put(params, layout), sharding.put_batch(placed.inputs, mesh))
    order = placed.order_B if packed else None
    found_BT = packing.in_order(np.asarray(jax.device_get(logp_BT)), order)
  np.testing.assert_allclose(found_BT[:, 1:][mask_BT], wanted_BT[mask_BT], atol=2e-5)


# Where it comes from.


@pytest.mark.long
def test_a_teacher_is_loaded_as_passes_read_it(other_run, directory):
  """In bfloat16, but for the router; frozen weights need no more."""
  (workdir, params), (path, hf_params, _) = other_run, directory
  mesh = sharding.make_mesh(MeshConfig(1, 2, 2, 1), jax.devices()[:4])
  for named, expected in (workdir, params), (path, hf_params):
    config = student(named, compute__dtype="bfloat16", mesh__fsdp=2, mesh__expert=2, mesh__data=1)
    taught = teacher.find_teacher(config)
    with jax.set_mesh(mesh):
      loaded = taught.source.load(taught.model, mesh, config.compute.dtype)
    types = transformer.dtypes(taught.model, "bfloat16")
    assert jax.tree.map(lambda x: x.dtype, loaded) == jax.tree.map(jnp.dtype, types)
    assert loaded.blocks[0].ffn.router.dtype == jnp.float32 and loaded.embed.dtype == jnp.bfloat16
    layout = transformer.shardings(taught.model, sharding.TRAIN, mesh)
    for x, y, s in zip(*map(jax.tree.leaves, (loaded, expected, layout)), strict=True):
      assert x.sharding.is_equivalent_to(s, x.ndim)
      np.testing.assert_array_equal(x, jnp.asarray(y).astype(x.dtype))


@pytest.mark.long
def test_a_run_is_named_as_its_weights_are(other_run, tmp_path):
  workdir, _ = other_run
  taught = teacher.find_teacher(student(workdir))
  assert taught.source.path.endswith("checkpoints/rl/2") and taught.source.tokenizer == "bytes"
  assert taught.model.num_experts == 8 and taught.source.about["step"] == 2
  first = teacher.find_teacher(student(workdir / "checkpoints" / "rl" / "1"))
  assert first.source.about["step"] == 1
  assert teacher.find_teacher(config_of(tiny.get_config)) is None
  assert teacher.find_teacher(student(workdir, job="eval")) is None, "nothing is trained"


def refused(config, tmp_path, message):
  with pytest.raises(ValueError, match=message) as error:
    read_inputs(config, tmp_path / "new")
  assert "\n" not in str(error.value)
  assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_what_cannot_teach_is_refused_by_name(other_run, directory, tmp_path):
  workdir, _ = other_run
  message = (
    r"^distillation\.teacher=/nowhere is not a directory: set it to a Hugging Face directory"
  )
  refused(student("/nowhere"), tmp_path, message)
  message = r"^distillation\.teacher=http://a:80: http:// is not supported"
  refused(student("http://a:80"), tmp_path, message)
  nine = workdir / "checkpoints" / "rl" / "9"
  refused(student(nine), tmp_path, r"^distillation\.teacher='.*' is not a complete checkpoint")
  wider = student(workdir, model__vocab_size=272)
  refused(wider, tmp_path, "vocabulary of 264 tokens .* model.vocab_size=272.* the same vocabulary")
  base = tiny_moe(264)
  for changes, message in (
    (dict(max_position_embeddings=8), "= 12 exceed the max_position_embeddings=8 of"),
    (
      dict(num_kv_heads=1),
      r"distillation.teacher=.*attention\.k .* K=1 is not divisible by mesh.tensor=2",
    ),
  ):
    path = tmp_path / "teacher"
    small = dict(
      hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, moe_intermediate_size=16
    )
    model = dataclasses.replace(base, **small | changes)
    hf.save(path, transformer.init(model, jax.random.key(0)), model)
    refused(student(path, mesh__tensor=2, mesh__fsdp=4, mesh__data=1), tmp_path, message)
    shutil.rmtree(path)
  named = tmp_path / "named"
  shutil.copytree(directory[0], named)
  toy_qwen3.write_tokenizer(named)
  refused(
    student(named), tmp_path, "has another tokenizer, .*named', than the policy, tokenizer='b"
  )
  read_inputs(student(directory[0]), tmp_path / "new")


# Whole runs.


@pytest.mark.long
def test_a_student_nears_its_teacher_without_a_reward(directory, tmp_path):
  """One response to a prompt, of which the verifier finds none right; and the run ends as one that
  was interrupted."""
  path, _, model = directory
  changes = dict(
    rl__prompts=128, rl__group_size=1, rl__iterations=5, rl_optimizer__learning_rate=1e-2
  )
  config = student(path, **changes)
  _, params = trained(config, tmp_path / "whole")
  rows = rows_of(tmp_path / "whole", "rl")
  divergence = [row["distillation/reverse_kl"] for row in rows[1:]]
  assert divergence[0] > 1.0 and divergence[-1] < 0.85 * divergence[0]
  assert all(row["reward/mean"] == 0 for row in rows[1:])
  lines = (tmp_path / "whole" / "rollouts" / "rl_000001.jsonl").read_text().splitlines()
  assert np.std([json.loads(line)["advantage"] for line in lines]) > 0.05
  text = "\n".join(plan.lines(read_inputs(config)))
  assert f"teacher: {transformer.count(model)[0]:,} parameters, frozen, {path}" in text
  assert "the teacher's weights" in text
  stored = parameters(tmp_path / "whole", 5)
  assert stored.keys() <= {"step", "params", "opt_state", "skipped", "clip_factor"}
  sizes = [x.size for x in jax.tree.leaves(stored["params"])]
  assert sum(sizes) == transformer.count(config.model)[0], "the teacher is not in it"

  with told_to_go(checks=9):
    trained(config, tmp_path / "again")
  assert 1 < len(rows_of(tmp_path / "again", "rl")) < 6, "in the middle"
  _, same = trained(config, tmp_path / "again")
  assert jax.tree.all(jax.tree.map(np.array_equal, same, params))
  assert figures(tmp_path / "again") == figures(tmp_path / "whole")


@pytest.mark.long
def test_a_run_goes_on_with_the_checkpoint_that_it_began_with(other_run, tmp_path):
  """Also with only the directory of its checkpoints."""
  source = tmp_path / "source"
  shutil.copytree(other_run[0], source)
  first, last = (source / "checkpoints" / "rl" / name for name in "12")
  shutil.move(last, tmp_path / "later")
  config = student(source, rl__iterations=1, checkpoint__directory=str(tmp_path / "kept"))
  trained(config, tmp_path / "run")
  made_with = json.loads((tmp_path / "run" / "config.json").read_text())["provenance"]
  assert made_with["teacher"]["checkpoint"] == str(first)
  shutil.move(tmp_path / "later", last)
  assert teacher.find_teacher(config).source.path == str(last)
  recorded = provenance.recorded_origins(
    provenance.read(tmp_path / "run"), dataclasses.asdict(config)
  )["teacher"]
  assert teacher.find_teacher(config, recorded).source.path == str(first)
  for workdir in ("run", "another machine"):
    with open_run(read_inputs(config, tmp_path / workdir)) as run:
      assert run.teacher.source.path == str(first)


def test_its_pass_is_counted(directory):
  path, _, model = directory
  config = student(path)
  taught, prompts = teacher.find_teacher(config), np.array([5, 5, 7, 7])
  ends = np.array([9, 8, 8, 10])
  alone = dataclasses.replace(config, distillation=DistillationConfig())
  (without, updates), (with_it, same) = (
    iteration_flops(c, model, prompts, ends) for c, model in ((alone, None), (config, taught.model))
  )
  forward = forward_flops(model, prompts[::4], prompts, ends)
  assert with_it - without == pytest.approx(forward) and forward > 0 and same == updates


def test_the_programs_of_a_run_have_its_pass_and_its_weights(directory):
  """`gspo_jax.aot` compiles them from a teacher's files alone."""
  path, _, model = directory
  config = student(path, compute__dtype="bfloat16", rl__packed=True, rl__microbatches=2)
  mesh = sharding.make_mesh(ONE, jax.devices()[:1])
  case = programs.make_case(config)
  compiled = dict(programs.programs(case, mesh, ["train", "score"]))
  assert list(compiled) == ["train", "score", "teacher"]
  weights = device_bytes(compiled["teacher"].arguments[0])
  assert 2 * transformer.count(model)[0] <= weights < 2.1 * transformer.count(model)[0]
  assert all(device_bytes(compiled[name].resident) >= weights for name in ("train", "score"))
  plain = programs.make_case(
    student("", distillation__reward_weight=1.0, compute__dtype="bfloat16")
  )
  without = dict(programs.programs(plain, mesh, ["train", "score"]))
  assert (
    device_bytes(compiled["train"].resident) - device_bytes(without["train"].resident) == weights
  )
  assert estimate.needed("teacher", case, mesh) > estimate.needed("score", case, mesh) * 0.4
  with jax.set_mesh(mesh):
    logp_BT = jax.eval_shape(compiled["teacher"].function, *compiled["teacher"].arguments)
  assert logp_BT.shape == (case.sequences, case.length)
