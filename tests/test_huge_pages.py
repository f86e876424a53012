"""gspo_jax/huge_pages.py: a process that starts itself again, once, and only where it helps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_jax import huge_pages

PROGRAM = """
import os, sys
from gspo_jax import huge_pages
print("started", flush=True)
huge_pages.restart_with()
print(sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), os.getpid(), flush=True)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Where large pages are given on request; what is executed is recorded."""
  calls = []
  monkeypatch.setattr(huge_pages, "MODE", tmp_path / "enabled")
  monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36", raising=False)
  monkeypatch.setattr(
    os, "execv", lambda *call: calls.append((*call, os.environ["GLIBC_TUNABLES"]))
  )
  monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "gspo_jax.main", "--config=x"])
  monkeypatch.setenv("GLIBC_TUNABLES", "")
  huge_pages.MODE.write_text("always [madvise] never\n")
  return calls


def test_starts_again_with_the_same_arguments(machine, monkeypatch):
  monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
  huge_pages.restart_with()
  command = [sys.executable, "-m", "gspo_jax.main", "--config=x"]
  tunables = f"glibc.malloc.check=0:glibc.malloc.hugetlb=1:glibc.malloc.arena_max={os.cpu_count()}"
  assert machine == [(sys.executable, command, tunables)]
  huge_pages.restart_with()
  assert len(machine) == 1


def test_leaves_a_number_of_arenas_alone(machine, monkeypatch):
  monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
  huge_pages.restart_with()
  assert machine[0][-1] == "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("mode", ["[always] madvise never", "always madvise [never]"])
def test_stays_where_the_kernel_does_not_ask(machine, mode):
  huge_pages.MODE.write_text(mode)
  huge_pages.restart_with()
  assert not machine


@pytest.mark.parametrize("version", ["glibc 2.34", "musl 1.2", None])
def test_stays_with_a_malloc_that_cannot(machine, monkeypatch, version):
  def confstr(name):
    if version is None:
      raise ValueError(name)
    return version

  monkeypatch.setattr(os, "confstr", confstr)
  huge_pages.restart_with()
  assert not machine


def test_stays_where_it_was_turned_off(machine, monkeypatch):
  monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
  huge_pages.restart_with()
  assert not machine


def test_a_process_goes_on_under_its_id():
  command = [sys.executable, "-c", PROGRAM, "--config=a b", "c"]
  path = dict(PYTHONPATH=str(Path(__file__).parents[1]))
  child = subprocess.Popen(
    command, env=os.environ | path | dict(GLIBC_TUNABLES=""), stdout=subprocess.PIPE, text=True
  )
  lines = child.communicate(timeout=60)[0].split("\n")[:-1]
  restarted = huge_pages._on_request()
  assert lines[:-1] == ["started"] * (1 + restarted)
  tunables = huge_pages.settings() if restarted else ""
  assert lines[-1] == f"{['--config=a b', 'c']} {tunables} {child.pid}"
