"""The report does in a browser what it promises: filters, colours, readings, comparison."""

import pytest
from support import reported_runs as cases
from support.browser import CHROME

from gspo_jax.report import data, page, rollouts
from gspo_jax.report.page import write_report

pytestmark = pytest.mark.skipif(CHROME is None, reason="needs Chrome or Chromium")


def write_run(folder, scale=1.0, steps=20, **config):
  """Twenty steps, if not fewer; two prompts with four responses each at the steps 10 and 20."""
  rows = []
  for step in range(1, steps + 1):
    row = {"phase": "rl", "step": step, "entropy": scale * step, "loss": -step}
    row |= {f"minibatch/{i}/loss": step + i for i in range(3)}
    row |= {"time/sample": 2.0, "time/update": 1.0, "grad_norm": 1.0}
    row |= {"time/score": 1.0} if scale > 1 else {}
    rows.append(row | ({"warning/entropy": 1.0} if step in (3, 4, 5, 9) else {}))
  dumps = [("rl", n, [response(n, p, i) for p in (1, 2) for i in range(4)]) for n in (10, 20)]
  dumps.append(("eval", 20, [cases.record(20, 9, 0, eval=True, response="held out")]))
  return cases.write(folder, rows, dumps, **config)


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


def problems(tab):
  return int(tab.texts(".found")[0].split()[0])


def show(tab, view):
  tab.evaluate(f"void (location.hash = '#{view}')")
  tab.wait(f"document.documentElement.dataset.view === '{view}'")
  tab.evaluate(
    "document.querySelectorAll('.view:not([hidden]) details').forEach((d) => { d.open = true })"
  )


def test_all_charts_are_drawn_and_text_stays_text(tab, tmp_path):
  path = write_report(cases.make_run(tmp_path))
  tab.open(path)
  report = cases.embedded(path)
  for view in {section["view"]: None for section in report["sections"]}:
    show(tab, view)
    sections = [section for section in report["sections"] if section["view"] == view]
    charts = [figure for section in sections for figure in section["figures"]]
    drawn = [f for f in charts if any("constant" not in series for series in f["series"])]
    assert tab.texts(f"#view-{view} figure h3") == [figure["title"] for figure in drawn]
    text = " ".join(tab.texts(f"#view-{view} .constants"))
    assert all(figure["title"] in text for figure in charts if figure not in drawn)
    marks = f"document.querySelectorAll('#view-{view} figure > svg path').length"
    assert tab.evaluate(marks) >= len([f for f in drawn if f["kind"] != "heat"])
  show(tab, "responses")
  assert tab.evaluate("document.title") == "Responses · a <b>run"  # no response took it
  assert problems(tab) == 25 and "NaN" not in tab.evaluate(
    "document.getElementById('page').innerHTML"
  )


def test_responses_by_length(tab, run_page):
  tab.open(run_page, "#responses")
  assert problems(tab) == 17
  tab.choose("shortest", "13")
  assert problems(tab) == 12
  tab.choose("longest", "23")
  assert problems(tab) == 8
  assert set(tab.texts(".sample .cell[data-label=tokens]")) == {"13", "23"}
  tab.choose("shortest", "")
  assert problems(tab) == 13  # the held-out one has three tokens


def test_responses_by_clipping_and_by_end(tab, run_page):
  tab.open(run_page, "#responses")
  tab.choose("clip", "clipped")
  assert problems(tab) == 8
  assert set(tab.texts(".sample .flag")) == {"clipped", "clipped, truncated"}
  tab.choose("ending", "whole")
  assert set(tab.texts(".sample .flag")) == {"clipped"}
  tab.choose("clip", "unclipped")
  assert problems(tab) == 8  # the held-out one is neither clipped nor not
  tab.choose("reward", "1,1")
  assert problems(tab) == 0 and tab.texts(".empty") == ["No response matches these filters."]


