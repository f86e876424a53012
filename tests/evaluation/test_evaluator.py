"""avg@k counts what it says, in chunks as at once, interrupted or not."""

import dataclasses
import gc
import json
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.configs import config_of
from support.echo import STOP, Echo
from support.environments import TALK, Teacher
from support.sampling import sample
from support.small_models import DENSE, initial

from configs import common
from gspo_jax import rewards, sharding
from gspo_jax.data import tokenizer
from gspo_jax.evaluation import elo, resume
from gspo_jax.evaluation.benchmarks import Benchmark, check_problems
from gspo_jax.evaluation.evaluator import Evaluator
from gspo_jax.evaluation.statistics import pass_at_k, problem_rows, summary
from gspo_jax.models import transformer
from gspo_jax.rewards.signals import Signals
from gspo_jax.sampling import LocalEngine, SingleTurn, Trajectory
from gspo_jax.sampling.trajectory import recorded_turn
from gspo_jax.settings.evaluation import BenchmarkConfig
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE
from gspo_jax.structs import Prompt
from gspo_jax.verifiers.pool import Failure

MODEL = dataclasses.replace(DENSE, vocab_size=264)
CONFIG = dataclasses.replace(
  config_of(common.base).eval, every=1, problems=0, samples=3, max_new_tokens=3, batch=8
)
PROBLEMS = [
  Prompt(str(i), f"q{i}", "a", (ord("q"), ord(str(i))), info=(("rating", str(1000 + 100 * i)),))
  for i in range(5)
]
SET = BenchmarkConfig(**common.benchmark(data="x", samples=3))


def benchmark(score, name="", problems=PROBLEMS, **changes):
  return Benchmark(name, dataclasses.replace(SET, **changes), problems, score)


def evaluator(*benchmarks, directory=None, seed=0, **changes):
  return Evaluator(
    config=dataclasses.replace(CONFIG, **changes),
    model=MODEL,
    benchmarks=benchmarks,
    tokenizer=tokenizer.load("bytes"),
    prompt_length=4,
    seed=seed,
    directory=directory,
  )


def evaluate(judge, params, step=0, **options):
  engine = LocalEngine(MODEL)
  engine.load(params, version=0)
  return judge(engine, judge.key(params), step, **options)


@pytest.fixture(scope="module")
def params():
  return initial(MODEL)


def test_responses_that_end_otherwise_are_of_another_evaluation(params):
  judge = evaluator()
  other = dataclasses.replace(judge, stop_strings=("7",))
  assert judge.key(params) == evaluator().key(params) != other.key(params)


def by_length(responses, answers, finished=None):
  reward = np.array([len(r) % 2 for r in responses], np.float32)
  outcomes = {"right": int(reward.sum()), "wrong": int((1 - reward).sum())}
  return rewards.Scores(reward, outcomes, reward)


def untimed(row):
  return {k: v for k, v in row.items() if not k.startswith("time/")}


