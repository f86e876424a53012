"""A run that is killed, over and over, ends as if nobody had touched it.

`pytest -m slow tests/runs/test_kills.py` kills at fifty random points, and says what was going on
there.
"""

import collections
import random
import shutil
import signal
import time

import pytest
from support.command_line import SMALL, assert_same_run, command, run, run_until, started

from gspo_jax.system.preemption import EXIT_CODE

# A run with all that can be cut off: many evaluations in many parts, and a checkpoint per step.
RUN = """
  rl.iterations=6 rl.dump_every=1 eval.problems=32 eval.samples=4 eval.batch=4 eval.every=2
  checkpoint.every=1 checkpoint.keep=1 checkpoint.keep_every=4 checkpoint.best=eval/accuracy
""".split()
PARTIAL = """
  rl.extra_prompts=4 rl.token_budget=60 objective.old_logp=sampler objective.volatility=False
  eval.greedy=False engine.steps=2 engine.slots=12
""".split()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("untouched")
  run(workdir, *SMALL, *RUN)
  return workdir


@pytest.mark.long
@pytest.mark.usefixtures("hangups")
def test_a_signal_saves_and_ends_with_its_code(untouched, tmp_path):
  """The signal comes within an iteration, beyond any checkpoint, and within an evaluation."""
  flags = [*SMALL, *RUN]
  rare = ["checkpoint.every=1000", "resume=force"]
  for phase, step, signal_number, expected in (
    ("sft", 4, signal.SIGTERM, 75), ("rl", 1, signal.SIGINT, 130), ("rl", 4, signal.SIGHUP, 75)
  ):  # fmt: skip
    stderr, code = run_until(tmp_path, phase, step, signal_number, [*flags, *rare])
    assert code == expected and "; the same command continues" in stderr, stderr
    assert "Traceback" not in stderr
    steps = [int(p.name) for p in (tmp_path / "checkpoints" / phase).iterdir()]
    assert max(steps) >= step
  run(tmp_path, *flags, "resume=force")
  assert_same_run(tmp_path, untouched, 6)


@pytest.mark.long
def test_without_its_cold_start_and_its_last_checkpoint_it_goes_on(untouched, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(untouched, workdir)
  shutil.rmtree(workdir / "checkpoints" / "sft")
  shutil.copytree(untouched / "checkpoints/rl/6", workdir / "checkpoints/rl/5")  # not this one
  data = max((workdir / "checkpoints/rl/6/state").rglob("d/*"), key=lambda p: p.stat().st_size)
  content = bytearray(data.read_bytes())
  content[len(content) // 2] ^= 1  # a bit flips
  data.write_bytes(content)
  (workdir / "checkpoints/rl/5/host/metadata").write_text("{}")
  stderr = run(workdir, *SMALL, *RUN)
  assert "checkpoints/sft is missing; RL has checkpoints and resumes without it\n" in stderr
  newest = f"checkpoint {workdir}/checkpoints/rl/6 is damaged and skipped: "
  assert " is not what was written" in stderr.partition(newest)[2].partition("\n")[0]
  assert f"checkpoint {workdir}/checkpoints/rl/5 is damaged and skipped:" in stderr
  assert_same_run(workdir, untouched, 6)


def going_on(workdir):
  """Names the activity of a killed run, from its directory."""
  if any(workdir.glob("checkpoints/*/*tmp*")):
    return "writing a checkpoint"
  if not (workdir / "metrics.jsonl").exists():
    return "starting"
  if any(workdir.glob("**/*.tmp")):
    return "writing another file"
  evaluations = [p.stat().st_mtime for p in workdir.glob("evaluations/unfinished.jsonl")]
  before = [
    p.stat().st_mtime for p in (workdir / "metrics.jsonl", *workdir.glob("checkpoints/*/*"))
  ]
  return "evaluating" if evaluations and evaluations[0] > max(before) else "between those"


def kill_at(process, workdir, moment, rng, seconds):
  """Kills with -9 (one time in five, SIGTERM) at a random moment; False if the run is over before.

  The moment is after the start, or while a checkpoint or an evaluation is written.
  """
  deadline = time.monotonic() + rng.uniform(0.5, seconds)
  entries = {
    "checkpoint": lambda: any(workdir.glob("checkpoints/*/*tmp*")),
    "evaluation": lambda: any(workdir.glob("evaluations/unfinished.jsonl*")),
    "time": lambda: False,
  }[moment]
  while process.poll() is None:
    if time.monotonic() > deadline or entries():
      time.sleep(rng.uniform(0, 0.03) if moment != "time" else 0)
      process.send_signal(rng.choice([signal.SIGKILL] * 4 + [signal.SIGTERM]))
      code = process.wait(60)
      assert code in (0, EXIT_CODE, -signal.SIGKILL, -signal.SIGTERM), process.stderr.read()
      return code != 0
    time.sleep(0.001)
  assert process.returncode == 0, process.stderr.read()[-3000:]
  return False


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], PARTIAL], ids=["whole", "partial"])
def test_fifty_kills(flags, tmp_path):
  flags = [*SMALL, *RUN, *flags]
  run(tmp_path / "untouched", *flags)
  start = time.monotonic()
  run(tmp_path / "again", *flags)  # Everything is compiled.
  seconds = time.monotonic() - start
  rng, kills, moments_of = random.Random(0), 0, collections.Counter()
  while kills < 50:
    workdir = tmp_path / "killed"
    shutil.rmtree(workdir, ignore_errors=True)
    alive, moments = True, 0
    while alive:
      process = started(command(workdir, *flags))
      moment = ("time", "checkpoint", "evaluation")[moments % 3] if moments < 12 else "time"
      # The first moment is one of the start; later, a busy machine would never come to the end.
      patience = seconds * (1 + moments / 8) if moments else 1.0
      alive = kill_at(process, workdir, moment, rng, patience)
      moments += 1
      if alive:
        kills += 1
        moments_of[going_on(workdir)] += 1
    assert_same_run(workdir, tmp_path / "untouched", 6)
    for folder in "rollouts", "checkpoints/sft", "checkpoints/rl":
      ours, theirs = (
        {p.name for p in (tmp_path / n / folder).iterdir()} for n in ("killed", "untouched")
      )
      # SIGTERM may have saved the start; the last removal of an old checkpoint may be cut off.
      assert ours - {"0"} == theirs or (folder != "rollouts" and ours > theirs)
  print(f"{kills} kills: {dict(moments_of)}")  # noqa: T201
  assert {"writing a checkpoint", "starting"} < set(moments_of)
