"""Places that a key names, and those that are none."""

from pathlib import Path

import pytest

from gspo_jax.system import files


@pytest.mark.parametrize(
  "name", ["foo://x", "http://[", "file:///tmp/x", "://", "s3://b/x", "az://b/x", "hf://a/b"]
)
def test_a_scheme_that_is_none_is_told_with_its_key(name, tmp_path):
  scheme = name.partition(":")[0]
  with pytest.raises(ValueError, match=r"^data\.eval=.*: " + scheme + r".* is not supported"):
    files.located(name, "data.eval")
  assert files.located(str(tmp_path), "weights") == tmp_path


def test_a_bucket_that_does_not_answer_is_told_with_its_key(monkeypatch):
  class Missing:
    def __init__(self, name):
      pass

    def expanduser(self):
      return self

    def exists(self):
      raise ImportError("Please install gcsfs")

  monkeypatch.setattr(files.epath, "Path", Missing)
  with pytest.raises(ValueError, match=r"^weights=gs://x: .*the extra gcs: pip.*install gcsfs"):
    files.located("gs://x", "weights")


def test_a_place_that_can_be_no_directory_is_told(tmp_path):
  (tmp_path / "file").touch()
  (tmp_path / "link").symlink_to("/nowhere/at/all")
  wrong = {
    tmp_path / "file": "is not a directory",
    tmp_path / "file" / "run": "is not a directory",
    tmp_path / "link": "is not a directory",
    tmp_path / ("x" * 300): "File name too long",
    Path("/" + "x/" * 3000): "File name too long",
    Path("/"): "this is the root of the file system",
  }
  for path, why in wrong.items():
    with pytest.raises(ValueError, match=f"^--workdir=X: .*{why}"):
      files.check_writable("--workdir=X", path)
  for path in tmp_path, tmp_path / "new" / "run", tmp_path / "two\nlines":
    files.check_writable("--workdir=X", path)
  assert len([*tmp_path.iterdir()]) == 2


def test_a_place_that_is_not_writable_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write anywhere
  with pytest.raises(ValueError, match=r"^--workdir=X: .* is not writable"):
    files.check_writable("--workdir=X", tmp_path / "run")
