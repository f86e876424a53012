"""The code of docs/verifiers.md runs as it stands there."""

import re

import pytest
from support.command_line import ROOT
from support.sandboxes import available

BLOCKS = re.findall(
  r"^```python\n(.*?)^```$", (ROOT / "docs/verifiers.md").read_text(), re.M | re.S
)


def test_the_examples_run():
  if not available():
    pytest.skip("no namespaces here")
  names = {}
  for block in BLOCKS:
    if "GRPOTrainer" not in block:  # test_trainers.py runs TRL
      exec(compile(block, "docs/verifiers.md", "exec"), names)
  assert names["outcomes"] == ["right", "wrong"]
  assert sum("GRPOTrainer" in block for block in BLOCKS) == 1
