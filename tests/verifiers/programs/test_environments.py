"""No file of a checkout can be seen from a program, wherever interpreter and environment lie."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.cases import long
from support.command_line import ROOT
from support.sandboxes import needs_namespaces

MARK = "mark_of_the_checkout.txt"
TOP = {"dev", "etc", "lib", "lib64", "packages", "python", "scratch", "tmp", "usr"}
RUN = """
import json, sys
from gspo_jax.verifiers.programs import process
with process.Sandbox("namespaces", process.DEFAULTS) as sandbox:
  print(json.dumps(sandbox.run({"kind": "stdin", "code": sys.stdin.read()})))
"""
# Modules that the sandbox has not loaded, in packages that it has, and from shared libraries.
LOOK = """
import array, colorsys, email.message, encodings.latin_1, importlib.util, json.tool, os, sys
import decimal, unicodedata, zlib
import numpy

open(os.__file__).close(), open(json.__file__).close(), open(numpy.__file__).close()
visible = [path for path in PATHS if os.path.lexists(path)]
for directory, folders, files in os.walk("/"):
  visible += [directory] * (MARK in files)
  folders[:] = [name for name in folders if directory != "/" or name not in ("usr", "lib", "lib64")]
places = [sys.prefix, sys.base_prefix, sys.executable, numpy.__file__, *sys.path, *sys.orig_argv]
print(repr((visible, os.listdir("/"), places)))
"""


def environment(python: Path, place: Path, *options: str) -> Path:
  subprocess.run([python, "-m", "venv", "--without-pip", *options, place], check=True)
  return place / "bin/python"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory) -> Path:
  """Installs an interpreter and its library below one directory, like conda and uv."""
  prefix, version = tmp_path_factory.mktemp("interpreter"), sysconfig.get_python_version()
  (prefix / "bin").mkdir()
  shutil.copy(os.path.realpath(sys.executable), prefix / f"bin/python{version}")
  (prefix / "bin/python").symlink_to(f"python{version}")
  library = sysconfig.get_path("stdlib")
  skipped = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "__pycache__")
  shutil.copytree(library, prefix / "lib" / Path(library).name, ignore=skipped)
  return prefix


@pytest.fixture
def places(tmp_path) -> tuple[Path, Path]:
  """Makes a checkout with the files of a sandbox, and a home."""
  checkout, home = tmp_path / "projects/checkout", tmp_path / "home"
  shutil.copytree(ROOT / "gspo_jax/verifiers", checkout / "gspo_jax/verifiers")
  shutil.copy(ROOT / "gspo_jax/__init__.py", checkout / "gspo_jax")
  (checkout / MARK).write_text("secret")
  home.mkdir()
  return checkout, home


def check(python: Path, checkout: Path, home: Path) -> None:
  """Runs a program in a sandbox of this interpreter; it finds modules and nothing else."""
  query = "import sysconfig; print(sysconfig.get_path('purelib'))"
  packages = Path(subprocess.check_output([python, "-c", query], text=True).strip())
  (packages / "numpy").mkdir(parents=True)
  (packages / "numpy/__init__.py").touch()
  hidden = [checkout, checkout.parent, checkout / MARK, home, packages, python, python.parents[1]]
  program = f"MARK, PATHS = {MARK!r}, {[*map(str, hidden)]!r}\n{LOOK}"
  done = subprocess.run(
    [python, "-c", RUN], input=program, cwd=checkout, capture_output=True, text=True,
    env={"HOME": str(home), "PYTHONPATH": str(checkout), "PATH": os.environ["PATH"]},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report["status"] == 0, report
  visible, top, paths = eval(report["stdout"])
  assert visible == []
  assert set(top) <= TOP
  assert not [path for path in paths if str(checkout.parents[1]) in path]


def base() -> Path:
  return Path(os.path.realpath(sys._base_executable))


@needs_namespaces
@pytest.mark.parametrize(
  "place",
  [
    "projects/checkout/.venv",
    *long(("projects/.venv", "home/venv")),
  ],
)
@pytest.mark.parametrize("options", [[], ["--copies"]], ids=["", "copies"])
def test_a_virtual_environment(places, tmp_path, place, options):
  check(environment(base(), tmp_path / place, *options), *places)


@needs_namespaces
def test_a_symlinked_environment(places):
  checkout, home = places
  environment(base(), home / "environments/first")
  (checkout / ".venv").symlink_to(home / "environments/first")
  check(checkout / ".venv/bin/python", *places)


@needs_namespaces
@pytest.mark.parametrize("version", [*long(("3.11", "3.12")), "3.13"])
def test_an_interpreter_of_pyenv(places, version):
  interpreters = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
  if not interpreters:
    pytest.skip(f"no pyenv with Python {version} here")
  check(environment(interpreters[-1], places[0] / ".venv"), *places)


@needs_namespaces
def test_an_interpreter_of_uv(places, interpreter):
  """uv installs a patch release; environments refer to a link with the minor version."""
  checkout, home = places
  installed = home / ".local/share/uv/python"
  shutil.copytree(interpreter, installed / "cpython-3.x.y", symlinks=True, copy_function=os.link)
  (installed / "cpython-3.x").symlink_to("cpython-3.x.y")
  check(environment(installed / "cpython-3.x/bin/python", checkout / ".venv"), *places)


@needs_namespaces
def test_an_environment_of_uv(places):
  if not (uv := shutil.which("uv")):
    pytest.skip("no uv here")
  command = [uv, "venv", "--offline", "--no-project", "--python", base(), places[0] / ".venv"]
  subprocess.run(command, check=True, capture_output=True)
  check(places[0] / ".venv/bin/python", *places)


@needs_namespaces
@pytest.mark.parametrize(
  "place",
  [
    pytest.param("projects/checkout/env", marks=pytest.mark.long),
    "home/miniconda3/envs/first",
  ],
)
def test_an_environment_of_conda(places, interpreter, tmp_path, place):
  shutil.copytree(interpreter, tmp_path / place, symlinks=True, copy_function=os.link)
  check(tmp_path / place / "bin/python", *places)
