"""A failed write ends a run soon, with one line."""

import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from support.command_line import SMALL, called, command

from gspo_jax.evaluation.resume import ResumeLog
from gspo_jax.runs import checkpoint, metrics, nonfinite, provenance
from gspo_jax.runs.mirror import Mirror
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import files

ROW = dict(phase="rl", step=1, loss=2.0)
CONFIG = CheckpointConfig(directory="", every=1, keep=1, keep_every=0, best="", grace_s=30.0)
STATE = dict(x=jnp.arange(2.0))


@pytest.mark.long
def test_a_run_whose_disk_is_full_ends_with_one_line(tmp_path):
  """Files of a checkpoint exceed the limit of 20 KiB."""
  flags = [*SMALL, "job=sft", "checkpoint.every=2"]
  started = time.monotonic()
  limited = ["bash", "-c", 'ulimit -f 20 && exec "$@"', "-", *command(tmp_path, *flags)]
  done = called(limited, JAX_ENABLE_COMPILATION_CACHE="false")
  written = time.time() - (tmp_path / "metrics.jsonl").stat().st_mtime
  usual = "gspo_jax: configs/", "config ", "sft "
  lines = [line for line in done.stderr.splitlines() if not line.startswith(usual)]
  assert done.returncode == 1 and len(lines) == 1, done.stderr[-3000:]
  assert lines[0].startswith(f"gspo_jax: {tmp_path}/checkpoints/sft/2 cannot be written: File too")
  assert "the same command resumes" in lines[0]
  assert written < min(20, time.monotonic() - started)  # the twenty minutes of Orbax are not waited


SAVE = """
import sys, jax.numpy as jnp
from gspo_jax.runs import checkpoint
from gspo_jax.settings.training import CheckpointConfig
from gspo_jax.system import files
config = CheckpointConfig(every=1, keep=1)
checkpoints = checkpoint.Checkpointer(sys.argv[1], "rl", config)
checkpoints.save(1, dict(x=jnp.arange(2.0)), {})
checkpoints._wait()
def refuse(*_, **__):
  raise PermissionError(1, "Operation not permitted", "there")
import etils.epath.backend as backend
for name in "mkdir", "makedirs":
  setattr(backend._OsPathBackend, name, refuse)
try:
  checkpoints.save(2, dict(x=jnp.arange(2.0)), {})
  checkpoints.close()
except files.WriteError as error:
  sys.exit(str(error))
"""


CODE, SPEC = "[os_error_code='27']", """[tensorstore_spec='{\\"driver\\":\\"zarr\\"}']"""


@pytest.mark.parametrize("notes", [CODE, f"{CODE} {SPEC}", f"{SPEC} {CODE}"])
def test_the_reason_is_the_systems_message(notes):
  """TensorStore appends its notes in any order."""
  prefix = 'OUT_OF_RANGE: Error opening "zarr" driver: Failed writing: "/a: b/c"'
  error = ValueError(f"{prefix}: Failed to write 9 bytes to file 4: File too large {notes}")
  assert checkpoint.reason(error) == "File too large"


def test_an_impossible_directory_lets_the_process_end(tmp_path):
  """It ends without `main.end_process`: no thread waits forever."""
  done = called([sys.executable, "-c", SAVE, str(tmp_path)])
  assert done.returncode == 1
  assert f"{tmp_path}/checkpoints/rl/2 cannot be written: Operation not permitted" in done.stderr
  assert (tmp_path / "checkpoints" / "rl" / "1").exists()  # keep=1: not before there is another one


def test_a_failed_save_is_raised_with_the_next_row(tmp_path, monkeypatch):
  """The next save may be hours away. Failures of the mirror are failures of the save."""
  bucket = tmp_path / "bucket"
  config = CheckpointConfig(**vars(CONFIG) | dict(directory=str(bucket)))
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "metrics.jsonl").write_text("{}")
  bucket.mkdir()
  (bucket / "workdir").write_text("a file in the way")
  checkpoints = checkpoint.Checkpointer(tmp_path / "run", "rl", config)
  checkpoints.save(1, STATE, {})
  deadline = time.monotonic() + 30
  with pytest.raises(files.WriteError, match=f"{bucket}/workdir.* cannot be written: "):
    while time.monotonic() < deadline:
      checkpoints.metrics()
  for again in checkpoints.close, lambda: checkpoints.save(2, STATE, {}):
    with pytest.raises(files.WriteError, match=f"{bucket}/workdir.* cannot be written: "):
      again()
  assert not (bucket / "rl" / "1").exists()  # it is complete with its mirror only


