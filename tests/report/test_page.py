"""The report holds what the run has, nothing else, and opens without a network."""

import contextlib
import re

import pytest
from support.reported_runs import (
  HOSTILE,
  STAGES,
  describe,
  embedded,
  eval_keys,
  figures,
  make_run,
  record,
  rl_row,
  sft_row,
  write,
)

from gspo_jax.report import curves, data, page
from gspo_jax.report.__main__ import main
from gspo_jax.report.page import unique_names, write_report
from gspo_jax.system.files import WriteError


@pytest.fixture
def workdir(tmp_path):
  return make_run(tmp_path)


def facts(report, run=0):
  """The figures of a run's three answers, by their names."""
  answers = report["runs"][run]["answers"]
  return {fact["label"]: fact for answer in answers for fact in answer["facts"]}


def test_every_metric_of_the_rows_is_drawn(workdir):
  run = embedded(write_report(workdir))
  drawn = {
    (series["phase"], series["key"]) for f in figures(run).values() for series in f["series"]
  }
  bands = {"ratio/min", "ratio/max", "eval/accuracy/low", "eval/accuracy/high"}
  rl_keys = set(rl_row(1)) | set(eval_keys(0))
  assert {key for phase, key in drawn if phase == "rl"} == rl_keys - bands - {"phase", "step"}
  assert {key for phase, key in drawn if phase == "sft"} == set(sft_row(1)) - {"phase", "step"}
  expected = {
    "Held-out accuracy", "Reward", "Response length", "Entropy", "Wasted samples",
    "Importance ratio", "Ratio deviation by mini-batch", "Clipped sequences", "Clipped tokens",
    "Clipped sequences by mini-batch", "Clipped tokens by mini-batch", "Sampler against trainer",
    "KL to the sampling policy", "Loss", "Gradient norm", "Load balance", "Time per stage",
    "Throughput", "Skipped updates", "Volatility by layer",
  }  # fmt: skip
  assert expected <= {title for _, title in figures(run)}
  assert "Other metrics" not in {section["title"] for section in run["sections"]}


def test_curves_hold_the_values_of_the_rows(workdir):
  run = embedded(write_report(workdir))
  during, _ = figures(run)["Learning", "Held-out accuracy"]["series"]
  assert (during["phase"], during["x"], during["y"]) == ("rl", [0, 2, 4], [0.25, 0.4, 0.8])
  assert during["low"] == pytest.approx([0.2, 0.35, 0.75])
  by_minibatch = figures(run)["Ratio", "Ratio deviation by mini-batch"]["series"]
  assert [series["label"] for series in by_minibatch] == [f"mini-batch {i}" for i in range(12)]
  layers = figures(run)["Volatility", "Volatility by layer"]["series"]
  assert [series["label"] for series in layers] == [f"layer {i:02d}" for i in range(12)]
  by_length = figures(run)["Learning", "Reward by length"]["series"]
  assert [series["label"] for series in by_length] == [f"up to {n} tokens" for n in (64, 128, 256)]
  stages = figures(run)["Iteration", "Time per stage"]
  assert [series["label"] for series in stages["series"]] == list(STAGES)
  marks = figures(run)["Ratio", "Importance ratio"]["marks"]
  assert [mark["at"] for mark in marks] == pytest.approx([0.9997, 1.0004])


def test_the_answers_tell_accuracy_before_and_after_the_rl(workdir):
  run = embedded(write_report(workdir))
  accuracy = facts(run)["Held-out accuracy, avg@k"]  # No configuration names k.
  assert (accuracy["before"], accuracy["value"]) == (0.25, 0.8)
  assert facts(run)["Iterations"]["value"] == "4"
  assert run["name"] == "a <b>run" and "4 responses each" in run["runs"][0]["summary"]


