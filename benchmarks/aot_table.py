"""The table of benchmarks/results/models.md: models on slices of TPU chips, from one chip to 256.

Command:   python -m benchmarks.aot_table [--only=REGEX] [--again] [--tries=2]
             [--rows=FILE.json] [--docs=PAGE.md]
           python -m benchmarks.aot_table --gpus       a table of docs/one_chip.md: runs on GPUs
           python -m benchmarks.aot_table --small      another of its tables: runs on small slices
           python -m benchmarks.aot_table --families   the table of docs/models.md: one run of each
Every row is a search of the mesh, the micro-batches and what is recomputed, for one update of 64
sequences x 8,192 tokens, or as many as the slice has devices. A model's smallest slice of each chip
is found by compiling larger and larger ones. Nothing runs on a TPU: needs libtpu, and one to five
minutes a row on two cores. What is finished is kept in the file of rows, so that an interrupted
command goes on; --again compiles anew what --only names. The table is written between the two
marks of the page, whenever a row is finished. A row of --gpus or --small is a run as configured, of
which all programs are compiled; GPUs need the extra aot-cuda. A row of --families has two of them,
and the reason against the next smaller slice or number of GPUs.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX with libtpu would look for a TPU.

import jax

from configs import common, dense_math, moe_aime
from gspo_jax.aot import chips, search
from gspo_jax.aot.compiler import devices_of
from gspo_jax.aot.programs import Case, make_case
from gspo_jax.models.families.lookup import FAMILIES
from gspo_jax.settings.reading import from_dict
from gspo_jax.settings.sizes import PUBLISHED

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 8192
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SOLID = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
SLICES = dict(v5e=FLAT, v5p=SOLID, v6e=FLAT, tpu7x=SOLID)
# Of each model: slices besides the smallest of every chip.
MODELS = {
  "Qwen3-0.6B": ("v5e:8x8",),
  "Qwen3-1.7B": ("v5e:8x8", "v5p:4x4x4"),
  "Qwen3-30B-A3B": ("v5e:16x16", "v5p:4x4x4", "v5p:4x8x8", "v6e:8x8", "v6e:16x16", "tpu7x:4x4x4"),
  "Qwen3-235B-A22B": ("v5p:4x8x8", "v6e:16x16", "tpu7x:4x8x8"),
}
GPU_RUNS = {  # Flags of the run by model and topology.
  "Qwen3-0.6B h100:1": "--config=configs/gsm8k.py:0.6B-h100",
  "Qwen3-1.7B h100:1": "--config=configs/gsm8k.py:1.7B-h100",
  "Qwen3-4B h100:1": "--config=configs/gsm8k.py:4B-h100",
  "Qwen3-8B h100:1": "--config=configs/gsm8k.py:8B-h100",
  "Qwen3-8B a100:1": "--config=configs/gsm8k.py:8B-h100",
  "Qwen3-8B h100:8": "--config=configs/dense_math.py:Qwen3-8B-Base --config.rl.microbatches=16",
  "Qwen3.5-0.8B h100:1": "--config=configs/gsm8k.py:Qwen3.5-0.8B-h100",
  "Qwen3.5-2B h100:1": "--config=configs/gsm8k.py:Qwen3.5-2B-h100",
  "Qwen3.5-4B h100:1": "--config=configs/gsm8k.py:Qwen3.5-4B-h100",
  "Qwen3-30B-A3B h100:8": "--config=configs/moe_aime.py --config.mesh.fsdp=2 "
  "--config.lora.rank=32 --config.rl_optimizer.learning_rate=1e-5 --config.engine.slots=64 "
  "--config.rl.prompts=64 --config.rl.microbatches=32 --config.mesh.rollout_experts=auto",
  "Qwen3-30B-A3B h100:4x8": "--config=configs/moe_aime.py --config.mesh.fsdp=8 "
  "--config.engine.slots=64 --config.rl.microbatches=32 --config.mesh.rollout_experts=auto",
}
ADAPTERS = "--config.lora.rank=32 --config.rl_optimizer.learning_rate=1e-5"
EXPERTS = f"{ADAPTERS} --config.mesh.expert=8"
UNPACKED = f"{EXPERTS} --config.rl.packed=False"
TENSOR = "--config.mesh.tensor=2"  # Splits weights outside the experts, in sampling too.


def _math(model: str, rows: int, more: str = "", slots: int = 64) -> str:
  """Returns flags of configs/dense_math.py, by rows of a micro-batch."""
  flags = f"--config.rl.microbatches={128 // rows} --config.engine.slots={slots} {more}"
  return f"--config=configs/dense_math.py:{model} {flags}".strip()


def _runs(flags: str, *topologies: str) -> dict[str, str]:
  return dict.fromkeys(topologies, flags)


FAMILY_RUNS = {  # Flags of one run of each family, by topology.
  "llama": _runs(_math("Llama-3.2-1B", 8), "v5e:2x2", "h100:1"),
  "qwen2": _runs(_math("Qwen2.5-0.5B", 4), "v5e:1x1", "h100:1"),
  "qwen3": _runs("--config=configs/gsm8k.py:0.6B-v5e", "v5e:1x1", "h100:1"),
  "mistral": _runs(_math("Mistral-7B-v0.3", 8, ADAPTERS), "v6e:2x2", "h100:1"),
  "mixtral": _runs(_math("Mixtral-8x7B-v0.1", 32, EXPERTS), "v6e:2x4", "h100:8"),
  "gemma": _runs(_math("gemma-3-1b-pt", 8), "v5e:2x2", "h100:1"),
  "smollm3": _runs(_math("SmolLM3-3B", 8), "v5e:2x4", "h100:1"),
  "granite": _runs("--config=configs/granite_moe.py", "v6e:1x1", "h100:1"),
  "olmo": _runs(_math("OLMo-2-0425-1B", 8), "v5e:2x2", "h100:1"),
  "olmoe": _runs("--config=configs/olmoe.py", "v5e:2x4", "h100:1"),
  "glm4_moe": _runs(_math("GLM-4.5-Air", 32, f"{EXPERTS} {TENSOR}"), "v6e:4x8")
  | _runs(_math("GLM-4.5-Air", 32, EXPERTS), "h100:2x8"),
  "gpt_oss": _runs(_math("gpt-oss-20b", 8, EXPERTS), "v6e:2x4", "h100:8"),
  "minimax_m2": _runs(_math("MiniMax-M2", 128, f"{UNPACKED} {TENSOR}"), "v5e:8x16")
  | _runs(_math("MiniMax-M2", 128, UNPACKED), "h100:2x8"),
  "qwen3_5": _runs("--config=configs/gsm8k.py:Qwen3.5-0.8B-v5e", "v5e:1x1")
  | _runs("--config=configs/gsm8k.py:Qwen3.5-0.8B-h100", "h100:1"),
  "qwen3_next": _runs(_math("Qwen3-Next-80B-A3B-Instruct", 32, EXPERTS), "v6e:4x4", "h100:8"),
}
SMALL_RUNS = {  # As GPU_RUNS, on slices of 4, 8 and 16 chips.
  "Qwen3-4B v4:2x2x1": _math("Qwen3-4B-Base", 8),
  "Qwen3-8B v4:2x2x4": _math("Qwen3-8B-Base", 64, slots=256),
  "Qwen3-30B-A3B v4:2x2x4": _math(
    "Qwen3-30B-A3B-Base", 64, f"{ADAPTERS} --config.mesh.expert=4", slots=256
  ),
  "Qwen3-1.7B v5e:2x4": _math("Qwen3-1.7B-Base", 16, slots=128),
  "Qwen3-4B v5e:2x4": _math("Qwen3-4B-Base", 16, ADAPTERS),
  "Qwen3-4B v6e:2x4": _math("Qwen3-4B-Base", 32, slots=128),
  "Qwen3-8B v6e:2x4": _math("Qwen3-8B-Base", 32, ADAPTERS, slots=128),
}
MARK, END = "<!-- table: benchmarks/aot_table.py --{} -->\n", "<!-- end of table -->"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", default="", help="rows by a regular expression on their names")
  parser.add_argument("--again", action="store_true", help="compile them although they are known")
  parser.add_argument("--tries", type=int, default=2, help="most programs compiled for a row")
  parser.add_argument("--rows", type=Path)
  parser.add_argument("--docs", type=Path)
  tables = parser.add_mutually_exclusive_group()
  for name in TABLES:
    tables.add_argument(f"--{name}", dest="table", action="store_const", const=name)
  name = parser.parse_args().table or "slices"
  make, table, expected, rows, page = TABLES[name]
  parser.set_defaults(rows=ROOT / rows, docs=ROOT / page)
  options, mark = parser.parse_args(), MARK.format(name)
  rows = json.loads(options.rows.read_text()) if options.rows.exists() else {}
  for name in expected():
    if re.search(options.only, name) and (options.again or name not in rows):
      started = time.perf_counter()
      rows[name] = make(name, options.tries)
      print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
      options.rows.write_text(json.dumps(rows, indent=1) + "\n")
      replace(options.docs, mark, table(rows))
      jax.clear_caches()
  replace(options.docs, mark, table(rows))


def names() -> list[str]:
  """Returns the rows' names: a model with a slice or, to search, "CHIP least"."""
  return [
    f"{model} {size}"
    for model, slices in MODELS.items()
    for size in (*(f"{chip} least" for chip in SLICES), *slices)
  ]