def test_accuracy_is_the_mean_over_samples_and_problems(params, capsys):
  accuracies = []

  # Problem 0 is always right, problem 1 on its first sample.
  def score(responses, answers, finished):
    accuracies.append(responses)
    reward = np.zeros(len(responses), np.float32)
    samples = len(responses) // 5
    reward[:samples] = 1
    reward[samples] = 1
    return rewards.Scores(reward, {"right": 4, "timeout": 1}, reward)

  row, records = evaluate(evaluator(benchmark(score)), params, alone=True)
  assert capsys.readouterr().err.startswith("eval 0/10  compilation and first problems; 0:0")
  assert row["eval/accuracy"] == pytest.approx((3 + 1) / 15)
  assert row["eval/greedy"] == pytest.approx(2 / 5)
  assert row["eval/accuracy/low"] <= row["eval/accuracy"] <= row["eval/accuracy/high"]
  assert row["eval/verifier/timeout"] == pytest.approx(1 / 15)
  assert [r["reward"] for r in records] == [1, 1, 1, 1] + [0] * 11
  assert [r["prompt_id"] for r in records] == [str(i // 3) for i in range(15)]
  assert [len(s) for s in accuracies] == [15, 5]


def unknown_for(*problems):
  """A verifier without a verdict on some responses; the others are right."""

  def score(responses, prompts, finished):
    unknown = {i: "crash: it broke" for i, p in enumerate(prompts) if p.id in problems}
    reward = np.array([i not in unknown for i in range(len(prompts))], np.float32)
    return rewards.Scores(reward, {"right": int(reward.sum())}, reward, unknown)

  return score


def unless_failed(responses, prompts, finished):
  """All responses are right but those that could not be sampled."""
  failed = {i: f"{x}: {x.reason}" for i, x in enumerate(responses) if isinstance(x, Failure)}
  correct = np.array([i not in failed for i in range(len(responses))], np.float32)
  return rewards.Scores(correct, {}, correct, failed)


def test_a_response_that_could_not_be_sampled_is_unknown():
  sampled = [Trajectory(PROBLEMS[0].tokens, i, 0, SingleTurn(())) for i in range(2)]
  sampled[1].fail("6 calls failed")
  outcome = evaluator()._verdicts(benchmark(unless_failed), PROBLEMS[:1] * 2, ["5", ""], sampled)
  reason = "crash: 6 calls failed"
  rows = [dict(reward=1.0, correct=True), dict(reward=0.0, correct=False, unknown=reason)]
  assert outcome[1] == rows


def test_constraints_leave_out_responses_without_a_verdict():
  limit = dict(constraints__costs__length__bound="at_most", constraints__costs__length__limit=5.0)
  config = config_of(common.base, **limit)
  sampled = [Trajectory(PROBLEMS[0].tokens, i, 0, SingleTurn(())) for i in range(2)]
  tokens = np.arange(65, 75, dtype=np.int32)
  sampled[0] = recorded_turn(PROBLEMS[0].tokens, 0, tokens, True)
  sampled[1].fail("6 calls failed")
  judge = dataclasses.replace(evaluator(), signals=Signals(config.constraints, config.reward, {}))
  mine = benchmark(unless_failed, problems=PROBLEMS[:1], samples=2)
  row = summary(mine, judge._score(mine, [0], sampled))
  assert row["constraint/length"] == len(tokens)


def test_what_is_unknown_counts_as_not_right_and_is_told(params, tmp_path):
  run = evaluator(benchmark(unknown_for("1", "3")), directory=tmp_path, batch=2)
  row, records = evaluate(run, params)
  assert row["eval/accuracy"] == row["eval/greedy"] == pytest.approx(3 / 5)
  assert row["eval/verifier/unknown"] == pytest.approx(2 / 5)
  assert [r.get("unknown") for r in records[3:7]] == ["crash: it broke"] * 3 + [None]
  again, _ = evaluate(evaluator(benchmark(by_length)), params)
  assert again["eval/verifier/unknown"] == 0


def test_the_first_chunk_without_any_verdict_ends_the_evaluation(params, tmp_path):
  everything = evaluator(benchmark(unknown_for(*"01234")), directory=tmp_path, batch=2)
  message = r"any of 6 responses\. .*it broke.*unknown.jsonl"
  with pytest.raises(rewards.NoVerdictError, match=message):
    evaluate(everything, params)
  rows = [json.loads(line) for line in (tmp_path / "unknown.jsonl").read_text().splitlines()]
  assert len(rows) == 6 and all(row["unknown"] == "crash: it broke" for row in rows)


def test_chunks_change_nothing(params):
  whole, records = evaluate(evaluator(benchmark(by_length)), params)
  parts, again = evaluate(evaluator(benchmark(by_length), batch=2), params)  # 2, 2 and 1
  assert again == records
  for name, value in untimed(whole).items():
    assert parts[name] == pytest.approx(value), name
  assert {"time/eval/sample", "time/eval/score"} <= whole.keys()


def test_benchmarks_by_name_with_results_by_problem(params, tmp_path):
  run = evaluator(
    benchmark(by_length),
    benchmark(by_length, "code", PROBLEMS[:3], samples=3, pass_at=(1, 2), rating=True),
    directory=tmp_path,
    greedy=False,
  )
  row, records = evaluate(run, params, 7)
  code = [r for r in records if r.get("benchmark") == "code"]
  assert len(code) == 9 and len(records) == 24
  right_P = np.array([r["reward"] for r in code]).reshape(3, 3).sum(1)
  assert row["eval/code/accuracy"] == pytest.approx(right_P.sum() / 9)
  assert row["eval/code/pass@1"] == pytest.approx(right_P.sum() / 9)
  assert row["eval/code/pass@2"] == pytest.approx(pass_at_k(3, right_P, 2).mean())
  assert row["eval/code/rating"] == pytest.approx(elo.rating(right_P / 3, [1000, 1100, 1200]))
  assert row["eval/code/rating/low"] <= row["eval/code/rating"] <= row["eval/code/rating/high"]
  assert row["eval/code/response_length/mean"] == np.mean([r["length"] for r in code])
  assert row["eval/code/truncated_fraction"] == np.mean([r["truncated"] for r in code])
  assert "eval/greedy" not in row and "eval/accuracy" in row

  lines = [json.loads(x) for x in (tmp_path / "code_000007.jsonl").read_text().splitlines()]
  assert [x["id"] for x in lines] == ["0", "1", "2"]
  assert [x["right"] for x in lines] == right_P.tolist()
  assert [x["rating"] for x in lines] == ["1000", "1100", "1200"]
  assert sum(x["truncated"] for x in lines) == sum(r["truncated"] for r in code)
  assert len((tmp_path / "eval_000007.jsonl").read_text().splitlines()) == 5


def test_figures_of_graded_rewards_count_right_responses(params, tmp_path):
  """Any range: right are two of three samples of each problem, with rewards from -4 to -1."""

  def score(responses, prompts, finished):
    reward = np.resize(np.float32([-1, -4, -2]), len(responses))
    return rewards.Scores(reward, {}, np.float32(reward > -3), {0: "crash: it broke"}, None, reward)

  run = evaluator(benchmark(score, pass_at=(1, 2)), directory=tmp_path)
  row, records = evaluate(run, params, 3)
  assert [row["eval/accuracy"], row["eval/pass@1"]] == pytest.approx([2 / 3, 2 / 3])
  assert row["eval/pass@2"] == 1 and row["eval/greedy"] == pytest.approx(3 / 5)
  assert row["eval/reward/mean"] == pytest.approx(-34 / 14)  # the unknown one is in no mean
  assert [r["reward"] for r in records[:3]] == [-1, -4, -2]
  lines = [json.loads(x) for x in (tmp_path / "eval_000003.jsonl").read_text().splitlines()]
  assert [x["right"] for x in lines] == [2] * 5 and lines[0]["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
  "figure, reward, right_from, right",
  [
    (0.5, 1.0, None, False),  # Neither half a right response nor a whole one.
    (1.0, -1.0, None, True),
    (1.0, 0.5, 0.75, False),
    (0.0, 0.75, 0.75, True),
    (1.0, -2.0, -2.0, True),
  ],
)
def test_a_conversation_is_right_in_all_files_or_in_none(figure, reward, right_from, right):
  talks = [Trajectory((1,), g, 0, SingleTurn((1,))) for g in range(4)]
  for talk in talks:
    talk.observe([2])
    talk.end_turn(reward)
    talk.finish(True)
    talk.figures = dict(correct=figure)
  talks[-1].failure = "it broke"
  judged = dataclasses.replace(benchmark(None, problems=PROBLEMS[:1], samples=4), environment=id)
  run = dataclasses.replace(evaluator(judged), right_from=right_from)
  outcomes, rows = run._verdicts(judged, PROBLEMS[:1] * 4, [""] * 4, talks)
  records = [row | dict(length=1, truncated=False) for row in rows]
  results = dict(records=records, outcomes=outcomes)
  (line,) = problem_rows(judged, results)
  row = summary(judged, results)
  assert row["accuracy"] == line["accuracy"] == 0.75 * right
  assert row["reward/mean"] == reward and row["verifier/unknown"] == 0.25


class Interrupted(Exception):
  pass


def stopping_after(calls):
  """A verifier that fails after a number of calls."""

  def score(responses, answers, finished):
    score.calls += 1
    if score.calls > calls:
      raise Interrupted
    return by_length(responses, answers)

  score.calls = 0
  return score


def test_an_interrupted_evaluation_goes_on(params, tmp_path):
  same = [dataclasses.replace(p, id=f"{p.id} again") for p in PROBLEMS[:2]]

  def evaluated(score, directory=tmp_path):
    problems = [*PROBLEMS[:3], *same]  # responses of the same ones hang together
    judge = evaluator(benchmark(score, problems=problems), batch=2, directory=directory)
    return evaluate(judge, params)

  whole, records = evaluated(by_length, tmp_path / "w")
  with pytest.raises(Interrupted):
    evaluated(stopping_after(2))
  with (tmp_path / "unfinished.jsonl").open("a") as file:
    file.write('{"chunk": "/samples/3/4", "records": [')  # killed while writing
  engine = stopping_after(99)
  row, again = evaluated(engine)
  assert engine.calls == 4  # one chunk of samples was left, and three greedy ones
  assert untimed(row) == untimed(whole) and again == records
  assert row["time/eval/sample"] > 0
  expected = {
    r["prompt_id"]: [x["response"] for x in records if x["prompt_id"] == r["prompt_id"]]
    for r in records
  }
  assert (
    expected["0"][:3] != expected["0 again"][:3] and expected["1"][:3] != expected["1 again"][:3]
  )
  assert evaluated(stopping_after(0)) == (row, again)
  evaluator(directory=tmp_path).remove_log()
  assert not (tmp_path / "unfinished.jsonl").exists()


def test_greedy_samples_and_the_greedy_response_are_kept_apart(params, tmp_path):
  run = evaluator(benchmark(by_length, samples=1), temperature=0.0, directory=tmp_path)
  first, again = evaluate(run, params)[0], evaluate(run, params)[0]
  assert untimed(first) == untimed(again) and "eval/greedy" in first


@pytest.mark.parametrize(
  "change",
  ["weights", "seed", "problems", "identity", pytest.param("temperature", marks=pytest.mark.long)],
)
def test_what_was_evaluated_otherwise_is_not_used(params, tmp_path, change):
  run = evaluator(benchmark(by_length), directory=tmp_path, greedy=False)
  evaluate(run, params)
  if change == "weights":
    # The least change of one number.
    head = params.final_norm_D if hasattr(params, "final_norm_D") else jax.tree.leaves(params)[0]
    changed = head.ravel().at[0].set(np.nextafter(head.ravel()[0], 9)).reshape(head.shape)
    params = jax.tree.map(lambda x: changed if x is head else x, params)
  if change == "problems":
    other = dataclasses.replace(PROBLEMS[2], answer="b")
    benchmarks = [benchmark(by_length, problems=[*PROBLEMS[:2], other, *PROBLEMS[3:]])]
    run = dataclasses.replace(run, benchmarks=benchmarks)
  if change in ("seed", "identity"):
    run = dataclasses.replace(run, **{change: dict(seed=1, identity="other")[change]})
  if change == "temperature":
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, temperature=0.5))
  count = stopping_after(9)
  changes = [dataclasses.replace(b, score=count) for b in run.benchmarks]
  evaluate(dataclasses.replace(run, benchmarks=changes), params)
  assert count.calls == 1


