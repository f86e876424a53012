"""The import arrows that may exist. Structure that is not tested decays."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gspo_jax"

# importer: what it may import. A package name stands for all its modules.
ARROWS = {
  "main": "config huge_pages report run runs sft train",
  "replay": "config learner run runs sharding structs",
  "partial": "run sampling structs",
  "train": "data hardware learner minibatches multi_turn objectives partial programs report run"
  " runs sampling structs",
  "programs": "learner minibatches models run sharding structs",
  "minibatches": "config data learner models multi_turn run sharding structs",
  "multi_turn": "data objectives run sampling structs",
  "sft": "data learner run runs sharding structs",
  "run": "config data evaluation models rewards runs sampling sharding structs tasks",
  "config": "data evaluation learner models rewards runs sampling sharding",
  "aot": "config hardware learner models sampling sharding structs",
  "evaluation": "data models rewards runs sampling structs tasks",
  "learner": "models objectives sharding structs",
  "sampling": "models runs sharding structs",
  "data": "rewards structs tasks",
  "rewards": "tasks",
  "report": "runs",
  "runs": "run sharding structs",
  "hardware": "models",
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
  allowed = set(ARROWS.get(name, "").split()) | {name, "ranges"}
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
