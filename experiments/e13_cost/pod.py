"""Estimates memory and time of an iteration on a pod, by replay and old log-probs, in pod.csv.

`python -m experiments.e13_cost.pod` takes five minutes and no TPU, but libtpu (`pip install -e
'.[tpu]'`).
"""

import csv
import os
from pathlib import Path
from typing import Any

from gspo_jax.settings.reading import from_dict

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX with libtpu would look for a TPU.

import jax

from experiments import runs
from experiments.e13_cost.conditions import ARMS
from experiments.pod import CONFIG
from gspo_jax import sharding
from gspo_jax.aot import chips, iteration
from gspo_jax.aot.compiler import check, devices_of, examine
from gspo_jax.aot.programs import Case, make_case, programs, resolve_remat

TOPOLOGY = "v5p:4x4x4"
FILE = Path(__file__).with_name("pod.csv")
SAMPLES, TRAINS = ("publish", "prefill", "decode"), "train"


def case_of(arm: str) -> Case:
  """Returns the flagship's configuration with an arm's keys."""
  return make_case(from_dict(runs.applied(CONFIG, ARMS[arm])))


def shared(case: Case, name: str) -> tuple:
  """Returns a program's key: arms with equal keys share it."""
  objective = case.config.objective
  replayed = {TRAINS: objective.replay, "score": None}
  return name, replayed.get(name, objective.needs_sampler_routing)


def compiled(case: Case, mesh: Any, cache: dict[tuple, dict]) -> dict[str, dict]:
  """Returns rows of aot's report by program; compiles those not in `cache`."""
  missing = [name for name in (TRAINS, "score", *SAMPLES) if shared(case, name) not in cache]
  for name, program in programs(case, mesh, missing):
    cache[shared(case, name)] = examine(program, TOPOLOGY, case.config.compute.remat).row
  return {name: cache[shared(case, name)] for name in (TRAINS, "score", *SAMPLES)}


def main() -> None:
  cache, lines = {}, []
  for arm in ARMS:
    case = case_of(arm)
    mesh = sharding.make_mesh(case.config.mesh, devices_of(TOPOLOGY))
    check(case, mesh)
    case = resolve_remat(case, mesh)
    with jax.set_mesh(mesh):
      rows = compiled(case, mesh, cache)
      estimated = iteration.estimate(case, mesh, chips.parse(TOPOLOGY)[1], rows)
    seconds = {part.name: part.seconds for part in estimated.parts}
    lines.append(
      {"arm": arm, "topology": TOPOLOGY, "iteration_s": estimated.seconds}
      | {f"{name}_s": seconds.get(name, 0.0) for name in rows}
      | {f"{name}_gib": row["peak_gib"] for name, row in rows.items()}
    )
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in lines[-1].items()})
  with open(FILE, "w", newline="") as file:
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
      shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()}
      writer.writerow(shown)


if __name__ == "__main__":
  main()
