"""Starting from another run's checkpoint."""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy_qwen3
from support.command_line import SMALL_VALUES
from support.configs import config_of

from configs import gsm8k, tiny
from gspo_jax import export, sft, sharding, train
from gspo_jax.inputs import read_inputs
from gspo_jax.models import lora
from gspo_jax.run import open_run
from gspo_jax.runs import checkpoint, weight_source
from gspo_jax.settings.mesh import MeshConfig

SMALL = SMALL_VALUES | dict(
  job="sft", model__num_layers=1, sft__steps=4, sft__batch=8, sft__target_loss=0.0,
  rl__iterations=1, rl__prompts=8, rl__group_size=2, rl__minibatches=1,
  eval__problems=2, eval__batch=2, checkpoint__every=2,
)  # fmt: skip


def config(**changes):
  return config_of(tiny.get_config, **SMALL | changes)


@pytest.fixture(scope="module")
def pupil(tmp_path_factory):
  """A cold start with checkpoints after 2 and 4 updates, and its parameters."""
  workdir = tmp_path_factory.mktemp("pupil")
  with open_run(read_inputs(config(), workdir)) as run:
    return workdir, jax.device_get(sft.sft(run))


def begins_with(workdir, weights, **changes):
  with open_run(read_inputs(config(job="rl", weights=str(weights), **changes), workdir)) as run:
    return jax.device_get(run.initial_params())


def same(a, b):
  return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_a_run_starts_from_the_parameters_of_another(pupil, tmp_path):
  workdir, params = pupil
  assert same(begins_with(tmp_path / "a", workdir), params)
  assert same(begins_with(tmp_path / "b", workdir / "checkpoints" / "sft", seed=5), params)
  earlier = begins_with(tmp_path / "c", workdir / "checkpoints" / "sft" / "2")
  assert not same(earlier, params)
  assert jax.tree.structure(earlier) == jax.tree.structure(params)
  made_with = json.loads((tmp_path / "c" / "config.json").read_text())["provenance"]
  about = dict(phase="sft", step=2, seed=0, commit=made_with["commit"])
  assert made_with["start"] == about | dict(checkpoint=f"{workdir}/checkpoints/sft/2")
  assert "start" not in json.loads((workdir / "config.json").read_text())["provenance"]


def test_a_continued_run_keeps_its_first_checkpoint(pupil, tmp_path):
  """Its reference policy is read again, while the named run may have newer checkpoints."""
  source = tmp_path / "source"
  shutil.copytree(pupil[0], source)
  shutil.move(source / "checkpoints" / "sft" / "4", tmp_path / "later")
  first = begins_with(tmp_path / "new", source)
  shutil.move(tmp_path / "later", source / "checkpoints" / "sft" / "4")
  assert same(begins_with(tmp_path / "new", source), first)
  made_with = json.loads((tmp_path / "new" / "config.json").read_text())["provenance"]
  assert made_with["start"]["checkpoint"] == f"{source}/checkpoints/sft/2"
  later = source / "checkpoints" / "sft" / "4"  # another one is asked for
  assert not same(begins_with(tmp_path / "new", later, resume="force"), first)
  assert not same(begins_with(tmp_path / "newer", source), first)


def test_another_checkpoint_in_the_same_place_is_refused(pupil, tmp_path):
  source = tmp_path / "source"
  shutil.copytree(pupil[0], source)
  first = begins_with(tmp_path / "new", source)
  metadata = source / "checkpoints/sft/4/host/metadata"
  metadata.write_bytes(metadata.read_bytes() + b"\n")
  with pytest.raises(ValueError, match="was last started with other contents of weights: "):
    begins_with(tmp_path / "new", source)
  assert same(begins_with(tmp_path / "new", source, resume="force"), first)


NAMES = {".": [".", "checkpoints/sft"], "checkpoints": ["sft", "sft/4"]}
NAMES |= {"checkpoints/sft": [".", "4"], "checkpoints/sft/4": ["../../.."]}