def test_tokens_are_coloured_on_request(tab, run_page):
  tab.open(run_page, "#responses")
  tab.choose("query", "lines")
  assert set(tab.texts(".sample .token.found")) == {"lines"}
  tab.choose("tokens", "plain")
  assert set(tab.texts(".sample mark")) == {"lines"} and tab.texts(".sample .token") == []
  tab.choose("kind", "train")
  tab.choose("tokens", "colored")
  assert tab.evaluate("document.querySelectorAll('mark').length") == 0
  assert tab.texts(".sample pre")[0] == "two\nlines"
  assert set(tab.texts(".sample .token.lower")) == {"two"}  # No newline: it did not change.
  first = "document.querySelectorAll('.sample pre')[0].children"
  backs = tab.evaluate(f"[...{first}].map((node) => getComputedStyle(node).backgroundColor)")
  assert len(set(backs)) == 3
  box = tab.box(f"{first}[0]")
  assert tab.evaluate("document.querySelector('.tip').hidden")
  tab.point(box["x"] + 4, box["y"] + 4)
  assert tab.texts(".tip:not([hidden])") == ['"two"log-ratio −0.02 · ×0.9802 · less probable']
  tab.point(box["x"] + 4, box["y"] - 200)
  assert tab.evaluate("document.querySelector('.tip').hidden")


def test_a_folded_response_unfolds_whole_in_colour(tab, tmp_path):
  tokens = [f" word{i}" for i in range(400)]
  ratios = [0.001] * 400
  record = cases.record(1, 1, 0, response="".join(tokens), tokens=tokens, log_ratio=ratios)
  record["clipped_tokens"] = [int(i in (1, 399)) for i in range(400)]
  tab.open(write_report(cases.write(tmp_path, dumps=[("rl", 1, [record])])), "#responses")
  assert 50 < len(tab.texts(".sample .token")) < 400
  tab.evaluate("document.querySelector('.more').click()")
  assert tab.texts(".sample .token") == tokens
  assert tab.texts(".sample .token.clipped") == [" word1", " word399"]
  assert tab.texts(".scale .clipped") == ["clipped"]


def test_turns_and_templates_are_told_apart(tab, tmp_path):
  turns = [("ab", "policy"), ("<b>tool", "environment"), ("c", "policy")]
  turns = [dict(role=role, text=text, length=len(text)) for text, role in turns]
  first = cases.record(1, 1, 0, response="abtoolc", turns=turns)
  first |= dict(prompt="1+1", rendered_prompt="<user> 1+1 <end>")
  dump = "rl", 1, [first | dict(tokens=[*"abc"], log_ratio=[0.1, 0.0, 0.2]), first | dict(sample=1)]
  tab.open(write_report(cases.write(tmp_path, dumps=[dump])), "#responses")
  assert tab.texts(".prompt") == ["<user> 1+1 <end>"]
  assert tab.texts(".prompt .template") == ["<user> ", " <end>"]
  for mode, tokens in ("colored", ["a", "b", "c"]), ("plain", []):
    tab.choose("tokens", mode)
    assert tab.texts(".observation") == ["<b>tool"] * 2
    assert tab.texts(".sample pre") == ["ab<b>toolc"] * 2 and tab.texts(".sample .token") == tokens
  tab.choose("query", "TOOL")
  assert set(tab.texts(".observation mark")) == {"tool"}


