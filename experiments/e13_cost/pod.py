"""Memory and time of the flagship's iteration on a pod, by replay and old log-probs: pod.csv.

`python -m experiments.e13_cost.pod` takes five minutes and no TPU, but libtpu (`pip install -e
'.[tpu]'`).
"""

import csv
import os
from pathlib import Path
from typing import Any

from gspo_jax.settings.reading import from_dict

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed JAX would look for a TPU

import jax

from experiments import runs
from experiments.e13_cost.conditions import ARMS
from experiments.pod import CONFIG
from gspo_jax import sharding
from gspo_jax.aot import chips, iteration
from gspo_jax.aot.compiler import check, devices_of, examine
from gspo_jax.aot.programs import Case, make_case, programs, resolved

TOPOLOGY = "v5p:4x4x4"
FILE = Path(__file__).with_name("pod.csv")
SAMPLES, TRAINS = ("publish", "prefill", "decode"), "train"


def case_of(arm: str) -> Case:
  """The flagship's configuration with an arm's keys."""
  return make_case(from_dict(runs.applied(CONFIG, ARMS[arm])))


def shared(case: Case, name: str) -> tuple:
  """What the program of this name depends on: arms that are equal there share it."""
  objective = case.config.objective
  of = {TRAINS: objective.replay, "score": None}
  return name, of.get(name, objective.needs_sampler_routing)


def compiled(case: Case, mesh: Any, known: dict[tuple, dict]) -> dict[str, dict]:
  """Rows of aot's report by program; those that are not `known` are compiled."""
  missing = [name for name in (TRAINS, "score", *SAMPLES) if shared(case, name) not in known]
  for name, program in programs(case, mesh, missing):
    known[shared(case, name)] = examine(program, TOPOLOGY, case.config.compute.remat).row
  return {name: known[shared(case, name)] for name in (TRAINS, "score", *SAMPLES)}


def main() -> None:
  known, lines = {}, []
  for arm in ARMS:
    case = case_of(arm)
    mesh = sharding.make_mesh(case.config.mesh, devices_of(TOPOLOGY))
    check(case, mesh)
    case = resolved(case, mesh)
    with jax.set_mesh(mesh):
      rows = compiled(case, mesh, known)
      found = iteration.estimate(case, mesh, chips.parse(TOPOLOGY)[1], rows)
    seconds = {part.name: part.seconds for part in found.parts}
    lines.append(
      {"arm": arm, "topology": TOPOLOGY, "iteration_s": found.seconds}
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
