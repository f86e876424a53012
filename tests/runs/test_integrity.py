"""A damaged checkpoint is found before it is used, and the one before it is restored."""

import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import long

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
  """Writes checkpoints 1, the best, and 2."""
  workdir = tmp_path_factory.mktemp("whole")
  save(workdir, 1, 2)
  return workdir


def save(workdir, *steps):
  checkpoints = checkpoint.Checkpointer(workdir, "rl", CONFIG)
  for step in steps:
    state = jax.tree.map(jnp.asarray, STATES[step])
    checkpoints.save(step, state, dict(n=step), dict(score=-step))
  checkpoints.close()


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


def resume_step(workdir):
  """Restores the newest checkpoint, checks its values, and returns its step."""
  checkpoints = checkpoint.Checkpointer(workdir, "rl", CONFIG)
  like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE) for k, x in STATES[1].items()}
  step, state, host = checkpoints.restore_newest(lambda: like)
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


def shortened(content, _):
  return content[: len(content) // 2]


@pytest.mark.parametrize(
  "change",
  [zeros, *long((flipped, garbage, shortened))],
)
def test_a_changed_file_is_harmless_or_sets_its_checkpoint_aside(change, whole, copy, capsys):
  """Not every file is read."""
  rng, used = random.Random(change.__name__), []
  for number, name in enumerate(files_of(whole, 2)):
    if name.parts[0] == "metrics":
      continue  # see below
    workdir, step = copy(str(number), 2)
    content = (step / name).read_bytes()
    (step / name).write_bytes(change(content, rng))
    used.append(resume_step(workdir))
    stderr = capsys.readouterr().err
    assert (step.parent / "damaged_2").is_dir() == (used[-1] == 1)
    if used[-1] == 1:
      assert f"checkpoint {step} is damaged and skipped: " in stderr and stderr.count("\n") == 1
    assert used[-1] == 1 or str(name) != "host/metadata"
    assert used[-1] == 1 or len(content) < 10_000, "it is the one with the values"
  assert used.count(1) >= 4


def test_every_bit_of_the_values_counts(whole, copy, capsys):
  """Orbax does not notice a flipped bit."""
  rng = random.Random(0)
  folder = whole / "checkpoints" / "rl" / "2"
  name = max(files_of(whole, 2), key=lambda name: (folder / name).stat().st_size)
  for number in range(8):
    workdir, step = copy(str(number), 2)
    content = bytearray((step / name).read_bytes())
    content[len(content) // 4 + rng.randrange(len(content) // 2)] ^= 1 << rng.randrange(8)
    (step / name).write_bytes(content)
    assert resume_step(workdir) == 1
    assert "x is not what was written" in capsys.readouterr().err
  workdir, step = copy("gone", 2)
  (step / name).unlink()
  assert resume_step(workdir) == 1 and "damaged and skipped: " in capsys.readouterr().err
  save(workdir, 2)  # It can be written again.
  assert resume_step(workdir) == 2


def test_sums_are_the_same_on_every_mesh():
  mesh = jax.make_mesh((8,), ("data",))
  x_X = np.random.default_rng(0).normal(size=64)
  for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8):
    x = jnp.asarray(x_X * 50, dtype)
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    assert integrity.sums(dict(x=x)) == integrity.sums(dict(x=spread))
    assert integrity.sums(dict(x=x)) != integrity.sums(dict(x=x.at[3].add(1)))


def test_unreadable_metrics_are_reported_in_one_line(copy):
  """Metrics of all checkpoints are read before one is chosen."""
  workdir, best = copy("run", 1)
  (best / "metrics" / "metrics").write_text('{"score": ')
  with pytest.raises(ValueError, match=f"checkpoint {best} is damaged.*remove it"):
    resume_step(workdir)


def test_without_a_whole_checkpoint_the_run_stops_and_says_what_to_do(copy):
  workdir, newest = copy("run", 2)
  for step in 1, 2:
    path = newest.parent / str(step) / "host" / "metadata"
    path.write_bytes(flipped(path.read_bytes(), random.Random(0)))
  for _ in range(2):  # The second time is the next start.
    with pytest.raises(ValueError, match=r"rl has no undamaged checkpoint: restore one"):
      resume_step(workdir)


def test_the_metric_of_the_best_checkpoint_may_change(copy):
  """Checkpoints without it are not the best."""
  workdir, _ = copy("run", 2)
  for best in "other", "":
    config = CONFIG.__class__(**vars(CONFIG) | dict(best=best))
    checkpoints = checkpoint.Checkpointer(workdir, "rl", config)
    checkpoints.save(3, {"x": jnp.ones(3)}, {}, {"other": 1.0})
    checkpoints.close()
