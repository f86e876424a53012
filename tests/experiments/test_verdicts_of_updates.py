"""Verdicts of E5, E8, E10, E11 and E12 on results that were made up, so that the truth is known."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from support import verdicts  # noqa: E402

from experiments import definition  # noqa: E402
from experiments.report import FAILS, HOLDS, OPEN, Results  # noqa: E402


def ranges(exponent):
  """E5's values: clipped tokens fall as 1/(1 + c/σ), σ ∝ T^exponent."""

  def value(c, seed):
    lines = c.changes.get("data.lines", (16,))[0]
    scale = (lines / 16) ** exponent * (lines / 16) ** (0.05 * (seed % 3 - 1))
    clipped = 0.5 / (1 + c.changes["objective.clip_low"] / 3e-4 / scale)
    return {
      "clip_fraction/token": clipped,
      "eval/area": 0.6 - 0.05 * np.log(clipped / 0.15) ** 2,
      "ratio/std": scale,
      "ratio/effective_length": 6 * lines**0.9,
    }

  return value


@pytest.mark.parametrize(
  "exponent, outcome",
  [(-0.5, HOLDS), (-0.1, FAILS), pytest.param(-1.0, FAILS, marks=pytest.mark.long), (-0.25, OPEN)],
)
def test_e5_finds_the_exponent_of_the_range(exponent, outcome):
  result = verdicts.report("e5", ranges(exponent))
  assert result.verdict.outcome == outcome, result.verdict
  table = result.tables[0].splitlines()
  fitted = {line.split(" | ")[0][2:]: line.split(" | ")[2] for line in table[2:]}
  same = fitted["range that clips the same fraction, over T"]
  assert float(same.split()[0]) == pytest.approx(exponent, abs=0.02)


def noise(c, seed):
  return 0.002 * np.sin(37 * seed + len(c.name))


@pytest.mark.parametrize(
  "half, clipped, outcome",
  [(-0.1, 0.15, HOLDS), (0.1, 0.15, FAILS), (0.1, 0.3, OPEN)],
)
def test_e8_tells_whether_another_exponent_wins(half, clipped, outcome):
  def value(c, seed):
    mine = c.name == "n32_half"
    accuracy = 0.5 + half * mine - 0.1 * (c.name.endswith("half") and not mine) + noise(c, seed)
    fraction = clipped if mine else 0.15
    return {"eval/final": accuracy, "eval/area": 0.4, "clip_fraction/token": fraction}

  assert verdicts.report("e8", value).verdict.outcome == outcome


@pytest.mark.parametrize("slope, outcome", [(0.05, HOLDS), (-0.05, HOLDS), (0.0, FAILS)])
def test_e10_tells_whether_groups_matter_more_to_one_loss(slope, outcome):
  def value(c, seed):
    doublings = np.log2(c.changes["rl.group_size"])
    gspo = c.changes["objective.name"] == "gspo"
    return {"eval/final": 0.3 + (0.01 + slope * gspo) * doublings + noise(c, seed)}

  assert verdicts.report("e10", value).verdict.outcome == outcome


@pytest.mark.parametrize(
  "slope, outcome", [(0.3, HOLDS), pytest.param(-0.3, FAILS, marks=pytest.mark.long), (0.0, FAILS)]
)
def test_e11_tells_which_loss_suffers_more_from_noise(slope, outcome):
  def value(c, seed):
    rate = sum(v for key, v in c.changes.items() if key.startswith("reward.false"))
    gspo = c.changes["objective.name"] == "gspo"
    return {"eval/final": 0.6 - (0.5 - slope * gspo) * rate + noise(c, seed)}

  assert verdicts.report("e11", value).verdict.outcome == outcome


def test_e12_shows_what_a_lag_costs_each_loss_and_gives_no_verdict():
  def value(c, seed):
    gspo, lag = c.changes["objective.name"] == "gspo", c.changes.get("rl.lag", 0)
    return {"eval/final": 0.5 - (0.03 if gspo else 0.01) * lag + noise(c, seed)}

  result = verdicts.report("e12", value)
  assert result.verdict.outcome == OPEN and "-0.12" in result.verdict.because
  costs = [[float(cell.split()[0]) for cell in line[1:-1].split(" | ")]
           for line in result.tables[0].splitlines()[2:]]  # fmt: skip
  expected = [[lag, 3, -0.03 * lag, -0.01 * lag, -0.02 * lag] for lag in (1, 2, 4)]
  np.testing.assert_allclose(costs, expected, atol=0.01)


@pytest.mark.parametrize(
  "gain, outcome", [(0.2, HOLDS), pytest.param(0.0, FAILS, marks=pytest.mark.long)]
)
def test_e17_wants_each_objective_to_gain(gain, outcome):
  """A single objective without gain fails the claim."""

  def value(c, seed):
    mine = gain if c.name == "gmpo" else 0.3
    return {"eval/start": 0.4 - noise(c, seed), "eval/final": 0.4 + mine + noise(c, seed)}

  result = verdicts.report("e17", value).verdict
  assert result.outcome == outcome
  assert ("gmpo" in result.because) == (gain < 0.3)

  def diverged(c, seed):
    return value(c, seed) | {"status": "nan" if c.name == "dapo" else "done"}

  result = verdicts.report("e17", diverged).verdict
  assert result.outcome == FAILS and "dapo, -0.4" in result.because


def test_e17_does_not_wait_for_what_was_added_to_it():
  def value(c, seed):
    status = "failed" if c.name == "gspo batch" else "done"
    return {"eval/start": 0.4, "eval/final": 0.7 + noise(c, seed), "status": status}

  result = verdicts.report("e17", value)
  assert result.verdict.outcome == HOLDS
  assert not any("gspo batch" in table for table in result.tables)


@pytest.mark.parametrize("name", ["e5", "e8", "e10", "e11", "e12", "e17"])
def test_without_runs_nothing_is_claimed(name):
  _, module = definition.load(definition.find(name))
  none = pd.DataFrame(columns=["condition", "seed", "stage", "status"])
  assert module.report(Results(none, none)).verdict.outcome == OPEN
