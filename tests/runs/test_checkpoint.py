"""Checkpoints are restored bit for bit, on any mesh, or refused."""

import contextlib
import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from support.cases import long
from support.configs import config_of
from support.small_models import SHALLOW_MOE

from configs import tiny
from gspo_jax import main, sharding
from gspo_jax.learner.state import new_state
from gspo_jax.models import transformer
from gspo_jax.models.params import abstract
from gspo_jax.runs import checkpoint, mirror, paths
from gspo_jax.runs.mirror import Mirror
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import preemption

MODEL = SHALLOW_MOE
TX = optax.adamw(1e-3)
CONFIG = CheckpointConfig(directory="", every=1, keep=2, keep_every=0, best="", grace_s=30.0)


def state_on(mesh, model=MODEL, seed=0):
  shardings = transformer.shardings(model, sharding.TRAIN, mesh)
  init = jax.jit(lambda key: transformer.init(model, key), out_shardings=shardings)
  return new_state(init(jax.random.key(seed)), TX)


def mesh_of(*sizes):
  return sharding.make_mesh(MeshConfig(*sizes))


@pytest.fixture
def mesh():
  """Eight devices, as data parallel as can be, in use."""
  mesh = mesh_of(8, 1, 1, 1)
  with jax.set_mesh(mesh):
    yield mesh


def save(directory, state, steps=(1,), host=None, config=CONFIG):
  checkpoints = checkpoint.Checkpointer(directory, "rl", config)
  for step in steps:
    checkpoints.save(step, state, host or {"data": {"next": step}})
  checkpoints.close()


def restore(directory, like, mesh, config=CONFIG):
  checkpoints = checkpoint.Checkpointer(directory, "rl", config)
  restored = checkpoints.restore_newest(lambda: abstract(like, mesh))
  checkpoints.close()
  return restored


