"""Warnings come when a run goes wrong, once, and the same after an interruption."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from configs import common
from gspo_jax.report.data import flatten
from gspo_jax.runs import alarms
from gspo_jax.runs.alarms import Alarms
from gspo_jax.settings.training import AlarmConfig

CONFIG = AlarmConfig(grad_norm=5.0, entropy=0.1, ratio=0.01, mismatch=1.0, reward=0.3, unknown=0.05)


@pytest.fixture(autouse=True)
def short_window(monkeypatch):
  monkeypatch.setattr(alarms, "WINDOW", 4)


def healthy(step, **changes):
  row = {"phase": "rl", "step": step, "grad_norm": 1.0 + 0.1 * (step % 3), "entropy": 0.8}
  row |= {"ratio/deviation": 1e-3, "reward/mean": 0.5 + 0.01 * step, "clip_range": 3e-4}
  row |= {"verifier/unknown": 0.01, "eval/verifier/unknown": 0.0}
  row |= {"mismatch/sequence/mean": -4e-4, "mismatch/sequence/abs/mean": 2e-4}
  return row | {"mismatch/recomputed": 2e-4, "mismatch/tail": 0.1, "ratio/tail": 0.1} | changes


def run(rows, watch=None):
  """Returns steps by warning, and the printed lines."""
  watch, steps, printed = watch or Alarms(CONFIG), {}, []
  for row in rows:
    metrics, lines = watch(row)
    printed += lines
    for name in metrics:
      steps.setdefault(name, []).append(row["step"])
  return steps, printed


def test_a_healthy_run_has_no_warnings():
  assert run(healthy(step) for step in range(30)) == ({}, [])


TROUBLE = {
  "grad_norm": (dict(grad_norm=7.0), "gradient norm 7"),
  "entropy": (dict(entropy=0.05), "entropy is down to 0.05"),
  "ratio": ({"ratio/deviation": 0.02}, "differ from 1 by 0.02"),
  "unknown": ({"eval/verifier/unknown": 0.0625}, "no verdict on 6.25% of the responses"),
  "mismatch": ({"mismatch/sequence/abs/mean": 4e-4}, "of sampler and trainer differ by 0.0004"),
  "mismatch_tail": ({"mismatch/tail": 0.12}, "factor above 2 on 12.0% of the tokens"),
  "ratio_tail": (
    {"ratio/tail": 0.12},
    "importance ratios of 12.0% of the tokens differ from 1 by a factor above 2",
  ),
  "recomputed": ({"mismatch/recomputed": 4e-4}, "those of the first update by 0.0004"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_a_warning_is_printed_once_and_marked_while_it_lasts(name):
  changes, text = TROUBLE[name]
  rows = [healthy(step, **(changes if step in (10, 11, 20) else {})) for step in range(30)]
  steps, printed = run(rows)
  assert steps == {f"warning/{name}": [10, 11, 20]}
  assert len(printed) == 2 and "step 10" in printed[0] and "step 20" in printed[1]
  assert text in printed[0] and alarms.ALARMS[name].advice in printed[0]


def test_advice_names_keys_and_sections_that_exist():
  root, keys = Path(__file__).parents[2], dict(flatten(common.base().to_dict())).keys()
  for title, advice, _, page in alarms.ALARMS.values():
    words = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", f"{title} {advice}")
    assert {word for word in words if word != "metrics.jsonl"} <= keys
    path, _, section = page.partition("#")
    headings = re.findall("^#+ (.*)", (root / path).read_text(), re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert section in slugs
    assert (title[0].isupper(), title[-1], advice[0].isupper(), advice[-1]) == (True, ".") * 2


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_ratios_may_differ_by_the_clip_range(clip_range):
  """Ratios of tokens have wide ranges, and some losses have none."""
  rows = [healthy(0, **{"ratio/deviation": 0.05, "clip_range": clip_range})]
  assert run(rows, Alarms(dataclasses.replace(CONFIG, ratio=None))) == ({}, [])
  assert run(rows)[0] == {"warning/ratio": [0]}  # The configured limit holds.


def test_an_iteration_that_trains_on_nothing_has_no_entropy():
  nothing = {"entropy": 0.0, "ratio/mean": 0.0, "ratio/deviation": 0.0}
  assert run(healthy(step, **nothing) for step in range(3)) == ({}, [])


def test_a_gradient_after_iterations_without_one_is_no_jump():
  norms = [0, 0, 0, 0, 0.5, 0, 0, 0.3, 0, 0.4, 0.4, 0, 4.0]
  steps, _ = run(healthy(s, grad_norm=norm) for s, norm in enumerate(norms))
  assert steps == {"warning/grad_norm": [12]}


REASONS = {
  "uniform_groups": {"groups_without_spread": 1.0},
  "filled_groups": {"groups_without_spread": 1.0, "dynamic_sampling/filled_groups": 4.0},
  "all_dropped": {"query_set/dropped": 12.0, "query_set/tried": 12.0},
  "all_masked": {"masked_responses": 12.0, "truncated_fraction": 1.0},
  "no_gradient": {"groups_without_spread": 0.5, "masked_responses": 3.0},
}
CASES = [*REASONS.items(), ("all_masked", {"masked_responses": 12.0, "recorded/responses": 12.0})]


@pytest.mark.parametrize("name, metrics", CASES)
def test_no_gradient_is_reported_with_its_reason(name, metrics):
  idle = dict(grad_norm=0.0) | metrics
  steps, printed = run(healthy(s, **(idle if s >= 3 else {})) for s in range(12))
  assert steps == {f"warning/{name}": [7, 8, 9, 10, 11]}
  assert len(printed) == 1 and "gradient was 0 in 5 iterations in a row" in printed[0]
  assert printed[0].endswith(f"{alarms.ALARMS[name].advice} ({alarms.ALARMS[name].page})")


def test_reward_warns_when_its_mean_has_fallen():
  rewards = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0]
  steps, printed = run(healthy(s, **{"reward/mean": r}) for s, r in enumerate(rewards))
  # The best mean of four is 0.8; it is 0.4, more than 0.3 below, when two of four have fallen.
  assert steps == {"warning/reward": [8, 9, 10, 11]} and "from 0.8" in printed[0]


@pytest.mark.parametrize("low, high", [(0, 1), (-1, 1), (0, 100), (-9, -1), (0, 0.01)])
def test_a_fall_of_the_reward_is_relative_to_the_range_of_rewards(low, high):
  shares = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.6, 0.6, 0.6, 0.6, 0.0, 0.0, 0.0]
  rewards = [{"reward/mean": low + (high - low) * share} for share in shares]
  ends = {"reward/min": low, "reward/max": high}
  steps, _ = run(healthy(s, **ends, **reward) for s, reward in enumerate(rewards))
  assert steps == {"warning/reward": [11, 12, 13]}


def test_a_slow_rise_of_the_gradient_norm_is_no_warning():
  assert run(healthy(s, grad_norm=1.3**s) for s in range(40)) == ({}, [])


def test_zero_turns_a_warning_off():
  off = Alarms(AlarmConfig(grad_norm=0, entropy=0, ratio=0, mismatch=0, reward=0))
  rows = [healthy(s, **TROUBLE["entropy"][0]) for s in range(5)]
  rows += [{"phase": "rl", "step": 5, "grad_norm": 1e9, "ratio/deviation": 9.0, "reward/mean": -9}]
  rows.append(healthy(6, **TROUBLE["mismatch"][0]))
  assert run(rows, off) == ({}, [])


def sampler_row(step, distance):
  """Row of a run with the sampler's old log-probs."""
  row = healthy(step, **{"mismatch/sequence/abs/mean": distance})
  del row["mismatch/recomputed"]
  return row


