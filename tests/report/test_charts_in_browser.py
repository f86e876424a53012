"""Charts of runs that differ: in length, in what they measure, in whether they train at all."""

import itertools
import re

import pytest
from support import reported_runs as cases
from support.browser import CHROME
from support.reported_runs import write

from gspo_jax.report.page import write_report

pytestmark = pytest.mark.skipif(CHROME is None, reason="needs Chrome or Chromium")


def layers(steps):
  return [
    {"phase": "rl", "step": step, "router/volatility/layer_00": 0.01 * (step % 5 + 1)}
    for step in range(1, steps + 1)
  ]


def test_heat_maps_of_runs_have_one_scale_of_steps(tab, tmp_path):
  runs = [write(tmp_path / "long", layers(60)), write(tmp_path / "short", layers(15))]
  tab.open(write_report(*runs, output=tmp_path / "compare.html"), "#router")
  canvas = "[...document.querySelectorAll('figure.heat canvas')][1]"
  width = tab.evaluate(f"{canvas}.width")
  data = tab.evaluate(f"[...{canvas}.getContext('2d').getImageData(0, 0, {width}, 1).data]")
  opaque = [alpha > 0 for alpha in data[3::4]]
  assert width == 60 and opaque == [i < 15 for i in range(60)]
  box = tab.box(canvas)
  tab.point(box["x"] + box["width"] * 40.5 / 60, box["y"] + box["height"] / 2)
  assert tab.texts(".heat .legend > span:last-child") == ["largest: layer 00 2.0%", "–"]


def test_bars_of_a_shorter_run_are_as_wide(tab, tmp_path):
  timed = [{"phase": "rl", "step": i, "time/sample": 1 + i % 3} for i in range(1, 41)]
  runs = [write(tmp_path / "long", timed), write(tmp_path / "short", timed[:10])]
  tab.open(write_report(*runs, output=tmp_path / "compare.html"), "#speed")
  drawn = "[...document.querySelectorAll('figure')].filter((f) => f.querySelector('.bar'))"
  boxes = f"{drawn}.map((f) => f.querySelector('.bar').getBBox().width)"
  long, short = tab.evaluate(boxes)
  assert short == pytest.approx(long * 10 / 40, rel=0.1)


def test_bars_keep_their_width_at_the_edges_and_clear_of_their_neighbours(tab, tmp_path):
  steps = [10, 20, 30, 32, 40]
  rows = [{"phase": "rl", "step": step, "time/sample": 1.0 + step} for step in steps]
  tab.open(write_report(write(tmp_path / "run", rows)), "#speed")
  path = tab.figure("Time per stage", "f.querySelector('.bar').getAttribute('d')")
  bars = [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)V", path)]
  widths = [end - start for start, end in bars]
  assert len(bars) == 5 and widths[0] == pytest.approx(widths[1], abs=0.2) == widths[4] > 20
  assert all(end <= start + 0.2 for (_, end), (start, _) in itertools.pairwise(bars))
  ends = "['x1', 'x2'].map((x) => +f.querySelector('.base').getAttribute(x))"
  ends = tab.figure("Time per stage", ends)
  assert ends[0] <= bars[0][0] and bars[-1][1] <= ends[1]


def test_a_trained_run_beside_an_evaluation_keeps_its_reading(tab, tmp_path):
  evaluated = {"eval/accuracy": 0.5, "eval/accuracy/low": 0.4, "eval/accuracy/high": 0.6}
  trained = [{"phase": "rl", "step": i, "reward/mean": 0.1 * i} | evaluated for i in range(8)]
  trained[-1] = trained[-1] | {"eval/accuracy": 0.55}
  runs = [write(tmp_path / "one", trained)]
  runs += [write(tmp_path / "two", [{"phase": "eval", "step": 0, **evaluated}])]
  tab.open(write_report(*runs, output=tmp_path / "compare.html"), "#learning")
  text = tab.figure(
    "Held-out accuracy", "[...f.querySelectorAll('.legend b')].map((b) => b.textContent)"
  )
  assert text[0].startswith("55.0%")


def test_what_is_constant_in_either_phase_is_told_of_both(tab, tmp_path):
  rows = [{"phase": phase, "step": i, "router/z": z, "router/dropped_tokens": 0.0}
          for phase, z in (("sft", 0.5), ("rl", 0.25)) for i in range(1, 4)]  # fmt: skip
  tab.open(write_report(write(tmp_path / "run", rows)), "#router")
  text = " ".join(tab.texts(".constants"))
  assert "0.5" in text and "0.25" in text and text.count("Dropped tokens") == 2


def test_filters_stay_when_the_view_is_left(tab, tmp_path):
  tab.open(write_report(cases.make_run(tmp_path)), "#responses?query=a?b")
  assert tab.evaluate("document.querySelector('[name=query]').value") == "a?b"
  tab.evaluate("void (location.hash = '#learning')")
  tab.wait("document.documentElement.dataset.view === 'learning'")
  tab.press("2")
  tab.wait("document.documentElement.dataset.view === 'responses'")
  assert tab.evaluate("document.querySelector('[name=query]').value") == "a?b"


def test_smoothing_keeps_straight_lines_and_bounds(tab, tmp_path):
  tab.open(write_report(write(tmp_path / "run", layers(3))))
  line = tab.evaluate("smooth(Array.from({ length: 60 }, (_, i) => 3 * i + 1), 0.05)")
  assert line == pytest.approx([3 * i + 1 for i in range(60)])
  steps = tab.evaluate("smooth(Array.from({ length: 60 }, (_, i) => Number(i % 20 > 9)), 0.05)")
  assert min(steps) >= 0 and max(steps) <= 1 and 0.2 < steps[10] < 0.8


def test_a_log_axis_places_decades_evenly(tab, tmp_path):
  tab.open(write_report(write(tmp_path / "run", layers(3))))
  places = tab.evaluate("[0.001, 0.01, 0.1, 1].map(logAxis([0.001, 1], { unit: 'number' }).place)")
  assert places == pytest.approx([0, 1 / 3, 2 / 3, 1])
