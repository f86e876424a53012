"""The report holds what the run has, nothing else, and opens without a network."""

import json
import re
import shutil
import subprocess

import pytest

from gspo_jax import metrics, rollout_viewer

HOSTILE = (
  "</script><script>document.title='taken'</script><!-- <img src=x onerror=alert(1)> {{run}}"
)
NAMES = (
  "reward/mean", "reward/std", "response_length/mean", "response_length/max", "truncated_fraction",
  "groups_without_spread", "loss", "grad_norm", "learning_rate", "entropy", "tokens_per_second",
  "ratio/mean", "ratio/min", "ratio/max", "ratio/std", "ratio/deviation", "kl/k1", "kl/k3",
  "mismatch/abs/mean", "mismatch/abs/max",
  "mismatch/sequence/abs/mean", "router/load_balance", "router/entropy",
  "router/dropped_tokens", "router/busiest_expert", "verifier/right", "verifier/crash",
)  # fmt: skip
STAGES = ("sample", "score", "logp", "update", "publish")


def eval_keys(accuracy):
  return {
    "eval/accuracy": accuracy,
    "eval/accuracy/low": accuracy - 0.05,
    "eval/accuracy/high": accuracy + 0.05,
    "eval/greedy": accuracy + 0.1,
    "eval/response_length/mean": 5.0,
  }


def sft_row(step):
  names = ("loss", "accuracy", "grad_norm", "learning_rate", "tokens_per_second")
  return {"phase": "sft", "step": step, **{name: 1.0 / step for name in names}}


def rl_row(step):
  row = {"phase": "rl", "step": step}
  names = [*NAMES]
  names += [f"clip_fraction/{a}{b}" for a in ("sequence", "token") for b in ("", "/low", "/high")]
  names += [f"time/{stage}" for stage in STAGES]
  for i in range(12):
    names += [f"minibatch/{i}/{k}" for k in ("ratio/deviation", "clip_fraction/sequence")]
    names += [f"minibatch/{i}/clip_fraction/token"]
  return row | {name: step / 10 for name in names}


def record(step, prompt, sample, **changes):
  usual = {
    "step": step, "prompt_id": prompt, "sample": sample, "prompt": f"{prompt} + 1 = ",
    "response": "42", "answer": str(prompt + 1), "reward": float(sample % 2), "advantage": 0.5,
    "length": 3, "truncated": False, "stop_reason": "stop", "eval": False,
  }  # fmt: skip
  return usual | changes


@pytest.fixture
def workdir(tmp_path):
  """A run of three sft steps and four rl steps, evaluated before, during and after."""
  config = {
    "name": "a <b>run</b>",
    "objective": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
  }
  (tmp_path / "config.json").write_text(json.dumps(config | {"rl": {"group_size": 4}}))
  with metrics.Writer(tmp_path) as writer:
    for step in (1, 2, 3):
      writer.write(sft_row(step) | (eval_keys(0.2) if step == 3 else {}))
    writer.write({"phase": "eval", "step": 0, **eval_keys(0.25)})
    for step in (1, 2, 3, 4):
      writer.write(rl_row(step) | (eval_keys(0.2 * step) if step % 2 == 0 else {}))
    for step in (1, 4):
      records = [record(step, prompt, sample) for prompt in range(3) for sample in range(4)]
      records[5] |= {"response": HOSTILE, "ratio": 1.0002, "clipped": True}
      writer.dump_rollouts("rl", step, records)
    writer.dump_rollouts("eval", 4, [record(4, 9, 0, eval=True, response="lone \udc80 \u2028")])
  return tmp_path


def embedded(page, name):
  (text,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)
  return json.loads(text)


def figures(run):
  return {(s["title"], f["title"]): f for s in run["sections"] for f in s["figures"]}


def test_every_metric_of_the_rows_is_drawn(workdir):
  run = embedded(rollout_viewer.write_report(workdir).read_text("utf-8"), "run")
  drawn = {
    (series["phase"], series["key"]) for f in figures(run).values() for series in f["series"]
  }
  bands = {"ratio/min", "ratio/max", "eval/accuracy/low", "eval/accuracy/high"}
  rl_keys = set(rl_row(1)) | set(eval_keys(0))
  assert {key for phase, key in drawn if phase == "rl"} == rl_keys - bands - {"phase", "step"}
  sft_keys = set(sft_row(1)) | set(eval_keys(0))
  assert {key for phase, key in drawn if phase == "sft"} == sft_keys - bands - {"phase", "step"}
  expected = {
    "Held-out accuracy", "Reward", "Response length", "Entropy", "Wasted samples",
    "Importance ratio", "Ratio deviation by mini-batch", "Clipped sequences", "Clipped tokens",
    "Clipped sequences by mini-batch", "Clipped tokens by mini-batch", "Sampler against trainer",
    "KL to the sampling policy", "Loss", "Gradient norm", "Load balance", "Time per stage",
    "Throughput", "Token accuracy",
  }  # fmt: skip
  assert expected <= {title for _, title in figures(run)}
  assert "Other metrics" not in {section["title"] for section in run["sections"]}


