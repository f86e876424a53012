"""Runs that are killed and started again end as if they had not been: a table of flags."""

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import (
  SMALL,
  SMALL_MODEL,
  TALK,
  TOGETHER,
  assert_same_run,
  modules_in,
  rows,
  rows_of,
  run,
  run_until,
)

IN_RL = (("rl", 3, signal.SIGKILL),)


def flags_without(*prefixes):
  return [flag for flag in SMALL if not flag.startswith(prefixes)]


@dataclasses.dataclass(frozen=True)
class Case:
  """A run, and the points at which it is killed.

  Attributes:
    files: texts by name, of the folder that `FOLDER` stands for; modules among them are found.
    prepare: runs before it, with that folder.
    check: asserts of the directory of the run that was not killed, and of RL's rows.
  """

  flags: str = ""
  base: list[str] = dataclasses.field(default_factory=lambda: SMALL)
  config: str = "configs/tiny.py"
  kills: tuple[tuple[str, int, signal.Signals], ...] = IN_RL
  files: dict[str, str] = dataclasses.field(default_factory=dict)
  prepare: Callable[[Path], None] = lambda folder: None
  check: Callable[[Path, list[dict]], None] = lambda whole, rows: None


def check_adapters(whole, rows):
  assert rows[-1]["mismatch/abs/max"] < 1e-4, "sampler and trainer have the same sums"
  assert rows[-1]["ratio/deviation"] > 0, "adapters move"


def check_critic(whole, rows):
  _, first, *_, last = rows
  assert first["learning_rate"] == 0 == first["ratio/deviation"], "the critic learns alone"
  assert last["ratio/deviation"] > 0 and last["reward/kl_penalty"] != 0
  assert last["value/mean"] != 0 == first["value/mean"], "there is a price before any reward"
  record = json.loads((whole / "rollouts" / "rl_000008.jsonl").read_text().splitlines()[0])
  assert len(record["values"]) == record["length"]


def check_partial(whole, rows):
  assert max(row["partial/stale_tokens"] for row in rows[1:]) > 0


def check_query_set(whole, rows):
  assert rows[-1]["query_set/dropped"] > 0 and rows[-1]["query_set/tried"] > 20
  assert any(row["dynamic_sampling/rounds"] > 1 for row in rows[1:])


def check_lengths(whole, rows):
  expected = [None, 8, 8, 8, 12, 12, 192, 192, 192, 192]
  assert [row.get("sampling/max_new_tokens") for row in rows] == expected


def check_group_sizes(whole, rows):
  assert rows[1]["group_size/mean"] == 4 and 2 < rows[-1]["group_size/mean"] < 4
  assert rows[-1]["group_size/responses"] == 8 * rows[-1]["group_size/mean"]


def check_constraints(whole, rows):
  multipliers = [row["constraint/length/multiplier"] for row in rows[1:]]
  assert multipliers[0] == 0.3 and len(set(multipliers)) > 2
  assert {f"eval/constraint/{name}" for name in ("length", "text", "extra")} <= rows[-1].keys()
  assert rows[-1]["eval/constraint/length"] == rows[-1]["eval/response_length/mean"]
  assert rows[-1]["eval/constraint/extra"] == rows[-1]["eval/accuracy"]
  lines = (whole / "rollouts" / "rl_000006.jsonl").read_text().splitlines()
  assert all(record["signals"]["length"] == record["length"] for record in map(json.loads, lines))
  assert rows[-1]["constraint/length/cost"] == pytest.approx(rows[-1]["response_length/mean"])


def check_offline(fresh):
  def check(whole, rows):
    last = rows[-1]
    assert ("reward/mean" in last) == (fresh > 0)
    assert ("mismatch/abs/max" in last) == (fresh > 0) and last.get("mismatch/abs/max", 0) < 1e-4
    assert last["spo/error"] != 0 and last["recorded/responses"] == 8 * 4 * (1 - fresh)

  return check


def lines(problems):
  return "".join(json.dumps(problem) + "\n" for problem in problems)