def tpu_row(name: str, tries: int) -> dict[str, Any]:
  """Returns the row of a slice, or of a chip's smallest one."""
  return (smallest if name.endswith(" least") else search_row)(name, tries)


def smallest(name: str, tries: int) -> dict[str, Any]:
  """Returns the row of the smallest fitting slice, with the reason against the next smaller one.

  If none fits, it is the row of the largest slice.
  """
  model, chip, _ = name.split(" ")
  below = ""
  for shape in SLICES[chip]:
    row = search_row(f"{model} {chip}:{shape}", tries)
    if row["fits"]:
      break
    below = textwrap.shorten(f"{shape}: {row['error']}", 160, placeholder=" ...")
  return row | dict(below=below if row["fits"] else "")


def search_row(name: str, tries: int) -> dict[str, Any]:
  """The best row of a search on one slice."""
  model, topology = name.split(" ")
  devices = len(devices_of(topology))
  case = case_of(model, devices)
  start = search.changed(case, compute=dict(remat="auto"))
  candidates = search.meshes(start, devices)
  result = search.find("train", [candidates], topology, tries=6, enough=tries)
  row = dict(model=model, slice=topology, sequences=case.sequences)
  if not result.best:
    return row | dict(fits=False, error=result.needs())
  best, measured = result.best, result.rows[result.ranked()[0]]
  columns = ("peak_gib", "hbm_gib", "compute_s", "hbm_s", "interconnect_s", "binds", "mfu", "remat")
  mesh = [getattr(best.config.mesh, axis) for axis in ("fsdp", "expert", "tensor")]
  settings = dict(mesh=mesh, microbatches=best.microbatches)
  return row | dict(fits=True, **settings, **{key: measured[key] for key in columns})


