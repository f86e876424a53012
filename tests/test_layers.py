"""The import arrows that may exist. Structure that is not tested decays."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gspo_jax"

# importer: what it may import. A package name stands for all its modules.
LEAVES = "objectives sharding structs system tasks settings.ranges settings.model cli.before_jax"
ARROWS = {
  "main": "aot cli evaluation report run runs sampling settings sft train",
  "train": "hardware learner report rollouts run runs sampling teacher",
  "sft": "data learner run runs",
  "rollouts": "data models rewards run runs sampling settings",
  "cli": "settings",
  "export": "models runs",
  "replay": "learner models runs sampling settings",
  "run": "data evaluation hardware learner models offline paths rewards rollouts runs sampling "
  "settings tasks teacher",
  "teacher": "data learner models runs sampling settings",
  "paths": "models rewards rollouts runs",
  "settings": "data evaluation learner models offline rewards rollouts runs sampling",
  "offline": "data learner",
  "aot": "cli configs hardware learner models run runs sampling settings teacher",
  "configs": "learner models settings",
  "evaluation": "data models rewards rollouts runs sampling settings tasks",
  "learner": "models objectives settings",
  "sampling": "models settings",
  "data": "rewards.math_answer rollouts.prompt_filter settings tasks",
  "report": "runs",
  "rewards": "tasks settings",
  "hardware": "models settings",
  "models": "settings",
  "runs": "settings learner models",
}  # all of them may import the leaves


MODULES = [
  (path, path.relative_to(PACKAGE).with_suffix("").parts[0])
  for path in sorted(PACKAGE.rglob("*.py"))
]


def imports(path: Path) -> set[str]:
  """Modules of ours that a file imports: `package` or `package.module`."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gspo_jax"):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      found |= {".".join(name.split(".")[1:3]) for name in names}
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names if alias.name.startswith("gspo_jax.")]
      found |= {".".join(name.split(".")[1:3]) for name in names}
  return found


@pytest.mark.parametrize("path, name", MODULES, ids=lambda x: getattr(x, "name", x))
def test_imports_point_downward(path, name):
  allowed = {name, *LEAVES.split(), *ARROWS.get(name, "").split()}
  wrong = {found for found in imports(path) if not allowed & {found, found.split(".")[0]}}
  assert not wrong, f"{path} imports {sorted(wrong)}"


def test_rewards_never_import_jax():
  for path in (PACKAGE / "rewards").rglob("*.py"):
    assert "import jax" not in path.read_text(), path


@pytest.mark.parametrize("path", [path for path, _ in MODULES], ids=lambda p: p.name)
def test_files_stay_short(path):
  assert len(path.read_text().splitlines()) <= 400, "one noun, one file"
