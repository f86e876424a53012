"""Hosts that see different things come to the same verdicts, keep the same checkpoints, and find
damage together.

`python tests/runs/test_two_hosts.py WORKDIR RESULTS` is one host; pytest starts it twice.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax.settings.training import CheckpointConfig

if __name__ == "__main__":
  sys.path.insert(0, str(Path(__file__).parents[1]))
from support.command_line import on_two_processes
from support.configs import config_of
from support.echo import WORKLOAD, Echo
from support.small_models import DENSE

from configs import tiny_tools
from gspo_jax import rewards
from gspo_jax.data import sources, tokenizer
from gspo_jax.data.sources import Batches
from gspo_jax.evaluation.benchmarks import Benchmark
from gspo_jax.evaluation.evaluator import Evaluator
from gspo_jax.rollouts import scoring
from gspo_jax.rollouts.groups import Group
from gspo_jax.runs import checkpoint, provenance
from gspo_jax.sampling import Driver, Trajectory
from gspo_jax.sampling.driver import new_groups
from gspo_jax.settings.data import DataError
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts, lock


def test_two_hosts(tmp_path):
  workdir, paths = tmp_path / "run", [tmp_path / f"{i}.json" for i in range(2)]
  on_two_processes(
    lambda i: [sys.executable, __file__, str(workdir), str(paths[i])], devices=1, timeout=120
  )
  first, second = (json.loads(path.read_text()) for path in paths)
  assert first.pop("said").count("is damaged and skipped") == 1 and second.pop("said") == ""
  assert first == second
  assert first["correct"] == [1.0, 0.0] and first["outcomes"] == dict(right=1, timeout=1)
  assert first["unknown"] == [False, True]
  assert first["turns"] == [[5], [5]] and first["rewards"] == [1.0, 1.0]
  assert first["figures"] == [0.0, 0.0], "the environments are the first host's"
  assert first["heard"] == ["opened", "cannot be opened"]
  assert first["kept"] == [1, 3]  # 1 is the best by the first host, 2 would be by the second
  assert first["whole"] == 1
  assert first["refused"] == ["another run is in"] * 2
  assert first["prompts"] == ["", "host 1 has other prompts than host 0"]
  assert first["rows"] == [5, 4] and len(first["drawn"]) == 12 and first["changed"]
  assert first["another"] == "weights: 'DIR' -> 'OTHER')"
  assert first["began_with"] == dict(checkpoint="DIR/checkpoints/rl/2")


def verdicts(process):
  """Scores an evaluation on a host with a time limit of its own."""

  def score(responses, prompts, finished):
    outcomes = ["right", "timeout"] if process == 0 else ["timeout", "right"]
    correct = np.array([outcome == "right" for outcome in outcomes], np.float32)
    unknown = {outcomes.index("timeout"): "timeout"}
    return rewards.Scores(correct, dict(right=1, timeout=1), correct, unknown)

  problems = [Prompt(str(i), "q", "a", (1,)) for i in range(2)]
  config = BenchmarkConfig("x", "", 0, 1, (), False, "")
  benchmark = Benchmark("", config, problems, score)
  evaluator = Evaluator(None, DENSE, [benchmark], tokenizer.load("bytes"), 4, 0)
  sampled = [Trajectory((1,), 0, 0, None) for _ in problems]
  chunk = evaluator._score(benchmark, [0, 1], sampled)
  rows = chunk["records"]
  scores = dict(correct=[r["reward"] for r in rows], unknown=["unknown" in r for r in rows])
  return scores | dict(outcomes=chunk["outcomes"])


class OnHost:
  """Environment with tokens and rewards of its host: 5 on the first one."""

  def __init__(self, prompt):
    self.heard = 0

  def reset(self):
    return [3 + jax.process_index()]

  def step(self, response):
    self.heard += 1
    return [5 + jax.process_index()], 0.5 + jax.process_index(), self.heard == 2

  def figures(self):
    return dict(host=float(jax.process_index()))


def conversations():
  prompt, engine = Prompt("p", "q", "a", (1,)), Echo()
  engine.load(None, 1)
  workload = dataclasses.replace(WORKLOAD, several_turns=True)
  (trajectories,) = new_groups([prompt], 2, 0, 4, OnHost)
  driver = Driver(engine, workload, max_turns=3)
  driver.begin(trajectories)
  assert len(list(driver.run())) == 2
  groups, config = [Group(prompt, trajectories)], config_of(tiny_tools.get_config).environment
  groups[0].responses = [str(trajectory.tokens.tolist()) for trajectory in trajectories]
  scoring.assign_verdicts(
    groups, hosts.run_on_first_host(lambda: scoring.score_conversations(groups, config))
  )
  return dict(
    turns=[trajectory.tokens[trajectory.turns < 0].tolist() for trajectory in trajectories],
    responses=groups[0].responses,
    rewards=groups[0].reward_G.tolist(),
    figures=[trajectory.figures["host"] for trajectory in trajectories],
  )


@contextlib.contextmanager
def context(process, fails):
  assert process == 0, "the others leave it alone"
  if fails:
    raise RuntimeError("cannot be opened")
  yield "opened"


def opened(process):
  """Enters a context on the first host; returns each host's value or error."""
  heard = []
  for fails in (False, True):
    try:
      with hosts.enter_on_first_host(context(process, fails)) as value:
        assert (value is None) == (process > 0)
        heard.append("opened")
    except RuntimeError as error:
      heard.append(str(error))
  return dict(heard=heard)


