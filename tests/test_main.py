"""The command line: a whole run, interrupted and not, and what bad input gets."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = """
  model.hidden_size=32 model.num_layers=2 model.num_heads=2 model.num_kv_heads=2 model.head_dim=16
  model.moe_intermediate_size=16 sft.steps=8 sft.batch=16 sft.log_every=2 rl.iterations=8
  rl.prompts=8 rl.group_size=4 rl.dump_every=4 eval.problems=8 eval.every=4 eval.batch=8
  checkpoint.every=2 sft_optimizer.warmup_steps=2 rl_optimizer.warmup_steps=2
  objective.entropy_coef=0.01
""".split()  # so small a model earns no reward; the bonus for entropy gives it a gradient


def command(workdir, *overrides, config="configs/tiny.py"):
  flags = [f"--config.{flag}" for flag in overrides]
  module = [sys.executable, "-m", "gspo_jax.main", f"--config={config}", f"--workdir={workdir}"]
  return [*module, *flags]


def environment():
  # One device: eight simulated ones compile three times as long, and other tests have them.
  return os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))


def run(workdir, *overrides, config="configs/tiny.py", ok=True):
  done = subprocess.run(
    command(workdir, *overrides, config=config),
    cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert (done.returncode == 0) == ok, done.stderr[-3000:]
  return done.stderr


def rows(workdir):
  path = workdir / "metrics.jsonl"
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  return [json.loads(line) for line in lines]


def figures(workdir):
  """What two runs of one seed must agree on: all but the clock."""
  timed = lambda name: name.startswith("time/") or name == "tokens_per_second"  # noqa: E731
  return [{k: v for k, v in row.items() if not timed(k)} for row in rows(workdir)]


def run_until(workdir, phase, step, how):
  """Starts a run and ends it with a signal once `phase` has come to `step`."""
  process = subprocess.Popen(
    command(workdir, *SMALL), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
  )
  deadline = time.monotonic() + 200
  while not any(r["phase"] == phase and r["step"] >= step for r in rows(workdir)):
    assert process.poll() is None and time.monotonic() < deadline, "ended too early"
    time.sleep(0.02)
  process.send_signal(how)
  _, stderr = process.communicate(timeout=60)
  return stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  stderr = run(workdir, *SMALL)
  return workdir, stderr


def test_a_run_leaves_everything_in_its_directory(finished):
  workdir, stderr = finished
  phases = [(r["phase"], r["step"]) for r in rows(workdir)]
  assert phases == [("sft", s) for s in (2, 4, 6, 8)] + [("rl", s) for s in range(9)]
  assert json.loads((workdir / "config.json").read_text())["rl"]["group_size"] == 4
  assert list((workdir / "tensorboard").rglob("events.*"))
  assert (workdir / "report.html").stat().st_size > 20_000
  assert {p.name for p in (workdir / "checkpoints" / "rl").iterdir()} == {"6", "8"}
  record = json.loads((workdir / "rollouts" / "rl_000004.jsonl").read_text().splitlines()[0])
  assert {"prompt", "response", "answer", "reward", "advantage", "length"} <= record.keys()
  assert "reward" in stderr and "tokens/s" in stderr and "left" in stderr


def test_its_metrics_show_that_it_is_off_policy(finished):
  training = [r for r in rows(finished[0]) if r["phase"] == "rl" and r["step"] > 0]
  for row in training:
    assert row["minibatch/0/ratio/deviation"] < 1e-6
    assert all(row[f"minibatch/{i}/ratio/deviation"] > 0 for i in (1, 2, 3))
    assert row["mismatch/abs/max"] < 1e-4
    assert row["router/dropped_tokens"] == 0
    assert {"clip_fraction/sequence", "clip_fraction/token", "ratio/max", "entropy"} <= row.keys()
  evaluated = [r["step"] for r in rows(finished[0]) if "eval/accuracy" in r]
  assert evaluated == [0, 4, 8]


def test_a_run_that_was_killed_ends_as_if_it_had_not_been(finished, tmp_path):
  run_until(tmp_path, "sft", 4, signal.SIGKILL)
  stderr = run_until(tmp_path, "rl", 3, signal.SIGINT)
  assert "the same command continues" in stderr
  run_until(tmp_path, "rl", 5, signal.SIGKILL)
  run(tmp_path, *SMALL)
  assert figures(tmp_path) == figures(finished[0])
  same = (tmp_path / "rollouts" / "eval_000008.jsonl").read_text()
  assert same == (finished[0] / "rollouts" / "eval_000008.jsonl").read_text()


def test_a_directory_of_another_configuration_is_refused(finished):
  stderr = run(finished[0], *SMALL, "rl.group_size=8", ok=False)
  assert "rl.group_size: 4 -> 8" in stderr and "--config.resume=force" in stderr


BAD = {
  "unknown key": (["rl.promts=3"], "promts.*prompts"),
  "wrong type": (["rl.prompts=many"], "rl.prompts=many"),
  "batch that does not divide": (["rl.prompts=6"], "rl.prompts=6.*rl.minibatches=4"),
  "mesh that does not match": (["mesh.fsdp=3", "mesh.data=1"], "mesh.fsdp=3.*1 are there"),
  "vocabulary too small": (["model.vocab_size=256"], "259 tokens.*model.vocab_size=256"),
  "prompt beyond its window": (["data.max_prompt_tokens=4"], "data.max_prompt_tokens=4"),
  "no such objective": (["objective.name=gsop"], "objective.name='gsop' is not one of gspo"),
  "no such data": (["data.train=/no/such.jsonl"], "data.train.*/no/such.jsonl"),
  "weights that are not there": (["weights=/no/model"], "--config.weights=/no/model"),
  "tokenizer that is not there": (["tokenizer=/no/tok"], "/no/tok"),
  "greedy training": (["sampling.temperature=0.0"], "sampling.temperature=0"),
  "truncated training": (["sampling.top_k=5"], "sampling.top_k=5"),
  "group of one": (["rl.group_size=1"], "rl.group_size=1"),
  "window beyond the model": (["sampling.max_new_tokens=9999"], "max_position_embeddings=2048"),
  "demonstration beyond its window": (["sft.max_tokens=12"], "12"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_before_training(case, tmp_path):
  overrides, message = BAD[case]
  stderr = run(tmp_path / "run", *SMALL, *overrides, ok=False)
  assert "Traceback" not in stderr
  assert re.search(message, stderr.replace("\n", " ")), stderr
  assert not rows(tmp_path / "run")


def test_the_flagship_says_which_paths_to_set(tmp_path):
  stderr = run(tmp_path, config="configs/moe_aime.py", ok=False)
  for key in ("weights", "tokenizer", "data.train", "data.eval"):
    assert f"--config.{key}=" in stderr
