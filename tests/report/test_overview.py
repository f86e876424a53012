"""What the top of a report answers, and which charts a metric gets."""

import math
import random

import pytest
from support.reported_runs import describe, eval_keys, figures

from gspo_jax.report import curves, data


def answers(rows):
  learning, healthy, fast = describe(rows)["runs"][0]["answers"]
  return learning, healthy, fast


def rl(step, **values):
  return {"phase": "rl", "step": step, **values}


def evaluated(*accuracies):
  return [rl(10 * i, **eval_keys(accuracy)) for i, accuracy in enumerate(accuracies)]


@pytest.mark.parametrize(
  "accuracies, state, answer",
  [  # intervals are 0.05 to either side
    ((0.3, 0.5), "good", "Yes"),
    ((0.3, 0.39), "open", "Not shown yet"),
    ((0.5, 0.3), "bad", "No, it got worse"),
    ((0.3, 0.9, 0.6), "bad", "It was, but accuracy fell again"),
    ((0.3,), "open", "Too early to say"),
  ],
)
def test_learning_is_judged_by_intervals_of_held_out_accuracy(accuracies, state, answer):
  learning, _, _ = answers(evaluated(*accuracies))
  assert (learning["state"], learning["answer"]) == (state, answer)


@pytest.mark.parametrize(
  "aime, math, state",
  [
    ((0.1, 0.3), (0.5, 0.2), "bad"),
    ((0.0, 0.0), (0.5, 0.8), "good"),
    ((0.1, 0.1), (0.5, 0.5), "open"),
  ],
)
def test_learning_is_judged_by_all_benchmarks(aime, math, state):
  rows = []
  for step, accuracies in enumerate(zip(aime, math)):
    row = rl(10 * step)
    for name, accuracy in zip(("aime", "math"), accuracies):
      keys = eval_keys(accuracy).items()
      row |= {key.replace("eval/", f"eval/{name}/"): value for key, value in keys}
    rows.append(row)
  learning = answers(rows)[0]
  assert learning["state"] == state
  assert learning["because"].startswith("aime" if state == "open" else "math")


@pytest.mark.parametrize("reward, shown", [(0.3, []), (0.7, [0.7]), (None, [])])
def test_graded_rewards_are_beside_the_accuracy(reward, shown):
  rows = [rl(0, **eval_keys(0.3), **{"eval/reward/mean": reward}), rl(1)]
  facts = answers(rows)[0]["facts"]
  assert [x["value"] for x in facts if x["label"] == "Held-out problems, mean reward"] == shown


@pytest.mark.parametrize("slope, state", [(0.01, "good"), (-0.01, "bad")])
def test_without_evaluations_the_reward_must_move_by_more_than_it_scatters(slope, state):
  for seed in range(20):
    chance = random.Random(seed)
    rows = [rl(i, **{"reward/mean": slope * i + chance.gauss(0, 0.02)}) for i in range(1, 61)]
    assert answers(rows)[0]["state"] == state


def test_noise_alone_is_seldom_called_learning():
  sure = 0
  for seed in range(200):
    chance = random.Random(seed)
    rows = [rl(i, **{"reward/mean": chance.gauss(0.5, 0.1)}) for i in range(1, 101)]
    sure += answers(rows)[0]["state"] != "open"
  assert sure <= 0.1 * 200


def test_health_follows_alarms_skipped_updates_and_broken_values():
  def state(*changes):
    rows = [rl(i, loss=0.1, grad_norm=1.0, updates_skipped=0.0) for i in range(1, 31)]
    for step, change in changes:
      rows[step - 1] |= change
    _, healthy, _ = answers(rows)
    return healthy["state"], healthy["because"]

  assert state()[0] == "good"
  assert state((30, {"warning/entropy": 1.0})) == ("bad", "1 alarm at the end, listed below")
  assert state((5, {"warning/entropy": 1.0})) == ("open", "1 alarm earlier, none at the end")
  idle = [(i, {"grad_norm": 0.0}) for i in range(1, 31)]
  assert state(*idle) == ("bad", "no learning: the gradient was 0 in all 30 rows")
  assert state(*idle[1:])[0] == "good"  # the alarms say if it is so for long
  since = [(i, {"updates_skipped": 2.0}) for i in range(5, 31)]  # it counts from the start
  assert state(*since) == ("open", "2 skipped updates")
  since[0][1].update(loss=None, grad_norm=None)  # Values of its row on file.
  assert state(*since) == ("open", "2 skipped updates")
  again = [(i, {"updates_skipped": float(i - 27)}) for i in range(28, 31)]
  assert state(*again) == ("bad", "3 skipped updates")
  assert state((5, {"loss": math.nan}))[0] == "bad"
  assert state((5, {"router/dropped_tokens": 3.0}))[0] == "bad"


def sft(step, **values):
  return {"phase": "sft", "step": step, **values}


