"""Checksums of users' modules and what they import."""

import sys

import pytest

from gspo_jax.rewards import user_source

FILES = {
  "mine/__init__.py": "",
  "mine/reward.py": "from . import tools\nfrom mine.parts.deep import x\nimport beside, numpy",
  "mine/tools.py": "def f():\n  from .parts import other\n",
  "mine/parts/__init__.py": "",
  "mine/parts/deep.py": "x = 1",
  "mine/parts/other.py": "y = 1",
  "mine/unused.py": "z = 1",
  "beside.py": "import broken",
  "broken.py": "def (",
}
IMPORTED = set(FILES) - {"mine/unused.py"}


@pytest.fixture(params=["project", "site-packages"])
def root(request, tmp_path, monkeypatch):
  for name, text in FILES.items():
    path = tmp_path / request.param / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  monkeypatch.syspath_prepend(tmp_path / request.param)
  yield tmp_path / request.param
  for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
    del sys.modules[name]


def test_an_edit_of_a_local_module_changes_the_checksum(root):
  checksum = user_source.checksum("mine.reward:f")
  assert len(checksum) == 8 and user_source.checksum("mine.reward:g") == checksum
  for name, text in FILES.items():
    (root / name).write_text(f"{text} # edited")
    own = root.name == "project" or name.startswith("mine/")
    assert (user_source.checksum("mine.reward:f") != checksum) == (name in IMPORTED and own), name
    (root / name).write_text(text)
  assert user_source.checksum("mine.reward:f") == checksum
  assert not {"beside", "mine.tools", "mine.parts"} & set(sys.modules)  # Nothing is run.


@pytest.mark.parametrize("name", ["", "math", "nowhere:f", "math:sqrt", "mine.nowhere:f"])
def test_other_names_have_no_checksum(name, root):
  assert user_source.checksum(name) == ""


def test_the_package_is_left_to_its_commit(tmp_path, monkeypatch):
  (tmp_path / "mine_too.py").write_text("import gspo_jax.verifiers")
  monkeypatch.syspath_prepend(tmp_path)
  checksum = user_source.checksum("mine_too:f")
  (tmp_path / "gspo_jax").mkdir()
  (tmp_path / "gspo_jax/verifiers.py").write_text("")
  assert checksum and user_source.checksum("mine_too:f") == checksum
