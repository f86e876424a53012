"""Learning from conversations: what is trained on, by how much, and a whole run of it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.command_line import environment
from support.sampling import sample

from configs import tiny_tools
from gspo_jax import collect, config
from gspo_jax import objectives as O
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.evaluation.benchmarks import Benchmark, BenchmarkConfig
from gspo_jax.evaluation.evaluator import Evaluator
from gspo_jax.learner import batch as batches
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.models import transformer
from gspo_jax.models.sizes import REFERENCE, tiny_dense
from gspo_jax.objectives.reductions import compute
from gspo_jax.sampling import LocalEngine, Response, Trajectory
from gspo_jax.structs import Prompt

ROOT = Path(__file__).parents[1]
SMALL = dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
MODEL = dataclasses.replace(tiny_dense(64), intermediate_size=48, **SMALL)
CONFIG = config.from_dict(tiny_tools.get_config().to_dict())
TALK = dataclasses.replace(CONFIG.environment, max_turns=3, discount=0.5)
G = 4


class Teacher:
  """Three words to everything; rewards short turns, and large numbers."""

  def __init__(self, prompt):
    self.prompt = prompt

  def reset(self):
    return self.prompt

  def step(self, response):
    return [20, 21, 22], response[0] / 64 - len(response) / 8, response[0] % 3 == 0


@pytest.fixture(scope="module")
def params():
  return transformer.init(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def rollout(params):
  environments = [Teacher([30 + p] * (1 + p % 3)) for p in range(4) for _ in range(G)]
  options = dict(group_size=G, max_new_tokens=30, stop_ids=tuple(range(16)), prompt_length=3)
  return sample(params, MODEL, environments=environments, max_turns=TALK.max_turns, **options)


@pytest.fixture(scope="module")
def batch(rollout):
  advantage_PG = np.asarray(O.group_advantages(rollout.rewards.sum(1).reshape(-1, G)))
  advantage_BL = collect.turn_advantages(rollout, G, TALK.max_turns, TALK.discount, "std")
  turns_BL = np.where(rollout.mask > 0, rollout.turns, -1)
  made = batches.train_batch(rollout, advantage_PG, advantage_BL, turns_BL, shared_prompts=False)
  return made.replace(old_logp_BT=made.sampler_logp_BT)


def test_the_batch_holds_whole_conversations(batch, rollout):
  B, T = batch.tokens_BT.shape
  assert T == 33
  observed = (batch.segments_BT == 1) & (batch.mask_BT == 0)
  for row in range(B):
    end, start = rollout.ends[row], rollout.prompt_lengths[row]
    assert batch.segments_BT[row].sum() == end
    assert batch.mask_BT[row].sum() == rollout.lengths[row]
    assert observed[row].sum() == end - rollout.lengths[row]
    assert observed[row, start:].sum() == 3 * rollout.turns[row].max()
  assert (batch.unit_BT >= 0).sum() == batch.mask_BT.sum()
  assert not batch.advantage_BT[batch.mask_BT == 0].any()
  assert rollout.turns.max() == 2
  assert batch.prompt_B is None, "conversations of a group may begin differently"


def test_advantages_of_turns_against_loops(batch, rollout):
  """Every token has the advantage of its turn: its discounted return, compared in its group."""
  turns, rewards = rollout.turns, rollout.rewards
  for first in range(0, len(turns), G):
    for u in range(3):
      returns = {
        row: sum(0.5 ** (v - u) * rewards[row][turns[row] == v].sum() for v in range(u, 3))
        for row in range(first, first + G)
        if (turns[row] == u).any()
      }
      values = np.array([*returns.values()])
      for row, value in returns.items():
        found = batch.advantage_BT[row, : turns.shape[1]][turns[row] == u]
        assert np.ptp(found) == 0
        expected = (value - values.mean()) / (values.std(ddof=1) + 1e-6) if len(values) > 1 else 0
        assert found[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)


WIDE = dict(clip_low=0.2, clip_high=0.28)


def objective(name, **changes):
  ranges = {k: v for k, v in WIDE.items() if k in O.POLICY_LOSSES[name].options}
  unset = dict.fromkeys(O.POLICY_LOSSES[CONFIG.objective.name].options)
  return dataclasses.replace(CONFIG.objective, **unset | ranges | changes, name=name)


def loss(name, logp_BT, batch, **changes):
  total, metrics = train_step.policy_loss(
    objective(name, **changes), logp_BT, jnp.zeros_like(logp_BT), batch, 30
  )
  return total.numerator / total.denominator, compute(metrics)


def moved(batch):
  """Log-probabilities that have drifted since, observations included."""
  noise = np.random.default_rng(0).normal(size=batch.mask_BT.shape).astype(np.float32)
  return batch.sampler_logp_BT + 0.1 * noise


@pytest.mark.parametrize("name", O.POLICY_LOSSES)
def test_observations_have_no_gradient_and_no_say(batch, name):
  logp_BT = moved(batch)
  value, grad_BT = jax.value_and_grad(lambda x: loss(name, x, batch)[0])(logp_BT)
  off = batch.mask_BT == 0
  assert not np.any(np.asarray(grad_BT)[off]) and np.any(np.asarray(grad_BT)[~off])
  garbage = np.where(off, np.nan, 1)
  other = batch.replace(
    old_logp_BT=batch.old_logp_BT * garbage, advantage_BT=batch.advantage_BT * garbage
  )
  assert loss(name, logp_BT * garbage, other)[0] == pytest.approx(float(value), rel=1e-6)


def test_a_ratio_per_turn(batch):
  """Against NumPy: |turn| and |y| count what was sampled, and nothing else."""
  logp_BT = moved(batch)
  rows, bounds = [], (1 - 0.2, 1 + 0.28)
  for row, turns in enumerate(np.asarray(batch.unit_BT)):
    per_turn = []
    for u in range(turns.max() + 1):
      mine = turns == u
      ratio = np.exp((logp_BT[row] - batch.old_logp_BT[row])[mine].mean())
      advantage = batch.advantage_BT[row][mine][0]
      clipped = np.clip(ratio, *bounds)
      per_turn.append((mine.sum(), min(ratio * advantage, clipped * advantage)))
    lengths, values = map(np.array, zip(*per_turn))
    assert lengths.sum() == batch.mask_BT[row].sum()
    rows.append(values.mean())
  assert loss("segment", logp_BT, batch)[0] == pytest.approx(-np.mean(rows), rel=1e-4)
  by_hand = O.segment_loss(
    logp_BT, batch.old_logp_BT, batch.advantage_BT, batch.mask_BT, batch.unit_BT, 0.2, 0.28
  )[0]
  assert loss("segment", logp_BT, batch)[0] == pytest.approx(float(by_hand), rel=1e-6)


def test_a_ratio_per_conversation_and_an_advantage_per_turn(batch):
  logp_BT = moved(batch)
  rows = []
  for row, mask in enumerate(batch.mask_BT > 0):
    ratio = np.exp((logp_BT[row] - batch.old_logp_BT[row])[mask].mean())
    advantage = batch.advantage_BT[row][mask]
    rows.append(np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage).mean())
  assert loss("gspo_token", logp_BT, batch)[0] == pytest.approx(-np.mean(rows), rel=1e-4)


def test_without_turns_a_segment_is_the_response(batch):
  logp_BT, plain = moved(batch), batch.replace(unit_BT=None, advantage_BT=None)
  segment, token = loss("segment", logp_BT, plain), loss("gspo_token", logp_BT, plain)
  assert segment[0] == pytest.approx(float(token[0]), rel=1e-5)
  assert token[0] != pytest.approx(float(loss("gspo_token", logp_BT, batch)[0]), rel=1e-2)


@pytest.mark.parametrize("name", ["gspo_token", "segment"])
def test_an_update_on_conversations(params, batch, name):
  learner = train_step.Learner(MODEL, REFERENCE, 1.0, microbatches=2, load_balance_coef=0.0)
  step = train_step.make_rl_step(learner, objective(name), optax.sgd(1e-2))
  start = new_state(jax.tree.map(jnp.copy, params), optax.sgd(1e-2))
  _, metrics = step(start, jax.tree.map(jnp.asarray, batch))
  row = {k: float(v) for k, v in train_step.summarize((metrics,)).items()}
  assert row["mismatch/abs/max"] < 1e-4  # the trainer's log-probs are the sampler's
  assert row["ratio/deviation"] < 1e-4 and row["grad_norm"] > 0


def test_metrics_count_conversations():
  def trajectory(turns, asked):
    one = Trajectory((5, 6), 0, 0, Teacher([5, 6]))
    for turn in range(turns):
      response = Response(None, 0, *[np.zeros(4)] * 3, np.zeros(4, np.int32), True, True, None)
      one.add(response)
      one.end_turn(0.5)
      if turn < turns - 1:
        one.observe([20, 21, 22])
    one.environment.figures = lambda: dict(tool_use=asked)
    one.finish(True)
    return one

  group = collect.Group(None, [trajectory(1, 0), trajectory(3, 1)])
  row = collect.environment_metrics([group])
  assert row["environment/tool_use"] == 0.5 and row["environment/correct"] == 1
  assert row["environment/turns"] == 2
  assert row["environment/observation_fraction"] == pytest.approx(6 / (6 + 16))


def test_evaluation_holds_conversations(params):
  prompts = [Prompt(str(i), "?", "", (40 + i,)) for i in range(5)]
  eval_config = dataclasses.replace(
    CONFIG.eval, problems=0, samples=G, max_new_tokens=24, greedy=False, batch=2
  )
  tok = types.SimpleNamespace(
    stop_ids=tuple(range(16)), pad_id=0, decode=lambda ids: str(list(ids))
  )
  engine = LocalEngine(MODEL, dataclasses.replace(CONFIG.engine, slots=3))
  engine.load(params, version=0)
  judge = Evaluator(
    config=eval_config,
    model=MODEL,
    benchmarks=[
      Benchmark(
        "",
        BenchmarkConfig("x", "", 0, G, (), False, ""),
        prompts,
        None,
        lambda p: Teacher(p.tokens),
      )
    ],
    tokenizer=tok,
    prompt_length=3,
    seed=5,
    environment=TALK,
  )
  row, records = judge(engine)
  out = sample(
    params,
    MODEL,
    environments=[Teacher(p.tokens) for p in prompts for _ in range(G)],
    max_turns=TALK.max_turns,
    group_size=G,
    max_new_tokens=24,
    stop_ids=tok.stop_ids,
    prompt_length=3,
    seed=5,
  )
  right = out.rewards.sum(1) > 0
  assert 0 < right.mean() < 1 and row["eval/accuracy"] == pytest.approx(right.mean())
  assert [r["reward"] for r in records] == right.tolist()
  assert [r["length"] for r in records] == out.lengths.tolist()
  assert [r["response"] for r in records] == [str(out.response(i)) for i in range(len(records))]
  assert row["eval/truncated_fraction"] == pytest.approx(1 - out.stopped.mean())


def test_the_environment_in_the_documentation():
  page = (ROOT / "docs" / "multi_turn.md").read_text()
  scope, tok = {}, ByteTokenizer()
  exec(re.search(r"```python\n(.*?)```", page, re.S).group(1), scope)
  one = scope["Guess"](Prompt("x", "?", "42", (1,)), tok)
  said = [one.step([*tok.encode(text), *tok.stop_ids]) for text in ("forty", "40", "50", "42")]
  assert [(tok.decode(o), r, d) for o, r, d in said] == [
    ("A number, please. ", -0.1, False), ("Low. ", 0.0, False), ("High. ", 0.0, False),
    ("", 1.0, True),
  ]  # fmt: skip


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"environment.max_turns": 0}, r"environment\.max_turns=0"),
    ({"environment.max_turn": 1}, r"unknown config key environment\.max_turn.*max_turns"),
    ({"reward.overlong_weight": 0.5}, r"reward\.overlong_weight=0\.5.*environment\.name"),
    ({"environment.workers": 2, "distributed": True}, r"environment\.workers=2.*distributed"),
  ],
)
def test_configurations_that_cannot_be(changes, message):
  values = tiny_tools.get_config().to_dict()
  values["reward"] |= dict(overlong_max=36, overlong_buffer=8)
  for key, value in changes.items():
    section, _, name = key.rpartition(".")
    (values[section] if section else values)[name] = value
  with pytest.raises(ValueError, match=message):
    config.from_dict(values)


FLAGS = """
  model.hidden_size=32 model.num_heads=2 model.num_kv_heads=2 model.head_dim=16
  model.moe_intermediate_size=16 sft.steps=2 sft.batch=8 sft_optimizer.warmup_steps=1
  rl.iterations=2 rl.prompts=8 rl.group_size=4 rl_optimizer.warmup_steps=1 eval.problems=8
  eval.every=1 eval.samples=2 eval.batch=4 objective.replay=R3