@pytest.mark.parametrize(
  "last, steps, state, answer",
  [
    (0.1, 60, "good", "Yes, the loss reached its target"),
    (0.4, 60, "open", "Yes, but the loss missed its target"),
    (0.4, 90, "good", "Yes"),
  ],
)
def test_a_cold_start_alone_is_judged_by_its_target(last, steps, state, answer):
  losses = [3.0, 2.5, 2.0, 1.5, 1.0, last]
  rows = [
    sft(10 * i, loss=x, held_out_loss=x, **{"time/update": 20.0}) for i, x in enumerate(losses, 1)
  ]
  report = describe(rows, {"job": "sft", "sft": {"target_loss": 0.2, "steps": steps, "batch": 8}})
  learning, healthy, fast = report["runs"][0]["answers"]
  assert (learning["state"], learning["answer"]) == (state, answer)
  assert (healthy["state"], fast["answer"]) == ("good", "2 s an update")
  assert "8 demonstrations each" in report["runs"][0]["summary"]
  assert any(figure["overview"] for figure in figures(report).values())


def test_speed_is_that_of_the_second_half():
  rows = [rl(1, **{"time/sample": 100.0, "time/update": 50.0})]  # compiles
  rows += [rl(i, **{"time/sample": 1.0, "time/update": 3.0}) for i in range(2, 9)]
  rows[-1] |= {"time/evaluate": 6.0}
  report = describe(rows)
  _, _, fast = report["runs"][0]["answers"]
  assert fast["answer"] == "4 s an iteration"
  assert fast["facts"][1]["value"] == "update, 75%"
  lines = {line["name"]: line for line in report["runs"][0]["timeline"]}
  assert [stage["name"] for stage in lines["typical"]["stages"]] == ["sample", "update"]
  assert [stage["name"] for stage in lines["last"]["stages"]] == ["sample", "update", "evaluate"]
  assert lines["slowest"]["step"] == 1
  stages = figures(report)["Iteration", "Time per stage"]
  assert stages["top"] == 10.0 and stages["largest"] == 150.0  # An outlier, cut off.


def test_constant_metrics_are_marked_and_others_are_not():
  def run(name, rate):
    rows = [rl(i, **{"grad_norm": 1e-7 * i, "learning_rate": rate, "padding": 0.1}) for i in (1, 2)]
    rows[1] |= {"padding": 0.1 + (1e-9 if name == "a" else 0.2)}
    return data.Run(name, rows, {})

  drawn = figures(data.describe([run("a", 1.0), run("b", 2.0)]))
  series = {title: figure["series"] for (_, title), figure in drawn.items()}
  assert [s.get("constant") for s in series["Learning rate"]] == [1.0, 2.0]
  assert not any("constant" in s for s in series["Gradient norm"])
  assert not any("constant" in s for s in series["Padding"])  # it is not in the other run


@pytest.mark.parametrize(
  "values, log",
  [
    ([10.0**-i for i in range(6)], True),
    ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], False),
    ([-1.0, *(10.0**-i for i in range(6))], False),
    ([0.0] * 6 + [10.0**-i for i in range(6)], False),
  ],
)
def test_a_log_scale_where_the_values_ask_for_it(values, log):
  assert curves.wants_log([{"y": values}]) is log


def test_metrics_of_asynchrony_engines_and_layers_have_their_views():
  rows = [
    rl(
      i,
      **{"lag/mean": i, "lag/max": 2.0 * i, "engine/probe/mean": 1.0 / i, "engine/queue": i},
      **{f"router/volatility/layer_{j:02d}": 0.01 * i * j for j in range(3)},
    )
    for i in (1, 2, 3)
  ]
  report = describe(rows)
  place = {
    (s["key"]): (section["view"], figure["kind"])
    for section in report["sections"]
    for figure in section["figures"]
    for s in figure["series"]
  }
  assert place == {
    "lag/mean": ("ratio", "line"), "lag/max": ("ratio", "line"),
    "engine/probe/mean": ("ratio", "line"), "engine/queue": ("speed", "line"),
    **{f"router/volatility/layer_{j:02d}": ("router", "heat") for j in range(3)},
  }  # fmt: skip
  lag = figures(report)["Asynchrony", "Lag"]
  assert {s["label"] for s in lag["series"]} == {"mean", "max"}
  assert list(report["views"])[:2] == ["overview", "responses"]


def test_ten_thousand_steps_of_48_layers_stay_small():
  rows = [
    rl(i, **{f"router/volatility/layer_{j:02d}": math.sin(i + j) for j in range(48)}, loss=1.0 / i)
    for i in range(1, 10_001)
  ]
  drawn = figures(describe(rows))
  assert sum(len(s["x"]) for s in drawn["Volatility", "Volatility by layer"]["series"]) <= 16_000
  assert len(drawn["Optimisation", "Loss"]["series"][0]["x"]) <= 800
