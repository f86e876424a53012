"""The house: what stands on which floor, and that nothing reaches up. Structure that is not tested
decays."""

import ast
from pathlib import Path

import pytest

from gspo_jax.settings import rules

PACKAGE = Path(__file__).parents[1] / "gspo_jax"

# From the ground. A room imports from the floors below its own, and from itself.
FLOORS = """
  verifiers
  objectives structs system tasks
  settings
  sharding rewards cli
  models data
  sampling runs configs
  learner rollouts evaluation report export
  teacher replay
  inputs
  run aot
  train sft
  main
"""
FLOOR = {room: floor for floor, line in enumerate(FLOORS.split("\n")) for room in line.split()}
LONGEST = 400  # lines of a file: one noun, one file
ROOT_FILES = 12
RULE_LINES, RULE_ROWS = 550, 110  # All rules stand in one file.

FILES = sorted(
  path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "configs"
)


def room(path: Path) -> str:
  return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
  """Rooms that a file imports from; those that are for its types alone do not count."""
  tree, rooms = ast.parse(path.read_text()), set()
  for_types = {
    node
    for block in ast.walk(tree)
    if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
    for node in ast.walk(block)
  }
  for node in set(ast.walk(tree)) - for_types:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gspo_jax"):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      rooms |= {name.split(".")[1] for name in names}
    if isinstance(node, ast.Import):
      rooms |= {x.name.split(".")[1] for x in node.names if x.name.startswith("gspo_jax.")}
  return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path):
  own = room(path)
  if own == "__init__":
    return
  up = {other for other in imports(path) - {own} if FLOOR[other] >= FLOOR[own]}
  assert not up, f"{path} imports {sorted(up)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short(path):
  longest = {PACKAGE / "settings/rules.py": RULE_LINES}.get(path, LONGEST)
  assert len(path.read_text().splitlines()) <= longest, "one noun, one file"


def test_the_root_is_the_users():
  assert len(list(PACKAGE.glob("*.py"))) <= ROOT_FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_configuration_has_a_type(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef):
      arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
      untyped = [
        x.arg
        for x in arguments
        if x.arg in ("c", "config") and (x.annotation is None or ast.unparse(x.annotation) == "Any")
      ]
      assert not untyped, f"{path}:{node.lineno}: {node.name}({untyped[0]})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_has_a_name(path):
  tree = ast.parse(path.read_text())
  lambdas = [
    node.lineno
    for node in ast.walk(tree)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
  ]
  assert not lambdas, f"{path}: assigned lambdas in lines {lambdas}"


def test_the_iteration_is_one_screen():
  (train,) = (
    node
    for node in ast.parse((PACKAGE / "train.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name == "train"
  )
  assert train.end_lineno - train.lineno < 60
  assert sum(isinstance(node, ast.FunctionDef) for node in ast.walk(train)) == 1


def test_rewards_never_import_jax():
  """Their processes would each take a second and a hundred megabytes more."""
  rooms = [path for name in ("rewards", "verifiers") for path in (PACKAGE / name).rglob("*.py")]
  for path in [*rooms, PACKAGE / "settings/rewards.py"]:
    assert "import jax" not in path.read_text(), path


def test_verifiers_import_nothing_else_of_the_package():
  for path in (PACKAGE / "verifiers").rglob("*.py"):
    assert imports(path) <= {"verifiers"}, path


def test_an_init_hands_on_names():
  for path in PACKAGE.rglob("__init__.py"):
    made = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
    assert not any(isinstance(node, made) for node in ast.parse(path.read_text()).body), path


def test_rules_stay_few():
  tables = rules.UNUSED, rules.INVALID, rules.INVALID_RL, rules.WARNINGS, rules.WARNINGS_RL
  assert sum(map(len, (*tables, rules.INVALID_DATA, rules.DATA_WARNINGS))) <= RULE_ROWS
