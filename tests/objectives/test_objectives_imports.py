"""`import gspo_jax.objectives` is `import jax` and a few short files."""

import ast
import pathlib
import subprocess
import sys

import gspo_jax.objectives as O

PACKAGE = pathlib.Path(O.__file__).parent


def test_nothing_but_jax_is_loaded():
  code = (
    "import sys, jax, jax.numpy; before = set(sys.modules); import gspo_jax.objectives; "
    "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
  )
  output = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=True,
    cwd=PACKAGE.parent.parent,
  )
  loaded = set(output.stdout.split())
  assert "gspo_jax" in loaded
  assert loaded - {"gspo_jax"} <= sys.stdlib_module_names | {"jax"}


def test_nothing_but_jax_is_imported():
  for path in PACKAGE.glob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      names += [node.module] if isinstance(node, ast.ImportFrom) else []
      for name in names:
        root = name.split(".")[0]
        ours = name.startswith("gspo_jax.objectives")
        assert ours or root == "jax" or root in sys.stdlib_module_names, (path.name, name)


def test_every_public_name_is_documented():
  public = [x for x in vars(O).values() if getattr(x, "__module__", "").startswith(O.__name__)]
  assert len(public) > 30
  for value in public:
    assert value.__doc__, value.__name__


def test_every_public_name_is_exported():
  """From a package with py.typed a type checker lets others use `x as x`, no more."""
  public = {k for k, x in vars(O).items() if getattr(x, "__module__", "").startswith(O.__name__)}
  imports = [n for n in ast.parse(pathlib.Path(O.__file__).read_text()).body if hasattr(n, "names")]
  names = [(alias.name, alias.asname) for node in imports for alias in node.names]
  assert public and set(names) == {(name, name) for name in public | {"ESTIMATORS"}}