def test_curves_hold_the_values_of_the_rows(workdir):
  run = embedded(rollout_viewer.write_report(workdir).read_text("utf-8"), "run")
  before, during = figures(run)["Learning", "Held-out accuracy"]["series"][::2]
  assert (before["phase"], before["x"], before["y"]) == ("sft", [3], [0.2])
  assert (during["phase"], during["x"], during["y"]) == ("rl", [0, 2, 4], [0.25, 0.4, 0.8])
  assert during["low"] == pytest.approx([0.2, 0.35, 0.75])
  by_minibatch = figures(run)["Ratio and clipping", "Ratio deviation by mini-batch"]["series"]
  assert [series["label"] for series in by_minibatch] == [f"mini-batch {i}" for i in range(12)]
  stages = figures(run)["Time", "Time per stage"]
  assert [series["label"] for series in stages["series"]] == list(STAGES)
  marks = figures(run)["Ratio and clipping", "Importance ratio"]["marks"]
  assert [mark["at"] for mark in marks] == pytest.approx([0.9997, 1.0004])


def test_headline_tells_accuracy_before_and_after_the_rl(workdir):
  run = embedded(rollout_viewer.write_report(workdir).read_text("utf-8"), "run")
  accuracy = run["headline"][0]
  assert (accuracy["before"], accuracy["after"]) == (0.25, 0.8)
  values = {item["label"]: item.get("value") for item in run["headline"]}
  assert values["GSPO steps"] == "4" and values["Cold start steps"] == "3"
  assert run["name"] == "a <b>run</b>" and "4 responses each" in run["summary"]


def test_before_is_the_end_of_the_cold_start_where_step_0_was_not_evaluated():
  rows = [
    sft_row(1) | eval_keys(0.1),
    sft_row(2) | eval_keys(0.3),
    rl_row(1),
    rl_row(5) | eval_keys(0.7),
  ]
  accuracy = rollout_viewer.describe(rows, {}, "run")["headline"][0]
  assert (accuracy["before"], accuracy["after"]) == (0.3, 0.7)


