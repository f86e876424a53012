"""The command line: a whole run, interrupted and not, and what bad input gets."""

import dataclasses
import json
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.command_line import (
  ROOT,
  SMALL,
  SMALL_MODEL,
  TALK,
  TOGETHER,
  environment,
  figures,
  modules_in,
  rows,
  rows_of,
  run,
)
from support.configs import config_of

from configs import moe_aime, tiny
from gspo_jax import main, train
from gspo_jax.cli import before_jax
from gspo_jax.data import tokenizer
from gspo_jax.inputs import read_inputs
from gspo_jax.models import flops, hf, transformer
from gspo_jax.run import open_run
from gspo_jax.runs import metrics
from gspo_jax.runs.mirror import Mirror
from gspo_jax.settings import sizes
from gspo_jax.settings.reading import from_dict
from gspo_jax.system.files import unseal

FLAGS = [*SMALL, "model.num_layers=1", "profile.iteration=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  stderr = run(workdir, *FLAGS, JAX_LOG_COMPILES="1")
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
  assert {"ratio", "clipped", "tokens", "log_ratio"} <= record.keys()
  assert len(record["tokens"]) == len(record["log_ratio"]) == record["length"]
  assert any(record["log_ratio"]) and 0.5 < record["ratio"] < 2
  assert "reward" in stderr and "tokens/s" in stderr and "left" in stderr
  *_, accuracy, newest, report = stderr.splitlines()
  assert re.match(r"eval/accuracy [\d.]+%, 95% interval .* \(avg@\d+, problems: \d+\)", accuracy)
  assert newest == f"checkpoint: {workdir}/checkpoints/rl/8"
  assert report == f"report: {workdir}/report.html"
  assert list((workdir / "profile").rglob("*.xplane.pb"))  # profile=3


def test_updates_are_compiled_once_each(finished):
  """The cold start's and the policy's, each in a thread before its first call."""
  _, stderr = finished
  assert stderr.count("Compiling jit(step)") == 2


def test_it_says_what_it_was_made_with(finished):
  workdir, stderr = finished
  provenance = json.loads((workdir / "config.json").read_text())["provenance"]
  assert {"python", "jax", "flax", "optax", "orbax-checkpoint", "numpy"} <= provenance[
    "versions"
  ].keys()
  assert (
    "gspo_jax/main.py" in provenance["command"]
    and "--config.profile.iteration=3" in provenance["command"]
  )
  head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
  assert provenance["commit"] == (head.stdout.strip() or None)
  assert "config rl.prompts: 64 -> 8\n" in stderr and "config profile.iteration: 0 -> 3\n" in stderr
  assert "config rl.minibatches" not in stderr  # Values of the file.


def test_its_metrics_tell_what_it_cost(finished):
  for row in rows_of(finished[0], "rl")[1:]:
    assert {f"time/{stage}" for stage in ("sample", "score", "logp", "update", "publish")} <= set(
      row
    )
    assert row["flops_per_second/update"] > 0 and 0.1 < row["memory/host_peak_gib"] < 64
    assert row["updates_skipped"] == 0 and "mfu/update" not in row  # no peak is known of a CPU
  totals = [row["total/tokens"] for row in rows_of(finished[0], "rl")]
  lengths = [row["response_length/mean"] * 8 * 4 for row in rows_of(finished[0], "rl")[1:]]
  assert totals[0] == 0 and np.diff(totals).tolist() == lengths
  later = rows_of(finished[0], "rl")[3:]
  assert any("time/save" in row for row in later) and any("checkpoint/seconds" in r for r in later)


def test_its_operations_are_those_of_its_responses(finished):
  """Sampling, one pass without gradient, and updates; an iteration's responses are on file."""
  settings = json.loads((finished[0] / "config.json").read_text())
  c = from_dict({k: v for k, v in settings.items() if k != "provenance"})
  totals = {row["step"]: row["total/flops"] for row in rows_of(finished[0], "rl")}
  lines = (finished[0] / "rollouts" / "rl_000004.jsonl").read_text().splitlines()
  tok, expected = tokenizer.load("bytes"), 0.0
  for i, record in enumerate(map(json.loads, lines)):
    prompt, new = len(tok.encode(record["prompt"])), record["length"]
    end = prompt + new
    if i % c.rl.group_size == 0:  # nobody needs logits of it
      sampled, scored = (flops.work(c.model, 1, n, n) for n in (prompt - 1, prompt))
      expected += sampled.forward() - sampled.head + 4 * (scored.forward() - scored.head)
    expected += flops.work(c.model, 1, new, end - 1).forward()
    expected += 4 * flops.work(c.model, 1, new, end).forward()
  assert len(lines) == 32 and totals[4] - totals[3] == pytest.approx(expected, rel=1e-12)


def test_its_metrics_show_that_it_is_off_policy(finished):
  training = [r for r in rows(finished[0]) if r["phase"] == "rl" and r["step"] > 0]
  for row in training:
    assert row["minibatch/0/ratio/deviation"] == 0
    assert all(row[f"minibatch/{i}/ratio/deviation"] > 0 for i in (1, 2, 3))
    assert row["mismatch/abs/max"] < 1e-4
    assert row["router/dropped_tokens"] == 0
    assert {"clip_fraction/sequence", "clip_fraction/token", "ratio/max", "entropy"} <= row.keys()
  evaluated = [r["step"] for r in rows(finished[0]) if "eval/accuracy" in r]
  assert evaluated == [0, 4, 8]


def talking(folder):
  """Environment variables and flags for a run with the environment of TOGETHER."""
  (folder / "talk.py").write_text(TALK)
  return modules_in(folder)


@pytest.mark.long
def test_partial_rollouts_go_with_everything_else(tmp_path):
  run(tmp_path / "run", *SMALL, *TOGETHER.split(), **talking(tmp_path))
  training = [row for row in rows_of(tmp_path / "run", "rl") if row["step"]]
  assert [row["step"] for row in training] == [1, 2, 3, 4]
  for row in training:
    assert row["minibatch/0/ratio/deviation"] == 0, "recomputed with the replayed experts"
    assert row["environment/turns"] > 1 and row["router/dropped_tokens"] == 0
    paid = 0.01 * row["environment/tokens"] + 0.1 * row["environment/tool_calls"]
    assert row["environment/cost"] == pytest.approx(paid)
    assert row["reward/mean"] == pytest.approx(row["environment/reward"] - paid, abs=1e-5)
    assert row.get("mismatch/abs/max", 0) < 1e-4, "older weights are not the sampler's fault"
    assert row["partial/stale_tokens"] < 1 and row["tokens_per_second"] > 0
  assert {row["dynamic_sampling/rounds"] for row in training} <= {1, 2}
  assert any(row["dynamic_sampling/rounds"] == 2 for row in training)
  assert training[0]["partial/stale_tokens"] == 0 and "mismatch/abs/max" in training[0]
  assert max(row["partial/stale_tokens"] for row in training) > 0
  assert max(row["partial/oldest"] for row in training) >= 1


EVALUATION = (
  SMALL_MODEL
  + """
  data.max_prompt_tokens=160 eval.max_new_tokens=4 eval.batch=2
  reward.workers=1 eval.benchmarks.aime24.samples=4
""".split()
)


@pytest.mark.long
def test_an_evaluation_job_of_several_benchmarks(tmp_path):
  aime = [dict(id=i, problem=f"Find {i}.", solution="So.", answer=str(i)) for i in range(3)]
  gsm8k = [dict(question=f"{i}?", answer=f"#### {i}") for i in range(5)]
  for name, content in ("aime", aime), ("gsm8k", gsm8k):
    (tmp_path / name).with_suffix(".jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in content)
    )
  flags = [
    *EVALUATION,
    f"eval.benchmarks.aime24.data=aime@{tmp_path}/aime.jsonl",
    f"eval.benchmarks.gsm8k.data=gsm8k@{tmp_path}/gsm8k.jsonl where question!=0?",
  ]
  suite = dict(config="configs/eval_suite.py:tiny")
  results, responses = (tmp_path / "run" / name for name in ("evaluations", "rollouts"))
  blocked = responses / "eval_000000.jsonl"
  blocked.mkdir(parents=True)  # Killed, so to speak, before the end: what was done is on file.
  assert "cannot be written" in run(tmp_path / "run", *flags, **suite, ok=False)
  lines = (results / "unfinished.jsonl").read_text().splitlines(keepends=True)
  assert len(lines) == 1 + 2 + 2
  (results / "unfinished.jsonl").write_text("".join(lines[:-1]) + lines[-1][:50])
  blocked.rmdir()
  stderr = run(tmp_path / "run", *flags, **suite)
  (row,) = rows(tmp_path / "run")
  for name in "aime24", "gsm8k":
    assert {f"eval/{name}/{m}" for m in ("accuracy", "accuracy/low", "accuracy/high")} <= row.keys()
    assert row[f"eval/{name}/response_length/mean"] > 0
    assert f"eval/{name}/truncated_fraction" in row and f"time/eval/{name}/sample" in row
    assert f"eval/{name}/accuracy {row[f'eval/{name}/accuracy']:.1%}, 95% interval" in stderr
  assert "eval/accuracy" not in row and "eval/codeforces/rating" not in row
  chunks = [chunk for chunk in map(unseal, lines[1:]) if chunk["chunk"].startswith("aime24/")]
  assert row["time/eval/aime24/sample"] == sum(chunk["seconds"]["sample"] for chunk in chunks)
  problems = (results / "gsm8k_000000.jsonl").read_text().splitlines()
  assert len(problems) == 4 and json.loads(problems[0])["id"] == "gsm8k.jsonl:2"
  assert len(blocked.read_text().splitlines()) == 3 * 4 + 4
  assert not (results / "unfinished.jsonl").exists()


class Evaluates:
  """An evaluator that finds nothing wrong, unless it is killed."""

  key, benchmarks = str, ()

  def __init__(self, killed=False):
    self.killed = killed

  def __call__(self, engine, key, alone):
    assert alone
    if self.killed:
      raise KeyboardInterrupt
    return {"eval/accuracy": 1.0}, []

  def remove_log(self):
    pass


@pytest.mark.parametrize("resume, evaluations", [("same", 1), ("force", 2)])
def test_a_finished_evaluation_job_is_repeated_by_force_alone(
  resume, evaluations, tmp_path, monkeypatch, capsys
):
  """It replaces its own row and no others: the workdir may be one that a run has trained in."""
  loaded = []
  monkeypatch.setattr(train, "start_policy", lambda run, start_params: start_params())
  trained = [dict(phase="sft", step=4), dict(phase="rl", step=2)]
  config = SimpleNamespace(job="eval", resume=resume)
  engine = SimpleNamespace(load=lambda *a, **_: loaded.append(a))
  for _ in range(2):
    with metrics.Writer(tmp_path) as writer:
      for row in trained:
        writer.write(row)
      trained = []  # By the first process.
      parts = dict(config=config, engine=engine, evaluate=Evaluates(), writer=writer)
      main.run_job(SimpleNamespace(initial_params=dict, **parts))
  assert [row["phase"] for row in rows(tmp_path)] == ["sft", "rl", "eval"]
  assert len(loaded) == evaluations
  assert ("finished before this start" in capsys.readouterr().err) == (resume == "same")


def test_a_killed_repetition_leaves_no_older_results(tmp_path, monkeypatch):
  """Otherwise the same command without force would print them as its own."""
  monkeypatch.setattr(train, "start_policy", lambda run, start_params: start_params())
  config = SimpleNamespace(job="eval", resume="force")
  parts = dict(config=config, engine=SimpleNamespace(load=lambda *_, **__: None))
  with metrics.Writer(tmp_path) as writer:
    parts |= dict(writer=writer, initial_params=dict)
    main.run_job(SimpleNamespace(evaluate=Evaluates(), **parts))
    with pytest.raises(KeyboardInterrupt):
      main.run_job(SimpleNamespace(evaluate=Evaluates(killed=True), **parts))
  assert not rows(tmp_path)


@pytest.mark.long
def test_a_run_that_goes_on_with_other_code_says_so(finished, tmp_path):
  """The finished run, as if an older version had made it: nothing is left to do."""
  workdir = tmp_path / "copy"
  shutil.copytree(finished[0], workdir)
  config = json.loads((workdir / "config.json").read_text())
  config["provenance"]["versions"]["jax"] = "0.4.1"
  (workdir / "config.json").write_text(json.dumps(config))
  (workdir / "rollouts" / "best.jsonl").write_text('{"response": "4"}\n')  # The user's file.
  stderr = run(workdir, *FLAGS)
  assert stderr.count("warning: report.html is not updated: ") == 1
  assert re.search(r"warning: this run resumes with another jax: '0\.4\.1' -> '\d", stderr)
  assert figures(workdir) == figures(finished[0])


def refused(workdir, message, **changes):
  with (
    pytest.raises(ValueError, match=message),
    open_run(read_inputs(config_of(tiny.get_config, **changes), workdir)),
  ):
    pass


def test_a_directory_of_another_configuration_is_refused(finished):
  flags = (flag.split("=") for flag in (*FLAGS, "rl.group_size=8"))
  changes = {key: json.loads(value) for key, value in flags}
  refused(finished[0], r"rl\.group_size: 4 -> 8.*--config\.resume=force", **changes)


def test_a_directory_that_is_refused_stays_as_it_is(tmp_path, monkeypatch):
  """Nothing is opened there, and no run at Weights & Biases continued with the wrong settings."""
  files = {"config.json": b'{"seed": 1}', "metrics.jsonl": b'{"phase": "rl", "st'}
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  monkeypatch.setitem(sys.modules, "wandb", None)  # fails where it is imported
  refused(tmp_path, r"another configuration .*wandb: '' -> 'project'", wandb="project")
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


WRITTEN = {  # Names; all of them are in the way of a run.
  "file": "",
  "empty.py": "",
  "none.py": "def get_config(): pass",
  "syntax.py": "def get_config(:",
  "name.py": "def get_config():\n  return undefined",
  "verifier.py": "def reward(text, prompt):\n  return 1.0\nnumber = 3",
  "talk.py": "def Talk(prompt, tokenizer):\n  raise KeyError('two\\nlines')",
}
COMMANDS = {
  "--config=configs/tiny.py": r"--workdir must be given",
  "--workdir=RUN": r"--config must be given",
  "--config=configs/tiny.py --workdir=RUN eval": r"'eval' is no flag",
  "--config=nowhere.py --workdir=RUN": r"--config=nowhere.py: there is no file",
  "--config=configs/tiny.py:small --workdir=RUN": r"variant 'small' is not one of: gemma, hybrid",
  "--config=HERE/empty.py --workdir=RUN": r"empty.py: .*get_config",
  "--config=HERE/none.py --workdir=RUN": r"none.py: .*get_config",
  "--config=HERE/syntax.py --workdir=RUN": r"SyntaxError: .*syntax.py, line 1",
  "--config=HERE/name.py --workdir=RUN": r"name.py:2: NameError: .*undefined",
  "--config=configs/tiny.py --workdir=HERE/file": r"HERE/file is not a directory",
  "--config=configs/tiny.py --workdir=HERE/file/run": r"HERE/file is not a directory",
  "TINY --nothing=1": r"Unknown command line flag 'nothing'; keys are set with",
  "TINY --lr=1": r"flag 'lr'; did you mean --config\.rl_optimizer\.learning_rate or",
  "TINY --config.engine.name=vllm": r"is not one of local, server; did you mean server\?",
  "TINY --config.rl.promts=3": r"unknown config key rl.promts; did you mean rl.prompts\?",
  "TINY --config.rll.prompts=3": r"unknown config key rll\.prompts; did you mean rl\.prompts\?",
  "TINY --config.eval.benchmark.x.data=y": r"eval.benchmark.x.data; did you mean eval.benchmarks",
  "TINY --config.eval.benchmarks.x.data=y": r"eval.benchmarks.x.data; the section has none",
  "TINY --config.lr=3": r"key lr; did you mean rl_optimizer.learning_rate or sft_opt",
  "TINY --config.rl.temperature=3": r"did you mean sampling.temperature or eval.temperature\?",
  "TINY --config.compute.dtype=bf16": r"is not one of float32, bfloat16; did you mean bfloat16\?",
  "TINY --config.objective.name=gpso": r"objective.name='gpso' is not one of .*did you mean gspo\?",
  "--config=tinny": r"there is no file 'tinny'; did you mean tiny\?",
  "TINY --config.rl=3": r"--config.rl=3 must be a section",
  "TINY --config.rl.prompts=many": r"rl.prompts=many must be a whole number, at least 1",
  "TINY --config.rl_optimizer.learning_rate=nan": r"rl_optimizer.learning_rate=nan must be above 0",
  "TINY --config.weights=HERE": r"weights=HERE has no config.json: set it to a Hugging Face dir",
  "TINY --config.weights=HERE/file": r"weights=HERE/file is not a directory: .* random(?=\n)",
  # Named first, since weights may take an hour to download.
  "TINY --config.eval.max_new_tokens=9999 --config.weights=HERE --config.data.eval=no.jsonl": (
    r"data.eval: there is no file no.jsonl"
  ),
  "TINY --config.data.train=HERE/file": r"data.train: HERE/file ends in none of .jsonl",
  "TINY --config.checkpoint.directory=HERE/file": r"directory=HERE/file: HERE/file is not a dir",
  "TINY --config.reward.name=nowhere:f": r"'nowhere:f' cannot be imported: .*on PYTHONPATH",
  "TINY --config.reward.name=verifier:number": r"verifier:number'.*is not a function",
  "TINY --config.environment.name=talk:Talk": r"environment.name='talk:Talk' fails .*KeyError",
  "TINY --config.environment.name=syntax:Talk": r"environment.name='syntax:Talk'.*SyntaxError",
}
TINY = "--config=configs/tiny.py --workdir=RUN --config.reward.workers=1"


@pytest.fixture(scope="module")
def in_the_way(tmp_path_factory):
  folder = tmp_path_factory.mktemp("files")
  for name, text in WRITTEN.items():
    (folder / name).write_text(text)
  return folder


FAST = [line for line in COMMANDS if "no.jsonl" in line]
LONG = ["--config=HERE/name.py --workdir=RUN"]
LONG += ["TINY --config.rl.promts=3", "TINY --config.weights=HERE"]
LINES = [
  line
  if line in FAST
  else pytest.param(line, marks=pytest.mark.long if line in LONG else pytest.mark.slow)
  for line in COMMANDS
]


@pytest.mark.parametrize("line", LINES)
def test_a_bad_command_is_answered_in_one_line_and_at_once(line, in_the_way):
  names = dict(TINY=TINY, HERE=str(in_the_way), RUN=str(in_the_way / "run"))
  message = COMMANDS[line].replace("HERE", str(in_the_way))
  for name, value in names.items():
    line = line.replace(name, value)
  before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
  done = subprocess.run(
    [sys.executable, "-m", "gspo_jax.main", *line.split()],
    cwd=ROOT, env=environment(**modules_in(in_the_way)), capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
  output = done.stderr.removeprefix(before_jax.greeting(line.split()))
  assert done.returncode == 2 and re.search(f"^gspo_jax: .*{message}.*\n\\Z", output), done.stderr
  assert not done.stdout and seconds < 10, (
    "nothing is compiled; of this machine's seconds it takes 2"
  )
  assert not (in_the_way / "run").exists() or not rows(in_the_way / "run")


def test_weights_are_compared_with_the_configuration_at_the_start(tmp_path):
  small = dataclasses.replace(sizes.tiny_moe(264), num_layers=1, hidden_size=8)
  hf.save(tmp_path / "weights", transformer.init(small, jax.random.key(0)), small)
  changes = {"weights": str(tmp_path / "weights"), "job": "rl"}
  message = r"model\.hidden_size=128 and not 8, model\.num_layers=4 and not 1, .*\. Set these"
  refused(tmp_path / "run", message, **changes)
  changes |= {"model.hidden_size": 8, "model.num_layers": 1}
  (path,) = (tmp_path / "weights").glob("*.safetensors")
  path.write_bytes(path.read_bytes()[:-1])
  refused(tmp_path / "run", f"{path}: not a complete safetensors file", **changes)


def test_a_model_that_cannot_fit_is_refused_before_it_is_made(tmp_path):
  message = r"moments take [\d,]+ GiB, more than the \d+ GiB"
  refused(tmp_path / "run", message, model__hidden_size=65_536, model__num_layers=1024)


REFUSED = {
  "mesh that does not match": ({"mesh.fsdp": 3, "mesh.data": 1}, r"mesh\.fsdp=3.*8 exist"),
  "demonstration beyond its window": ({"sft.max_tokens": 12}, "16 tokens.*sft.max_tokens=12"),
  "batch that does not divide": ({"rl.prompts": 6}, r"rl\.prompts=6.*rl\.minibatches=4"),
  "vocabulary too small": (
    {"model.vocab_size": 256},
    r"ids up to 258.*vocab_size=256",
  ),
  "prompt beyond its window": ({"data.max_prompt_tokens": 4}, r"data\.max_prompt_tokens=4"),
  "no such objective": ({"objective.name": "gsop"}, r"objective\.name='gsop' is not one of gspo"),
  "no such data": ({"data.train": "/no/such.jsonl"}, r"data\.train.*/no/such\.jsonl"),
  "weights that are not there": ({"weights": "/no/model"}, "--config.weights=/no/model"),
  "tokenizer that is not there": ({"tokenizer": "/no/tok"}, "/no/tok"),
  "greedy training": ({"sampling.temperature": 0.0}, r"sampling\.temperature=0"),
  "truncated training": (
    {"sampling.top_p": 0.9},
    r"sampling\.top_p=0\.9.*set sampling\.top_k between 2 and 1024",
  ),
  "group of one": ({"rl.group_size": 1}, r"rl\.group_size=1"),
  "no such environment": ({"environment.name": "talk:Talk"}, r"environment\.name='talk:Talk'"),
  "window beyond the model": ({"sampling.max_new_tokens": 9999}, "max_position_embeddings=2048"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(case, tmp_path):
  changes, message = REFUSED[case]
  refused(tmp_path / "run", message, **changes)
  assert not (tmp_path / "run").exists()


def test_a_directory_with_the_checkpoints_of_another_run_is_refused_as_such(tmp_path):
  """Not as the workdir that its copy would have been put into, and nothing is."""
  changes = {"checkpoint.directory": str(tmp_path / "bucket"), "eval.problems": 8}
  with open_run(read_inputs(config_of(tiny.get_config, **changes), tmp_path / "run")):
    Mirror(tmp_path / "run", changes["checkpoint.directory"]).copy()
  message = r"bucket/workdir/config\.json belongs.*seed: 0 -> 1.*another --config\.checkpoint\.dir"
  refused(tmp_path / "other", message, **changes, seed=1)
  assert not (tmp_path / "other").exists()


def test_held_out_problems_that_are_trained_on_get_one_line(tmp_path, capsys):
  for split, count in ("heldout", 8), ("train", 0):
    changes = {"data.train": f"arithmetic:{split}", "eval.problems": 8}
    with open_run(read_inputs(config_of(tiny.get_config, **changes), tmp_path / split)) as opened:
      assert sum(b.shared for b in opened.inputs.data.held_out) == count
    warned = [line for line in capsys.readouterr().err.split("\n") if "held-out" in line]
    assert len(warned) == (count > 0) and all("8 of 8 of data.eval" in line for line in warned)


def test_the_flagship_says_which_paths_to_set(tmp_path):
  config = config_of(moe_aime.get_config)
  with pytest.raises(ValueError) as error, open_run(read_inputs(config, tmp_path / "run")):
    pass
  for key in ("weights", "data.train", "data.eval"):
    assert f"--config.{key}=" in str(error.value)
