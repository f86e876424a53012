"""How long a report takes to write, and a browser to open it.

`python benchmarks/report.py --steps=10000 --responses=10000` makes such a run, with 48 layers of
experts, in a temporary directory, writes its report, opens each view in a headless browser and
prints seconds and megabytes.
"""

import argparse
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from gspo_jax.report.page import write_report
from gspo_jax.runs import metrics

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WORDS = "so we add the two sides and see that x is equal to 7 because of what was said".split()
METRICS, LAYERS, DUMPS = 150, 48, 50  # Half of the dumps have log-ratios.
VIEWS = ("overview", "responses", "router", "other")

# Put before the page's own script: when the view is in the page, and when all has its place.
# The page then empties itself, lest its text in the browser's output be measured too.
PROBE = """<script>
const root = document.documentElement;
new MutationObserver(() => {
  root.dataset.readyAt = performance.now();
  document.body.getBoundingClientRect();
  root.dataset.laidOutAt = performance.now();
  document.body.replaceChildren();
}).observe(root, { attributeFilter: ["data-ready"] });
</script>
"""


def make_run(folder: Path, steps: int, responses: int, length: int) -> None:
  """Writes a run with responses of `length` tokens, in groups of eight."""
  chance = random.Random(0)
  with metrics.Writer(folder) as writer:
    for step in range(1, steps + 1):
      row = {f"minibatch/{i}/loss": chance.random() for i in range(16)}
      row |= {f"router/volatility/layer_{i:02d}": chance.random() for i in range(LAYERS)}
      row |= {f"extra/{i}": chance.random() for i in range(METRICS - len(row))}
      writer.write({"phase": "rl", "step": step, "reward/mean": chance.random(), **row})
    for i in range(1, DUMPS + 1):
      with_ratios = i > DUMPS // 2
      records = [make_record(chance, n, length, with_ratios) for n in range(responses // DUMPS)]
      writer.dump_rollouts("rl", i * steps // DUMPS, records)


def make_record(chance: random.Random, n: int, length: int, with_ratios: bool) -> dict:
  """One response, the `n`-th of its dump."""
  tokens = [f" {word}" for word in chance.choices(WORDS, k=length)]
  record = {
    "prompt_id": n // 8, "sample": n % 8, "prompt": f"What is {n // 8} + 1?", "answer": "7",
    "response": "".join(tokens), "reward": float(n % 2), "advantage": chance.gauss(0, 1),
    "length": length, "truncated": n % 50 == 0, "eval": False,
  }  # fmt: skip
  if with_ratios:
    ratios = [chance.gauss(0, 0.01) for _ in tokens]
    record |= {"tokens": tokens, "log_ratio": ratios, "ratio": 1.0, "clipped": n % 7 == 0}
  return record


def open_in_browser(page: Path, view: str, profile: Path) -> dict[str, float]:
  """Returns seconds of the browser, and of the page until it is drawn."""
  probed = page.with_name("probed.html")
  probed.write_text(page.read_text("utf-8").replace("<body>", "<body>" + PROBE, 1), "utf-8")
  command = [
    BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    f"--user-data-dir={profile}", "--dump-dom", f"{probed.as_uri()}#{view}",
  ]  # fmt: skip
  start = time.perf_counter()
  result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
  seconds = {"browser": time.perf_counter() - start}
  for name, key in (("ready", "data-ready-at"), ("laid out", "data-laid-out-at")):
    match = re.search(rf'{key}="([\d.]+)"', result.stdout[:2000])
    seconds[name] = float(match[1]) / 1000 if match else float("nan")
  return seconds


def main() -> None:
  """Prints one line per opening."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=10_000)
  parser.add_argument("--responses", type=int, default=10_000)
  parser.add_argument("--tokens", type=int, default=300, help="of each response")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    make_run(folder, options.steps, options.responses, options.tokens)
    start = time.perf_counter()
    page = write_report(folder)
    print(f"written in {time.perf_counter() - start:.2f} s, {page.stat().st_size / 1e6:.1f} MB")
    if not BROWSER:
      print(f"not opened: no browser on PATH, none of {BROWSERS}")
      return
    empty = folder / "empty.html"
    empty.write_text("<!doctype html><html><body></body></html>")
    for name, opened, view in (("empty page", empty, ""), *((v, page, v) for v in VIEWS)):
      timings = open_in_browser(opened, view, folder / "profile")
      seconds = "  ".join(f"{label} {s:.2f} s" for label, s in timings.items() if s == s)
      print(f"{name}: {seconds}")


if __name__ == "__main__":
  main()
