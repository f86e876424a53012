"""The report does in a browser what it promises: filters, colours, readings, comparison."""

import json

import pytest
from support import reported_runs as cases
from support.browser import CHROME, Browser

from gspo_jax.report import data, page, rollouts
from gspo_jax.report.page import write_report
from gspo_jax.runs import metrics

pytestmark = pytest.mark.skipif(CHROME is None, reason="needs Chrome or Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  browser = Browser(tmp_path_factory.mktemp("profile"))
  yield browser
  browser.close()


@pytest.fixture
def tab(browser):
  """The browser; no script of the test's page may have failed or said anything."""
  yield browser
  browser.evaluate("0")  # what it has to report comes before this answer
  assert browser.errors == []


def write_run(folder, scale=1.0, steps=20, **config):
  """Twenty steps, if not fewer; two prompts with four responses each at the steps 10 and 20."""
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  with metrics.Writer(folder) as writer:
    for step in range(1, steps + 1):
      row = {"phase": "rl", "step": step, "entropy": scale * step, "loss": -step}
      row |= {f"minibatch/{i}/loss": step + i for i in range(3)}
      row |= {"time/sample": 2.0, "time/update": 1.0, "grad_norm": 1.0}
      row |= {"time/score": 1.0} if scale > 1 else {}
      row |= {"warning/entropy": 1.0} if step in (3, 4, 5, 9) else {}
      writer.write(row)
    for step in (10, 20):
      writer.dump_rollouts("rl", step, [response(step, p, i) for p in (1, 2) for i in range(4)])
    writer.dump_rollouts("eval", 20, [cases.record(20, 9, 0, eval=True, response="held out")])
  return folder


def response(step, prompt, i):
  """The i-th has 10 i + 3 tokens; every second one was clipped, the last one was cut."""
  tokens = ["two", "\n", "lines", *(f" {n}" for n in range(10 * i))]
  ratios = [-0.02, 0.0, 0.01, *(0.001 * (n % 5) for n in range(10 * i))]
  return cases.record(
    step, prompt, i, response="".join(tokens), tokens=tokens, log_ratio=ratios, length=len(tokens),
    ratio=1.01, clipped=i % 2 == 1, truncated=i == 3,
  )  # fmt: skip


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
  return write_report(write_run(tmp_path_factory.mktemp("runs") / "one"))


@pytest.fixture(scope="module")
def comparison_page(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  runs = [write_run(folder / "one", seed=1), write_run(folder / "two", 2.0, seed=2)]
  return write_report(*runs, output=folder / "compare.html")


def found(tab):
  return int(tab.texts(".found")[0].split()[0])


def test_all_charts_are_drawn_and_text_stays_text(tab, tmp_path):
  path = write_report(cases.make_run(tmp_path))
  tab.open(path)
  report = cases.embedded(path)
  assert tab.texts("figure h3") == [title for _, title in cases.figures(report)]
  assert tab.evaluate("document.querySelectorAll('figure > svg path').length") > 50
  assert tab.evaluate("document.title") == "a <b>run"  # no response took it
  assert found(tab) == 25 and "NaN" not in tab.evaluate("document.getElementById('page').innerHTML")


def test_responses_by_length(tab, run_page):
  tab.open(run_page)
  assert found(tab) == 17
  tab.choose("shortest", "13")
  assert found(tab) == 12
  tab.choose("longest", "23")
  assert found(tab) == 8
  assert set(tab.texts(".sample:not(.titles) .cell[data-label=tokens]")) == {"13", "23"}
  tab.choose("shortest", "")
  assert found(tab) == 13  # the held-out one has three tokens


def test_responses_by_clipping_and_by_end(tab, run_page):
  tab.open(run_page)
  tab.choose("clip", "clipped")
  assert found(tab) == 8
  assert set(tab.texts(".sample:not(.titles) .flag")) == {"clipped", "clipped, truncated"}
  tab.choose("ending", "whole")
  assert set(tab.texts(".sample:not(.titles) .flag")) == {"clipped"}
  tab.choose("clip", "unclipped")
  assert found(tab) == 8  # the held-out one is neither clipped nor not
  tab.choose("reward", "1,1")
  assert found(tab) == 0 and tab.texts(".empty") == ["No response matches these filters."]


def test_tokens_are_coloured_on_request(tab, run_page):
  tab.open(run_page)
  tab.choose("query", "lines")
  assert set(tab.texts(".sample mark")) == {"lines"} and tab.texts(".sample .token") == []
  tab.choose("kind", "train")
  tab.choose("tokens", "colored")
  assert tab.evaluate("document.querySelectorAll('mark').length") == 0
  assert tab.texts(".sample pre")[0] == "two\nlines"
  assert set(tab.texts(".sample .token.lower")) == {"two"}  # and no newline: it did not change
  first = "document.querySelectorAll('.sample pre')[0].children"
  backs = tab.evaluate(f"[...{first}].map((node) => getComputedStyle(node).backgroundColor)")
  assert len(set(backs)) == 3
  box = tab.evaluate(f"""(() => {{
    {first}[0].scrollIntoView({{ block: "center" }});
    return {first}[0].getBoundingClientRect().toJSON();
  }})()""")
  assert tab.evaluate("document.querySelector('.tip').hidden")
  tab.point(box["x"] + 4, box["y"] + 4)
  assert tab.texts(".tip:not([hidden])") == ['"two"log-ratio −0.02 · ×0.9802 · less probable']
  tab.point(box["x"] + 4, box["y"] - 200)
  assert tab.evaluate("document.querySelector('.tip').hidden")


def test_a_folded_response_unfolds_whole_in_colour(tab, tmp_path):
  tokens = [f" word{i}" for i in range(400)]
  with metrics.Writer(tmp_path) as writer:
    ratios = [0.001] * 400
    record = cases.record(1, 1, 0, response="".join(tokens), tokens=tokens, log_ratio=ratios)
    record["clipped_tokens"] = [int(i in (1, 399)) for i in range(400)]
    writer.dump_rollouts("rl", 1, [record])
  tab.open(write_report(tmp_path))
  tab.choose("tokens", "colored")
  assert 50 < len(tab.texts(".sample .token")) < 400
  tab.evaluate("document.querySelector('.more').click()")
  assert tab.texts(".sample .token") == tokens
  assert tab.texts(".sample .token.clipped") == [" word1", " word399"]
  assert tab.texts(".scale .clipped") == ["clipped"]


def test_the_page_says_which_tokens_it_left_out(tab, tmp_path):
  run = write_run(tmp_path / "run")
  found = rollouts.read_rollouts([run / "rollouts"], 100, 60)
  path = tmp_path / "page.html"
  path.write_text(page.render(data.describe([data.Run("run", [], {})]), found), "utf-8")
  tab.open(path)
  assert not tab.evaluate("document.querySelector('.scale').checkVisibility()")
  tab.choose("tokens", "colored")
  assert tab.evaluate("document.querySelector('.scale').checkVisibility()")
  assert "Only the newest 3 of 16 such responses" in tab.texts(".scale")[0]
  assert tab.evaluate("document.querySelectorAll('.sample pre:has(.token)').length") == 3


def test_pointing_at_a_chart_reads_all_charts_at_that_step(tab, run_page):
  tab.open(run_page)
  assert tab.figure("Entropy", "f.querySelector('.legend b').textContent") == "20"  # at the end
  tab.point_at_step(7, "Entropy")
  assert tab.figure("Entropy", "f.querySelector('.legend b').textContent") == "7"
  assert tab.figure("Loss", "f.querySelector('.legend b').textContent") == "−7"
  assert tab.figure("Loss", "f.querySelector('.at').textContent") == "step 7"
  assert tab.figure("Loss", "f.querySelector('.cross').style.visibility") == "visible"
  tab.point(2, 2)
  assert tab.figure("Loss", "f.querySelector('.legend b').textContent") == "−20"


def test_warnings_are_on_top(tab, run_page, tmp_path):
  tab.open(run_page)
  assert tab.texts(".warnings li") == ["step 3–5: entropy", "step 9: entropy"]
  tab.open(write_report(cases.make_run(tmp_path)))
  assert tab.texts(".warnings") == []


def test_a_comparison_draws_the_curves_of_all_runs_in_one_chart(tab, comparison_page):
  tab.open(comparison_page)
  curves = "[...f.querySelectorAll('svg > .curve')]"
  colors = f"{curves}.map((c) => getComputedStyle(c).stroke)"
  assert len(set(tab.figure("Entropy", colors))) == 2
  legends = "[...f.querySelectorAll('.legend')].map((l) => l.textContent)"
  assert tab.figure("Entropy", legends) == ["one 20", "two 40"]
  # Of several lines each, the runs have their colours, and in a sequence the lines their shades.
  assert len(set(tab.figure("Loss by mini-batch", colors))) == 6
  keys = "[...f.querySelectorAll('.legend')].map((l) => [...l.children].map((k) => k.textContent))"
  expected = ["two", "mini-batch 0 20", "mini-batch 1 21", "mini-batch 2 22"]
  assert tab.figure("Loss by mini-batch", keys)[1] == expected
  assert tab.texts("figure h3").count("Time per stage") == 2  # bars cannot lie over each other
  stacks = "[...document.querySelectorAll('figure')].filter((g) => g.querySelector('.bar'))"
  fills = "[...g.querySelectorAll('.bar')].map((bar) => getComputedStyle(bar).fill)"
  one, two = tab.evaluate(f"{stacks}.map((g) => {fills})")
  assert one[0] == two[0] and one[-1] == two[-1] and len(one) == 2 and len(two) == 3
  tab.point_at_step(7, "Entropy")
  assert tab.figure("Entropy", legends) == ["one 7", "two 14"]


def test_a_shorter_run_has_nothing_to_read_beyond_its_end(tab, tmp_path):
  runs = [write_run(tmp_path / "long"), write_run(tmp_path / "short", steps=10)]
  tab.open(write_report(*runs, output=tmp_path / "compare.html"))
  legends = "[...f.querySelectorAll('.legend')].map((l) => l.textContent)"
  assert tab.figure("Entropy", legends) == ["long 20", "short 10"]
  tab.point_at_step(15, "Entropy")
  assert tab.figure("Entropy", legends) == ["long 15", "short –"]


def test_a_comparison_tells_the_runs_apart(tab, comparison_page):
  tab.open(comparison_page)
  assert tab.texts("thead th") == ["one", "two"]
  assert tab.texts("details tbody tr") == ["seed12"]
  assert found(tab) == 34
  tab.choose("run", "1")
  assert found(tab) == 17 and set(tab.texts(".group .of")) == {"two"}
