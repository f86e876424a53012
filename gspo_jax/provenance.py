"""What a run was made with: the commit and the versions that figures depend on."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = "jax jaxlib libtpu flax optax orbax-checkpoint grain numpy gspo-jax".split()


def provenance() -> dict[str, Any]:
  """JSON: `commit` of the code (None where it is not a git checkout), whether there were changes
  beside it (`dirty`), `versions` by package, and the `command`."""
  root = Path(__file__).parents[1]
  versions = dict(python=platform.python_version())
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
  dirty = bool(commit and _git(root, "status", "--porcelain", "--untracked-files=no"))
  return dict(commit=commit, dirty=dirty, versions=versions, command=shlex.join(sys.argv))


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """Lines `name: old -> new` for code and packages that are not those a run was begun with."""
  a = dict(old.get("versions", {}), commit=old.get("commit"))
  b = dict(new["versions"], commit=new["commit"])
  return [
    f"{k}: {a.get(k)} -> {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)
  ]


def _git(root: Path, *arguments: str) -> str | None:
  try:
    done = subprocess.run(
      ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
