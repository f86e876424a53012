"""What the tests of sandboxes share."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from gspo_jax.verifiers.programs import cases as code_tests
from gspo_jax.verifiers.programs import process

LIMITS = process.Limits(
  cpu_s=1, wall_s=2.0, memory_bytes=256 << 20, output_bytes=1 << 20, file_bytes=1 << 20,
  scratch_bytes=4 << 20, open_files=32, threads=8,
)  # fmt: skip

PRINTS_2 = json.dumps({"inputs": ["1"], "outputs": ["2"]})  # the gold answer to print(2)


def available():
  """Whether this kernel lets us, found out without the code under test."""
  flags = 0x6C020000 | (0x10000000 if os.geteuid() else 0)  # namespaces; for users one of their own
  unshare = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
  return subprocess.run([sys.executable, "-c", unshare]).returncode == 0


needs_namespaces = pytest.mark.skipif(not available(), reason="no namespaces here")


def stdin(*cases):
  inputs, outputs = zip(*cases)
  return code_tests.Tests("stdin", inputs, outputs)


def run(code, limits=LIMITS, most=None, **request):
  """The report on one program."""
  with process.Sandbox("namespaces", limits) as sandbox:
    return sandbox.run({"kind": "stdin", "code": code, **request}, most)


def session(outer):
  """Processes in the session of `outer` or started by it, without zombies."""
  processes, parents = [], {outer}
  for stat in sorted(pathlib.Path("/proc").glob("[0-9]*/stat"), key=lambda p: int(p.parent.name)):
    with contextlib.suppress(OSError):
      pid, state, parent = int(stat.parent.name), *stat.read_text().rpartition(")")[2].split()[:2]
      if (pid == outer or int(parent) in parents) and state != "Z":
        processes.append(pid)
        parents.add(pid)
  return processes