def test_an_evaluation_alone_has_its_figures():
  row = {"phase": "eval", "step": 0, "eval/aime24/accuracy": 0.3, "time/eval/score": 2.0}
  config = {"eval": {"samples": 4, "benchmarks": {"aime24": {"samples": 32}}}}
  described = describe([row | eval_keys(0.7)], config)
  assert facts(described)["Held-out accuracy, avg@4"]["value"] == 0.7
  assert facts(described)["aime24, avg@32"]["value"] == 0.3
  assert figures(described)["Learning", "Held-out accuracy"]["series"][0]["label"] == "avg@4"
  assert described["phases"] == {"eval": {"title": "Evaluation", "from": 0, "to": 0}}
  _, healthy, fast = described["runs"][0]["answers"]
  assert healthy["answer"] == fast["answer"] == "Nothing was trained"
  assert ("Learning", "eval/aime24/accuracy") in figures(described)
  assert figures(described)["Learning", "Held-out accuracy"]["phases"] == ["eval"]


def test_parts_of_a_stage_are_not_counted_twice():
  row = {"phase": "rl", "step": 1, "time/sample": 50.0, "time/sample/decode": 45.0, "time/save": 15}
  described = describe([row])
  assert facts(described)["Time in stages"]["value"] == "1:05"
  stages = figures(described)["Iteration", "Time per stage"]
  assert [series["label"] for series in stages["series"]] == ["sample", "save"]
  assert ("Iteration", "Within sampling") in figures(described)
  typical, last = described["runs"][0]["timeline"]
  parts = [[stage["name"], stage["seconds"], stage["parts"]] for stage in typical["stages"]]
  assert parts == [["sample", 50.0, [["decode", 45.0]]], ["save", 15, []]]
  assert (typical["step"], last["step"]) == (None, 1)