def checkpoints_of(workdir):
  config = CheckpointConfig(every=1, keep=1, best="score")
  return checkpoint.Checkpointer(workdir, "rl", config)


def saved(workdir, process):
  """Saves three checkpoints of a distributed array, with another score on each host."""
  mesh = jax.make_mesh((2,), ("data",))
  spread = jax.NamedSharding(mesh, jax.P("data"))
  whole = np.random.default_rng(0).normal(size=2000).astype(np.float32)
  state = dict(x=jax.make_array_from_callback(whole.shape, spread, lambda i: whole[i]))
  checkpoints = checkpoints_of(workdir)
  for step, scores in (1, (3.0, 1.0)), (2, (1.0, 3.0)), (3, (0.0, 0.0)):
    checkpoints.save(step, state, {}, dict(score=scores[process]))
  checkpoints.close()
  steps = sorted(checkpoints._manager.all_steps())
  # One host alone reads what has changed: the other one has to know.
  newest = checkpoints.directory / "3"
  if process == 0:
    data = max(newest.glob("state/ocdbt.process_1/d/*"), key=lambda p: p.stat().length)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
  multihost_utils.sync_global_devices("damaged")
  checkpoints = checkpoints_of(workdir)
  step, restored, _ = checkpoints.restore_newest(lambda: jax.tree.map(abstract, state))
  checkpoints.close()
  for shard in restored["x"].addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])
  return dict(kept=steps, whole=step)


def began_with(workdir, process):
  """Reads origins from workdirs on each host; only the first one has config.json."""
  mine, config = Path(f"{workdir}_{process}"), dict(resume="auto", weights="DIR")
  mine.mkdir()
  if process == 0:
    provenance.record(mine, config, dict(checkpoint="DIR/checkpoints/rl/2"))
  recorded = provenance.check_configuration(mine, config)
  facts = dict(began_with=provenance.recorded_origins(recorded, config)["start"])
  try:
    provenance.check_configuration(mine, config | dict(weights="OTHER"))
  except ValueError as error:
    facts["another"] = str(error).partition("(")[2][:26]
  return facts


def prompts(process):
  """Compares prompts of both hosts, first equal ones, then ones with other tokens."""
  messages = []
  for token in (2, 2 + process):
    try:
      sources.require_same_on_hosts([sources.Prompts([Prompt("id", "q", "a", (1, token))])])
      messages.append("")
    except DataError as error:
      messages.append(str(error).partition(":")[0])
  return dict(prompts=messages)


def growing(workdir, process):
  """Reads a growing file on two hosts; the second one sees rows later."""
  from rollouts.test_schedules import ids, lines, source_of  # has weights: JAX has begun by then

  path = Path(f"{workdir}_{process}") / "rows.jsonl"
  path.write_text(lines(range(5 + 2 * process)) + "{")
  source = source_of(path)
  passes, count = Batches(source, 1, seed=1), len(source)
  path.write_text(lines(range(9 + 3 * process)))
  rows, drawn, changed = [count, source.look()], ids(passes.take(12)), False
  if process == 0:
    path.write_text(lines(range(3)))
  try:
    source.look()
  except DataError as error:
    changed = "rows.jsonl has changed" in str(error)
  return dict(rows=rows, drawn=drawn, changed=changed)


def abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def refused(workdir):
  """Returns the errors of a second run in a locked directory."""
  heard = []
  with lock.alone_in(workdir):
    for _ in range(2):
      try:
        with lock.alone_in(workdir):
          pass
      except ValueError as error:
        heard.append(str(error)[:17])
  return dict(refused=heard)


if __name__ == "__main__":
  jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
    process_id=int(os.environ["JAX_PROCESS_ID"]),
  )
  with contextlib.redirect_stderr(io.StringIO()) as stderr:
    results = verdicts(jax.process_index()) | conversations() | opened(jax.process_index())
    results |= saved(sys.argv[1], jax.process_index()) | refused(sys.argv[1])
    results |= began_with(sys.argv[1], jax.process_index())
    results |= growing(sys.argv[1], jax.process_index()) | prompts(jax.process_index())
  Path(sys.argv[2]).write_text(json.dumps(results | dict(said=stderr.getvalue())))