@pytest.mark.long
def test_evaluation_holds_conversations():
  params, samples = initial(DENSE), 4
  prompts = [Prompt(str(i), "?", "", (40 + i,)) for i in range(5)]
  tok = SimpleNamespace(
    stop_ids=tuple(range(16)), pad_id=0, vocab_size=64, decode=lambda ids: str(list(ids))
  )

  def make(prompt):
    return Teacher(prompt.tokens)

  settings = dict(samples=samples, max_new_tokens=24, greedy=False, batch=2)
  judge = Evaluator(
    config=dataclasses.replace(CONFIG, **settings),
    model=DENSE,
    benchmarks=[Benchmark("", dataclasses.replace(SET, samples=samples), prompts, None, make)],
    tokenizer=tok,
    prompt_length=3,
    seed=5,
    environment=TALK,
  )
  engine = LocalEngine(DENSE, dataclasses.replace(LOCAL_ENGINE, slots=3, steps=4))
  engine.load(params, version=0)
  row, records = judge(engine)
  out = sample(
    params,
    DENSE,
    environments=[make(prompt) for prompt in prompts for _ in range(samples)],
    max_turns=TALK.max_turns,
    group_size=samples,
    max_new_tokens=24,
    stop_ids=tok.stop_ids,
    prompt_length=3,
    seed=5,
  )
  right = out.rewards.sum(1) > 0
  assert 0 < right.mean() < 1 and row["eval/accuracy"] == pytest.approx(right.mean())
  assert [r["correct"] for r in records] == right.tolist()
  np.testing.assert_allclose([r["reward"] for r in records], out.rewards.sum(1), rtol=1e-6)
  assert row["eval/reward/mean"] == pytest.approx(out.rewards.sum(1).mean())
  assert [r["length"] for r in records] == out.lengths.tolist()
  assert [r["response"] for r in records] == [str(out.response(i)) for i in range(len(records))]
  assert row["eval/truncated_fraction"] == pytest.approx(1 - out.stopped.mean())


