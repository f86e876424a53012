"""The room by itself: no other package than NumPy and SymPy, no JAX, and no other room."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.command_line import ROOT

IMPORT = """
import importlib, json, pkgutil, sys
from gspo_jax import verifiers
for module in pkgutil.walk_packages(verifiers.__path__, "gspo_jax.verifiers."):
  importlib.import_module(module.name)
from gspo_jax.verifiers import math_answer, string_match, trainers
assert math_answer.verify(r"\\boxed{\\sqrt{8}}", r"2\\sqrt{2}") == "right"
assert trainers.math_reward(["q"], ["It is 5."], ["5"]) == [1.0]
assert string_match.verify("<answer>Paris</answer>", "paris") == "right"
print(json.dumps([*sys.modules]))
"""
PACKAGES = ("numpy", "numpy.libs", "sympy", "mpmath")


def test_every_module_is_imported_where_there_is_nothing_but_numpy_and_sympy(tmp_path):
  for name in PACKAGES:
    if (source := Path(sysconfig.get_path("purelib"), name)).exists():
      (tmp_path / name).symlink_to(source)
  done = subprocess.run(
    [sys.executable, "-S", "-c", IMPORT], capture_output=True, text=True,
    env=dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}"),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  modules = json.loads(done.stdout)
  assert not {"jax", "jaxlib", "flax", "torch"} & {name.partition(".")[0] for name in modules}
  rooms = {name.split(".")[1] for name in modules if name.startswith("gspo_jax.")}
  assert rooms == {"verifiers"}
