"""How long a report takes to write, and a browser to open it.

`python benchmarks/report.py --responses=10000` makes a run of that many responses in a temporary
directory, writes its report, opens it in a headless browser and prints seconds and megabytes.
"""

import argparse
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from gspo_jax.report import page as rollout_viewer
from gspo_jax.runs import metrics

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WORDS = "so we add the two sides and see that x is equal to 7 because of what was said".split()

# Put before the page's own script: when the responses are in the page, and when each has its place.
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


def make_run(folder: Path, options: argparse.Namespace) -> None:
  """A run of `steps` steps; its responses lie in `dumps` files, some with log-ratios."""
  chance = random.Random(0)
  names = ["reward/mean", "loss", "entropy", "grad_norm", "ratio/mean", "ratio/min", "ratio/max"]
  names += [f"time/{name}" for name in ("sample", "score", "logp", "update", "publish")]
  names += [f"minibatch/{i}/{k}" for i in range(16) for k in ("loss", "ratio/deviation")]
  names += [f"extra/{i}" for i in range(options.metrics - len(names))]
  with metrics.Writer(folder) as writer:
    for step in range(1, options.steps + 1):
      row = {name: chance.random() for name in names}
      writer.write({"phase": "rl", "step": step, **row})
    per_dump = options.responses // options.dumps
    for i in range(1, options.dumps + 1):
      step = i * options.steps // options.dumps
      with_ratios = i > options.dumps * (1 - options.share)
      records = [make_record(chance, n, options.tokens, with_ratios) for n in range(per_dump)]
      writer.dump_rollouts("rl", step, records)


def make_record(chance: random.Random, n: int, count: int, with_ratios: bool) -> dict:
  """One response, the `n`-th of its dump, in groups of eight."""
  tokens = [f" {word}" for word in chance.choices(WORDS, k=count)]
  record = {
    "prompt_id": n // 8, "sample": n % 8, "prompt": f"What is {n // 8} + 1?", "answer": "7",
    "response": "".join(tokens), "reward": float(n % 2), "advantage": chance.gauss(0, 1),
    "length": count, "truncated": n % 50 == 0, "eval": False,
  }  # fmt: skip
  if with_ratios:
    ratios = [chance.gauss(0, 0.01) for _ in tokens]
    record |= {"tokens": tokens, "log_ratio": ratios, "ratio": 1.0, "clipped": n % 7 == 0}
  return record


def open_in_browser(page: Path, profile: Path) -> dict[str, float]:
  """Seconds of the whole browser, and of the page until its responses are drawn and laid out."""
  probed = page.with_name("probed.html")
  probed.write_text(page.read_text("utf-8").replace("<body>", "<body>" + PROBE, 1), "utf-8")
  command = [
    BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    f"--user-data-dir={profile}", "--dump-dom", probed.as_uri(),
  ]  # fmt: skip
  start = time.perf_counter()
  result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
  found = {"browser": time.perf_counter() - start}
  for name, key in (("ready", "data-ready-at"), ("laid out", "data-laid-out-at")):
    match = re.search(rf'{key}="([\d.]+)"', result.stdout[:2000])
    found[name] = float(match[1]) / 1000 if match else float("nan")
  return found


def main() -> None:
  """Prints one line per opening."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--responses", type=int, default=10_000)
  parser.add_argument("--tokens", type=int, default=300, help="of each response")
  parser.add_argument("--share", type=float, default=0.5, help="of the dumps, with log-ratios")
  parser.add_argument("--dumps", type=int, default=50)
  parser.add_argument("--steps", type=int, default=500)
  parser.add_argument("--metrics", type=int, default=100)
  parser.add_argument("--repeats", type=int, default=3)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    make_run(folder, options)
    start = time.perf_counter()
    page = rollout_viewer.write_report(folder)
    print(f"written in {time.perf_counter() - start:.2f} s, {page.stat().st_size / 1e6:.1f} MB")
    if not BROWSER:
      print(f"not opened: no browser on PATH, none of {BROWSERS}")
      return
    empty = folder / "empty.html"
    empty.write_text("<!doctype html><html><body></body></html>")
    print(f"an empty page: browser {open_in_browser(empty, folder / 'profile')['browser']:.2f} s")
    for i in range(options.repeats):
      found = open_in_browser(page, folder / f"profile{i}")
      print("  ".join(f"{what} {seconds:.2f} s" for what, seconds in found.items()))


if __name__ == "__main__":
  main()
