"""Checksum of a user's module, to notice edits of a reward function or an environment."""

import ast
import importlib.util
import zlib
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}


def checksum(name: str) -> str:
  """Returns a checksum of a module and of its local imports, direct and indirect.

  Local imports are modules of the same top-level package. If this package is not in site-packages,
  all modules in its parent directory are local, except `gspo_jax`. Local modules are read, not
  imported; only the parent packages of the module in `name` are imported.

  Args:
    name: `package.module:function`.

  Returns:
    Eight hexadecimal digits; "" for a name without a colon, or for a module without readable file.
  """
  module, colon, _ = name.partition(":")
  if not colon:
    return ""
  try:
    spec = importlib.util.find_spec(module)
    is_package = spec.submodule_search_locations is not None
    sources = _read_local(module, Path(spec.origin).parents[module.count(".") + is_package])
  except (ImportError, AttributeError, TypeError, ValueError, OSError):  # There is no file.
    return ""
  value = 0
  for module, source in sorted(sources.items()):
    value = zlib.crc32(module.encode() + source, value)
  return f"{value:08x}"


def _read_local(module: str, root: Path) -> dict[str, bytes]:
  """Reads sources of a module and its local imports, by name.

  Raises:
    OSError: the module itself cannot be read.
  """
  package = module.partition(".")[0]
  installed = not _INSTALLED.isdisjoint(root.parts)
  sources, pending = {module: _path(root, module).read_bytes()}, [module]
  while pending:
    importer = pending.pop()
    for name in _imports(sources[importer], importer, _path(root, importer)):
      first = name.partition(".")[0]
      path = _path(root, name)
      if name in sources or first == "gspo_jax" or (installed and first != package):
        continue
      if path.is_file():
        sources[name] = path.read_bytes()
        pending.append(name)
  return sources


def _path(root: Path, module: str) -> Path:
  """Returns the path of a module below `root`, even if it does not exist."""
  path = root.joinpath(*module.split("."))
  return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imports(source: bytes, module: str, path: Path) -> Iterator[str]:
  """Yields names of possibly imported modules, and of their parent packages.

  `from a import b` yields `a` and `a.b`, since b may be a module.

  Args:
    source: source of the importing module.
    module: name of the importing module, for relative imports.
    path: file of the importing module.
  """
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError):
    return
  parents = module.split(".")
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      up = node.level - (path.name == "__init__.py")
      package = parents[: len(parents) - up] if node.level else []
      base = ".".join([*package, *filter(None, [node.module])])
      names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
    else:
      continue
    for name in names:
      parts = name.split(".")
      yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
