"""A whole RL iteration against TRL's (torch) and Tunix's (JAX): seconds, tokens/s, memory, start.

Command:   python benchmarks/iteration.py [--systems=ours,nopass,trl,tunix]
             [--models=dense,moe | smollm2] [--rounds=3] [--iterations=8] [--cold=1] [--cores=2]
             [--pages=small|large] [--save=FILE.json]
An iteration samples 8 responses of exactly 128 tokens to each of 4 prompts of 32, scores them with
a Python function, and makes four GSPO updates with AdamW, each on 8 sequences of 160 tokens, in
float32, from the same random weights (4 layers; dense, and 16 experts of which 2 are used). With
--models=smollm2 the network is of SmolLM2-135M's shape, and 16 prompts of 48 tokens have 8
responses of 16, much as in configs/smollm2.py; Tunix, which is set up for Qwen3, is left out. Ours
is `gspo_jax.main` with configs/tiny.py at these sizes; how TRL and Tunix are set up, and where
Tunix cannot do the same, stands in iteration_peers.py. `nopass` is ours without the pass for the
old policy's log-probabilities, which TRL makes and Tunix does not: objective.old_logp="sampler", as
in the full-size configurations. Evaluations, checkpoints and dumps of rollouts are outside the
iterations that count; metrics are written in all of them. --pages=large has malloc ask for pages of
2 MiB, in all systems.

Every run is a process of its own on the same cores, and the systems take turns. The first two
iterations of a process and the last do not count. Printed are medians over all others, and the
range of the medians of processes:
  iteration   seconds from the beginning of one to the beginning of the next
  sampling    tokens of responses per second of sampling
  updates     tokens of prompts and responses per second of what is neither sampling nor scoring
              (rewards, old log-probabilities), so that work between the stages counts as well
  bound       useful operations (each prompt once, though TRL and Tunix go through it with every
              response) at the speed of one large float32 matmul of JAX, measured in the same run,
              as a share of the time: of the updates, and of the whole iteration
  memory      the peak of resident memory of the process
  start       seconds from the start of the process to the end of the first iteration: cold, with
              an empty compilation cache (--cold times), and warm, with one that has been filled
and as evidence of equal work: tokens and updates of a process, how far these moved the weights
(relative to their norm), and the last iteration's gradient norm and losses as each system reports
them. Runs during which others took more than 10 % of the machine are left out where quieter ones
remain. A system that is not installed is left out; benchmarks/peers.txt installs them. (That brings
torch, which tensorboardX then imports into Tunix: about a second and 0.2 GB.)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import busy_seconds, environment, installed

ROOT = Path(__file__).resolve().parents[1]
NEEDS = dict(ours=("jax",), nopass=("jax",), trl=("trl", "torch", "datasets"), tunix=("tunix",))
OURS = ("ours", "nopass")
COMPILED = (*OURS, "tunix")  # The others start equally fast cold and warm.
PACKAGES = ("jax", "torch", "transformers", "trl", "google-tunix")
FOREIGN = 0.1  # share of the machine that other processes may take
FIRST = 2  # iterations of a process that do not count
PAUSE = 0.5  # seconds between processes
PAGES = dict(  # GLIBC_TUNABLES: what malloc asks of Linux
  large="glibc.malloc.hugetlb=1",
  small="glibc.malloc.hugetlb=0",
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--systems", default=",".join(NEEDS))
  parser.add_argument("--models", default="dense,moe")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--iterations", type=int, default=8, help="of a process, at least 4")
  parser.add_argument("--cold", type=int, default=1, help="starts without a compilation cache")
  parser.add_argument("--cores", type=int, default=2)
  parser.add_argument("--pages", choices=("large", "small"), default="small")
  parser.add_argument("--save", default="", help="file for the figures of every run, as JSON")
  options = parser.parse_args()
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
  if options.iterations < FIRST + 2:
    parser.error(f"--iterations={options.iterations} leaves none that counts")
  if options.cold < 1:
    parser.error(f"--cold={options.cold}: the first start fills the cache of the others")
  os.environ["GLIBC_TUNABLES"] = PAGES[options.pages]
  systems = [system for system in options.systems.split(",") if installed(system, NEEDS[system])]
  print(about := environment(PACKAGES), flush=True)
  results = []
  for model in options.models.split(","):
    available = [s for s in systems if s != "tunix" or model != "smollm2"]
    with tempfile.TemporaryDirectory() as scratch:
      results.append(compare(model, available, Path(scratch), options))
    show(results[-1])
  if options.save:
    Path(options.save).write_text(json.dumps(dict(environment=about, results=results), indent=2))


def compare(model: str, systems: list[str], scratch: Path, options) -> dict[str, Any]:
  """Runs every system on one model, and measures the machine's speed meanwhile."""
  spec = dict(model=model, directory=str(scratch / "model"), data=str(scratch / "prompts.jsonl"))
  (scratch / "model").mkdir()
  cache = {system: scratch / f"{system}_0" for system in systems}
  prepared = process("prepare", spec, scratch, scratch / "none")["record"]
  useful, per_iteration = prepared["useful"], prepared["work"]
  spec |= dict(config=prepared["config"])
  cold = {system: [] for system in systems}
  for i in reversed(range(options.cold)):  # the last one's cache stays
    for system in systems:
      if system in COMPILED:
        run = process(system, spec | dict(iterations=2), scratch, scratch / f"{system}_{i}")
        cold[system].append(first_end(run))
  runs, speeds = {system: [] for system in systems}, []
  for _ in range(options.rounds):
    for system in systems:
      process_spec = spec | dict(iterations=options.iterations)
      runs[system].append(process(system, process_spec, scratch, cache[system]))
    speeds.append(process("probe", {}, scratch, scratch / "none")["record"]["matmul"])
  for system in systems:  # Systems without compilation always start cold.
    cold[system] = cold[system] or [first_end(run) for run in runs[system]]
  matmul = max(speeds)
  for system in systems:
    check_work(system, runs[system], per_iteration)
  results = {s: summary(runs[s], cold[s], useful, per_iteration, matmul) for s in systems}
  return dict(model=model, matmul=matmul, useful=useful, systems=results, runs=runs)


