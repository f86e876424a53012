"""Verdicts of E6 and E9 on results that were made up, so that the truth is known."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from support import verdicts  # noqa: E402

from experiments.gradients import LOSSES, UPDATES  # noqa: E402
from experiments.report import FAILS, HOLDS, OPEN  # noqa: E402


def report(name, value, curve=None):
  """`value` and `curve` give columns of a condition's name and a seed."""
  points = curve and (lambda c, seed, _: curve(c.name, seed))
  return verdicts.report(name, lambda c, seed: value(c.name, seed), points, UPDATES)


@pytest.mark.parametrize(
  "at_most, exponent, outcome",
  [
    (2.0, 0.5, HOLDS),
    pytest.param(1.02, 0.01, FAILS, marks=pytest.mark.long),
    (2.0, -0.5, FAILS),
    pytest.param(2.0, 0.0, OPEN, marks=pytest.mark.long),
  ],
)
def test_e6_wants_a_gap_that_grows(at_most, exponent, outcome):
  def value(name, seed):
    n = int(name[1:])
    wobble = 1 + 0.03 * np.sin(7 * seed + 3 * n)
    snr = dict(gspo=0.1 * at_most * (n / 32) ** exponent * wobble, grpo=0.1, dapo=0.1, raw=-0.01)
    return {
      f"gradient/{loss}/{metric}": snr[loss] for loss in LOSSES for metric in ("snr", "cosine")
    }

  def curve(name, seed):
    final = value(name, seed)
    names = ("snr", "cosine", "bias", "scale", "clip_fraction/token")
    return {
      f"gradient/{x}/{metric}": final[f"gradient/{x}/snr"] for x in LOSSES for metric in names
    }

  result = report("e6", value, curve)
  assert result.verdict.outcome == outcome, result.verdict
  assert "no runs (0 seeds)" in result.tables[0], "there is no ratio to a square below 0"
  assert result.tables[1].count("| GSPO |") == 9


@pytest.mark.parametrize(
  "gain, outcome",
  [
    (dict(token_process=0.1), HOLDS),
    (dict(token_process=0.01), FAILS),
    (dict(token_process=0.1, token_terminal=0.1), FAILS),
    (dict(token_process=None), OPEN),
  ],
)
def test_e9_wants_a_gain_from_process_rewards_alone(gain, outcome):
  def value(name, seed):
    noise = 0.001 * np.sin(37 * seed + len(name))
    if name in gain and gain[name] is None:  # no seed like another
      noise = 0.08 * (-1) ** seed
    return {"eval/start": 0.5, "eval/final": 0.6 + (gain.get(name) or 0.0) + noise}

  result = report("e9", value)
  assert result.verdict.outcome == outcome, result.verdict
