"""The import arrows that may exist. Structure that is not tested decays."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gspo_jax"

# importer: what it may import. A package name stands for all its modules.
# They import nothing but ranges.
LEAVES = "accelerators command_line hosts jsons objectives ranges sharding structs tasks"
ARROWS = {
  "main": "config config_flag dry_run evaluation report run runs sampling sft train",
  "serve": "config config_flag data models paths sampling serving weights",
  "train": "collect hardware learner objectives pipeline records report run runs segments steps "
  "teacher",
  "sft": "data learner run runs",
  "records": "collect",
  "pipeline": "collect groups run runs sampling",
  "collect": "constraints costs data group_metrics groups rewards run sampling schedules segments",
  "costs": "groups sampling",
  "group_metrics": "groups models sampling",
  "groups": "data sampling",
  "config_flag": "config",
  "serving": "data.tokenizer sampling",
  "export": "models runs weights",
  "weights": "config learner models runs",
  "replay": "config learner models runs sampling",
  "run": "config consistency constraints data evaluation hardware learner models offline paths "
  "rewards runs sampling schedules steps tasks teacher weights",
  "teacher": "data learner models runs sampling weights",
  "paths": "constraints models rewards runs",
  "config": "consistency constraints data evaluation learner models rewards runs "
  "sampling schedules",
  "consistency": "constraints offline sampling schedules",
  "constraints": "groups rewards sampling",
  "offline": "data learner",
  "aot": "config config_flag hardware learner models sampling teacher",
  "dry_run": "aot config configs hardware learner models run runs teacher",
  "configs": "learner models",
  "evaluation": "constraints data group_metrics models rewards runs sampling tasks",
  "learner": "models objectives",
  "sampling": "models runs.preemption",
  "data": "rewards.math_answer tasks",
  "report": "runs",
  "rewards": "tasks",
  "hardware": "models",
  "models": "",
  "runs": "",
  "schedules": "runs.files runs.metrics",
  "segments": "",
  "steps": "",
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
  allowed = {name, "ranges"}
  if name not in LEAVES.split():
    allowed |= {*LEAVES.split(), *ARROWS.get(name, "").split()}
  wrong = {found for found in imports(path) if not allowed & {found, found.split(".")[0]}}
  assert not wrong, f"{path} imports {sorted(wrong)}"


def test_there_are_no_cycles():
  below = {name: [x.split(".")[0] for x in arrows.split()] for name, arrows in ARROWS.items()}

  def reach(name, seen):
    assert name not in seen, f"cycle: {' -> '.join([*seen, name])}"
    for other in below.get(name, ()):
      reach(other, [*seen, name])

  for name in below:
    reach(name, [])


def test_rewards_never_import_jax():
  for path in (PACKAGE / "rewards").rglob("*.py"):
    assert "import jax" not in path.read_text(), path


@pytest.mark.parametrize("path", [path for path, _ in MODULES], ids=lambda p: p.name)
def test_files_stay_short(path):
  assert len(path.read_text().splitlines()) <= 400, "one noun, one file"
