"""What E6 measures, at the size of a toy's toy."""

import jax
import pytest

pytest.importorskip("pandas")

from experiments import runs, worker
from experiments.gradients import LOSSES
from gspo_jax import sharding
from gspo_jax.runs.metrics import read_rows

SMALL = {
  "data.lines": (2,),
  "sampling.max_new_tokens": 12,
  "model.hidden_size": 16,
  "model.head_dim": 8,
  "model.num_heads": 2,
  "model.num_kv_heads": 2,
  "model.moe_intermediate_size": 8,
  "rl.prompts": 8,
  "rl.group_size": 4,
  "rl.minibatches": 4,
  "rl_optimizer.warmup_steps": 0,
  "eval.problems": 8,
  "reward.false_positive": 0.5,  # random weights are never right
  "rl_optimizer.learning_rate": 1e-3,
  "job": "rl",
}


@pytest.mark.slow
def test_losses_differ_as_the_policy_moves(tmp_path, monkeypatch):
  make_mesh = sharding.make_mesh
  monkeypatch.setattr(sharding, "make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))
  values = runs.applied("configs/tiny_long.py", SMALL)
  answer = worker.make(values, tmp_path / "run", "experiments.gradients:measure")
  assert answer["status"] == "done", answer
  rows = {row["step"]: row for row in read_rows(tmp_path / "run" / "metrics.jsonl")}
  assert sorted(rows) == [1, 4], "those of UPDATES that there are"
  for row in rows.values():
    # Without stop tokens and clipped tokens, DAPO is GRPO.
    noise = [row[f"gradient/{loss}/noise"] for loss in LOSSES if loss != "dapo"]
    assert min(noise) > 0 and len({*noise}) == len(noise)
    assert row["gradient/gspo/clip_fraction/token"] > row["gradient/grpo/clip_fraction/token"]
  assert rows[4]["gradient/grpo/ratio/deviation"] > rows[1]["gradient/grpo/ratio/deviation"]