DOUBLES = [dict(id=f"{i}", question=f"{i}+{i}=", answer=str(2 * i)) for i in range(27)]
SUMS = [dict(id=f"r{i}", question=f"{i}+1=", answer=str(i + 1)) for i in range(100, 112)]
OFFLINE = """
  data.on_error=skip rl.iterations=6 eval.every=3 checkpoint.every=2
  weights=FOLDER/start/checkpoints/sft offline.data=FOLDER/start/rollouts/rl_*.jsonl
"""
CASES = {
  "cold start": Case(
    kills=(("sft", 4, signal.SIGKILL), ("rl", 3, signal.SIGINT), ("rl", 5, signal.SIGKILL))
  ),
  "adapters": Case("lora.rank=2 rl_optimizer.learning_rate=1e-2", check=check_adapters),
  "linear attention": Case(
    "model.linear.pattern=2 objective.replay=R3 rl.packed=True rl.microbatches=2",
    config="configs/tiny.py:hybrid",
    kills=(("sft", 4, signal.SIGKILL), ("rl", 3, signal.SIGKILL)),
  ),
  "adapters of linear attention": Case(
    """
    model.linear.pattern=2 lora.rank=2 rl_optimizer.learning_rate=1e-2 job=rl engine.cache=paged
    """,
    config="configs/tiny.py:hybrid",
    check=check_adapters,
  ),
  "critic": Case(
    """
    objective.name=ppo_clip critic.name=model critic.warmup_iterations=2 critic.kl_coef=0.01
    rl.packed=True rl.microbatches=2 critic_optimizer.learning_rate=1e-3
    """,
    check=check_critic,
  ),
  "partial rollouts": Case(
    """
    job=rl rl.extra_prompts=4 rl.token_budget=60 objective.old_logp=sampler
    objective.volatility=False rl.iterations=6 eval.every=9 eval.greedy=False engine.steps=2
    engine.slots=12
    """,
    check=check_partial,
  ),
  "partial rollouts and more": Case(TOGETHER, files={"talk.py": TALK}, check=check_partial),
  "query set": Case(  # 27 prompts from two files, so that they come up again and again
    """
    job=rl reward.name=one_in_three:reward reward.workers=1 data.query_set.drop_after=1
    data.query_set.readmit_after=3 data.query_set.extra_rounds=2 eval.greedy=False eval.every=9
    rl.iterations=6 checkpoint.every=2 sampling.max_new_tokens=2 eval.max_new_tokens=2
    data.train=FOLDER/a.jsonl:0.4,FOLDER/b.jsonl:0.6
    """,
    files={
      "a.jsonl": lines(DOUBLES[:9]),
      "b.jsonl": lines(DOUBLES[9:]),
      "one_in_three.py": (
        "reward = lambda text, prompt: float(sum(map(ord, text + prompt['answer'])) % 3 == 0)"
      ),
    },
    check=check_query_set,
  ),
  "longer responses": Case(
    "rl.iterations=9 eval.every=9 checkpoint.every=2 schedule.new_tokens=1:8,4:12,6:192",
    config="configs/tiny_schedules.py:length",
    kills=(("rl", 5, signal.SIGKILL),),
    check=check_lengths,
  ),
  "group sizes": Case(
    """
    rl.iterations=9 eval.every=9 checkpoint.every=2 weights=random data.train=FOLDER/sums.jsonl
    reward.name=parity:judge reward.workers=1
    """,
    config="configs/tiny_schedules.py:groups",
    kills=(("rl", 5, signal.SIGKILL),),
    files={
      "sums.jsonl": lines(SUMS),
      "parity.py": (
        "def judge(response, prompt):\n"
        "  return int(prompt['answer']) % 2 == 0 or len(response) % 5 == 0\n"
      ),
    },
    check=check_group_sizes,
  ),
  "constraints": Case(
    """
    constraints.costs.length.limit=4.0 constraints.costs.length.initial=0.3
    constraints.costs.text.bound=at_most constraints.costs.text.text=7
    constraints.costs.text.limit=0.1
    constraints.rewards.extra.signal=arithmetic constraints.rewards.extra.weight=0.5
    rl.iterations=6 rl.prompts=8 rl.group_size=4 checkpoint.every=2 eval.every=6 eval.problems=8
    rl_optimizer.warmup_steps=2 job=rl
    """,
    base=SMALL_MODEL,
    config="configs/tiny_constrained.py",
    check=check_constraints,
  ),
  **{
    f"offline, {fresh} fresh": Case(
      f"{OFFLINE} offline.fresh={fresh}",
      base=flags_without("sft"),
      config="configs/tiny_offline.py",
      prepare=lambda folder: run(folder / "start", *SMALL, "rl.iterations=2", "rl.dump_every=1"),
      check=check_offline(fresh),
    )
    for fresh in (0, 0.5)
  },
  **{
    config: Case("rl.iterations=6", config=f"configs/{config}")
    for config in (
      "tiny_ppo.py",
      "tiny_rft.py",
      "tiny_agents.py",
      "tiny_segments.py",
      "tiny_segments.py:steps",
      "tiny_segments.py:long",
    )
  },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_as_if_it_had_not_been(name, tmp_path):
  case, whole, killed = CASES[name], tmp_path / "whole", tmp_path / "killed"
  for file, text in case.files.items():
    (tmp_path / file).write_text(text)
  case.prepare(tmp_path)
  flags = [*case.base, *case.flags.replace("FOLDER", str(tmp_path)).split()]
  options = dict(config=case.config, **modules_in(tmp_path))
  run(whole, *flags, **options)
  for phase, step, how in case.kills:
    stderr, _ = run_until(killed, phase, step, how, flags, **options)
    assert how == signal.SIGKILL or "the same command continues" in stderr
  run(killed, *flags, **options)
  assert_same_run(killed, whole, rows(whole)[-1]["step"])
  case.check(whole, rows_of(whole, "rl"))