def in_the_way(path):
  """Makes a file in a directory's place: not even root can write below it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("")
  return path


UNWRITABLE = {
  "workdir": lambda w: metrics.Writer(in_the_way(w / "run")),
  "metrics": lambda w: (w / "metrics.jsonl").mkdir() or metrics.Writer(w),
  "tensorboard": lambda w: in_the_way(w / "tensorboard") and metrics.Writer(w).write(ROW),
  "rollouts": lambda w: in_the_way(w / "rollouts") and metrics.Writer(w).dump_rollouts("rl", 1, []),
  "config.json": lambda w: provenance.record(in_the_way(w / "run"), {}),
  "evaluations": lambda w: ResumeLog(in_the_way(w / "evaluations"), "key"),
  "report": lambda w: files.write_whole(in_the_way(w / "run") / "report.html", ["x"]),
  "checkpoints": lambda w: checkpoint.Checkpointer(in_the_way(w / "run"), "rl", CONFIG),
  "mirror": lambda w: in_the_way(w / "a") and Mirror(w, str(in_the_way(w / "b"))).copy(),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_unwritable_file_is_named(name, tmp_path):
  with pytest.raises(files.WriteError, match=rf"{tmp_path}\S* cannot be written: \w+"):
    UNWRITABLE[name](tmp_path)


def test_a_failure_without_a_dump_is_still_raised(tmp_path):
  home = in_the_way(tmp_path / "home")
  guard = nonfinite.Guard(checkpoint.epath.Path(home), {}, "stop", updates=1, keep=1)
  state = type("State", (), dict(step=jnp.int32(0)))()
  with pytest.raises(nonfinite.NonFiniteError, match="loss is nan; its dump cannot be writ"):
    guard.check(ROW | dict(loss=float("nan")), state)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_removed_or_replaced_metrics_stop_the_run(change, tmp_path):
  writer = metrics.Writer(tmp_path / "run")
  writer.write(ROW)
  path = tmp_path / "run" / "metrics.jsonl"
  path.unlink()
  if change == "replaced":
    path.write_text("")
  with pytest.raises(files.WriteError, match=f"{path} cannot be written"):
    writer.write(ROW)
  writer.close()


@pytest.mark.parametrize("line", ["garbage", "3", "[]", "{}", '{"step": "1"}', "\0\0", "[" * 10**5])
def test_a_damaged_row_is_named(line, tmp_path):
  path = tmp_path / "metrics.jsonl"
  rows = [json.dumps(ROW | dict(step=step)) for step in (1, 2, 3)]
  path.write_text("\n".join([rows[0], line, rows[2], ""]))
  with pytest.raises(ValueError, match=f"{path}:2 is not .*: restore the line, or") as raised:
    metrics.Writer(tmp_path)
  assert "\n" not in str(raised.value)
  placeholder = str(raised.value).partition("replace it by ")[2]
  path.write_text("\n".join([rows[0], placeholder, rows[2], ""]))
  with metrics.Writer(tmp_path) as writer:
    assert writer.count_covered("rl", 2) == 2 and writer.truncate("rl", 2) == 1


@pytest.mark.parametrize("text", ["garbage", "3", "[]", '{"provenance": 1}', "\udcff", "[" * 10**5])
def test_a_damaged_configuration_is_named(text, tmp_path):
  path = tmp_path / "config.json"
  path.write_text(text, errors="surrogateescape")
  with pytest.raises(ValueError, match=f"{path} is damaged .*another --workdir"):
    provenance.check_configuration(tmp_path, dict(resume="auto"))


def sealed(directory: Path) -> list[str]:
  return (directory / "unfinished.jsonl").read_text().splitlines()


@pytest.mark.parametrize("line", ["garbage", "3", "{}", '{"chunk": "a"}', "\udcff", "[" * 10**5])
def test_an_unfinished_evaluation_continues_before_its_damage(line, tmp_path, capsys):
  log = ResumeLog(tmp_path, "key")
  for n in range(3):
    log.add(dict(chunk="a", n=n, reward=0.1 + n))
  path, lines = tmp_path / "unfinished.jsonl", sealed(tmp_path)
  lines[2] = line
  path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
  assert ResumeLog(tmp_path, "key").find("a") == [dict(chunk="a", n=0, reward=0.1)]
  assert f"{path}:3: its checksum does not match; problems from this" in capsys.readouterr().err
  assert len(sealed(tmp_path)) == 2


def test_a_flipped_bit_of_an_unfinished_evaluation_is_noticed(tmp_path):
  log = ResumeLog(tmp_path, "key")
  log.add(dict(chunk="a", reward=0.125))
  path = tmp_path / "unfinished.jsonl"
  path.write_text(path.read_text().replace("0.125", "0.135"))
  assert ResumeLog(tmp_path, "key").find("a") == []