def test_environments_begin_when_slots_are_free(tmp_path):
  """Few exist at once, and equal prompts have the sample numbers of a single batch."""
  existing, most = weakref.WeakSet(), []

  class Counted(Teacher):
    def __init__(self, prompt):
      super().__init__(prompt.tokens)
      existing.add(self)

    def step(self, response):
      most.append(len(existing))
      return [], 1.0, True

  prompts = [Prompt(str(i), "", "", (4, 3 + i % 3)) for i in range(12)]

  def evaluated(engine, directory, batch):
    judge = Evaluator(
      config=dataclasses.replace(CONFIG, batch=batch, greedy=False, max_new_tokens=12),
      model=MODEL,
      benchmarks=[Benchmark("", dataclasses.replace(SET, samples=2), prompts, None, Counted)],
      tokenizer=tokenizer.load("bytes"),
      prompt_length=4,
      seed=0,
      environment=TALK,
      directory=directory,
    )
    engine.load(None, version=0)
    most.clear()
    return judge(engine, "key")[1]

  class Stops(Echo):
    def step(self):
      if len(self.calls) > 8:
        raise Interrupted
      return super().step()

  records = evaluated(Echo(), None, 12)
  assert most[0] == 24 and len({x["response"] for x in records if x["prompt_id"] in "0369"}) == 8
  assert evaluated(Echo(), None, 2) == records and max(most) <= 8
  with pytest.raises(Interrupted):
    evaluated(Stops(), tmp_path, 2)
  assert (tmp_path / "unfinished.jsonl").read_text().count("chunk") > 1
  assert evaluated(Echo(), tmp_path, 2) == records and len(most) < 24
  gc.collect()
  assert not existing


