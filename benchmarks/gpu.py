"""One GPU: how much of it a train step and decoding use, and transformers (torch) on the same GPU.

Command:   python benchmarks/gpu.py [--models=dense,moe] [--systems=ours,transformers]
             [--tasks=train,sample] [--experts=auto] [--save=FILE.json] [--toy]
Models with random weights: `dense` has the shape of Qwen3-1.7B, `moe` that of Qwen3-MoE with 4.5 B
parameters, 1.3 B of them active. Two tasks, each in a process of its own, one after the other:
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
Targets: 50 % MFU (dense) and 35 % (MoE), 60 % of bandwidth, twice transformers' sampling. A process
that runs out of memory is tried again with half as many sequences at once. A system that is not
installed is left out; benchmarks/peers.txt installs torch and transformers.

Without a GPU it stops and says so. `--toy` makes the same programs, toy-sized, on whatever JAX
finds: on CPU that shows that they run, and nothing about a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import installed

ROOT = Path(__file__).resolve().parents[1]
NEEDS = dict(ours=("jax",), transformers=("torch", "transformers"))
GPU = ("gpu", "cuda", "rocm")  # JAX's names of the platform.
MEMORY_ENDS = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "Out of memory")

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

# Bytes per second, by the beginning of the device's name. NVIDIA's data sheets of the SXM modules:
# "H200 Tensor Core GPU" 4.8 TB/s, "H100" 3.35 TB/s, "A100 80GB" 2,039 GB/s (its 40 GB: 1,555).
BANDWIDTH = {
  "NVIDIA H200": 4.8e12,
  "NVIDIA H100": 3.35e12,
  "NVIDIA A100-SXM4-80GB": 2.039e12,
  "NVIDIA A100-SXM4-40GB": 1.555e12,
}


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--models", default=",".join(MODELS))
  parser.add_argument("--systems", default=",".join(NEEDS))
  parser.add_argument("--tasks", default=",".join(TARGETS))
  parser.add_argument("--experts", default="auto", help="formulation of ours, as compute.experts")
  parser.add_argument("--save", default="", help="file for all numbers, as JSON")
  parser.add_argument("--toy", action="store_true", help="toy sizes, on whatever is there")
  options = parser.parse_args(arguments)
  systems = [system for system in options.systems.split(",") if installed(system, NEEDS[system])]
  with tempfile.TemporaryDirectory() as scratch:
    device = process("gpu_ours.py", dict(task="probe"), Path(scratch))
    print(describe(device))
    device["bandwidth"] = bandwidth_of(device["kind"])
    if device["platform"] not in GPU and not options.toy:
      raise SystemExit("JAX finds no GPU here, so nothing was measured; --toy tries the programs")
    if options.toy:
      place = "on a GPU" if device["platform"] in GPU else "without a GPU"
      print(f"Toy sizes, {place}: these figures show only that the programs run.")
    results = []
    for model in options.models.split(","):
      for task in options.tasks.split(","):
        spec = make_spec(model, task, options.toy) | dict(experts=options.experts)
        needed = process("gpu_ours.py", dict(task="count", of=spec), Path(scratch), cpu=True)
        spec["hf_config"] = needed.pop("hf_config")
        records = {system: measure(system, spec, Path(scratch)) for system in systems}
        records = {system: record for system, record in records.items() if record}
        rows = [one_row(model, task, system, records, needed, device) for system in records]
        show(rows, needed)
        results += rows
  if options.save:
    Path(options.save).write_text(json.dumps(dict(device=device, results=results), indent=2))


def describe(device: dict[str, Any]) -> str:
  peak, bandwidth = device["flops"], bandwidth_of(device["kind"])
  limits = [f"{peak / 1e12:.0f} TF/s in bfloat16"] if peak else ["no peak known"]
  limits += [f"{bandwidth / 1e12:.2f} TB/s"] if bandwidth else ["no bandwidth known"]
  return f"{device['kind']}, {', '.join(limits)}; jax {device['jax']}"


def bandwidth_of(kind: str) -> float | None:
  return next((speed for name, speed in BANDWIDTH.items() if kind.startswith(name)), None)


def make_spec(model: str, task: str, toy: bool) -> dict[str, Any]:
  sizes = MODELS[model]
  work = dict(train=TRAIN, sample=SAMPLE)[task]
  if toy:
    sizes = sizes | TOY | (TOY_EXPERTS if sizes["num_experts"] else {})
    work = dict(train=TOY_TRAIN, sample=TOY_SAMPLE)[task]
  return dict(task=task, model=sizes, **work)


def measure(system: str, spec: dict[str, Any], scratch: Path) -> dict[str, Any] | None:
  """Returns a process's record; None if it fails. Out of memory, it retries with less."""
  file = dict(ours="gpu_ours.py", transformers="gpu_peers.py")[system]
  while True:
    try:
      return process(file, spec, scratch) | dict(at_once=spec.get("at_once"))
    except RuntimeError as error:
      out_of_memory = any(end in str(error) for end in MEMORY_ENDS)
      if not out_of_memory or spec.get("at_once", 1) == 1:
        print(f"{system}, {spec['task']} failed:\n{str(error)[-3000:]}")
        return None
    spec = spec | dict(at_once=spec["at_once"] // 2)
    print(f"{system} runs out of memory: {spec['at_once']} sequences at once", flush=True)


def process(file: str, spec: dict[str, Any], scratch: Path, cpu: bool = False) -> dict[str, Any]:
  """Runs a process to its end, to free the GPU.

  RuntimeError, with what it wrote, if it fails.
  """
  result = scratch / "result.json"
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
  variables = dict(PYTHONPATH=path, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
  variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"  # JAX's default is three quarters.
  if cpu:
    variables["JAX_PLATFORMS"] = "cpu"
  child = subprocess.run(
    [sys.executable, str(ROOT / "benchmarks" / file), str(result)],
    input=json.dumps(spec),
    env=os.environ | variables,
    capture_output=True,
    text=True,
  )
  if child.returncode:
    raise RuntimeError(child.stderr)
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
