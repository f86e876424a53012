"""One GPU, from correctness to speed: ours, and transformers (torch) on the same GPU.

Command:   python benchmarks/gpu.py [--budget=SECONDS] [--save=FILE.json] [--experts=auto]
             [--stages=compare,update,iteration] [--models=dense,moe] [--systems=ours,transformers]
             [--tasks=train,sample] [--check [--target=h100]] [--toy]
Every process ends before the next begins, and its output is shown. Stages:
  compare    small arrays, about a minute: cuDNN's and blockwise attention, each form of experts,
             decoding and scoring, in float32 and bfloat16. A wrong result ends the command
  update     the two tasks below, for each model
  iteration  a whole RL iteration: configs/tiny.py's, and one of SmolLM2-135M's shape
Models have random weights: `dense` has the shape of Qwen3-1.7B, `moe` that of Qwen3-MoE with 4.5 B
parameters, 1.3 B of them active; of its 12 layers as many as fit. Tasks:
  train    updates on 32 sequences of 2,048 tokens, all of which are trained on: GSPO with AdamW and
           the log-probabilities of 151,936 tokens; in bfloat16, with float32 weights and moments.
           transformers makes its own loss, cross-entropy, and AdamW with everything in bfloat16
  sample   8 responses of 512 tokens to each of 8 prompts of 1,024: batch 64, weights and cache in
           bfloat16. `generate` of both, with prefill, which ours makes once per prompt
and of each:
  tokens/s   of whole sequences; sampling: of responses, prefill included
  MFU        operations of the model (6 per active parameter and token, and attention; nothing
             that is computed twice) over those that the data sheet promises for dense bfloat16
  bandwidth  bytes that a decoding step has to read (weights once, those of experts as often as 64
             tokens that choose evenly reach one; keys and values up to each row's position), over
             its time and the data sheet's bandwidth. The time is that of a call less that of one
             for a single new token, over the tokens between
  ratio      tokens/s of ours over those of transformers
Targets: 50 % MFU (dense) and 35 % (MoE), 60 % of bandwidth, twice transformers' sampling.

Sizes come from the compiler's count of memory, before anything runs. --save is written after each
row. After --budget seconds no process starts, and the one that runs is ended. --check compiles
everything for a GPU that need not be there (h100, h200, a100, a100-40, b200; the extra aot-cuda),
and fails if a program does not fit. A system that is not installed is left out;
benchmarks/peers.txt installs torch and transformers. Ours needs the imports in NEEDS, in any
version from jax 0.10.2 on.

Without a GPU it stops and says so. `--toy` makes the same programs, toy-sized, on whatever JAX
finds: on CPU that shows that they run, and nothing about a GPU.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import installed

ROOT = Path(__file__).resolve().parents[1]
NEEDS = dict(
  ours=tuple("absl etils flax grain jax ml_collections ml_dtypes numpy optax orbax tqdm".split()),
  iteration=tuple("jinja2 safetensors sympy tensorboardX tokenizers".split()),
  transformers=("torch", "transformers"),
)
SYSTEMS = ("ours", "transformers")
STAGES = ("compare", "update", "iteration")
ITERATIONS = dict(dense="configs/tiny.py, 4 layers", smollm2="SmolLM2-135M's shape")
GPU = ("gpu", "cuda", "rocm")  # JAX's names of the platform.

QWEN3 = dict(vocab_size=151_936, hidden_size=2048, head_dim=128, max_position_embeddings=40_960)
MODELS = dict(
  dense=QWEN3
  | dict(num_layers=28, num_heads=16, num_kv_heads=8, intermediate_size=6144)
  | dict(num_experts=0, experts_per_token=0, moe_intermediate_size=0, tie_word_embeddings=True),
  moe=QWEN3
  | dict(num_layers=12, num_heads=32, num_kv_heads=4, intermediate_size=6144)
  | dict(num_experts=64, experts_per_token=8, moe_intermediate_size=768, tie_word_embeddings=False),
)
TRAIN = dict(rows=32, length=2048, at_once=8, calls=5)
SAMPLE = dict(prompts=8, group=8, prompt=1024, new=512, calls=3)
TARGETS = dict(train=dict(dense=0.50, moe=0.35), sample=dict(dense=0.60, moe=0.60))
RATIO = 2.0  # Target: our speed over that of transformers' `generate`.

TOY = dict(vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
TOY |= dict(intermediate_size=128)
TOY_EXPERTS = dict(num_experts=8, experts_per_token=2, moe_intermediate_size=32)
TOY_TRAIN = dict(rows=4, length=64, at_once=2, calls=2)
TOY_SAMPLE = dict(prompts=2, group=4, prompt=32, new=16, calls=2)


def main(arguments: list[str] | None = None) -> None:
  options = parse(arguments)
  require(NEEDS["ours"])
  with tempfile.TemporaryDirectory() as scratch:
    runner = Runner(Path(scratch), time.monotonic() + options.budget)
    if options.check:
      check(runner, options)
      return
    device = runner.attempt("probe", "gpu_ours.py", dict(task="probe"))
    if device is None:
      raise SystemExit(1)  # The reason is printed.
    print(describe(device))
    if device["platform"] not in GPU and not options.toy:
      raise SystemExit("JAX finds no GPU here, so nothing was measured; --toy tries the programs")
    if options.toy:
      place = "on a GPU" if device["platform"] in GPU else "without a GPU"
      print(f"Toy sizes, {place}: these figures show only that the programs run.")
    results = dict(device=device, compare=[], results=[], iterations=[])
    for stage in options.stages.split(","):
      rows = dict(compare=compare, update=updates, iteration=iterations)[stage]
      for key, row in rows(runner, options, device):
        results[key].append(row)
        if options.save:
          Path(options.save).write_text(json.dumps(results, indent=2))
    if wrong := [
      f"{row['name']}, {row['dtype']}" for row in results["compare"] if not row["right"]
    ]:
      raise SystemExit(f"wrong results: {'; '.join(wrong)}")
  if runner.failures:
    raise SystemExit(f"failed: {'; '.join(runner.failures)}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--stages", default=",".join(STAGES))
  parser.add_argument("--models", default=",".join(MODELS))
  parser.add_argument("--systems", default=",".join(SYSTEMS))
  parser.add_argument("--tasks", default=",".join(TARGETS))
  parser.add_argument("--experts", default="auto", help="formulation of ours, as compute.experts")
  parser.add_argument("--save", default="", help="file for all numbers, as JSON, after each row")
  parser.add_argument("--budget", type=float, default=math.inf, help="seconds for everything")
  parser.add_argument("--check", action="store_true", help="compile for --target, without a GPU")
  parser.add_argument("--target", default="h100", help="GPU of --check, as --topology of aot")
  parser.add_argument("--toy", action="store_true", help="toy sizes, on whatever is there")
  options = parser.parse_args(arguments)
  for name, names in dict(stages=STAGES, models=MODELS, systems=SYSTEMS, tasks=TARGETS).items():
    if unknown := set(getattr(options, name).split(",")) - set(names):
      parser.error(f"--{name} has {', '.join(sorted(unknown))}: it takes {', '.join(names)}")
  return options


def require(names: Sequence[str]) -> None:
  """Exits with one line if a module is missing."""
  if missing := [name for name in names if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"not installed: {', '.join(missing)}; needed: {', '.join(names)}")


def describe(device: dict[str, Any]) -> str:
  peak, bandwidth = device["flops"], device["bandwidth"]
  limits = [f"{peak / 1e12:.0f} TF/s in bfloat16"] if peak else ["no peak known"]
  limits += [f"{bandwidth / 1e12:.2f} TB/s"] if bandwidth else ["no bandwidth known"]
  return f"{device['kind']}, {', '.join(limits)}; jax {device['jax']}"


def make_spec(model: str, task: str, toy: bool) -> dict[str, Any]:
  sizes = MODELS[model]
  work = dict(train=TRAIN, sample=SAMPLE)[task]
  if toy:
    sizes = sizes | TOY | (TOY_EXPERTS if sizes["num_experts"] else {})
    work = dict(train=TOY_TRAIN, sample=TOY_SAMPLE)[task]
  return dict(task=task, model=sizes, **work)


def specs(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
  for model in options.models.split(","):
    for task in options.tasks.split(","):
      spec = make_spec(model, task, options.toy)
      yield model, task, spec | dict(experts=options.experts)


def check(runner: "Runner", options: argparse.Namespace) -> None:
  """Compiles all programs for a target; SystemExit if one fails."""
  print(f"Compiled for {options.target}, untuned: memory, and work of products or decode steps.")
  for model, task, spec in specs(options):
    spec = dict(task="check", target=options.target, of=spec)
    for row in runner.attempt(f"{model}, {task}", "gpu_ours.py", spec, cpu=True) or []:
      text = f"{model}, {row['program']}, {row['sizes']}: {row['peak'] / 1e9:.1f} GB fit "
      text += f"{row['usable'] / 1e9:.1f} GB"
      if row["needed"]:
        unit, name = (1e12, "TFLOP") if row["program"] == "update" else (1e9, "GB")
        text += f"; {row['executed'] / unit:.4g} {name} for {row['needed'] / unit:.4g} needed, "
        text += f"{row['executed'] / row['needed']:.2f} times"
      print(text, flush=True)
  if runner.failures:
    raise SystemExit(f"does not fit or compile: {'; '.join(runner.failures)}")
  print("all fits")


Rows = Iterator[tuple[str, dict[str, Any]]]


def compare(runner: "Runner", options: argparse.Namespace, device: dict[str, Any]) -> Rows:
  for row in runner.attempt("compare", "gpu_ours.py", dict(task="compare")) or []:
    yield "compare", row


def updates(runner: "Runner", options: argparse.Namespace, device: dict[str, Any]) -> Rows:
  systems = [name for name in options.systems.split(",") if installed(name, NEEDS[name])]
  for model, task, spec in specs(options):
    records = {}
    for system in systems:
      needed = runner.attempt("count", "gpu_ours.py", dict(task="count", of=spec), cpu=True)
      if needed is None:
        return
      file = dict(ours="gpu_ours.py", transformers="gpu_peers.py")[system]
      system_spec = spec | dict(hf_config=needed.pop("hf_config"))
      if record := runner.attempt(f"{system}, {model}, {task}", file, system_spec):
        spec |= record.pop("sizes", {})  # Those that fit; the other system takes them too.
        records[system] = record | dict(at_once=spec.get("at_once"))
    if not records:
      continue
    needed = runner.attempt("count", "gpu_ours.py", dict(task="count", of=spec), cpu=True)
    if needed is None:
      return
    needed.pop("hf_config")
    rows = [one_row(model, task, system, records, needed, device) for system in records]
    show(rows, needed)
    for row in rows:
      yield "results", row | dict(layers=spec["model"]["num_layers"])


def iterations(runner: "Runner", options: argparse.Namespace, device: dict[str, Any]) -> Rows:
  """Runs `gspo_jax.main`'s iterations as benchmarks/iteration.py does, on the device."""
  if not installed("iteration", NEEDS["ours"] + NEEDS["iteration"]):
    return
  for model, title in ITERATIONS.items():
    if options.toy and model != "dense":
      continue
    with tempfile.TemporaryDirectory(dir=runner.scratch) as directory:
      files = dict(directory="model", data="prompts.jsonl", workdir="run")
      paths = {key: str(Path(directory) / name) for key, name in files.items()}
      Path(paths["directory"]).mkdir()
      spec = dict(model=model, iterations=4 if options.toy else 8, **paths)
      work = runner.attempt(f"{model}, files", "prepare", spec, cpu=True)
      if work is None:
        return
      spec["config"] = work["config"]
      record = runner.attempt(f"{title}, iteration", "ours", spec)
    if record is None:
      continue
    starts = record["begun"]
    seconds = [end - start for start, end in itertools.pairwise(starts)][2:]
    row = dict(
      model=model,
      seconds=statistics.median(seconds or [starts[-1] - starts[-2]]),
      sampling=statistics.median(stage["sample"] for stage in record["stages"][1:]),
      tokens=work["work"]["sampled"],
      grad_norm=record["grad_norms"][-1],
      moved=record["moved"],
    )
    print(
      f"\niteration of {title}: {row['seconds']:.3f} s, sampling {row['sampling']:.3f} s, ", end=""
    )
    print(f"{row['tokens']} tokens; gradient {row['grad_norm']:.3g}, weights moved ", end="")
    print(f"{row['moved']:.2g}", flush=True)
    yield "iterations", row