def test_conversations_that_fail_are_wrong_and_no_problem_is_missing():
  """One cannot begin, one raises in its turn, and one has an infinite figure."""

  class Fails(Teacher):
    def reset(self):
      return {}["begin"] if self.prompt == (5,) else self.prompt

    def step(self, response):
      return {}["step"] if self.prompt == (6,) else ([], 1.0, True)

    def figures(self):
      return dict(cost=float("inf") if self.prompt == (7,) else 2.0)

  tok = SimpleNamespace(stop_ids=(STOP,), pad_id=0, vocab_size=64, decode=str)
  prompts = [Prompt(str(i), "?", "", (4 + i,)) for i in range(4)]
  settings = dict(samples=2, max_new_tokens=12, greedy=False, batch=3)
  evaluate_echo = Evaluator(
    config=dataclasses.replace(CONFIG, **settings),
    model=DENSE,
    benchmarks=[
      Benchmark("", dataclasses.replace(SET, samples=2), prompts, None, lambda p: Fails(p.tokens))
    ],
    tokenizer=tok,
    prompt_length=3,
    seed=5,
    environment=TALK,
  )
  engine = Echo()
  engine.load(None, version=0)
  row, records = evaluate_echo(engine)
  assert [record["reward"] for record in records] == [1, 1, 0, 0, 0, 0, 0, 0]
  assert row["eval/accuracy"] == 0.25 and row["eval/verifier/unknown"] == 0.75
  assert row["eval/cost"] == 2.0
  assert row["eval/tokens"] == np.mean([record["figures"]["tokens"] for record in records[:2]]) > 0
  reasons = [record.get("unknown", "") for record in records[::2]]
  for reason, text in zip(reasons, ("", "cannot begin: KeyError", "raised KeyError", "cost=inf")):
    assert text in reason