def case_of(model: str, devices: int) -> Case:
  """Makes the case of a model's update in its configuration."""
  config = (moe_aime if PUBLISHED[model].num_experts else dense_math).get_config()
  config.update(model=common.model(PUBLISHED[model]), rl=dict(packed=False))
  read = from_dict(config.to_dict())
  return make_case(read, max(64, devices), LENGTH)


def markdown(rows: dict[str, dict[str, Any]]) -> str:
  """Formats the table in the order of `names`, without repeated slices."""
  lines = [
    "| model | slice | fsdp x expert x tensor | micro-batches | remat | peak GiB of | compute s "
    "| memory s | links s | utilisation at the bound | the next smaller slice |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
  ]
  slices_done = set()
  for name in names():
    if name in rows and (name.split()[0], rows[name]["slice"]) not in slices_done:
      slices_done.add((name.split()[0], rows[name]["slice"]))
      lines.append(f"| {' | '.join(cells(rows[name]))} |")
  return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
  first = [row["model"], row["slice"]]
  if not row["fits"]:
    return [*first, f"does not fit: {row['error']}", *[""] * 8]
  seconds = [f"{row[key]:.3g}" for key in ("compute_s", "hbm_s", "interconnect_s")]
  return [
    *first,
    " x ".join(map(str, row["mesh"])),
    str(row["microbatches"]),
    row["remat"],
    f"{row['peak_gib']:.1f} of {row['hbm_gib']:.0f}",
    *seconds,
    f"{row['mfu']:.0%}",
    row.get("below", ""),
  ]


