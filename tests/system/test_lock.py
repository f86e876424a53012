"""One run at a time in a directory; a lock goes with its process, however that ends."""

import errno
import fcntl
import signal
import sys

import pytest
from support.command_line import SMALL, run, started

from gspo_jax.system import lock

HOLD = """
import sys, time
from gspo_jax.system import lock
with lock.alone_in(*sys.argv[1:]):
  print("held", flush=True)
  time.sleep(600)
"""


@pytest.mark.long
def test_the_second_run_is_refused_and_says_by_whom(tmp_path):
  with lock.alone_in(tmp_path):
    stderr = run(tmp_path, *SMALL, ok=False)
  last = stderr.splitlines()[-1]
  assert last.startswith(f"gspo_jax: another run is in {tmp_path} (process ")
  assert "another --workdir" in last and "Traceback" not in stderr
  assert not (tmp_path / "config.json").exists()


def test_a_crash_leaves_no_lock_behind(tmp_path):
  workdir, bucket = tmp_path / "run", tmp_path / "bucket"
  with started([sys.executable, "-c", HOLD, str(workdir), str(bucket)]) as process:
    assert process.stdout.readline() == "held\n"
    for directory in workdir, bucket:  # checkpoints may have a directory of their own
      with pytest.raises(ValueError, match="another run is in"), lock.alone_in(directory):
        pass
    process.send_signal(signal.SIGKILL)
  for _ in range(2):
    with lock.alone_in(workdir, bucket):
      pass


def test_a_bucket_has_no_lock_and_a_directory_is_taken_once(tmp_path):
  with lock.alone_in(tmp_path, "gs://bucket/run", "", str(tmp_path)):
    pass
  assert [p.name for p in tmp_path.iterdir()] == [lock.FILE]


def test_a_directory_that_cannot_be_created_is_told_with_the_remedy(tmp_path):
  (tmp_path / "file").touch()
  message = r"file/run cannot be created \(Not a directory\): set another --workdir or"
  with pytest.raises(ValueError, match=message), lock.alone_in(tmp_path / "file" / "run"):
    pass


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, capsys):
  def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
  with lock.alone_in(tmp_path):
    pass
  stderr = capsys.readouterr().err
  assert stderr == (
    f"warning: {tmp_path}/lock cannot be locked (No locks available); do not start a second run "
    "in this directory\n"
  )