def test_checksum_does_not_depend_on_the_layout(params):
  mesh = sharding.make_mesh(MeshConfig(1, 4, 1, 2))
  layout = transformer.shardings(MODEL, sharding.TRAIN, mesh)
  with jax.set_mesh(mesh):
    spread = resume.checksums(jax.device_put(params, layout))
  assert jax.device_get(spread) == jax.device_get(resume.checksums(params))


def test_virtual_contests(tmp_path):
  contests = [
    dict(contest_id="1", points=[9, 2, 0], ratings=[2000, 1500, 1000]),
    dict(contest_id="2", points=[9, 1], ratings=[1900, 1100]),
  ]
  path = tmp_path / "standings.jsonl"
  path.write_text("".join(json.dumps(c) + "\n" for c in contests))
  info = [("1", "1"), ("1", "4"), ("2", "1")]
  problems = [
    dataclasses.replace(p, info=(("contest_id", c), ("points", n)))
    for p, (c, n) in zip(PROBLEMS, info)
  ]

  def score(responses, answers, finished):  # samples 0 and 1 of each problem, sample 2 of none
    reward = np.array([1, 1, 0] * 3, np.float32)
    return rewards.Scores(reward, {}, reward)

  b = benchmark(score, "cf", problems, standings=str(path))
  check_problems("cf", b.config, problems)
  engine = Echo()
  engine.load(None, version=0)
  row, _ = evaluator(b, greedy=False, directory=tmp_path)(engine, "", 0)
  # Contest 1: 5, 5 and 0 points. Contest 2: 1, 1 and 0 points.
  scores = [0, 2 / 3, (1 + 1 + 1 / 2) / 3, 0, (1 / 2 + 1 / 2 + 0) / 3]
  expected = elo.rating(scores, [2000, 1500, 1000, 1900, 1100])
  assert row["eval/cf/contest_rating"] == pytest.approx(expected, abs=1)
  assert row["eval/cf/contest_rating/low"] < expected < row["eval/cf/contest_rating/high"]
  assert "eval/cf/rating" not in row

  with pytest.raises(ValueError, match=r"contests of problems are missing in .*standings.jsonl: 7"):
    check_problems("cf", b.config, [dataclasses.replace(problems[0], info=(("contest_id", "7"),))])
  path.unlink()
  with pytest.raises(ValueError, match=r"standings.*no such file"):
    check_problems("cf", b.config, problems)
