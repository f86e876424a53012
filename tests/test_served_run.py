"""Whole runs whose rollouts come from a server, on one process and on two."""

import json
import threading

import chex
import pytest
from support.command_line import command, on_two_processes, parameters, rows_of, run
from support.engine_server import EngineServer
from support.fake_server import FakeServer

pytestmark = pytest.mark.slow
SMALL = """
  job=rl tokenizer=bytes model.num_experts=0 model.experts_per_token=0 model.moe_intermediate_size=0
  model.hidden_size=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.intermediate_size=16 sampling.max_new_tokens=6 engine.name=server engine.server.wait_s=0
  objective.old_logp=behaviour objective.correction.name=masked objective.volatility=False
  rl.iterations=4 rl.prompts=8 rl.group_size=2 rl.minibatches=2 rl.dump_every=1
  rl_optimizer.schedule=constant rl_optimizer.learning_rate=1e-2 objective.entropy_coef=0.01
  eval.problems=8 eval.batch=8 eval.samples=2 eval.greedy=false eval.every=2 checkpoint.every=1
""".split()


@pytest.fixture
def server(request):
  started = getattr(request, "param", FakeServer)()
  yield started
  started.die()


def urls(server):
  return f'engine.urls=("{server.url}",)'


def test_a_run_ends_with_its_last_server_and_goes_on_when_there_is_one(server, tmp_path):
  def breaks(path, body):
    third = len(rows_of(tmp_path, "rl")) >= 3  # Includes the row of step 0.
    return "500" if third and path == "/inference/v1/generate" else None

  server.fault = breaks
  output = run(tmp_path, *SMALL, urls(server), ok=False)
  assert f"no server can be used. {server.url}: " in output
  assert "config samples with servers with float32 weights, and caches of their own types" in output
  assert "the same command resumes from the last checkpoint" in output
  server.fault = lambda path, body: None
  run(tmp_path, *SMALL, urls(server))
  rows = rows_of(tmp_path, "rl")
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  for row in rows[1:]:
    assert row["engine/servers"] == 1 and row["engine/probe/mean"] < 1e-4
    assert row["mismatch/current/abs/mean"] < 1e-4 and row["mismatch/older/tokens"] == 0
    assert row["minibatch/0/ratio/deviation"] < 1e-4 < row["minibatch/1/ratio/deviation"]
    assert row["grad_norm"] > 0 and "sampling/slot_utilisation" not in row
  assert server.version == "5" and "eval/accuracy" in rows[-1]


def test_servers_go_on_while_the_trainer_updates(server, tmp_path):
  """Tokens are of the versions that may be; servers that were lost are found again; and a run on
  the recorded batches makes the same updates."""
  workdir, again = tmp_path / "run", tmp_path / "again"
  lost = iter(range(9))  # more than are tried in a row, so that no server is left
  sampled, all_ahead = [], threading.Event()

  def count(answer):
    sampled.extend(answer["choices"])
    if len(sampled) == 16 + 3 * 16:  # the evaluation at the start, and three iterations
      all_ahead.set()
    return answer

  def breaks(path, body):
    """However fast the trainer is, its second weights come after all that the first ones may
    sample."""
    if path == "/pause" and server.version == "1":
      assert all_ahead.wait(300)
    if not path.endswith("generate") or "probe" in body["request_id"]:
      return None
    third = len(rows_of(workdir, "rl")) >= 3
    return "500" if third and next(lost, None) is not None else count

  server.fault, server.pace = breaks, 0.05
  flags = [*SMALL, "rl.iterations=6", "rl.lag=2", "engine.server.wait_s=60", "alarms.ratio=0"]
  flags = [flag for flag in flags if flag != "engine.server.wait_s=0"]
  run(workdir, *flags, urls(server), "rl.record=true")
  rows = rows_of(workdir, "rl")[1:]
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and next(lost, None) is None
  assert sum(row["engine/failed/status"] for row in rows) > 0
  assert [row["lag/max"] for row in rows[:3]] == [0, 1, 2]
  assert all(row["lag/max"] <= 2 for row in rows)
  assert all("time/wait_for_sampler" in row for row in rows)
  flags = [flag for flag in flags if not flag.startswith("engine")]
  run(again, *flags, f"rl.replay={workdir}/batches")
  chex.assert_trees_all_equal(parameters(again, 6), parameters(workdir, 6))
  for mine, same in zip(rows_of(again, "rl")[1:], rows):
    for name in ("grad_norm", "ratio/deviation", "lag/mean", "by_age/responses/1", "reward/mean"):
      assert mine[name] == same[name], name


def test_two_processes_are_told_what_the_first_one_heard(server, tmp_path):
  first, second = tmp_path / "one", tmp_path / "two"
  flags = [*SMALL, urls(server), "rl.iterations=2", "mesh.data=4"]
  run(first, *flags, JAX_NUM_CPU_DEVICES="4")
  on_two_processes(lambda _: command(second, *flags, "distributed=true"), devices=2)
  for name in ("rl_000001.jsonl", "rl_000002.jsonl"):
    theirs, ours = (
      [json.loads(x) for x in (d / "rollouts" / name).read_text().splitlines()]
      for d in (first, second)
    )
    assert [x["response"] for x in ours] == [x["response"] for x in theirs]
  assert [row["step"] for row in rows_of(second, "rl")] == [0, 1, 2]


@pytest.mark.parametrize("server", [EngineServer], indirect=True)
def test_an_engine_behind_the_server(server, tmp_path):
  """With experts and their routes, weights reloaded in place, and a secret."""
  model = [flag for flag in SMALL if flag.startswith("model") and "=0" not in flag]
  flags = [flag for flag in SMALL if not flag.startswith("model")] + model
  flags += ["model.moe_intermediate_size=16", "objective.replay=R3", "objective.volatility=true"]
  server.token = "swordfish"
  run(tmp_path, *flags, urls(server), GSPO_ENGINE_TOKEN="swordfish")
  rows = rows_of(tmp_path, "rl")
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  for row in rows[1:]:
    assert row["engine/servers"] == 1
    assert not any(value for key, value in row.items() if key.startswith("engine/failed/"))
    assert row["engine/probe/mean"] < 1e-5 and row["mismatch/abs/max"] < 1e-4
    assert row["grad_norm"] > 0
  assert sorted(path.name for path in (tmp_path / "published").iterdir()) == [
    "weights_000004",
    "weights_000005",
  ]
