"""Programs are compiled for one mesh."""

import subprocess
import sys

from support.command_line import ROOT, environment


def test_a_mesh_that_only_samples_is_refused_with_what_to_do():
  flags = "--config=tiny", "--config.rollout_mesh.fsdp=2"
  done = subprocess.run(
    [sys.executable, "-m", "gspo_jax.aot", *flags],
    cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert done.returncode == 1
  assert "rollout_mesh={'data': 1, 'fsdp': 2" in done.stderr and "--programs=train" in done.stderr
