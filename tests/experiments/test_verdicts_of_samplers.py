"""Verdicts of E7, E13 and E26 on made-up results, so that the truth is known."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from support import verdicts  # noqa: E402

from experiments import definition  # noqa: E402
from experiments.report import FAILS, HOLDS, OPEN, Results  # noqa: E402


def report(name, value, curve=None):
  """Reports on `value` and `curve` of conditions, with a little noise by seed."""

  def noisy(c, seed):
    noise = 0.002 * np.sin(37 * seed + len(c.name))
    return {k: v + noise for k, v in value(c).items()}

  return verdicts.report(name, noisy, curve and (lambda c, _, s: curve(c, s)), range(1, 13))


@pytest.mark.parametrize(
  "lost, outcome",
  [(0.01, HOLDS), (0.08, FAILS), (0.03, OPEN)],
)
def test_e7_tells_what_the_samplers_log_probs_cost(lost, outcome):
  def value(c):
    mine = c.name == "gspo_bfloat16_sampler"
    return {"eval/final": 0.6 - lost * mine, "mismatch/sequence/abs/mean": 1e-4}

  result = report("e7", value)
  assert result.verdict.outcome == outcome, result.verdict
  (line,) = [text for text in result.tables[0].splitlines() if text.startswith("| bfloat16")]
  assert float(line.split(" | ")[4].split()[0]) == pytest.approx(-lost, abs=0.005)


@pytest.mark.parametrize("lost, outcome", [(0.01, HOLDS), (0.08, FAILS), (0.032, OPEN)])
def test_e26_judges_the_int8_cache_by_recomputed_log_probs(lost, outcome):
  def value(c):
    losses = dict(recomputed=lost, own=0.2)
    return {"eval/final": 0.4 - losses.get(c.name, 0.0), "reward/mean": 0.3}

  result = report("e26", value)
  assert result.verdict.outcome == outcome, result.verdict
  gaps = [text for text in result.tables[1].splitlines() if text.startswith("| int8")]
  gaps = [float(text.split(" | ")[2].split()[0]) for text in gaps]
  np.testing.assert_allclose(gaps, [-lost, 0.0, -0.2], atol=0.005)


@pytest.mark.parametrize("more, outcome", [(0.5, HOLDS), (0.0, FAILS)])
def test_e13_compares_warm_iterations(more, outcome):
  """The first iterations compile and do not count."""

  def curve(c, step):
    dear = c.changes["objective.replay"] == "R2"
    stages = dict(sample=1.0, logp=0.1, update=2.0 + more * dear, publish=0.01)
    stages["update"] += (50.0 if step < 3 and not dear else 0.0) + 0.01 * (step % 3)
    return {f"time/{name}": value for name, value in stages.items()}

  def value(c):
    return {"flops": 2e9, "tokens": 1e3, "memory/host_peak_gib": 1.0}

  result = report("e13", value, curve)
  assert result.verdict.outcome == outcome, result.verdict
  (line,) = [text for text in result.tables[0].splitlines() if text.startswith("| recompute, R2")]
  assert float(line.split(" | ")[7].split()[0]) == pytest.approx(1 + more / 3.12, abs=0.01)


@pytest.mark.parametrize("name", ["e7", "e13", "e26"])
def test_without_runs_nothing_is_claimed(name):
  _, module = definition.load(definition.find(name))
  none = pd.DataFrame(columns=["condition", "seed", "stage", "status"])
  assert module.report(Results(none, none)).verdict.outcome == OPEN
