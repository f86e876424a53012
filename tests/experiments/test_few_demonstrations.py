"""The verdict of E24 on results that were made up."""

import pytest

pytest.importorskip("pandas")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from support import verdicts

from experiments.e24_few_demonstrations import conditions as e24
from experiments.report import FAILS, HOLDS


def made_up(gain):
  """Accuracies: validation prefers 80 updates, and held-out problems 160."""

  def value(c, seed):
    arm, count, stop = c.name.split("_")
    accuracy = 0.2 + 0.001 * int(stop) + (gain if arm == "gspo" else 0) + 0.01 * (seed % 2)
    validation = 0.5 - abs(int(stop) - 80) / 1000
    columns = dict.fromkeys(e24.SHOWN.values(), accuracy + 0.1 * (count == "640"))
    return columns | {e24.VALIDATION: validation}

  return value


@pytest.mark.parametrize("gain, outcome", [(0.1, HOLDS), (0.03, FAILS), (-0.1, FAILS)])
def test_gspo_after_a_cold_start_is_compared_with_the_validated_imitation(gain, outcome):
  result = verdicts.report("e24", made_up(gain))
  assert result.verdict.outcome == outcome
  lines = result.tables[0].splitlines()[2:]
  differences = [float(line.split(" | ")[4].split()[0]) for line in lines]
  # The imitation has 80 updates: 0.04 above the cold start of 40.
  expected = [gain - 0.04, gain] * 2
  assert differences == pytest.approx(expected, abs=1e-6)
  assert all("80, 80, 80" in line for line in lines)


def test_every_stop_has_both_arms_and_one_cold_start():
  names = {c.name for c in e24.EXPERIMENT.conditions}
  assert len(names) == 12
  starts = {
    tuple(c.changes[k] for k in ("sft.demonstrations", "sft.steps"))
    for c in e24.EXPERIMENT.conditions
  }
  assert len(starts) == 6
