"""Plans the paths inside a sandbox, where Python and NumPy have paths independent of the host.

The host's interpreter may be in a home directory or a checkout. The same path inside the sandbox
would reveal the names of the directories above the interpreter. System directories, which every
machine has, keep their paths, even if Python is in one of them. Texts in memory, such as the file
name of a code object, may still have a path of the host. But no file can be opened or examined by
such a path.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

PYTHON, PACKAGES = "/python", "/packages"
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")


def plan(packages: list[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
  """Plans the paths of this interpreter inside the sandbox.

  Args:
    packages: directories of installed packages on the host. Of their packages, only NumPy becomes
      readable. But if a directory is within a readable one, all its packages are readable.

  Returns:
    mounts: a dict from paths of the host to paths inside.
    moved: a dict from prefixes of this interpreter's paths on the host to prefixes inside.
    packages: directories to search for NumPy, as paths inside.
  """
  system = [*SYSTEM, *(path for path in ("/lib", "/lib64") if not os.path.islink(path))]
  mounts = {path: path for path in system if os.path.exists(path)}
  moved, searched = {os.path.dirname(sys.executable): f"{PYTHON}/bin"}, []
  if sys.base_prefix not in ("/", "/usr", "/usr/local"):
    moved |= dict.fromkeys((sys.base_prefix, os.path.realpath(sys.base_prefix)), PYTHON)
    if os.path.exists(library := os.path.join(sys.base_prefix, "lib")):
      mounts[library] = f"{PYTHON}/lib"
  for number, path in enumerate(sys.path):
    if os.path.exists(path) and not _below(path, mounts):
      if inside(path, moved) == path:
        moved[path] = f"{PYTHON}/{number}"
      mounts[path] = inside(path, moved)
  for directory in packages:
    directory = os.path.realpath(directory)
    target = inside(directory, moved)
    if not (_below(directory, system) or _below(target, mounts.values())):
      target = PACKAGES
      for name in ("numpy", "numpy.libs"):
        if os.path.exists(os.path.join(directory, name)):
          mounts.setdefault(os.path.join(directory, name), f"{PACKAGES}/{name}")
    searched.append(target)
  return mounts, moved, list(dict.fromkeys(searched))


def inside(path: str, moved: dict[str, str]) -> str:
  """Converts a path of the host to a path inside; a path without a moved prefix is unchanged."""
  for prefix in sorted(moved, key=len, reverse=True):
    if _below(path, [prefix]):
      return moved[prefix] + path[len(prefix) :]
  return path


def _below(path: str, directories: Iterable[str]) -> bool:
  """Whether a path is one of the directories, or within one."""
  return any(path == directory or path.startswith(f"{directory}/") for directory in directories)


def move_modules(moved: dict[str, str]) -> None:
  """Updates the paths of this interpreter and its modules, for further imports."""
  # There is no virtual environment inside.
  sys.prefix, sys.exec_prefix = sys.base_prefix, sys.base_exec_prefix
  names = "prefix exec_prefix base_prefix base_exec_prefix executable _base_executable _stdlib_dir"
  for name in names.split():
    _move(sys, name, moved)
  sys.path[:] = [inside(path, moved) for path in sys.path]
  sys.path_importer_cache.clear()
  for module in list(sys.modules.values()):
    spec = getattr(module, "__spec__", None)
    for holder, name in (
      (module, "__file__"), (module, "__cached__"), (module, "__path__"),
      (spec, "origin"), (spec, "cached"), (spec, "submodule_search_locations"),
      (getattr(spec, "loader", None), "path"),
    ):  # fmt: skip
      _move(holder, name, moved)


def _move(holder: Any, name: str, moved: dict[str, str]) -> None:
  """Converts an attribute with a path or a list of paths; ignores other attributes."""
  value = getattr(holder, name, None)
  if isinstance(value, list):
    value[:] = [inside(path, moved) for path in value]
  elif isinstance(value, str) and inside(value, moved) != value:
    setattr(holder, name, inside(value, moved))