def test_a_tenth_clipped_by_the_mismatch_alone_is_said_once():
  """P(|N(0, m)| > 3e-4) is a tenth at m = 1.82e-4, where the mean distance is 1.455e-4."""
  assert run([sampler_row(0, 1.45e-4)]) == ({}, [])
  first, *others = [sampler_row(s, distance) for s, distance in enumerate((1.5e-4, 1e-4, 1.5e-4))]
  steps, printed = run([first, *others])
  assert steps == {"warning/mismatch_clips": [0]} and len(printed) == 1
  assert "11% of the responses outside the clip range of 0.0003" in printed[0]
  ways = ("old_logp=recompute", "clip_high", "old_logp=behaviour")
  assert all(way in printed[0] for way in ways)
  assert run(others, Alarms(CONFIG, [first])) == ({}, []), "resumed"
  late = [healthy(0), sampler_row(1, 0), sampler_row(2, 1.5e-4)]
  assert run(late) == ({}, []), "recomputed log-probs, then an exact sampler at first"
  assert "warning/mismatch_clips" in run([healthy(0), sampler_row(1, 1.5e-4)])[0]
  assert run([sampler_row(0, 1.5e-4)], Alarms(AlarmConfig(mismatch=0))) == ({}, [])
  masked = sampler_row(0, 1.5e-4) | {"correction/masked": 0.2}
  assert run([masked]) == ({}, [])


def test_ratios_to_the_sampler_have_its_tail_and_limits_of_0_turn_tails_off():
  row = sampler_row(0, 0) | {"mismatch/tail": 0.2, "ratio/tail": 0.25}
  assert run([row])[0] == {"warning/mismatch_tail": [0]}
  assert "warning/ratio_tail" in run([row | {"ratio/tail": 0.31}])[0]
  assert run([row], Alarms(AlarmConfig(mismatch=0, ratio=0))) == ({}, [])


def test_without_a_clip_range_mismatch_does_not_warn():
  rows = [healthy(s, **TROUBLE["mismatch"][0], **TROUBLE["recomputed"][0]) for s in range(3)]
  for row in rows:
    del row["clip_range"]
  assert run(rows) == ({}, [])


@pytest.mark.parametrize("cut", [3, 9, 11, 15])
def test_a_resumed_run_warns_as_the_uninterrupted_one(cut):
  rows = [healthy(s, entropy=0.05 if 8 <= s < 14 else 0.8) for s in range(20)]
  rows[5]["grad_norm"] = math.nan  # an update that was left out; null on file
  whole = run(rows)
  on_file = [row | ({"grad_norm": None} if row["step"] == 5 else {}) for row in rows[:cut]]
  steps, printed = run(rows[cut:], Alarms(CONFIG, on_file))
  assert steps == {k: [s for s in v if s >= cut] for k, v in whole[0].items() if max(v) >= cut}
  assert printed == [line for line in whole[1] if int(line.split()[3].rstrip(":")) >= cut]