def test_segments_are_marked_and_read_by_pointer_and_keys(tab, tmp_path):
  tokens = ["one", "\n", "two", " more", "three"]
  fields = dict(segments=[0, 0, 1, 1, 2], segment_ratio=[1.25, 0.9, 1.0])
  fields |= dict(segment_gradient=[0.0, 0.125, 3.0], clipped_tokens=[1, 1, 0, 0, 0])
  ratios = [0.1, 0.3, -0.1, 0.0, 0.0]
  plain = cases.record(1, 1, 0, response="".join(tokens), tokens=tokens, log_ratio=ratios)
  dump = "rl", 1, [plain | fields, cases.record(1, 1, 1) | plain | dict(sample=1)]
  tab.open(write_report(cases.write(tmp_path, dumps=[dump])), "#responses")
  marks = "[...document.querySelectorAll('.sample .segment')]"
  assert tab.evaluate(f"{marks}.map((mark) => mark.getAttribute('aria-label'))") == [
    "segment 1 · ratio 1.25000 · clipped · gradient 0",
    "segment 2 · ratio 0.90000 · not clipped · gradient 0.125",
    "segment 3 · ratio 1.00000 · not clipped · gradient 3",
  ]
  # Each stands before the first token of its segment, and adds nothing to the text.
  assert tab.evaluate(f"{marks}.map((mark) => mark.nextSibling.textContent)") == [
    "one",
    "two",
    "three",
  ]
  assert tab.texts(".sample pre") == ["".join(tokens)] * 2
  shown = "[getComputedStyle({0}, '::before').content, {0}.offsetWidth > 5, {0}.tabIndex]"
  assert tab.evaluate(f"{marks}.map((mark) => {shown.format('mark')})") == [
    ['"1 clip"', True, 0],
    ['"2"', True, -1],
    ['"3"', True, -1],
  ]
  tab.evaluate(f"{marks}[0].focus()")
  assert tab.texts(".tip:not([hidden])") == ["segment 1 · ratio 1.25000 · clipped · gradient 0"]
  for _ in range(3):  # The pointer stays with the last.
    tab.press("ArrowRight")
  assert tab.texts(".tip:not([hidden])") == ["segment 3 · ratio 1.00000 · not clipped · gradient 3"]
  tab.press("ArrowLeft")
  assert tab.evaluate(f"{marks}.map((mark) => mark.tabIndex)") == [-1, 0, -1]
  tab.evaluate("document.activeElement.blur()")
  assert tab.texts(".tip:not([hidden])") == []
  box = tab.evaluate(f"{marks}[1].nextSibling.getBoundingClientRect().toJSON()")
  tab.point(box["x"] + 4, box["y"] + 4)
  (tip,) = tab.texts(".tip:not([hidden])")
  assert tip.startswith('"two"log-ratio −0.1') and tip.endswith("not clipped · gradient 0.125")
  assert "“clip” a clipped one" in tab.texts(".scale")[0]
  tab.choose("tokens", "plain")
  assert tab.evaluate(f"{marks}.length") == 0


def test_the_page_says_which_tokens_it_left_out(tab, tmp_path):
  run = write_run(tmp_path / "run")
  problems = rollouts.read_rollouts([run / "rollouts"], 100, 60)
  path = tmp_path / "page.html"
  path.write_text(page.render(data.describe([data.Run("run", [], {})]), problems), "utf-8")
  tab.open(path, "#responses?tokens=plain")
  assert not tab.evaluate("document.querySelector('.scale').checkVisibility()")
  tab.choose("tokens", "colored")
  assert tab.evaluate("document.querySelector('.scale').checkVisibility()")
  assert "the page has those of the newest 3 only" in tab.texts(".scale")[0]
  assert tab.evaluate("document.querySelectorAll('.sample pre:has(.token)').length") == 3


def test_pointing_at_a_chart_reads_all_charts_at_that_step(tab, run_page):
  tab.open(run_page, "#learning")
  assert (
    tab.figure("Entropy", "f.querySelector('.legend b').textContent") == "20"
  )  # Shown at the end.
  tab.point_at_step(7, "Entropy")
  assert tab.figure("Entropy", "f.querySelector('.legend b').textContent") == "7"
  assert tab.figure("Loss", "f.querySelector('.legend b').textContent") == "−7"
  assert tab.figure("Loss", "f.querySelector('.at').textContent") == "step 7"
  assert tab.figure("Loss", "f.querySelector('.cross').style.visibility") == "visible"
  tab.point(2, 2)
  assert tab.figure("Loss", "f.querySelector('.legend b').textContent") == "−20"