@dataclasses.dataclass
class Runner:
  """Runs processes in turn, to free the GPU, until a deadline."""

  scratch: Path
  deadline: float  # Of `time.monotonic`.
  failures: list[str] = dataclasses.field(default_factory=list)

  def attempt(self, name: str, *arguments: Any, **options: Any) -> Any:
    """Returns the result of a process, or None and records its failure."""
    try:
      return self.process(*arguments, **options)
    except RuntimeError as error:
      print(f"{name}: {error}", flush=True)
      self.failures.append(name)
      return None

  def process(self, program: str, spec: dict[str, Any], cpu: bool = False) -> Any:
    """Runs a process to its end, with its output.

    program: a file of this folder, or a system of `iteration_systems`.

    Raises:
      RuntimeError: it failed, or there was no time for it.
    """
    if (seconds := self.deadline - time.monotonic()) <= 0:
      raise RuntimeError("left out, no time left of --budget")
    source, result = self.scratch / "spec.json", self.scratch / "result.json"
    source.write_text(json.dumps(spec))
    if program.endswith(".py"):
      command = [str(ROOT / "benchmarks" / program), str(result)]
    else:
      command = ["-m", "benchmarks.iteration_systems", program, str(source), str(result)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = dict(PYTHONPATH=path, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"  # JAX's default is three quarters.
    variables |= dict(JAX_PLATFORMS="cpu") if cpu else {}
    limit = None if math.isinf(seconds) else seconds
    with open(source) as file:
      try:
        code = subprocess.run(
          [sys.executable, *command], stdin=file, env=os.environ | variables, timeout=limit
        ).returncode
      except subprocess.TimeoutExpired:
        raise RuntimeError("ended, no time left of --budget") from None
    if code:
      raise RuntimeError(f"failed with exit code {code}")
    return json.loads(result.read_text())


def one_row(
  model: str,
  task: str,
  system: str,
  records: dict[str, dict[str, Any]],
  needed: dict[str, float],
  device: dict[str, Any],
) -> dict[str, Any]:
  """Returns a row of the table; None for unknown values."""
  record = records[system]
  tokens = needed["tokens"] / record["seconds"]
  other = records.get("transformers")
  share, speed = None, None
  if task == "train":
    speed = needed["operations"] / record["seconds"]
    share = speed / device["flops"] if device["flops"] else None
  elif record["step_seconds"]:
    speed = needed["bytes"] / record["step_seconds"]
    share = speed / device["bandwidth"] if device["bandwidth"] else None
  return dict(
    model=model,
    task=task,
    system=system,
    tokens_per_second=tokens,
    speed=speed,
    share=share,
    # Toy sizes on a CPU compare overheads.
    ratio=other["seconds"] / record["seconds"] if other and device["platform"] in GPU else None,
    **record,
  )


def show(rows: list[dict[str, Any]], needed: dict[str, float]) -> None:
  if not rows:
    return
  model, task = rows[0]["model"], rows[0]["task"]
  print(f"\n{model}, {task}: {needed['parameters'] / 1e6:,.1f} M parameters, ", end="")
  print(f"{needed['active'] / 1e6:,.1f} M active")
  if task == "train":
    head = ("system", "s", "tokens/s", "TF/s", "MFU", "target", "ratio", "peak GB", "at once")
  else:
    head = ("system", "s", "tokens/s", "GB/s", "bandwidth", "target", "ratio", "target", "peak GB")
  table = [head, *map(cells, rows)]
  widths = [max(map(len, column)) for column in zip(*table)]
  for first, *others in table:
    right = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:])]
    print("  ".join([f"{first:<{widths[0]}}", *right]).rstrip(), flush=True)


def cells(r: dict[str, Any]) -> list[str]:
  """Returns the cells of a row, with targets beside their figures."""
  trains, ours = r["task"] == "train", r["system"] == "ours"
  texts = [r["system"], f"{r['seconds']:.3f}", f"{r['tokens_per_second']:,.0f}"]
  texts += [scaled(r["speed"], 1e12 if trains else 1e9, ".3g"), scaled(r["share"], 1, ".1%")]
  texts += [f"{TARGETS[r['task']][r['model']]:.0%}" if ours else ""]
  texts += [scaled(r["ratio"], 1, ".2f") if ours else ""]
  texts += [] if trains else [f"{RATIO:.1f}" if ours else ""]
  texts += [scaled(r["peak_bytes"], 1e9, ".1f")]
  return texts + ([f"{r['at_once']}"] if trains else [])


def scaled(value: float | None, unit: float, form: str) -> str:
  return "n/a" if value is None else f"{value / unit:{form}}"


if __name__ == "__main__":
  main()
