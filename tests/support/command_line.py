"""Runs of the command line, whole and cut off, for the tests."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gspo_jax.system import preemption

ROOT = Path(__file__).parents[2]
SMALL_MODEL = """
  model.hidden_size=32 model.num_layers=2 model.num_heads=2 model.num_kv_heads=2 model.head_dim=16
  model.moe_intermediate_size=16
""".split()
SMALL_VALUES = {  # the same for `config_of`
  key.replace(".", "__"): int(value) for key, value in (flag.split("=") for flag in SMALL_MODEL)
}
SMALL = (
  SMALL_MODEL
  + """
  sft.steps=8 sft.batch=16 sft.log_every=2 rl.iterations=8
  rl.prompts=8 rl.group_size=4 rl.dump_every=4 eval.problems=8 eval.every=4 eval.batch=8
  checkpoint.every=2 sft_optimizer.warmup_steps=2 rl_optimizer.warmup_steps=2
  objective.entropy_coef=0.01
""".split()
)  # A model this small earns no reward: the entropy bonus gives it a gradient.

# Conversations that are put aside, replayed, recomputed and sampled in several rounds.
TOGETHER = """
  job=rl rl.extra_prompts=4 rl.token_budget=150 rl.iterations=4 eval.every=9 eval.greedy=False
  objective.old_logp=recompute objective.replay=R3 objective.volatility=True
  data.query_set.extra_rounds=1 environment.name=talk:Talk environment.max_turns=4
  sampling.stop_strings=('1','7') sampling.max_new_tokens=40
  environment.token_cost=0.01 environment.call_cost=0.1
"""
TALK = """
class Talk:
  def __init__(self, prompt, tok):
    self.prompt, self.tok, self.heard = prompt, tok, 0
  def reset(self):
    return self.prompt.tokens
  def step(self, response):
    self.heard += 1
    return self.tok.encode("so?"), len(response) % 5 / 5, self.heard == 3
"""


def command(workdir, *overrides, config="configs/tiny.py"):
  flags = [f"--config.{flag}" for flag in overrides]
  module = [sys.executable, "-m", "gspo_jax.main", f"--config={config}", f"--workdir={workdir}"]
  return [*module, *flags]


def environment(**more):
  # One device: eight simulated ones compile three times as long, and other tests have them.
  ours = dict(
    JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="true", PYTHONPATH=str(ROOT)
  )  # compilation is most of the time
  return os.environ | ours | more


def modules_in(folder):
  """Environment variable for modules in a folder."""
  return dict(PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")


def called(argv, cwd=ROOT, **more):
  """Runs a process to its end with `more` variables; returns it with its output."""
  return subprocess.run(
    argv, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300
  )


FORKED = """
import gc, json, os, runpy, signal, sys
from gspo_jax import replay, run, sft, train
from gspo_jax.aot import iteration, programs, search
from gspo_jax.report import page
gc.freeze()  # An exit would look through all libraries.
for line in sys.stdin:
  module, arguments, cwd, *outputs = json.loads(line)
  if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    continue
  signal.alarm(100)  # A command that begins a run is ended.
  os.chdir(cwd)
  for stream, path in zip((1, 2), outputs):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
  sys.argv = [module, *arguments]
  sys.modules.pop(module, None)
  runpy.run_module(module, run_name="__main__", alter_sys=True)
  sys.exit()
"""


@contextlib.contextmanager
def forked_modules(folder):
  """Yields `run(module, *arguments, cwd)` for commands that end before JAX computes: each is a fork
  of one process with the libraries, whose import takes longer than they do."""
  outputs = [str(folder / name) for name in ("stdout", "stderr")]
  argv = [sys.executable, "-c", FORKED]
  with started(argv, subprocess.DEVNULL, stdin=subprocess.PIPE) as process:

    def run(module, *arguments, cwd):
      for path in outputs:
        Path(path).unlink(missing_ok=True)
      print(json.dumps([module, arguments, str(cwd), *outputs]), file=process.stdin, flush=True)
      code = int(process.stdout.readline())
      stdout, stderr = (Path(path).read_text() for path in outputs)
      return subprocess.CompletedProcess([module, *arguments], code, stdout, stderr)

    yield run
    process.stdin.close()


def started(argv, stderr=subprocess.PIPE, stdin=None, **more):
  """Starts a process with pipes for its output."""
  out = dict(stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True)
  return subprocess.Popen(argv, cwd=ROOT, env=environment(**more), **out)


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def start_two_processes(start, devices, **more):
  """Starts `start(process)` twice, connected."""
  more |= dict(JAX_NUM_CPU_DEVICES=str(devices), JAX_NUM_PROCESSES="2")
  more |= dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}")
  return [started(start(i), subprocess.STDOUT, **more, JAX_PROCESS_ID=str(i)) for i in range(2)]


def on_two_processes(start, devices, timeout=240, **more):
  """Runs two connected processes `start(process)`; returns their outputs."""
  processes = start_two_processes(start, devices, **more)
  try:
    outputs = [p.communicate(timeout=timeout)[0] for p in processes]
  finally:
    for p in processes:
      p.kill()
  assert [p.returncode for p in processes] == [0, 0], "\n".join(o[-3000:] for o in outputs)
  return outputs


def run(workdir, *overrides, config="configs/tiny.py", ok=True, **more):
  done = called(command(workdir, *overrides, config=config), **more)
  assert (done.returncode == 0) == ok, done.stderr[-3000:]
  return done.stderr


def rows(workdir):
  path = workdir / "metrics.jsonl"
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  return [json.loads(line) for line in lines]


def rows_of(workdir, phase):
  return [row for row in rows(workdir) if row["phase"] == phase]


OF_THE_MACHINE = (
  *("time/", "wall/", "goodput", "tokens_per_second", "flops_per_second", "memory/"),
  "checkpoint/",
)


def figures(workdir):
  """Metrics equal in two runs of one seed."""
  return [
    {k: v for k, v in row.items() if not k.startswith(OF_THE_MACHINE)} for row in rows(workdir)
  ]


@contextlib.contextmanager
def told_to_go(checks):
  """Stops the code within by a signal at the check after `checks`."""
  countdown = iter(range(checks))

  def check():
    if next(countdown, None) is None:
      raise preemption.Preempted

  with pytest.MonkeyPatch.context() as patch, pytest.raises(preemption.Preempted):
    patch.setattr(preemption, "check", check)
    yield


def run_until(workdir, phase, step, interrupt, flags=SMALL, config="configs/tiny.py", **more):
  """Starts a run and ends it with a signal once `phase` has come to `step`."""
  process = started(command(workdir, *flags, config=config), **more)
  deadline = time.monotonic() + 200
  while not any(r["phase"] == phase and r["step"] >= step for r in rows(workdir)):
    assert process.poll() is None and time.monotonic() < deadline, "ended too early"
    time.sleep(0.02)
  process.send_signal(interrupt)
  _, stderr = process.communicate(timeout=60)
  return stderr, process.returncode


def assert_same_run(got, expected, step):
  """Asserts equal figures, responses and training state of two runs after `step`."""
  assert figures(got) == figures(expected)
  np.testing.assert_equal(parameters(got, step), parameters(expected, step))
  for path in (expected / "rollouts").iterdir():
    assert (got / "rollouts" / path.name).read_text() == path.read_text()


def parameters(workdir, step):
  """The whole training state of a checkpoint, as arrays on the host."""
  path = workdir / "checkpoints" / "rl" / str(step) / "state"
  with ocp.PyTreeCheckpointer() as reader:
    tree = reader.metadata(path).item_metadata.tree
    whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return reader.restore(path, restore_args=whole)