@pytest.mark.parametrize(
  "directory, name", [(directory, name) for directory in NAMES for name in NAMES[directory]]
)
def test_a_checkpoint_has_many_names(directory, name, pupil, monkeypatch):
  monkeypatch.chdir(pupil[0] / directory)
  named = weight_source.find(name)
  assert str(named.path) == f"{pupil[0]}/checkpoints/sft/4"
  assert named.config["sft"]["steps"] == 4


def test_a_run_in_the_home_directory(pupil, monkeypatch):
  monkeypatch.setenv("HOME", str(pupil[0].parent))
  assert weight_source.find(f"~/{pupil[0].name}").path == weight_source.find(str(pupil[0])).path


def test_checkpoints_in_a_directory_of_their_own_are_found(tmp_path):
  """A copy of the workdir describes model and adapters of the checkpoints."""
  values = dict(checkpoint__directory=str(tmp_path / "own"), sft__steps=2)
  with open_run(read_inputs(config(**values), tmp_path / "run")) as run:
    sft.sft(run)
  starts = [weight_source.find(str(tmp_path / name)) for name in ("run", "own/sft/2", "own/sft")]
  assert {str(each.path) for each in starts} == {f"{tmp_path}/own/sft/2"}
  assert all(each.config == starts[0].config and "model" in each.config for each in starts)


def test_a_run_without_a_checkpoint_directory_is_refused(tmp_path):
  (tmp_path / "config.json").write_text('{"provenance": {}, "checkpoint": 1}')
  with pytest.raises(ValueError, match=r"RUN=.*config\.json has no checkpoint\.directory"):
    weight_source.find(str(tmp_path), "RUN")


def test_other_meshes_can_start_from_a_checkpoint(pupil, tmp_path):
  workdir, params = pupil
  assert same(begins_with(tmp_path, workdir, mesh__fsdp=2, mesh__data=4), params)


@pytest.mark.long
def test_rl_starts_from_a_cold_start_and_another_run_from_its_adapters(pupil, tmp_path, capfd):
  workdir, _ = pupil
  adapted = tmp_path / "adapted"
  moves = dict(lora__rank=2, objective__entropy_coef=0.1)  # A model of this size earns no reward.
  with open_run(read_inputs(config(job="rl", weights=str(workdir), **moves), adapted)) as run:
    params = jax.device_get(lora.merged(train.train(run, run.initial_params)))
  assert not (adapted / "checkpoints" / "sft").exists()
  assert "WARNING" not in capfd.readouterr().err  # Orbax has some for files of parts alone
  path = weight_source.find(str(adapted)).path  # a run that has come as far as RL stands for that
  assert (path.parent.name, path.name) == ("rl", "1")
  assert weight_source.find(str(workdir)).path.parent.name == "sft"
  assert same(begins_with(tmp_path / "new", adapted), params)
  assert not same(begins_with(tmp_path / "plain", workdir), params)


@pytest.fixture(scope="module")
def published(pupil, tmp_path_factory):
  """A published model: returns an empty workdir beside it, and the config of its adapters."""
  folder = tmp_path_factory.mktemp("published")
  export.export(str(pupil[0]), folder / "base", dtype="float32")
  moves = dict(lora__rank=2, objective__entropy_coef=0.1)
  start = dict(weights=str(folder / "base"), tokenizer="bytes")
  return folder, config(job="rl", rl_optimizer__learning_rate=1e-2, **start, **moves)


@pytest.fixture(scope="module")
def adapted(published):
  """Trains adapters of a published model; returns workdir, config and parameters."""
  workdir, c = published[0] / "run", published[1]
  with open_run(read_inputs(c, workdir)) as run:
    return workdir, c, jax.device_get(train.train(run, run.initial_params))


