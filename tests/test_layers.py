"""The import arrows that may exist. Structure that is not tested decays."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gspo_jax"

# importer: what it may import. A package name stands for all its modules.
ARROWS = {
  "main": "config context failures huge_pages preemption rollout_viewer sft train",
  "replay": "checkpoint config context failures metrics optimizer packing sharding structs"
  " train_step",
  "partial": "context sampling structs",
  "train": "alarms checkpoint context data failures metrics minibatches multi_turn objectives"
  " optimizer partial preemption programs query_set rollout_viewer roofline sampling structs"
  " train_step",
  "programs": "context minibatches models sharding structs train_step",
  "minibatches": "config context models multi_turn packing query_set sharding structs",
  "sft": "checkpoint context data failures metrics optimizer preemption sharding structs"
  " train_step",
  "failures": "checkpoint context sharding structs",
  "checkpoint": "mirror preemption",
  "metrics": "tracking",
  "evaluate": "elo metrics models rewards sampling structs tokenizer unfinished",
  "context": "checkpoint config data evaluate metrics mirror models provenance rewards sampling"
  " sharding structs tokenizer",
  "provenance": "config",
  "config": "alarms checkpoint data evaluate models optimizer rewards sampling sharding train_step",
  "aot": "aot_programs config hlo_costs models roofline sharding structs",
  "aot_programs": "config models optimizer roofline sampling sharding structs train_step",
  "roofline": "models",
  "train_step": "models objectives packing rows sharding structs",
  "packing": "sharding structs",
  "rows": "models sharding structs",
  "data": "data_embedded data_files data_rows query_set rewards structs tokenizer",
  "data_embedded": "data_files rewards structs tokenizer",
  "data_rows": "data_files rewards structs tokenizer",
  "multi_turn": "context objectives query_set sampling structs",
  "query_set": "structs",
  "rollout_viewer": "metrics report_data report_rollouts",
  "report_data": "metrics report_figures",
  "report_rollouts": "metrics",
  "sampling": "models preemption sharding structs",
  "models": "sharding",
}  # everything else is a leaf: it imports nothing of ours


MODULES = [
  (path, path.relative_to(PACKAGE).with_suffix("").parts[0])
  for path in sorted(PACKAGE.rglob("*.py"))
]


def imports(path: Path) -> set[str]:
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gspo_jax"):
      below = node.module.split(".")[1:]
      found |= {below[0]} if below else {alias.name for alias in node.names}
    if isinstance(node, ast.Import):
      found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("gspo_jax.")}
  return found


@pytest.mark.parametrize("path, name", MODULES, ids=lambda x: getattr(x, "name", x))
def test_imports_point_downward(path, name):
  allowed = set(ARROWS.get(name, "").split()) | {name}
  assert imports(path) <= allowed, f"{path} imports {sorted(imports(path) - allowed)}"


def test_there_are_no_cycles():
  below = {name: set(arrows.split()) for name, arrows in ARROWS.items()}

  def reach(name, seen):
    assert name not in seen, f"cycle: {' -> '.join([*seen, name])}"
    for other in below.get(name, ()):
      reach(other, [*seen, name])

  for name in below:
    reach(name, [])


def test_rewards_never_import_jax():
  for path in (PACKAGE / "rewards").glob("*.py"):
    assert "import jax" not in path.read_text(), path


@pytest.mark.parametrize("path", [path for path, _ in MODULES], ids=lambda p: p.name)
def test_files_stay_short(path):
  assert len(path.read_text().splitlines()) <= 420, "one noun, one file, about 400 lines"