""".split()


def run(workdir, *flags, **more):
  command = [sys.executable, "-m", "gspo_jax.main", "--config=configs/tiny_tools.py"]
  command += [f"--workdir={workdir}", *(f"--config.{flag}" for flag in (*FLAGS, *flags))]
  env = environment(**more)
  return subprocess.run(
    command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
  )


def test_a_run_with_an_environment_of_ones_own(tmp_path):
  """Random weights say random bytes, and this environment lets all of them speak three times."""
  (tmp_path / "my_game.py").write_text(
    """
class Game:
  def __init__(self, prompt, tok):
    self.prompt, self.tok, self.turns = prompt, tok, 0
  def reset(self):
    return [dict(role="user", content=self.prompt.question)]
  def step(self, response):
    self.turns += 1
    return self.tok.encode("go on"), len(response) % 5 / 5, self.turns == 3
  def figures(self):
    return dict(correct=self.turns == 3, turns_taken=self.turns)
"""
  )
  path = f"{ROOT}{os.pathsep}{tmp_path}"
  options = ("environment.name=my_game:Game", "environment.stop_strings=('a','e')", "sft.steps=2")
  done = run(tmp_path / "run", *options, PYTHONPATH=path)
  assert done.returncode == 0, done.stderr[-3000:]
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if row["phase"] == "rl"]
  assert [row["step"] for row in rows] == [0, 1, 2]
  for row in rows:
    assert 0 <= row["eval/accuracy"] <= 1 and row["eval/turns_taken"] >= 1
    assert row["eval/accuracy"] == pytest.approx(1 - row["eval/truncated_fraction"], abs=0.3)
  for row in rows[1:]:
    assert row["environment/turns"] == row["environment/turns_taken"] > 1
    assert row["environment/observation_fraction"] > 0
    assert row["mismatch/abs/max"] < 1e-4 and row["minibatch/0/ratio/deviation"] < 1e-5
  record = json.loads((tmp_path / "run/rollouts/rl_000001.jsonl").read_text().splitlines()[0])
  assert {"response", "reward", "length"} <= record.keys()
  texts = (tmp_path / "run/rollouts/rl_000001.jsonl").read_text()
  assert "go on" in texts
  broken = run(tmp_path / "x", "environment.name=my_game:Gama", PYTHONPATH=path)
  assert broken.returncode and "environment.name='my_game:Gama'" in broken.stderr