def run_row(name: str, tries: int) -> dict[str, Any]:
  """Compiles a run of `GPU_RUNS` or `SMALL_RUNS`; returns its figures."""
  return compile_run(name.split(" ")[1], (GPU_RUNS | SMALL_RUNS)[name])


def compile_run(topology: str, flags: str) -> dict[str, Any]:
  """Compiles a run; returns figures or an error by program."""
  with tempfile.TemporaryDirectory() as directory:
    out = Path(directory, "rows.json")
    command = ["-m", "gspo_jax.aot", f"--topology={topology}", f"--json={out}", *flags.split()]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if not out.exists():
      raise ValueError(f"{topology} {flags}: {done.stderr}")
    rows = json.loads(out.read_text())
  columns = ("fits", "peak_gib", "held_gib", "hbm_gib", "executed_flops", "product_flops")
  columns += ("needed_bytes", "hbm_bytes", "compile_s", "bound_s", "error")
  return {row["program"]: {key: row[key] for key in columns if key in row} for row in rows}


def family_names() -> list[str]:
  """Returns the rows' names: a family with a topology."""
  return [f"{name} {topology}" for name, runs in FAMILY_RUNS.items() for topology in runs]


def family_row(name: str, tries: int) -> dict[str, Any]:
  """Compiles update and decoding of a run, and programs on the next smaller topology."""
  family, topology = name.split(" ")
  flags, smaller = FAMILY_RUNS[family][topology], smaller_topology(topology)
  row = dict(programs=compile_run(topology, f"{flags} --programs=train,decode"), below="")
  if smaller and chips.parse(smaller)[1] < 8:
    flags = flags.replace("mesh.expert=8", "mesh.expert=-1 --config.mesh.fsdp=1")
  for program in ("publish", "train", "decode") if smaller else ():  # The first one takes a second.
    below = compile_run(smaller, f"{flags} --programs={program}")[program]
    if not below["fits"]:
      return row | dict(below=f"{smaller}: {program} {textwrap.shorten(below['error'], 160)}")
  return row


def smaller_topology(topology: str) -> str:
  """Returns the next smaller topology of a chip or card; "" for a single one."""
  chip, _, shape = topology.partition(":")
  shapes = SLICES.get(chip, ("1", "8", "2x8"))
  position = shapes.index(shape)
  return f"{chip}:{shapes[position - 1]}" if position else ""


