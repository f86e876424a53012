"""Command line: python -m gspo_jax.aot --config=configs/moe_aime.py --topology=v5p:4x4x4

Compiles the jitted programs of a run for TPUs or GPUs, on a machine without these devices. Prints
the memory and HBM traffic of each program, and for TPUs lower bounds on its time. Exits with an
error if a program does not fit into memory. With --search the command compiles updates and
sampling with several settings, and prints the fastest settings. It then exits with an error if no
compiled program fits. Compilers are installed with `pip install -e '.[tpu]'` for TPUs, and with
`pip install -e '.[aot-cuda]'` for GPUs (--topology=h100:8).
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.begin_command("train")

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # With libtpu installed, JAX would look for a TPU.

import jax
from absl import app, flags, logging

from gspo_jax import sharding
from gspo_jax.aot import chips, estimate, explain, iteration, verdict
from gspo_jax.aot.compiler import announce, check, devices_of, examine
from gspo_jax.aot.programs import PROGRAMS, Case, make_case, program_names, programs, resolve_remat
from gspo_jax.aot.search import find, sampling, updates
from gspo_jax.aot.table import print_line, print_row, slices_text, title
from gspo_jax.cli import flags as config_flag
from gspo_jax.inputs import model_of_weights
from gspo_jax.settings import run as configuration

flags.adopt_module_key_flags(config_flag)
_TOPOLOGY = flags.DEFINE_string(
  "topology",
  "v5p:4x4x4",
  "TPUs as CHIP:AxB or CHIP:AxBxC (v4, v5e, v5p, v6e, tpu7x), or GPUs as GPU:N or GPU:HOSTSxN "
  "(a100, a100-40, h100, h200, b200).",
)
_TARGET = flags.DEFINE_string(
  "target",
  "",
  "File that describes the GPU to XLA (a GpuTargetConfigProto in text format). By default the "
  "description is built from the data sheet of the GPU in --topology.",
)
_SLICES = flags.DEFINE_integer(
  "slices", 1, "Number of TPU slices; mesh.data must be a multiple of this number.", lower_bound=1
)
_SEQUENCES = flags.DEFINE_integer(
  "sequences",
  0,
  "Sequences per update (programs train and score), in one micro-batch; 0: the configured numbers "
  "of sequences and micro-batches.",
  lower_bound=0,
)
_LENGTH = flags.DEFINE_integer(
  "length",
  0,
  "Tokens per sequence (programs train and score); 0: data.max_prompt_tokens plus "
  "sampling.max_new_tokens.",
  lower_bound=0,
)
_SLOTS = flags.DEFINE_integer(
  "slots",
  0,
  "Responses that the sampler decodes at once, over all devices; 0: engine.slots.",
  lower_bound=0,
)
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Programs to compile.")
_SEARCH = flags.DEFINE_bool(
  "search",
  False,
  "Search for the fastest settings of the updates (program train), then of the sampling (program "
  "decode) on the mesh of these updates.",
)
_TRIES = flags.DEFINE_integer(
  "tries", 8, "Maximum number of programs compiled by each of the two searches.", lower_bound=1
)
_MEAN_RESPONSE = flags.DEFINE_integer(
  "mean_response",
  0,
  "Assumed mean number of tokens of a response; 0: half of sampling.max_new_tokens, at most 8,192.",
  lower_bound=0,
)
_MEAN_PROMPT = flags.DEFINE_integer(
  "mean_prompt",
  0,
  "Assumed mean number of tokens of a prompt; 0: a quarter of data.max_prompt_tokens.",
  lower_bound=0,
)
_EXPLAIN = flags.DEFINE_integer(
  "explain",
  0,
  "Maximum number of source lines to print per program, most HBM traffic first; not with --search.",
  lower_bound=0,
)
_TEXT = flags.DEFINE_string(
  "text", "", "Also write the compiled programs (HLO text) into this directory; not with --search."
)
_JSON = flags.DEFINE_string("json", "", "Also write the report to this file.")


def main(argv: list[str]) -> None:
  """Compiles the programs, or searches for the fastest settings.

  Exits with an error if a program does not fit. With --search, one setting of it must fit.
  """
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  try:
    config = config_flag.read_config(model_of_weights)
    if _JSON.value and not Path(_JSON.value).absolute().parent.is_dir():
      raise ValueError(
        f"--json={_JSON.value}: {Path(_JSON.value).parent} is no directory; create it"
      )
    check_config(config)
    case = make_case(
      config,
      _SEQUENCES.value,
      _LENGTH.value,
      slots=_SLOTS.value,
      mean_response=_MEAN_RESPONSE.value,
      mean_prompt=_MEAN_PROMPT.value,
    )
    unknown = set(_PROGRAMS.value) - set(PROGRAMS)
    if unknown:
      raise ValueError(
        f"--programs={','.join(sorted(unknown))}: unknown; the programs are {', '.join(PROGRAMS)}"
      )
    names = [name for name in _PROGRAMS.value if name in program_names(config)]
    if not names:
      raise ValueError(
        f"--programs={','.join(_PROGRAMS.value)}: with engine.name={config.engine.name!r} a run "
        f"compiles only {', '.join(program_names(config))}; choose among these"
      )
    if _SEARCH.value:
      rows, failed = search(case, _TOPOLOGY.value, names, _TRIES.value, _SLICES.value)
    else:
      rows = report(case, _TOPOLOGY.value, names, _SLICES.value)
      failed = [f"{row['program']} {row['error']}" for row in rows if not row["fits"]]
    if _JSON.value:
      Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n")
  except (ValueError, OSError) as error:
    config_flag.refuse(error)
  if failed:
    sys.exit(f"gspo_jax.aot: does not fit {_TOPOLOGY.value}: {'; '.join(failed)}")


def check_config(config: configuration.RunConfig) -> None:
  """Raises ValueError for a job without iterations of RL, and for a rollout mesh.

  The compiled programs are those of an iteration, all for one mesh.
  """
  if not config.has_iterations:
    raise ValueError(
      f"job={config.job!r} has no iterations, whose programs this command compiles; `python -m "
      "gspo_jax.main --dry_run --topology=...` estimates the memory of this job"
    )
  if config.rollout_mesh.enabled:
    raise ValueError(
      f"rollout_mesh={dataclasses.asdict(config.rollout_mesh)}: this command compiles for one mesh."
      " Set rollout_mesh.fsdp=0 and run the command twice: first with --programs=train,score and "
      "the trainer's mesh, then with --programs=prefill,decode and the sampler's axis sizes in "
      "config.mesh"
    )


def search(
  case: Case, topology: str, names: list[str], tries: int, slices: int
) -> tuple[list[dict[str, Any]], list[str]]:
  """Searches for the fastest settings of updates ("train") and of sampling ("decode").

  The search for sampling keeps the mesh of the fastest updates, else the configured mesh. Returns
  a row per compiled candidate, and the reason of each search without a fitting candidate. If a
  search compiles none, its only row has this reason as `error`.

  Args:
    case: configuration and batch to begin with.
    topology: chips of one slice, e.g. "v5p:4x4x4".
    names: names of programs. Settings are searched for "train" and "decode" alone.
    tries: maximum number of compiled candidates per search.
    slices: number of TPU slices.

  Raises:
    ValueError: `names` has neither "train" nor "decode", or the chips are GPUs.
  """
  if chips.parse(topology)[0].cuda:
    raise ValueError(
      f"--topology={topology}: --search ranks settings by time, which is unknown for GPUs; leave "
      "--search out"
    )
  if not {"train", "decode"} & {*names}:
    raise ValueError(
      f"--programs={','.join(names)}: --search finds settings for train and decode alone; name "
      "train or decode"
    )
  rows, searches, devices = [], [], devices_of(topology, slices)
  target = slices_text(topology, slices)
  if "train" in names:
    print_line(
      f"updates on {target}: {case.sequences} sequences x {case.length} tokens. A name is data x "
      "fsdp x expert x tensor, micro-batches, remat, expert_chunk/logits_chunk, compute.xla"
    )
    lists = updates(case, len(devices), slices)
    searches.append(find("train", lists, topology, tries, slices=slices))
    rows, case = searches[0].report(), searches[0].best or case
  if "decode" in names:
    print_line(
      f"sampling on {target}: responses of {case.lengths.mean:,.0f} tokens on average and at most "
      f"{case.lengths.most:,}. A name is slots, cache positions (0: a full window per slot), "
      "tokens of a prefill, mesh.rollout_experts"
    )
    shards = sharding.batch_shards(sharding.make_mesh(case.config.mesh, devices))
    searches.append(find("decode", sampling(case, shards), topology, tries, slices=slices))
    rows += searches[-1].report()
  for line in verdict.search_lines(searches, target, sys.argv[1:]):
    print_line(line)
  return rows, [f"{x.program} {x.needs()}" for x in searches if not x.best]


def report(case: Case, topology: str, names: list[str], slices: int) -> list[dict[str, Any]]:
  """Compiles the named programs; prints and returns a row for each.

  If all of PROGRAMS were compiled for TPUs, also estimates the time of an iteration.
  """
  target = Path(_TARGET.value).read_text() if _TARGET.value else ""
  mesh = sharding.make_mesh(case.config.mesh, devices_of(topology, slices, target))
  chip, num_chips = chips.mesh_chips(topology, mesh)
  check(case, mesh)
  case = resolve_remat(case, mesh)
  print_line(title(case, topology, mesh, slices))
  rows = []
  with jax.set_mesh(mesh):
    for name, program in programs(case, mesh, names):
      with announce(name):
        compiled = examine(program, topology, case.config.compute.remat)
      row = dict(program=name) | compiled.row
      if "hbm_bytes" in row:
        minimum = estimate.needed(name, case, mesh) * chip.devices
        row |= dict(needed_bytes=minimum, moved_over_needed=row["hbm_bytes"] / minimum)
      print_row(row, header=not rows)
      for line in explain.lines(compiled.costs, _EXPLAIN.value, 1 / program.steps):
        print_line(line)
      if _TEXT.value:
        Path(_TEXT.value).mkdir(parents=True, exist_ok=True)
        Path(_TEXT.value, f"{name}.txt").write_text(compiled.text)
      rows.append(row)
  by_name = {row["program"]: row for row in rows if "bound_s" in row}
  if by_name.keys() >= set(PROGRAMS) and len(by_name) == len(rows):
    estimated = iteration.estimate(case, mesh, num_chips, by_name)
    for line in iteration.lines(estimated, case):
      print_line(line)
    rows[-1]["iteration"] = dataclasses.asdict(estimated) | dict(
      seconds=estimated.seconds, tokens_per_second_and_chip=estimated.speed
    )
  shards = sharding.batch_shards(mesh)
  for line in verdict.lines(rows, case, slices_text(topology, slices), shards, sys.argv[1:]):
    print_line(line)
  return rows


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse)