@pytest.mark.parametrize("devices", [1, *long((8, 4))])
def test_values_and_shardings_come_back_on_another_mesh(devices, tmp_path):
  with jax.set_mesh(mesh_of(1, 2, 2, 2)):
    saved = state_on(jax.sharding.get_mesh())
    save(tmp_path, saved, steps=(1, 2, 3))
  sizes = MeshConfig(max(1, devices // 4), min(4, devices), 1, 1)
  mesh = sharding.make_mesh(sizes, jax.devices()[:devices])
  with jax.set_mesh(mesh):
    other = state_on(mesh, seed=1)
    step, restored, host = restore(tmp_path, other, mesh)
    assert step == 3 and host == {"data": {"next": 3}}
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(saved))
    chex.assert_trees_all_equal(jax.tree.map(jax.typeof, restored), jax.tree.map(jax.typeof, other))
  assert sorted(p.name for p in (tmp_path / "checkpoints" / "rl").iterdir()) == ["2", "3"]  # keep=2


def written(folder, name="rl/1"):
  """A directory with one checkpoint, at this place."""
  state = {"x": jnp.arange(4.0)}
  with contextlib.closing(checkpoint.Checkpointer(folder, "rl", CONFIG)) as checkpoints:
    checkpoints.save(1, state, {})
  place = folder / "checkpoints" / name
  place.parent.mkdir(exist_ok=True)
  (folder / "checkpoints/rl/1").rename(place)
  return place, jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("name", ["sft/1", "rl/2"])
def test_a_checkpoint_of_another_phase_or_step_is_set_aside(name, tmp_path, capsys):
  """The arrays may be equal; the host's counts differ."""
  place, like = written(tmp_path, name)
  checkpoints = checkpoint.Checkpointer(tmp_path, name[:-2], CONFIG)
  with pytest.raises(ValueError, match="no undamaged checkpoint: restore one"):
    checkpoints.restore_newest(lambda: like)
  stderr = capsys.readouterr().err
  assert f"{place} is damaged and skipped: it was written as step 1 of rl" in stderr


def test_a_checkpoint_without_the_names_of_its_arrays_is_damaged(tmp_path):
  place, like = written(tmp_path)
  (place / "state" / "_METADATA").unlink()
  with pytest.raises(checkpoint.DamagedError, match="rl/1/state/_METADATA is missing"):
    checkpoint.Checkpointer(tmp_path, "rl", CONFIG).restore(1, like)


def test_metadata_nested_too_deeply_is_reported_in_one_line(tmp_path):
  place, _ = written(tmp_path)
  (place / "_CHECKPOINT_METADATA").write_text("[" * 10**5 + "]" * 10**5)
  with pytest.raises(checkpoint.DamagedError, match="_CHECKPOINT_METADATA is damaged: nested"):
    checkpoint.Checkpointer(tmp_path, "rl", CONFIG)


def test_the_first_hosts_clock_decides_on_a_checkpoint(tmp_path, monkeypatch):
  clock = [1000.0]
  monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
  config = dataclasses.replace(CONFIG, every_minutes=2.0)
  with contextlib.closing(checkpoint.Checkpointer(tmp_path, "rl", config)) as checkpoints:
    assert checkpoints.newest() == "the start of this phase"
    for seconds, is_time in (119.0, False), (2.0, True):
      clock[0] += seconds
      assert checkpoints.is_time() is is_time
    checkpoints.save(1, {"x": jnp.arange(4.0)}, {})
    assert not checkpoints.is_time()
    monkeypatch.setattr(checkpoint.hosts, "broadcast", lambda value: not value)
    assert checkpoints.is_time(), "the first host says so"
  assert checkpoints.newest() == f"checkpoint {tmp_path}/checkpoints/rl/1"
  with contextlib.closing(checkpoint.Checkpointer(tmp_path, "rl", CONFIG)) as checkpoints:
    checkpoints.config = dataclasses.replace(CONFIG, every_minutes=0.0)
    clock[0] += 1e6
    assert not checkpoints.is_time(), "by steps alone"


def test_a_donated_state_is_saved_as_it_was(mesh, tmp_path):
  state = state_on(mesh)
  expected = state_on(mesh)
  checkpoints = checkpoint.Checkpointer(tmp_path, "rl", CONFIG)
  checkpoints.save(1, state, {})
  overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
  jax.block_until_ready(overwrite(state))
  checkpoints.close()
  _, restored, _ = restore(tmp_path, expected, mesh)
  chex.assert_trees_all_equal(restored, expected)


def test_a_half_written_checkpoint_is_not_read(mesh, tmp_path):
  state = state_on(mesh)
  save(tmp_path, state, steps=(1,))
  # What a kill in the middle of a write leaves: the directory before its final rename.
  (tmp_path / "checkpoints" / "rl" / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
  step, restored, _ = restore(tmp_path, state, mesh)
  assert step == 1
  chex.assert_trees_all_equal(restored, state)


def test_another_model_is_refused_with_both_shapes(mesh, tmp_path):
  save(tmp_path, state_on(mesh))
  wider = state_on(mesh, dataclasses.replace(MODEL, vocab_size=128))
  with pytest.raises(ValueError, match=r"embed has shape \(64, 32\).*expects \(128, 32\)"):
    restore(tmp_path, wider, mesh)


def steps_on_disk(workdir):
  folder = workdir / "checkpoints" / "rl"
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


@pytest.mark.parametrize(
  "best_is, sign", [("largest", 1), pytest.param("smallest", -1, marks=pytest.mark.long)]
)
def test_the_last_regular_and_best_checkpoints_are_kept(mesh, tmp_path, best_is, sign):
  """Two of the last, every fourth, and the best; steps without a number are never the best."""
  config = dataclasses.replace(CONFIG, keep_every=4, best="eval/accuracy", best_is=best_is)
  accuracy = {step: sign * x for step, x in {2: 0.1, 3: 0.9, 5: math.nan, 6: 0.8, 9: 0.2}.items()}
  state = {"x": jnp.arange(4.0, out_sharding=jax.P())}
  checkpoints = checkpoint.Checkpointer(tmp_path, "rl", config)
  for step in range(1, 8):
    metrics = {"eval/accuracy": jnp.float32(accuracy[step])} if step in accuracy else {}
    checkpoints.save(step, state, {}, metrics | {"loss": 1.0})
  checkpoints.close()
  assert steps_on_disk(tmp_path) == [3, 4, 6, 7]
  checkpoints = checkpoint.Checkpointer(tmp_path, "rl", config)  # a resumed run remembers
  for step in range(8, 11):
    checkpoints.save(step, state, {}, {"eval/accuracy": accuracy.get(step, -sign)})
  assert 0 < checkpoints.metrics()["checkpoint/seconds"] < 60
  checkpoints.close()
  assert steps_on_disk(tmp_path) == [3, 4, 8, 9, 10]


@pytest.mark.parametrize("best", ["", "eval/accuracy"])
def test_saving_a_step_again_replaces_it_for_the_metric_of_the_best_alone(best, mesh, tmp_path):
  """A kill between the removal and the end of the new save would leave neither."""
  first, second = state_on(mesh), state_on(mesh, seed=1)
  config = dataclasses.replace(CONFIG, best=best)
  save(tmp_path, first, (4,), {"n": 1}, config)
  save(tmp_path, second, (4,), {"n": 2}, config)
  step, restored, host = restore(tmp_path, first, mesh, config)
  assert (step, host) == (4, {"n": 2 if best else 1})
  chex.assert_trees_all_equal(restored, second if best else first)


def test_an_empty_workdir_is_filled_from_the_checkpoint_directory(mesh, tmp_path):
  """A copy of the workdir is beside the checkpoints."""
  config = dataclasses.replace(CONFIG, directory=str(tmp_path / "bucket"))
  workdir = tmp_path / "run"
  (workdir / "rollouts").mkdir(parents=True)
  for name, text in ("config.json", "{}"), ("metrics.jsonl", "1\n"), ("rollouts/a.jsonl", "a"):
    (workdir / name).write_text(text)
  for name in "failures", "published":  # weights for servers, which come and go, among them
    (workdir / name).mkdir()
    (workdir / name / "large.json").write_text("not copied")
  state = {"x": jnp.arange(4.0, out_sharding=jax.P())}
  save(workdir, state, (1,), config=config)
  (workdir / "metrics.jsonl").write_text("1\n2\n")
  (workdir / "rollouts" / "b.jsonl.tmp").write_text("half")
  save(workdir, state, (2,), config=config)
  assert not (workdir / "checkpoints").exists()
  shutil.rmtree(workdir)
  assert Mirror(workdir, config.directory).fill()
  texts = {p.relative_to(workdir).as_posix(): p.read_text() for p in workdir.rglob("*.json*")}
  assert texts == {"config.json": "{}", "metrics.jsonl": "1\n2\n", "rollouts/a.jsonl": "a"}
  assert not Mirror(workdir, config.directory).fill()  # it holds a run now
  assert restore(workdir, state, mesh, config)[0] == 2


def test_checkpoints_in_another_directory_than_before_are_refused(mesh, tmp_path):
  """Otherwise the run would begin again, even if it is to resume by force."""
  before, after = (dataclasses.replace(CONFIG, directory=str(tmp_path / name)) for name in "ab")
  (tmp_path / "run").mkdir()
  save(tmp_path / "run", {"x": jnp.arange(4.0, out_sharding=jax.P())}, config=before)
  record = dict(checkpoint=dict(directory=before.directory))
  (tmp_path / "run/config.json").write_text(json.dumps(record))
  changes = dict(resume="force", checkpoint=after)
  config = dataclasses.replace(config_of(tiny.get_config), **changes)
  with pytest.raises(
    ValueError, match=rf"/b has no checkpoints .* copy {tmp_path}/a/rl to .*/b/rl"
  ):
    paths.check_paths(config, tmp_path / "run")
  shutil.copytree(tmp_path / "a", tmp_path / "b")
  paths.check_paths(config, tmp_path / "run")


@pytest.mark.parametrize("job", ["eval", "rl"])
def test_an_evaluation_is_copied_when_it_ends(job, tmp_path):
  """It has no checkpoints, and a preempted machine loses its workdir."""
  sections = dict(job=job, checkpoint=SimpleNamespace(directory=str(tmp_path / "bucket")))
  (tmp_path / "run").mkdir()
  with (
    contextlib.suppress(preemption.Preempted),
    main.evaluation_copied(
      SimpleNamespace(workdir=tmp_path / "run", config=SimpleNamespace(**sections))
    ),
  ):
    (tmp_path / "run/chunks.jsonl").write_text("1\n")
    raise preemption.Preempted
  assert (tmp_path / "bucket/workdir/chunks.jsonl").exists() == (job == "eval")


def test_files_of_users_without_a_name(tmp_path, monkeypatch):
  """A container may run as a user and group that have no entry in its files."""
  monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
  monkeypatch.setattr("grp.getgrgid", {}.__getitem__)
  (tmp_path / "run").mkdir()
  (tmp_path / "run/a.json").write_text("a")
  Mirror(tmp_path / "run", str(tmp_path / "bucket")).copy()
  assert (tmp_path / "bucket/workdir/a.json").read_text() == "a"


def test_a_state_in_a_bucket_keeps_its_address(monkeypatch):
  read = []

  class Reader(contextlib.AbstractContextManager):
    __exit__ = staticmethod(lambda *_: None)
    restore = staticmethod(lambda path, like: read.append(str(path)))

  monkeypatch.setattr(checkpoint.ocp, "StandardCheckpointer", Reader)
  for path in "gs://bucket/state", "state":
    checkpoint.restore_state(path, None)
  assert read == ["gs://bucket/state", str(Path("state").absolute())]


@pytest.mark.parametrize("removed_at", ["listed", "copied"])
def test_files_removed_during_a_copy_are_left_out(removed_at, tmp_path, monkeypatch):
  workdir, bucket = tmp_path / "run", tmp_path / "bucket"
  workdir.mkdir()
  for name in "a.json", "b.json", "c.json":
    (workdir / name).write_text(name)
  copy = mirror._copy

  def removing(source, target):
    if source.name == dict(listed="a.json", copied="b.json")[removed_at]:
      (workdir / "b.json").unlink()
    copy(source, target)

  monkeypatch.setattr(mirror, "_copy", removing)
  Mirror(workdir, str(bucket)).copy()
  assert {path.name for path in (bucket / "workdir").iterdir()} == {"a.json", "c.json"}


def test_an_interrupted_copy_leaves_the_one_before(tmp_path, monkeypatch):
  """Each process copies all files anew, and may be gone in the middle of one."""
  workdir, bucket = tmp_path / "run", tmp_path / "bucket"
  workdir.mkdir()
  (workdir / "config.json").write_text("{}")
  Mirror(workdir, str(bucket)).copy()

  def cut_off(_, target):
    Path(target).write_text("{")
    raise KeyboardInterrupt

  monkeypatch.setattr(shutil, "copyfile", cut_off)
  with pytest.raises(KeyboardInterrupt):
    Mirror(workdir, str(bucket)).copy()
  monkeypatch.undo()
  assert Mirror(tmp_path / "next", str(bucket)).fill()
  assert [(p.name, p.read_text()) for p in (tmp_path / "next").iterdir()] == [("config.json", "{}")]
