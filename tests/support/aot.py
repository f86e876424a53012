"""Compiling for TPUs and GPUs without one, by the command line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--config.model.num_layers=2", "--config.mesh.fsdp=2", "--config.mesh.expert=2")
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"
)
needs_cuda = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="needs the compiler for GPUs: pip install -e '.[aot-cuda]'",
)


def run(*options: str, config="configs/moe_aime.py:tiny") -> subprocess.CompletedProcess:
  """The command line, without the test harness's simulated devices."""
  environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
  command = [sys.executable, "-m", "gspo_jax.aot", f"--config={config}", *options]
  return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def compiled(directory: Path, *options: str, **settings) -> tuple[dict[str, dict], str]:
  """Compiles; returns the report by program, and the output."""
  out = directory / "aot.json"
  done = run(f"--json={out}", *options, **settings)
  assert done.returncode == 0, done.stdout + done.stderr
  return {row["program"]: row for row in json.loads(out.read_text())}, done.stdout