def test_phases_of_stacked_bars_are_side_by_side(tab, tmp_path):
  rows = [
    {"phase": phase, "step": step, "goodput/update": 0.25 * scale, "goodput/compile": 0.5}
    for phase, steps, scale in (("sft", 6, 1), ("rl", 3, 2))
    for step in range(1, steps + 1)
  ]
  tab.open(write_report(cases.write(tmp_path / "run", rows)), "#speed")
  bars = """[...f.querySelectorAll("svg > .bar")].map((bar) => {
    const box = bar.getBBox();
    return [box.x, box.x + box.width, box.y, box.y + box.height];
  })"""
  drawn = tab.figure("Goodput", bars)
  assert len(drawn) == 4
  (_, sft_end, sft_top, low), (rl_start, rl_end, rl_top, _) = (
    (min(b[0] for b in pair), max(b[1] for b in pair), min(b[2] for b in pair), drawn[0][3])
    for pair in (drawn[:2], drawn[2:])
  )
  assert sft_end < rl_start and rl_end - rl_start > 3 * 24
  assert rl_end <= tab.figure("Goodput", "+f.querySelector('svg .base').getAttribute('x2')")
  assert (low - sft_top) / (low - rl_top) == pytest.approx(0.75, abs=0.01)
  names = tab.figure("Goodput", "[...f.querySelectorAll('svg text')].map((t) => t.textContent)")
  assert "100%" in "".join(names).replace(" ", "") and "200" not in "".join(names)


def test_warnings_are_on_top(tab, run_page, tmp_path):
  tab.open(run_page)
  (text,) = tab.texts(".warnings li")
  assert text.startswith("steps 3–5, 9: The policy has collapsed") and "Lower rl_opt" in text
  assert tab.texts(".warnings li code") == ["warning/entropy, docs/running.md#alarms"]
  tab.evaluate("document.querySelector('.warnings li a').click()")
  tab.wait("document.documentElement.dataset.view === 'learning'")
  assert "Entropy" in tab.texts("[id='learning/learning'] h3")
  tab.evaluate("history.back()")
  tab.open(write_report(cases.make_run(tmp_path)))
  assert tab.texts(".warnings") == []


def test_a_comparison_draws_the_curves_of_all_runs_in_one_chart(tab, comparison_page):
  tab.open(comparison_page, "#learning")
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
  tab.point_at_step(7, "Entropy")
  assert tab.figure("Entropy", legends) == ["one 7", "two 14"]
  tab.open(comparison_page, "#speed")
  assert tab.texts("figure h3").count("Time per stage") == 2  # bars cannot lie over each other
  stacks = "[...document.querySelectorAll('figure')].filter((g) => g.querySelector('.bar'))"
  fills = "[...g.querySelectorAll('.bar')].map((bar) => getComputedStyle(bar).fill)"
  first, second = tab.evaluate(f"{stacks}.map((g) => {fills})")
  assert first[0] == second[0] and first[-1] == second[-1] and len(first) == 2 and len(second) == 3


def test_a_shorter_run_has_nothing_to_read_beyond_its_end(tab, tmp_path):
  runs = [write_run(tmp_path / "long"), write_run(tmp_path / "short", steps=10)]
  tab.open(write_report(*runs, output=tmp_path / "compare.html"), "#learning")
  legends = "[...f.querySelectorAll('.legend')].map((l) => l.textContent)"
  assert tab.figure("Entropy", legends) == ["long 20", "short 10"]
  tab.point_at_step(15, "Entropy")
  assert tab.figure("Entropy", legends) == ["long 15", "short –"]


def test_a_comparison_tells_the_runs_apart(tab, comparison_page):
  tab.open(comparison_page)
  assert tab.texts("thead th") == ["one", "two"] * 4  # settings, and three questions
  assert tab.texts("details tbody tr") == ["seed12"]
  assert "Seconds per iteration3 s4 s +33%" in tab.texts("tbody tr")
  show(tab, "responses")
  assert problems(tab) == 34
  tab.choose("run", "1")
  assert problems(tab) == 17 and set(tab.texts(".group .of")) == {"two"}


def test_a_view_is_opened_by_its_address_and_by_a_key(tab, run_page):
  tab.open(run_page)
  names = tab.texts("nav a")
  assert names == ["Overview", "Responses", "Learning", "Speed and memory"]  # Values of the run.
  shown = (
    "[...document.querySelectorAll('.view')].filter((v) => v.checkVisibility()).map((v) => v.id)"
  )
  assert tab.evaluate(shown) == ["view-overview"] and len(tab.texts(".card")) == 3
  tab.press("3")
  assert tab.evaluate(shown) == ["view-learning"]
  assert tab.texts("nav [aria-current]") == ["Learning"]
  tab.evaluate("history.back()")
  tab.wait("document.documentElement.dataset.view === 'overview'")
  tab.open(run_page, "#nothing")
  assert tab.evaluate(shown) == ["view-overview"]