def family_markdown(rows: dict[str, dict[str, Any]]) -> str:
  """Formats all families: description and sizes of each, and its compiled run."""
  lines = [
    "| `model.family` | `model_type` | description | named sizes | fits | flags of the run |"
  ]
  lines.append("| --- | --- | --- | --- | --- | --- |")
  for name, family in FAMILIES.items():
    runs = FAMILY_RUNS.get(name, {})
    fitting = [topology for topology in runs if fits(rows.get(f"{name} {topology}", {}))]
    types = [x + (f" ({a.outer})" if a.outer else "") for x, a in family.architectures.items()]
    sizes = [x for x, model in PUBLISHED.items() if model.family == name]
    sizes = [x for x in sizes if not any(x != y and x.startswith(y) for y in sizes)]
    sizes = [sizes[0], "...", sizes[-1]] if len(sizes) > 4 else sizes
    run = "<br>".join(f"`{flags}`" for flags in dict.fromkeys(runs.values()))
    cells = ", ".join(types), description(name), ", ".join(sizes), ", ".join(fitting), run
    lines.append(f"| `{name}` | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def fits(row: dict[str, Any]) -> bool:
  return bool(row) and all(program["fits"] for program in row["programs"].values())


def description(name: str) -> str:
  """Returns the differences in the first line of a family's file, with its link."""
  text = importlib.import_module(f"gspo_jax.models.families.{name}").__doc__
  text, link = re.match("[^:]*: (.*?)\\.\\s+(https:\\S+)", text.replace("\n", " ")).groups()
  return f"[{text}]({link})"


def gpu_markdown(rows: dict[str, dict[str, Any]]) -> str:
  """Formats the runs on GPUs: GiB of each, and ratios to the needs."""
  lines = [
    "| model | GPUs | trained | update | between | sampling | of | operations | bytes of a step |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
  ]
  for name, flags in GPU_RUNS.items():
    if name not in rows:
      continue
    row, (model, topology) = rows[name], name.split(" ")
    train, decode = row["train"], row["decode"]
    ratios = train["product_flops"] / train["executed_flops"]
    ratios = ratios, decode["hbm_bytes"] / decode["needed_bytes"]
    parts = f"{train['hbm_gib']:.1f}", *(f"{n:.2f}" for n in ratios)
    values = model, topology, trained(flags), *(f"{n:.1f}" for n in memory(row)), *parts
    lines.append(f"| {' | '.join(values)} |")
  return "\n".join(lines) + "\n"


def small_markdown(rows: dict[str, dict[str, Any]]) -> str:
  """Formats the runs on small slices: GiB and lower bounds of each."""
  lines = [
    "| slice | model | trained | update, GiB | sampling, GiB | update, s | decode step, ms |",
    "| --- | --- | --- | --- | --- | --- | --- |",
  ]
  for name, flags in SMALL_RUNS.items():
    row, (model, topology) = rows.get(name), name.split(" ")
    if row and all(program["fits"] for program in row.values()):
      update, _, sampling = memory(row)
      seconds = f"{row['train']['bound_s']:.2g}", f"{1e3 * row['decode']['bound_s']:.2g}"
      values = topology, model, trained(flags), f"{update:.1f}", f"{sampling:.1f}", *seconds
      lines.append(f"| {' | '.join(values)} |")
  return "\n".join(lines) + "\n"


def trained(flags: str) -> str:
  """Names the trained weights of a run."""
  return "adapters" if re.search(r"lora.rank|[:-][48]B-h100", flags) else "all"


def memory(row: dict[str, Any]) -> tuple[float, float, float]:
  """Returns the GiB of updates, of the programs between, and of sampling."""
  total = {part: program["peak_gib"] + program["held_gib"] for part, program in row.items()}
  between, sampling = max(total["score"], total["publish"]), max(total["prefill"], total["decode"])
  return total["train"], between, sampling


def replace(page: Path, mark: str, table: str) -> None:
  """Writes the table between its mark and END. ValueError if the page lacks them."""
  before, opening, after = page.read_text().partition(mark)
  _, closing, rest = after.partition(END)
  if not opening or not closing:
    raise ValueError(f"{page} lacks {mark.strip()} and, after it, {END}")
  page.write_text(before + mark + table + END + rest)


TABLES = {  # Functions of a row, a table and the names of rows; file of the rows; page.
  "slices": (tpu_row, markdown, names, "docs/sharding.json", "benchmarks/results/models.md"),
  "gpus": (run_row, gpu_markdown, GPU_RUNS.keys, "docs/gpus.json", "docs/one_chip.md"),
  "small": (run_row, small_markdown, SMALL_RUNS.keys, "docs/small.json", "docs/one_chip.md"),
  "families": (family_row, family_markdown, family_names, "docs/models.json", "docs/models.md"),
}


if __name__ == "__main__":
  main()
