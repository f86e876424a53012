"""The house: what stands on which floor, and that nothing reaches up. Structure that is not tested
decays."""

import ast
import graphlib
from pathlib import Path

from gspo_jax.settings import rules

PACKAGE = Path(__file__).parents[1] / "gspo_jax"

# From the ground. A room imports from the floors below its own, and from itself.
FLOORS = """
  verifiers
  objectives structs system
  tasks
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
  __main__
"""
FLOOR = {room: floor for floor, line in enumerate(FLOORS.split("\n")) for room in line.split()}
LONGEST = 400  # lines of a file: one noun, one file
ROOT_FILES = 12
RULE_LINES, RULE_ROWS = 550, 110  # All rules stand in one file.

LONGEST_FUNCTION = 60
OPTIONAL_FIELDS = 8
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Path inside the package, and the parsed text, of each file.
FILES = {
  str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
  for path in sorted(PACKAGE.rglob("*.py"))
  if path.relative_to(PACKAGE).parts[0] != "configs"
}
MODULES = {
  ".".join(("gspo_jax", *Path(file).with_suffix("").parts)).removesuffix(".__init__"): tree
  for file, tree in FILES.items()
}


def room(file: str) -> str:
  return Path(file).with_suffix("").parts[0]


def names(tree: ast.AST) -> set[str]:
  """Full names imported from the package, those for types alone included."""
  nodes = list(ast.walk(tree))
  imported = {x.name for node in nodes if isinstance(node, ast.Import) for x in node.names}
  for node in nodes:
    if isinstance(node, ast.ImportFrom):
      imported |= {f"{node.module}.{x.name}" for x in node.names}
  return {name for name in imported if name.startswith("gspo_jax.")}


def imports(tree: ast.AST) -> set[str]:
  """Rooms that a file imports from."""
  return {name.split(".")[1] for name in names(tree)}


def modules(tree: ast.AST) -> set[str]:
  """Modules that a file imports, or imports from."""
  return {name if name in MODULES else name.rpartition(".")[0] for name in names(tree)}


def faults(check) -> list[str]:
  """Texts of what `check` finds in each file."""
  return [f"{file}: {fault}" for file, tree in FILES.items() for fault in check(file, tree)]


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
  return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def upward(file, tree):
  for other in sorted(imports(tree) - {room(file)}) if file != "__init__.py" else ():
    if FLOOR[other] >= FLOOR[room(file)]:
      yield f"imports {other}, which is not below"


def too_long(file, tree):
  lines = len((PACKAGE / file).read_text().splitlines())
  if lines > (RULE_LINES if file == "settings/rules.py" else LONGEST):
    yield f"{lines} lines; one noun, one file"
  for node in functions(tree):
    length = node.end_lineno - node.lineno + 1
    if length > LONGEST_FUNCTION:
      yield f"{node.name} has {length} lines"


def untyped(_, tree):
  for node in functions(tree):
    for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
      kind = x.annotation and ast.unparse(x.annotation)
      if x.arg in ("c", "config") and kind in (None, "Any"):
        yield f"line {node.lineno}: {node.name}({x.arg}) has no type"


def assigned_lambdas(_, tree):
  for node in ast.walk(tree):
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
      yield f"line {node.lineno}: a lambda is assigned"


def many_optional(_, tree):
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef):
      kinds = [ast.unparse(x.annotation) for x in node.body if isinstance(x, ast.AnnAssign)]
      optional = sum("None" in kind for kind in kinds)
      if optional > OPTIONAL_FIELDS:
        yield f"{node.name} has {optional} optional fields"


def test_imports_point_downward():
  assert not faults(upward)


def test_imports_make_no_circle():
  """Neither within a room nor for types alone."""
  graph = {name: modules(tree) - {name} for name, tree in MODULES.items()}
  list(graphlib.TopologicalSorter(graph).static_order())


def test_files_and_functions_stay_short():
  assert not faults(too_long)


def test_the_root_is_the_users():
  assert len(list(PACKAGE.glob("*.py"))) <= ROOT_FILES


def test_a_configuration_has_a_type():
  assert not faults(untyped)


def test_a_function_has_a_name():
  assert not faults(assigned_lambdas)


def test_structs_have_few_optional_fields():
  assert not faults(many_optional)


def test_the_iteration_is_one_screen():
  (train,) = (x for x in FILES["train.py"].body if getattr(x, "name", "") == "train")
  assert train.end_lineno - train.lineno < 60
  assert sum(isinstance(node, ast.FunctionDef) for node in ast.walk(train)) == 1


def test_rewards_never_import_jax():
  """Their processes would each take a second and a hundred megabytes more."""
  for file in FILES:
    if room(file) in ("rewards", "verifiers") or file == "settings/rewards.py":
      assert "import jax" not in (PACKAGE / file).read_text(), file


def test_verifiers_import_nothing_else_of_the_package():
  for file, tree in FILES.items():
    assert room(file) != "verifiers" or imports(tree) <= {"verifiers"}, file


def test_an_init_hands_on_names():
  statements = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
  for file, tree in FILES.items():
    assert not file.endswith("__init__.py") or not any(
      isinstance(x, statements) for x in tree.body
    ), file


def test_rules_stay_few():
  tables = rules.UNUSED, rules.INVALID, rules.INVALID_RL, rules.WARNINGS, rules.WARNINGS_RL
  assert sum(map(len, (*tables, rules.INVALID_DATA, rules.DATA_WARNINGS))) <= RULE_ROWS