def test_an_address_leads_to_a_section_of_a_view(tab, tmp_path):
  tab.open(write_report(cases.make_run(tmp_path)), "#ratio/clipping")
  section = "document.getElementById('ratio/clipping').getBoundingClientRect()"
  nav = "document.querySelector('nav').getBoundingClientRect()"
  assert tab.evaluate(f"Math.abs({section}.top - {nav}.bottom) < 30 && scrollY > 100")


def test_filters_are_part_of_the_address(tab, run_page):
  tab.open(run_page, "#responses?clip=clipped&query=lines")
  assert (
    problems(tab) == 8 and tab.evaluate("document.querySelector('[name=query]').value") == "lines"
  )
  tab.choose("clip", "unclipped")
  assert tab.evaluate("location.hash") == "#responses?clip=unclipped&query=lines"
  tab.open(run_page, "#responses?reward=never")
  assert problems(tab) == 17  # Values outside all filters are skipped.


def test_keys_search_and_read_charts(tab, run_page):
  tab.open(run_page)
  tab.press("/")
  assert tab.evaluate("document.activeElement.name") == "query"
  tab.press("2")
  assert tab.evaluate("document.documentElement.dataset.view") == "responses"  # typed, no key
  tab.open(run_page, "#learning")
  tab.figure("Entropy", "f.querySelector('svg[tabindex]').focus()")
  tab.press("ArrowLeft")
  tab.press("ArrowLeft")
  assert tab.figure("Loss", "f.querySelector('.legend b').textContent") == "−19"
  tab.press("Escape")
  assert tab.figure("Loss", "f.querySelector('.cross').style.visibility") == "hidden"
  tab.press("?")
  assert tab.evaluate("document.querySelector('dialog').open")


def test_constant_metrics_are_a_line_of_text(tab, run_page):
  tab.open(run_page, "#learning")
  assert "Throughout: Gradient norm 1" in tab.texts(".constants")
  assert "Gradient norm" not in tab.texts("figure h3")


def write_layers(folder, layers=3, steps=60):
  rows = []
  for step in range(1, steps + 1):
    volatility = {f"router/volatility/layer_{j:02d}": 0.01 * j * (step % 7) for j in range(layers)}
    kl = 10.0 ** (-1 - 5 * step / steps)
    row = {"phase": "rl", "step": step, "kl/k3": kl, "router/entropy": 1 + 1e-7 * (step % 9)}
    rows.append(row | {"router/z": 1 + 1e-5 * (step % 9)} | volatility)
  return write_report(cases.write(folder, rows))


def test_layers_are_a_heat_map_that_can_be_read(tab, tmp_path):
  tab.open(write_layers(tmp_path), "#router")
  heat = "document.querySelector('figure.heat canvas')"
  assert tab.evaluate(f"[{heat}.width, {heat}.height]") == [60, 3]
  data = tab.evaluate(f"[...{heat}.getContext('2d').getImageData(0, 0, 60, 3).data]")
  pixels = [tuple(data[i : i + 4]) for i in range(0, len(data), 4)]
  still, cold, hot = pixels[5], pixels[60 * 2 + 6], pixels[60 * 2 + 5]
  assert still == cold != hot
  box = tab.evaluate(f"{heat}.getBoundingClientRect().toJSON()")
  tab.point(box["x"] + box["width"] * 5.5 / 60, box["y"] + box["height"] * 0.9)
  assert tab.texts(".heat .legend > span:last-child") == ["layer 02 12.0%"]
  assert tab.texts(".heat .at") == ["step 6"]