@pytest.fixture(scope="module")
def untrained(published):
  """The same of adapters before their first update."""
  workdir, c = published[0] / "untrained", published[1]
  with open_run(read_inputs(c, workdir)) as run:
    checkpoints = checkpoint.Checkpointer(workdir, "rl", c.checkpoint)
    with contextlib.closing(checkpoints):
      checkpoints.save(1, train.start_state(run, run.initial_params), {})
  return workdir, c


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frozen_weights_as_they_are_stored_and_adapters_are_merged_with_one_rounding(
  dtype, adapted, tmp_path
):
  """Exports, teachers (with their own compute type) and first weights load in this way."""
  workdir, c, params = adapted
  checkpoint = weight_source.find(str(workdir))
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    merged = jax.device_get(checkpoint.load(c.model, mesh, dtype))
  exact = lora.merged(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
  rounded = jax.tree.map(lambda x, like: x.astype(like.dtype), exact, merged)
  assert same(merged, jax.device_get(rounded))
  assert merged.blocks[0].attention.q.dtype == dtype


@pytest.mark.long
def test_adapters_go_out_to_peft_and_come_back(adapted, pupil, tmp_path):
  workdir, c, params = adapted
  export.export(str(workdir), tmp_path / "adapter", adapters=True)
  described = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
  assert described["base_model_name_or_path"] == str(workdir.parent / "base")
  values = dict(lora__rank=2, lora__adapter=str(tmp_path / "adapter"))
  again = config(job="rl", weights=str(pupil[0]), **values)
  with open_run(read_inputs(again, tmp_path / "again")) as run:
    assert same(jax.device_get(train.start_policy(run, run.initial_params)), params)
    reference = train.as_read(train.start_policy(run, run.initial_params), c.model, "float32")
  assert same(jax.device_get(reference), jax.device_get(lora.dithered(params)))
  values |= dict(objective__name="gspo_token", critic__name="model")
  with open_run(
    read_inputs(config(job="rl", weights=str(pupil[0]), **values), tmp_path / "c")
  ) as run:
    trunk = train.start_state(run, run.initial_params).critic.params.trunk
  assert same(jax.device_get(trunk), jax.device_get(lora.merged(params)).replace(head=None))
  with pytest.raises(ValueError, match=r"set lora\.rank=2"):
    read_inputs(config(job="rl", lora__rank=4, lora__adapter=str(tmp_path / "adapter")))
  with pytest.raises(ValueError, match="has no adapters: leave out --adapters"):
    export.export(str(pupil[0]), tmp_path / "none", adapters=True)


def test_peft_finds_the_base_of_adapters_by_itself(untrained, tmp_path):
  peft = pytest.importorskip("peft")
  export.export(str(untrained[0]), tmp_path / "adapter", adapters=True)
  model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
  names = [name for name, _ in model.named_parameters()]
  assert any(name.endswith("q_proj.lora_A.default.weight") for name in names)


ADAPTIVE = dict(objective__adaptive_clip__target=0.2, rl__minibatches=2)


@pytest.mark.parametrize(
  "changes, line",
  [
    (dict(rl_optimizer__clip_norm=0.0), "rl_optimizer.clip_norm: 1.0 -> 0.0"),
    (dict(critic__name="head", objective__name="gspo_token"), "critic.name: 'none' -> 'head'"),
    (dict(lora__rank=3), "lora.rank: 2 -> 3"),
    (dict(lora__rank=0), "lora.rank: 2 -> 0"),
    (dict(lora__matrices=("q_proj",)), r"lora.matrices: \[.*\] -> \['q_proj'\]"),
    (ADAPTIVE, "objective.adaptive_clip.target: 0.0 -> 0.2"),
  ],
)
def test_a_forced_start_names_the_key_of_another_training_state(changes, line, untrained):
  workdir, c = untrained
  settings = dict(lora__rank=2, objective__entropy_coef=0.1, rl_optimizer__learning_rate=1e-2)
  settings |= changes | dict(job="rl", weights=c.weights, tokenizer="bytes", resume="force")
  with pytest.raises(ValueError, match=rf"rl/1 has another .*{line}.*Restore"):
    read_inputs(config(**settings), workdir)


def test_a_forced_start_with_the_same_arrays_goes_on(pupil):
  workdir, _ = pupil
  read_inputs(config(resume="force", rl_optimizer__clip_norm=0.0), workdir)
  read_inputs(config(resume="force", sft_optimizer__clip_norm=0.5), workdir)
  with pytest.raises(ValueError, match=r"sft/4 has another .*sft_optimizer.clip_norm: 1.0 -> 0.0"):
    read_inputs(config(resume="force", sft_optimizer__clip_norm=0.0), workdir)


@pytest.mark.parametrize(
  "below, changes, message",
  [
    ("", dict(model__num_layers=2), "another model .*: model.num_layers=2 and not 1. Set these"),
    ("checkpoints/sft/3", {}, r"not a complete checkpoint; complete steps: 2, 4"),
    ("checkpoints", {}, "config.json"),
    ("nowhere", {}, "is not a directory: set it to a Hugging Face directory .*, to the workdir of"),
    ("chekpoints", {}, r"is not a directory: .*; did you mean /.*/checkpoints\?$"),
  ],
)
def test_other_models_and_incomplete_checkpoints_are_refused(
  pupil, tmp_path, below, changes, message
):
  with pytest.raises((ValueError, OSError), match=message):
    begins_with(tmp_path / "new", pupil[0] / below, **changes)
  assert not (tmp_path / "new").exists()  # it is found before anything is written


def test_a_run_without_checkpoints_is_refused(tmp_path):
  with open_run(read_inputs(config(), tmp_path / "begun")):
    pass
  with pytest.raises(ValueError, match="is a run without a checkpoint"):
    begins_with(tmp_path / "new", tmp_path / "begun")


def test_a_damaged_checkpoint_is_named_with_the_one_before(tmp_path):
  with open_run(read_inputs(config(), tmp_path / "source")) as run:
    sft.sft(run)
  last = tmp_path / "source" / "checkpoints" / "sft" / "4"
  for path in (last / "state").rglob("ocdbt.process_0/d/*"):
    content = bytearray(path.read_bytes())
    for i in range(0, len(content), 100):  # whichever file the parameters are in
      content[i] ^= 1
    path.write_bytes(content)
  with pytest.raises(
    ValueError, match=r"4 is damaged: .*; the previous checkpoint is .*checkpoints/sft/2"
  ):
    begins_with(tmp_path / "new", tmp_path / "source")
  assert last.exists()  # it is another run's: nothing is set aside


def test_a_checkpoint_with_nan_is_refused_with_the_parameter(tmp_path):
  params = dict(embed=jnp.ones((4, 3)), head=jnp.ones(5).at[2].set(jnp.nan))
  (tmp_path / "checkpoints").mkdir()
  checkpoints = checkpoint.Checkpointer(tmp_path, "sft", config().checkpoint)
  checkpoints.save(1, dict(params=params), {})
  checkpoints.close()
  start = weight_source.find(str(tmp_path / "checkpoints/sft/1"))
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=device) for k, v in params.items()}
  with pytest.raises(ValueError, match=r"sft/1: head has 1 value that is NaN or infinite$"):
    start.restore(like)


@pytest.mark.parametrize("eps, fits", [(9.999999974752427e-07, True), (1.1e-6, False)])
def test_numbers_of_published_weights_may_be_rounded_to_float32(eps, fits, tmp_path):
  toy_qwen3.write(tmp_path / "hf")
  file = tmp_path / "hf" / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(rms_norm_eps=eps)))
  c = config_of(lambda: gsm8k.get_config("tiny"), weights=str(tmp_path / "hf"))
  source = weight_source.resolve("weights", c.weights, {})
  if fits:
    return source.check_model(c.model, c.weights)
  with pytest.raises(ValueError, match=r"model\.rms_norm_eps=1e-06 and not 1\.1e-06"):
    source.check_model(c.model, c.weights)