def process(name: str, spec: dict[str, Any], scratch: Path, cache: Path) -> dict[str, Any]:
  """Runs one process to its end. SystemExit, with the end of what it wrote, if it failed."""
  time.sleep(PAUSE)
  with tempfile.TemporaryDirectory(dir=scratch) as directory:
    files = [Path(directory) / file for file in ("spec.json", "result.json", "log")]
    files[0].write_text(json.dumps(spec | dict(workdir=str(Path(directory) / "work"))))
    variables = dict(
      JAX_PLATFORMS="cpu",
      JAX_COMPILATION_CACHE_DIR=str(cache),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
      PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
      HF_HUB_OFFLINE="1",
      TOKENIZERS_PARALLELISM="false",
    )
    command = [sys.executable, "-m", "benchmarks.iteration_systems", name, *map(str, files[:2])]
    busy, started, clock = busy_seconds(), time.time(), time.perf_counter()
    with open(files[2], "wb") as log:
      child = subprocess.Popen(
        command, stdout=log, stderr=log, env=os.environ | variables, cwd=directory
      )
      _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - clock
    foreign = busy_seconds() - busy - used.ru_utime - used.ru_stime
    if status:
      end = files[2].read_text(errors="replace")[-3000:]
      raise SystemExit(f"{name} failed with exit code {child.returncode}:\n{end}")
    return dict(
      record=json.loads(files[1].read_text()),
      started=started,
      seconds=seconds,
      foreign=max(foreign, 0.0) / seconds / os.cpu_count(),
      peak_bytes=used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def first_end(run: dict[str, Any]) -> float:
  return run["record"]["begun"][1] - run["started"]


def counted(run: dict[str, Any]) -> list[dict[str, float]]:
  """Returns seconds of a process's counted iterations, by stage and in total."""
  record, seconds = run["record"], []
  starts = record["begun"]
  for i in range(FIRST, len(starts) - 1):
    whole, stages = starts[i + 1] - starts[i], record["stages"][i]
    update = whole - stages["sample"] - stages["score"]
    seconds.append(dict(whole=whole, sample=stages["sample"], score=stages["score"], update=update))
  return seconds


def summary(
  runs: list[dict[str, Any]],
  cold: list[float],
  useful: dict[str, float],
  work: dict[str, int],
  matmul: float,
) -> dict[str, Any]:
  quiet = [run for run in runs if run["foreign"] <= FOREIGN] or runs
  median = {
    key: statistics.median(x[key] for run in quiet for x in counted(run))
    for key in ("whole", "sample", "score", "update")
  }
  process_medians = [statistics.median(x["whole"] for x in counted(run)) for run in quiet]
  last = quiet[-1]["record"]
  return dict(
    seconds=median,
    spread=(min(process_medians), max(process_medians)),
    sampling=work["sampled"] / median["sample"],
    updates=work["trained"] / median["update"],
    bound_update=useful["update"] / matmul / median["update"],
    bound_whole=sum(useful.values()) / matmul / median["whole"],
    peak_bytes=max(run["peak_bytes"] for run in runs),
    cold=statistics.median(cold),
    warm=statistics.median(first_end(run) for run in quiet),
    work={key: last[key] for key in ("updates", "moved")}
    | {key: sum(last[key]) for key in ("sampled", "trained")}
    | dict(losses=last["losses"][-1], grad_norm=last["grad_norms"][-1]),
    foreign=max(run["foreign"] for run in quiet),
    runs=len(quiet),
  )


def check_work(system: str, runs: list[dict[str, Any]], work: dict[str, int]) -> None:
  """Raises SystemExit unless every iteration did the expected work."""
  for run in runs:
    record = run["record"]
    iterations = len(record["begun"])
    actual = record["sampled"], record["trained"], record["updates"]
    expected = [work["sampled"]] * iterations, [work["trained"]] * iterations
    if actual != (*expected, work["updates"] * iterations):
      raise SystemExit(f"{system} did other work: sampled, trained on and updated {actual}")


def show(result: dict[str, Any]) -> None:
  systems, useful = result["systems"], result["useful"]
  print(
    f"\n{result['model']}: matmul {result['matmul'] / 1e9:.0f} GF/s; useful operations of", end=""
  )
  print(f" sampling {useful['sample'] / 1e9:.1f} GF, of updates {useful['update'] / 1e9:.1f} GF")
  print(f"{'':<6}{'iteration, s':>19}{'sample  score update':>22}{'sampling updates':>17}", end="")
  print(f"{'bound: up all':>15}{'memory':>9}{'start: cold  warm':>19} runs foreign")
  for name, s in systems.items():
    iteration = f"{s['seconds']['whole']:.2f} [{s['spread'][0]:.2f}-{s['spread'][1]:.2f}]"
    stages = "".join(f"{s['seconds'][key]:>7.2f}" for key in ("sample", "score", "update"))
    print(f"{name:<6}{iteration:>19}{stages:>22}{s['sampling']:>9.0f}{s['updates']:>8.0f}", end="")
    print(
      f"{s['bound_update']:>10.0%}{s['bound_whole']:>5.0%}{s['peak_bytes'] / 1e9:>6.2f} GB", end=""
    )
    print(f"{s['cold']:>11.1f} s{s['warm']:>4.1f} s{s['runs']:>5}{s['foreign']:>8.0%}")
  for name, s in systems.items():
    work = s["work"]
    losses = ", ".join(f"{loss:.2g}" for loss in work["losses"])
    print(f"{name:<6}{work['updates']} updates, {work['sampled']} tokens sampled, ", end="")
    print(f"{work['trained']} trained on; weights moved {work['moved']:.3%}; gradient ", end="")
    print(f"{work['grad_norm']:.2f}, losses {losses}")
  peers = {name: s["seconds"]["whole"] for name, s in systems.items() if name not in OURS}
  for name in filter(systems.__contains__, OURS if peers else ()):
    us, peer = systems[name], min(peers, key=peers.get)
    them = systems[peer]
    ratios = ", ".join(f"{p} {peers[p] / us['seconds']['whole']:.2f}" for p in peers)
    print(f"{name}: times as fast as {ratios}; as {peer}: ", end="")
    print(f"sampling {us['sampling'] / them['sampling']:.2f}, updates ", end="")
    print(f"{us['updates'] / them['updates']:.2f}, ", end="")
    print(f"memory {us['peak_bytes'] / them['peak_bytes']:.2f}", flush=True)


if __name__ == "__main__":
  main()
