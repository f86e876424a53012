"""A damaged checkpoint is found before it is used, and the one before it is used."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.runs import checkpoint, integrity
from gspo_jax.settings.training import CheckpointConfig

CONFIG = CheckpointConfig(directory="", every=1, keep=2, keep_every=0, best="score", grace_s=30.0)
STATES = {
  step: {"x": np.random.default_rng(step).normal(size=3000).astype(np.float32), "n": np.int32(step)}
  for step in (1, 2)
}


HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Checkpoints 1, which is the best, and 2."""
  workdir = tmp_path_factory.mktemp("whole")
  checkpoints = checkpoint.Checkpointer(workdir, "rl", CONFIG)
  for step, state in STATES.items():
    checkpoints.save(step, jax.tree.map(jnp.asarray, state), dict(n=step), dict(score=-step))
  checkpoints.close()
  return workdir


@pytest.fixture
def copy(whole, tmp_path):
  """Makes copies of the checkpoints; returns the workdir, and a checkpoint in it."""

  def make(name, step):
    shutil.copytree(whole, tmp_path / name)
    return tmp_path / name, tmp_path / name / "checkpoints" / "rl" / str(step)

  return make


def files_of(whole, step):
  folder = whole / "checkpoints" / "rl" / str(step)
  return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def goes_on(workdir):
  """The step that a run goes on from, whose values are as they were."""
  checkpoints = checkpoint.Checkpointer(workdir, "rl", CONFIG)
  step = checkpoints.latest_whole()
  like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE) for k, x in STATES[1].items()}
  state, host = checkpoints.restore(step, like)
  checkpoints.close()
  assert host == dict(n=step)
  jax.tree.map(np.testing.assert_array_equal, state, STATES[step])
  return step


def zeros(content, _):
  return bytes(min(4096, len(content))) + content[4096:]


def flipped(content, rng):
  changed = bytearray(content)
  changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  return bytes(changed)


def garbage(content, rng):
  return rng.randbytes(len(content))


@pytest.mark.parametrize("change", [zeros, flipped, garbage])
def test_a_file_of_the_right_size_with_other_bytes(change, whole, copy, capsys):
  rng = random.Random(change.__name__)
  for number, name in enumerate(files_of(whole, 2)):
    if len(name.parts) == 1 and name.name != integrity.SIZES:
      continue  # Orbax's own marks, see below
    workdir, step = copy(str(number), 2)
    (step / name).write_bytes(change((step / name).read_bytes(), rng))
    assert goes_on(workdir) == 1
    said = capsys.readouterr().err
    assert f"checkpoint {step} is damaged and set aside: {step / name}" in said
    assert said.count("\n") == 1
    assert (step.parent / "damaged_2").is_dir()


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "commit_success.txt"])
def test_what_nothing_is_read_from_does_no_harm(name, copy):
  """Orbax writes them last."""
  workdir, step = copy("run", 2)
  (step / name).write_bytes(zeros((step / name).read_bytes(), None))
  assert goes_on(workdir) == 2


def test_a_damaged_pointer_to_the_best_one(copy, capsys):
  """It is read of all checkpoints, not only of the one that the run goes on from."""
  workdir, best = copy("run", 1)
  (best / "metrics" / "metrics").write_text('{"score": 7.1}')
  assert goes_on(workdir) == 2
  assert f"checkpoint {best} is damaged and set aside: {best}/metrics/metrics" in (
    capsys.readouterr().err
  )


def test_when_none_is_left_the_run_stops_and_says_what_to_do(copy):
  workdir, newest = copy("run", 2)
  for step in 1, 2:
    path = newest.parent / str(step) / "host" / "metadata"
    path.write_bytes(flipped(path.read_bytes(), random.Random(0)))
  for _ in range(2):  # at the next start too
    with pytest.raises(
      ValueError, match=r"rl has no checkpoint left but damaged_1, damaged_2: put"
    ):
      goes_on(workdir)


def test_checkpoints_without_checksums_are_read_with_a_warning(copy, capsys):
  """Their lists are sizes by name."""
  workdir, step = copy("run", 2)
  listed = json.loads((step / integrity.SIZES).read_text())["value"]
  (step / integrity.SIZES).write_text(json.dumps({n: size for n, (size, _) in listed.items()}))
  assert goes_on(workdir) == 2
  said = capsys.readouterr().err
  assert said.startswith("warning: ") and "has no checksums" in said and said.count("\n") == 1
  path = step / "state" / "manifest.ocdbt"
  path.write_bytes(path.read_bytes()[:-1])
  assert goes_on(workdir) == 1


@pytest.mark.parametrize(
  "text", ["{}", "[]", "3", '{"value": {}, "crc32": 0}', "\0", "[" * 100_000]
)
def test_a_list_of_nothing_vouches_for_nothing(text, copy, capsys):
  workdir, step = copy("run", 2)
  (step / integrity.SIZES).write_text(text)
  assert goes_on(workdir) == 1
  assert f"set aside: {step / integrity.SIZES}" in capsys.readouterr().err


def test_another_metric_may_decide_from_now_on(copy):
  """Checkpoints that were not measured by it are not the best."""
  workdir, _ = copy("run", 2)
  for best in "other", "":
    config = CONFIG.__class__(**vars(CONFIG) | dict(best=best))
    checkpoints = checkpoint.Checkpointer(workdir, "rl", config)
    checkpoints.save(3, {"x": jnp.ones(3)}, {}, {"other": 1.0})
    checkpoints.close()