def test_the_page_is_self_contained(workdir):
  page = write_report(workdir).read_text("utf-8")
  shell = re.sub(r'(<script type="application/json".*?>).*?(</script>)', r"\1\2", page, flags=re.S)
  assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(", shell)
  # A name, not a link.
  assert re.findall(r"https?://\S+", shell) == ['http://www.w3.org/2000/svg";']
  assert "default-src 'none'" in shell  # The browser is told so.
  assert "innerHTML" not in shell and "{{" not in shell


def test_hostile_text_stays_text(workdir):
  page = write_report(workdir).read_text("utf-8")
  assert page.count("<script") == page.count("</script>") == 3
  assert "<img" not in page and "<b>" not in page
  assert "<title>a &lt;b&gt;run</title>" in page
  texts = [s["response"] for g in embedded(page, "rollouts")["groups"] for s in g["samples"]]
  assert texts.count(HOSTILE) == 2  # Unchanged.
  assert "lone \\udc80 \u2028" in texts  # spelled out, not half a character


def test_responses_are_grouped_by_prompt(workdir):
  rollouts = embedded(write_report(workdir), "rollouts")
  groups = rollouts["groups"]
  assert rollouts["total"] == 25 and len(groups) == 7
  assert [(g["step"], g["id"], g["eval"]) for g in groups[3:]] == [
    (4, "0", False), (4, "1", False), (4, "2", False), (4, "9", True),
  ]  # fmt: skip
  assert [s["reward"] for s in groups[0]["samples"]] == [0.0, 1.0, 0.0, 1.0]
  clipped = groups[1]["samples"][1]
  assert clipped["clipped"] is True and clipped["ratio"] == 1.0002
  assert "ratio" not in groups[0]["samples"][0]  # absent, not zero


def test_missing_metrics_leave_their_charts_out(tmp_path):
  first = {"phase": "rl", "step": 1, "reward/mean": 0.5, "reward/std": float("nan")}
  second = {"phase": "rl", "step": 2, "reward/mean": 0.75, "something/new": 3.0}
  run = embedded(write_report(write(tmp_path, [first, second])))
  assert list(figures(run)) == [("Learning", "Reward"), ("Other metrics", "something/new")]
  assert figures(run)["Learning", "Reward"]["series"][1]["y"] == [None]  # a gap
  assert (facts(run)["Reward"]["before"], facts(run)["Reward"]["value"]) == (0.5, 0.75)
  assert run["name"] == tmp_path.name


@pytest.mark.parametrize("name", ["a{b", "{", "}", "v/{}", "{i}", "x/{name}", "x/{i}/low", "{name"])
def test_braces_in_the_name_of_a_metric_are_braces(name):
  described = describe([{"phase": "rl", "step": 1, name: 2.0, "x/3": 1.0, "x/y": 0.0}])
  (series,) = figures(described)["Other metrics", name]["series"]
  assert (series["key"], series["y"]) == (name, [2.0])


def test_curves_of_all_layers_at_all_updates_are_left_out():
  layers = {f"minibatch/{i}/router/volatility/layer_{j:02d}": 0.1 for i in (0, 1) for j in (0, 1)}
  described = describe([{"phase": "rl", "step": 1, "loss": 0.0, **layers}])
  assert list(figures(described)) == [("Optimisation", "Loss")]


def test_an_empty_run_and_a_half_written_line_still_give_a_page(tmp_path):
  assert write_report(tmp_path).exists()
  (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1, "loss": 1.0}\n{"phase": "r')
  run = embedded(write_report(tmp_path))
  assert list(figures(run)) == [("Optimisation", "Loss")]
  assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_a_running_report_is_written_at_once_then_seldom(tmp_path, monkeypatch):
  time, stages, written = [0.0], [], []

  def write(workdir):
    written.append(time[0])
    time[0] += 2.0

  @contextlib.contextmanager
  def stage(name):
    stages.append(name)
    yield

  monkeypatch.setattr(page, "write_report", write)
  report = page.RunningReport(tmp_path, clock=lambda: time[0])
  for second, force in (0, False), (40, False), (50, True), (152, False), (153, False):
    time[0] = float(second)
    report.update(stage, force)
  assert written == [0, 50, 152] and stages == ["report"] * 3  # Each is followed by 100 seconds.
  page.RunningReport(tmp_path, active=False, clock=lambda: 0.0).update(stage, force=True)
  assert len(written) == 3


@pytest.mark.parametrize(
  "name, line, remedy",
  [
    ("rollouts/best.jsonl", '{"response": "4"}', "remove the line"),
    ("rollouts/rl_1.jsonl", '{"step": 1, "prompt_id": 1}', "remove the line of this response"),
    ("metrics.jsonl", '{"phase": "rl", "step": 1, "loss": "low"}', "set null"),
  ],
)
def test_a_file_that_cannot_be_read_is_a_warning_during_a_run(tmp_path, capsys, name, line, remedy):
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  path.write_text(line + "\n")
  report = page.RunningReport(tmp_path)
  for _ in range(2):
    report.update(contextlib.nullcontext, force=True)
  assert report.write() is None
  (warning,) = capsys.readouterr().err.splitlines()
  assert warning.startswith(f"warning: report.html is not updated: {path}")
  assert warning.endswith(f": {remedy}")
  path.unlink()
  assert report.write() == tmp_path / "report.html"
  (tmp_path / "report.html").unlink()
  (tmp_path / "report.html").mkdir()
  with pytest.raises(WriteError):
    report.write()


def test_stages_have_the_same_colors_in_all_charts():
  rows = [{"phase": "sft", "step": i, "time/update": 2.0 * i, "goodput/update": 0.5,
           "goodput/wait": 0.1 * i} for i in (1, 2)]  # fmt: skip
  rows += [{"phase": "rl", "step": i, "time/sample": 1.0 * i, "time/update": 1.0,
            "goodput/sample": 0.1 * i} for i in (1, 2)]  # fmt: skip
  drawn = figures(describe(rows))
  charts = [drawn["Iteration", name] for name in ("Time per stage", "Goodput")]
  charts.append(drawn["Iteration", "Time of the cold start"])
  colors = {s["key"].split("/")[1]: s["color"] for chart in charts for s in chart["series"]}
  assert {(s["label"], s["color"]) for chart in charts for s in chart["series"]} == {
    *colors.items()
  }
  assert charts[1]["labels"] == ["sample", "update", "wait"]


@pytest.mark.parametrize(
  "name, title", [("gspo_token", "GSPO-TOKEN"), ("my_module:my_loss", "my_loss")]
)
def test_a_phase_has_the_name_of_its_loss(name, title):
  run = data.Run("run", [{"phase": "rl", "step": 1, "loss": 0.0}], {"objective": {"name": name}})
  assert data.describe([run])["phases"]["rl"]["title"] == title


def test_warnings_join_consecutive_rows():
  def row(step, *names):
    return {"phase": "rl", "step": step, "loss": 0.0, **{f"warning/{n}": 1.0 for n in names}}

  rows = [sft_row(1) | {"warning/grad_norm": 1.0}, row(2), row(4, "entropy")]
  rows += [row(6, "entropy", "ratio"), row(8), row(10, "entropy") | {"warning/ratio": 0.0}]
  described = describe(rows)
  warned = [(w["phase"], w["from"], w["to"], w["name"]) for w in described["runs"][0]["warnings"]]
  assert warned == [
    ("sft", 1, 1, "grad_norm"), ("rl", 4, 6, "entropy"), ("rl", 6, 6, "ratio"),
    ("rl", 10, 10, "entropy"),
  ]  # fmt: skip
  places = [w["place"] for w in described["runs"][0]["warnings"]]  # None: no such curve.
  assert places == [{"view": "learning", "section": "Cold start"}, None, None, None]
  (warned,) = describe([row(2, "unknown") | {"eval/verifier/unknown": 0.5}])["runs"][0]["warnings"]
  assert warned["place"], "an evaluation alone may have the metric"
  assert {key for _, key in figures(described)} == {
    "Loss", "Entropy", "Gradient norm", "Learning rate", "Skipped updates", "Router entropy"
  }  # fmt: skip


def test_the_machine_and_skipped_updates_have_their_charts():
  keys = (
    "updates_skipped", "mfu/update", "flops_per_second/update", "memory/device_peak_gib",
    "memory/host_peak_gib", "checkpoint/seconds", "time/report",
  )  # fmt: skip
  rows = [{"phase": "rl", "step": 1, **dict.fromkeys(keys, 1.0)}]
  drawn = figures(describe(rows))
  assert {series["key"] for f in drawn.values() for series in f["series"]} == set(keys)
  assert "Other metrics" not in {section for section, _ in drawn}


PROVENANCE = {"commit": "0123456789ab", "dirty": True, "versions": {"jax": "1"}, "command": "a"}


def test_provenance_is_apart_from_the_settings():
  config = {"seed": 3, "provenance": PROVENANCE}
  (run,) = describe([], config)["runs"]
  assert run["summary"] == ["seed 3", "commit 01234567 with changes"]
  assert run["config"] == [["seed", "3"]]
  assert ["versions.jax", "1"] in run["provenance"] and ["command", "a"] in run["provenance"]
  no_git = {"provenance": PROVENANCE | {"commit": None}}
  assert describe([], no_git)["runs"][0]["summary"] == []


def test_a_comparison_lists_what_differs_and_joins_the_curves():
  def run(name, last, commit, **config):
    rows = [rl_row(step) for step in range(1, last + 1)]
    provenance = PROVENANCE | {"commit": commit, "command": name}
    return data.Run(name, rows, {"seed": 1, **config, "provenance": provenance})

  described = data.describe(
    [run("a", 4, "x", rl={"lr": 0.1}), run("b", 6, "y", rl={"lr": 0.2}), run("c", 2, "y", new=[])]
  )
  assert described["differences"] == {
    "settings": [
      {"key": "rl.lr", "values": ["0.1", "0.2", None]},
      {"key": "new", "values": [None, None, "[]"]},
    ],
    "code": [{"key": "commit", "values": ["x", "y", "y"]}],
  }
  assert described["phases"]["rl"] == {"title": "RL", "from": 1, "to": 6}
  loss = figures(described)["Optimisation", "Loss"]["series"]
  assert [(series["run"], len(series["x"])) for series in loss] == [(0, 4), (1, 6), (2, 2)]
  stages = [f for s in described["sections"] for f in s["figures"] if f["kind"] == "stack"]
  in_time = [f for f in stages if f["title"] == "Time per stage"]
  assert [{series["run"] for series in f["series"]} for f in in_time] == [{0}, {1}, {2}]
  assert [f["top"] for f in in_time] == pytest.approx([0.6 * len(STAGES)] * 3)  # one axis


def test_runs_are_named_by_what_tells_their_directories_apart(tmp_path):
  folders = [tmp_path / name for name in ("x/run", "y/run", "other", "z/y/run")]
  assert unique_names(folders) == ["x/run", f"{tmp_path.name}/y/run", "other", "z/y/run"]
  with pytest.raises(ValueError, match="named twice"):
    unique_names([tmp_path, tmp_path / "x" / ".."])


def test_runs_of_a_comparison_share_the_room_for_responses(tmp_path):
  dump = "rl", 1, [record(1, p, i) for p in range(10) for i in range(2)]
  runs = [write(tmp_path / name, dumps=[dump]) for name in "ab"]
  page = write_report(*runs, output=tmp_path / "page.html", max_rollouts=20)
  rollouts = embedded(page, "rollouts")
  runs = [g["run"] for g in rollouts["groups"] for _ in g["samples"]]
  assert rollouts["total"] == 40 and sorted(runs) == [0] * 10 + [1] * 10


def test_long_curves_are_thinned_and_bands_keep_their_extremes():
  count = 10_000
  curve = {"x": list(range(count)), "y": [0.0] * count, "low": [0.0] * count, "high": [0.0] * count}
  curve["y"][5000], curve["low"][17], curve["high"][9000] = None, -7.0, 9.0
  thin = curves.thin(curve, 100)
  assert len(thin["x"]) == len(thin["y"]) == 100 and thin["x"][-1] == count - 1
  assert min(thin["low"]) == -7 and max(thin["high"]) == 9
  assert curves.thin(curve, count) is curve


@pytest.mark.parametrize(
  "row, message",
  [
    ('{"step": 1}', "row of step 1 has phase=None, not one of sft, rl, eval: set one"),
    ('{"step": 1, "phase": ["rl"]}', "row of step 1 has phase="),
    ('{"step": 1, "phase": "rl", "loss": "low"}', "loss='low', which is no number: set null"),
    ("[1]", "metrics.jsonl:1 is not a JSON object with a step"),
  ],
)
def test_a_row_that_no_run_wrote_is_named(tmp_path, capsys, row, message):
  (tmp_path / "metrics.jsonl").write_text(row + "\n")
  with pytest.raises(SystemExit) as ended:
    main([str(tmp_path)])
  assert ended.value.code == 2 and message in capsys.readouterr().err


def test_command_line(workdir, tmp_path, capsys):
  write(tmp_path / "second", [rl_row(1)])
  (tmp_path / "file").touch()
  runs, output = [str(workdir), str(tmp_path / "second")], tmp_path / "compare.html"
  main([*runs, "--output", str(output)])
  assert capsys.readouterr().out.strip() == str(output)
  assert [run["name"] for run in embedded(output)["runs"]] == [workdir.name, "second"]
  for arguments, message in (
    ([str(tmp_path / "nowhere")], "has no metrics.jsonl"),
    (["gs://bucket/run"], "gs://bucket/run is not local"),
    ([runs[0], f"--output={tmp_path}/file/page.html"], "cannot be written: Not a directory"),
    (runs, "--output=compare.html"),
    ([runs[0], runs[0], f"--output={output}"], "named twice"),
    ([*runs * 5, f"--output={output}"], "at most 8"),
  ):
    with pytest.raises(SystemExit):
      main(arguments)
    assert message in capsys.readouterr().err