def test_the_page_is_self_contained(workdir):
  page = rollout_viewer.write_report(workdir).read_text("utf-8")
  shell = re.sub(
    r'(<script type="application/json"[^>]*>).*?(</script>)', r"\1\2", page, flags=re.S
  )
  assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(", shell)
  assert re.findall(r"https?://\S+", shell) == [
    'http://www.w3.org/2000/svg";'
  ]  # a name, not a link
  assert "default-src 'none'" in shell  # and the browser is told so
  assert "innerHTML" not in shell and "{{" not in shell


def test_hostile_text_stays_text(workdir):
  page = rollout_viewer.write_report(workdir).read_text("utf-8")
  assert page.count("<script") == page.count("</script>") == 3
  assert "<img" not in page and "<b>" not in page
  assert "<title>a &lt;b&gt;run&lt;/b&gt;</title>" in page
  samples = [s for g in embedded(page, "rollouts")["groups"] for s in g["samples"]]
  assert [s["response"] for s in samples].count(HOSTILE) == 2  # and unchanged
  assert "lone \\udc80 \u2028" in [
    s["response"] for s in samples
  ]  # spelled out, not half a character


def test_responses_are_grouped_by_prompt(workdir):
  rollouts = embedded(rollout_viewer.write_report(workdir).read_text("utf-8"), "rollouts")
  groups = rollouts["groups"]
  assert rollouts["total"] == 25 and len(groups) == 7
  assert [(g["step"], g["id"], g["eval"]) for g in groups[3:]] == [
    (4, "0", False), (4, "1", False), (4, "2", False), (4, "9", True),
  ]  # fmt: skip
  assert [s["reward"] for s in groups[0]["samples"]] == [0.0, 1.0, 0.0, 1.0]
  clipped = groups[1]["samples"][1]
  assert clipped["clipped"] is True and clipped["ratio"] == 1.0002
  assert "ratio" not in groups[0]["samples"][0]  # absent, not zero


@pytest.mark.parametrize("limit", [1, 8, 12, 100])
def test_at_most_max_rollouts_spread_over_the_run(tmp_path, limit):
  with metrics.Writer(tmp_path) as writer:
    for step in range(1, 11):
      records = [record(step, prompt, sample) for prompt in range(5) for sample in range(4)]
      writer.dump_rollouts("rl", step, records)
  rollouts = rollout_viewer.read_rollouts(tmp_path / "rollouts", limit)
  groups = rollouts["groups"]
  count = sum(len(group["samples"]) for group in groups)
  assert rollouts["total"] == 200 and limit // 2 <= count <= limit
  assert groups[-1]["step"] == 10  # the newest dump is always among them
  assert len({group["step"] for group in groups}) == min(10, limit)


def test_long_responses_are_shortened_and_say_so(tmp_path):
  text = "start" + "." * 50_000 + "end"
  with metrics.Writer(tmp_path) as writer:
    writer.dump_rollouts("rl", 1, [record(1, 1, 0, response=text)])
  (group,) = rollout_viewer.read_rollouts(tmp_path / "rollouts", 10)["groups"]
  shown = group["samples"][0]["response"]
  assert len(shown) < 5000 and shown.startswith("start") and shown.endswith("end")
  assert "46,008 characters left out" in shown


def test_missing_metrics_leave_their_charts_out(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write({"phase": "rl", "step": 1, "reward/mean": 0.5, "reward/std": float("nan")})
    writer.write({"phase": "rl", "step": 2, "reward/mean": 0.75, "something/new": 3.0})
  run = embedded(rollout_viewer.write_report(tmp_path).read_text("utf-8"), "run")
  assert list(figures(run)) == [("Learning", "Reward"), ("Other metrics", "something/new")]
  assert figures(run)["Learning", "Reward"]["series"][1]["y"] == [None]  # a gap
  assert run["headline"][0] == {"label": "Reward", "value": "0.5 → 0.75"}
  assert run["name"] == tmp_path.name


def test_an_empty_run_and_a_half_written_line_still_give_a_page(tmp_path):
  assert rollout_viewer.write_report(tmp_path).exists()
  (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1, "loss": 1.0}\n{"phase": "r')
  run = embedded(rollout_viewer.write_report(tmp_path).read_text("utf-8"), "run")
  assert list(figures(run)) == [("Optimisation", "Loss")]
  assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_long_curves_are_thinned_and_bands_keep_their_extremes():
  count = 10_000
  curve = {"x": list(range(count)), "y": [0.0] * count, "low": [0.0] * count, "high": [0.0] * count}
  curve["y"][5000], curve["low"][17], curve["high"][9000] = None, -7.0, 9.0
  thin = rollout_viewer.thin(curve, 100)
  assert len(thin["x"]) == len(thin["y"]) == 100 and thin["x"][-1] == count - 1
  assert min(thin["low"]) == -7 and max(thin["high"]) == 9
  assert rollout_viewer.thin(curve, count) is curve


def test_command_line(workdir, tmp_path, capsys):
  rollout_viewer.main([str(workdir), "--output", str(tmp_path / "page.html")])
  assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
  with pytest.raises(SystemExit):
    rollout_viewer.main([str(tmp_path / "nowhere")])
  assert "holds no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the chromium browser")
def test_the_page_draws_itself_in_a_browser(workdir, tmp_path):
  page = rollout_viewer.write_report(workdir)
  command = [
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
    "--virtual-time-budget=5000", "--dump-dom",
  ]  # fmt: skip
  profile = f"--user-data-dir={tmp_path / 'profile'}"
  result = subprocess.run(
    [*command, profile, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
  )
  dom = result.stdout
  assert "CONSOLE" not in result.stderr and "Uncaught" not in result.stderr
  assert 'data-ready="yes"' in dom and "<title>a &lt;b&gt;run" in dom  # nothing took the title
  run = embedded(page.read_text("utf-8"), "run")
  assert dom.count("<figure") == dom.count("<svg") == len(figures(run))
  assert all(f">{title}</h3>" in dom for _, title in figures(run))
  assert "25 responses to 7 prompts" in dom and "NaN" not in dom.split("<script")[0]