def test_axes_tell_their_ticks_apart_and_curves_are_smoothed(tab, tmp_path):
  tab.open(write_layers(tmp_path), "#router")
  assert any("Router entropy 1" in text for text in tab.texts(".constants"))  # Equal in float32.
  ticks = "[...f.querySelectorAll('svg > text')].map((t) => t.textContent)"
  names = tab.figure("Router z-loss", ticks)
  assert len(set(names[:4])) == 4
  curves = "[...f.querySelectorAll('svg > .curve')].map((c) => c.getAttribute('d'))"
  raw, smooth = tab.figure("Router z-loss", curves)
  assert raw != smooth
  tab.evaluate("""(() => {
    const slider = document.querySelector("nav input");
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
  })()""")
  assert tab.figure("Router z-loss", curves) == [raw]
  show(tab, "ratio")
  assert "log scale" in tab.figure(
    "KL to the sampling policy", "f.querySelector('.note').textContent"
  )
  assert tab.figure("KL to the sampling policy", ticks)[:3] == ["1e−6", "1e−4", "0.01"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_is_wider_than_a_narrow_screen(tab, tmp_path, scheme):
  with tab.screen(380, 844, scheme):
    tab.open(write_report(cases.make_run(tmp_path, loss="my_module:a_loss_of_a_very_long_name")))
    for view in tab.evaluate("views.map((view) => view.id)"):
      show(tab, view)
      assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
      texts = "[...document.querySelectorAll('nav .links, .note, h2, h3')]"
      assert tab.evaluate(f"{texts}.every((x) => x.scrollWidth <= x.clientWidth)"), view
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(247, 247, 245)") == (scheme == "light")


def test_the_overview_is_one_screen(tab, tmp_path):
  with tab.screen(1600, 900):
    tab.open(write_report(cases.make_run(tmp_path)))
    boxes = "[...document.querySelectorAll('.card, figure')].map((f) => f.getBoundingClientRect())"
    assert tab.evaluate(f"{boxes}.filter((box) => box.height > 0).length") >= 8
    assert tab.evaluate(f"{boxes}.every((box) => box.bottom <= 900)")


def test_responses_to_a_prompt_are_side_by_side(tab, run_page):
  tab.open(run_page, "#responses?kind=train")
  samples = "[...document.querySelector('.group').querySelectorAll('.sample')]"
  tops = tab.evaluate(f"{samples}.map((s) => s.getBoundingClientRect().top)")
  assert len(tops) == 4 and len(set(tops[:3])) == 1


def test_the_mean_of_a_group_is_over_responses_with_a_verdict(tab, tmp_path):
  rewards = (1.0, {}), (1.0, {}), (None, dict(unknown="crash: it died"))
  samples = [cases.record(10, 1, i, reward=r, **more) for i, (r, more) in enumerate(rewards)]
  samples += [cases.record(10, 2, 0, reward=None, unknown="crash: it died")]
  tab.open(write_report(cases.write(tmp_path, [], [("rl", 10, samples)])), "#responses")
  assert sorted(tab.texts(".meta.mean")) == ["mean 1", "mean –"]
  assert sum("no verdict: crash: it died" in text for text in tab.texts(".flag")) == 2


def test_the_stages_of_an_iteration_are_a_timeline(tab, run_page, comparison_page):
  tab.open(run_page, "#speed")
  assert tab.texts(".which") == [
    " typical iteration 3 s",
    " last: step 20 3 s",
    " slowest: step 1 3 s",
  ]
  assert tab.texts(".stage em")[:2] == ["sample 2 s", "update 1 s"]
  widths = "[...document.querySelectorAll('%s')].map((s) => s.getBoundingClientRect().width)"
  sample, update, *_ = tab.evaluate(widths % ".stage")
  assert sample == pytest.approx(2 * update, rel=0.02)
  tab.open(comparison_page, "#speed")  # One scale, in the colours of the bars.
  first, second = tab.evaluate(widths % ".stages")
  assert first == pytest.approx(0.75 * second, rel=0.02)
  colors = "[...document.querySelectorAll('%s')].map((s) => getComputedStyle(s).%s)"
  bars, stages = (colors % pair for pair in ((".bar", "fill"), (".stage", "borderTopColor")))
  assert set(tab.evaluate(bars)) == set(tab.evaluate(stages))
