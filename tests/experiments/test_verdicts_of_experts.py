"""Verdicts of E3, E4 and E19 on made-up results, so that the truth is known."""

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from support import verdicts

from experiments.report import FAILS, HOLDS, OPEN


def noise(c, seed):
  return 0.004 * np.sin(37 * seed + len(c.name))


def replay(gain, volatility=0.05, before=0.4, learned=0.2):
  """E3's: both losses end alike, GSPO with replay by so much higher."""

  def value(c, seed):
    gspo, replays = c.changes["objective.name"] == "gspo", c.changes["objective.replay"] != "none"
    return {
      "eval/start": before,
      "eval/final": before + learned + gain * (gspo and replays) + noise(c, seed),
      "minibatch/15/router/volatility/mean": volatility,
    }

  return value


@pytest.mark.parametrize(
  "gain, outcome", [(0.0, HOLDS), (-0.1, HOLDS), (0.1, FAILS), (0.03, FAILS)]
)
def test_e3_tells_whether_gspo_gains_by_replay(gain, outcome):
  report = verdicts.report("e3", replay(gain))
  assert report.verdict.outcome == outcome, report.verdict
  (line,) = [text for text in report.tables[1].splitlines() if text.startswith("| GSPO |")]
  assert float(line.split(" | ")[1].split()[0]) == pytest.approx(gain, abs=0.01)


@pytest.mark.parametrize("fault", [{"volatility": 0.01}, {"before": 0.02}, {"learned": 0.0}])
def test_e3_says_nothing_of_a_model_on_which_nothing_can_show(fault):
  """Without changed experts, or without learning, replay cannot gain."""
  assert verdicts.report("e3", replay(0.0, **fault)).verdict.outcome == OPEN


@pytest.mark.parametrize("slope, outcome", [(0.01, HOLDS), (0.0, FAILS), (-0.01, FAILS)])
def test_e4_finds_the_slope_over_depth(slope, outcome):
  def value(c, seed):
    share = 0.03 + slope * np.log2(c.changes["model.num_layers"]) + noise(c, seed) / 40
    return {"minibatch/1/router/volatility/mean": share, "eval/start": 0.4}

  assert verdicts.report("e4", value).verdict.outcome == outcome


def test_e4_leaves_out_seeds_of_which_a_model_has_learned_nothing():
  """A model without right answers has no gradient and no changed experts."""

  def value(c, seed):
    idle = c.changes["model.num_layers"] == 8 and seed < 22
    share = 0.0 if idle else 0.02 + 0.01 * np.log2(c.changes["model.num_layers"])
    return {
      "minibatch/1/router/volatility/mean": share + noise(c, seed) / 40,
      "eval/start": 0.02 if idle else 0.4,
    }

  report = verdicts.report("e4", value)
  assert report.verdict.outcome == HOLDS and "| 3 | 0.01" in report.tables[1]


def test_e19_has_the_share_of_experts_that_change_and_the_gain_by_replay():
  """One seed has no verdict."""

  def value(c, seed):
    gain = 0.1 if c.name == "grpo_R2" else 0.0
    changed = 0.05 if c.name == "gspo" else 0.5
    return {"minibatch/1/router/volatility/mean": changed, "eval/final": 0.3 + gain}

  report = verdicts.report("e19", value)
  assert report.verdict.outcome == OPEN and "0.050 [one seed]" in report.verdict.because
  gains = [line.split(" | ")[2].split()[0] for line in report.tables[2].splitlines()[2:]]
  assert gains == ["0.100", "0.000", "-0.100"]
