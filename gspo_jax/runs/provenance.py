"""Origin of a run: configuration, commit, and the versions that figures depend on."""

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from gspo_jax.system import hosts, jsons
from gspo_jax.system.files import write_whole

FILE = "config.json"
NO_PART = ("provenance", "resume")  # Keys that do not make a run another one.
ORIGINS = dict(start="weights", teacher="teacher", tokenizer="tokenizer")  # Keys that name them.
PACKAGES = "jax jaxlib libtpu flax optax orbax-checkpoint grain numpy gspo-jax".split()


def check(workdir: Path, config: Mapping[str, Any], flag: str = "--workdir") -> None:
  """Raises ValueError if a workdir holds a run of another configuration, unless `resume` is
  "force". The message names `flag`. The first process's workdir counts. All processes call it."""

  def compare() -> None:
    if config["resume"] == "force" or not (recorded := read(workdir)):
      return
    if changed := _changes(recorded, config):
      raise ValueError(
        f"{workdir / FILE} belongs to a run of another configuration ({'; '.join(changed)}): use "
        f"another {flag}, or --config.resume=force to go on with this one"
      )

  hosts.run_on_first_host(compare)


def record(
  workdir: Path,
  config: Mapping[str, Any],
  start: Mapping[str, Any] | None = None,
  teacher: Mapping[str, Any] | None = None,
  tokenizer: str = "",
) -> None:
  """Writes config.json. Prints the keys that differ from before if the run continues, and warns of
  other code or packages.

  Args:
    start: origin of the first weights; None or {} if they are random.
    teacher: origin of the teacher's weights; None without a teacher.
    tokenizer: name of the tokenizer.
  """
  origins = dict(start=start, teacher=teacher, tokenizer=tokenizer)
  written = provenance() | {part: about for part, about in origins.items() if about}
  if recorded := read(workdir):
    for line in _changes(recorded, config):
      sys.stderr.write(f"this run goes on with another {line}\n")
    for line in difference(_code(recorded.get("provenance", {})), _code(written)):
      sys.stderr.write(f"warning: this run was begun with another {line}\n")
  text = json.dumps(_as_json(config) | dict(provenance=written), indent=2)
  write_whole(workdir / FILE, [text, "\n"])  # Another process never reads half of it.


def _changes(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
  """Returns lines `key: old -> new` for keys of the run's identity."""
  old, new = (
    {k: v for k, v in c.items() if k not in NO_PART} for c in (recorded, _as_json(config))
  )
  return difference(old, new)


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
  """Returns lines `key: old -> new` for all differences."""
  lines = []
  for key in sorted(old.keys() | new.keys()):
    a, b = old.get(key), new.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      lines += difference(a, b, f"{prefix}{key}.")
    elif a != b:
      lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
  return lines


def provenance() -> dict[str, Any]:
  """Returns JSON of code and packages: `commit` (None outside a git checkout), `dirty` if it was
  changed since, `versions`, `command`."""
  root = Path(__file__).parents[2]
  versions = dict(python=platform.python_version())
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
  dirty = bool(commit and _git(root, "status", "--porcelain", "--untracked-files=no"))
  return dict(commit=commit, dirty=dirty, versions=versions, command=shlex.join(sys.argv))


def _code(origin: Mapping[str, Any]) -> dict[str, str | None]:
  """Returns versions of packages, and the commit."""
  return dict(origin.get("versions", {}), commit=origin.get("commit"))


def read(workdir: Path | epath.Path) -> dict[str, Any]:
  """Reads config.json of a workdir; {} if it is absent. Raises ValueError if it is damaged."""
  path = workdir / FILE
  if not path.exists():
    return {}
  try:
    config = jsons.parse_object(path.read_bytes())
    if isinstance(config.get("provenance", {}), dict):
      return config
    error = "its provenance is no object"
  except (OSError, ValueError) as reason:
    error = reason
  raise ValueError(
    f"{path} is damaged ({error}): put it back, remove it if the "
    "configuration is the same as before, or use another --workdir"
  )


def recorded_origins(workdir: Path | None, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the origins of a run by part of its provenance; {} for an unknown or new one.

  A run that continues keeps to these, even if its keys name newer weights by now. The first
  process's workdir counts. All processes call it.
  """
  recorded = hosts.run_on_first_host(lambda: read(workdir) if workdir is not None else {})
  old, new = (values.get("distillation", {}) | values for values in (recorded, config))
  origins = {}
  for part, key in ORIGINS.items():
    about = recorded.get("provenance", {}).get(part, {}) if old.get(key) == new.get(key) else {}
    origins[part] = dict(directory=about) if isinstance(about, str) else about
  return origins


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the configuration as JSON keeps it: tuples are lists."""
  return json.loads(json.dumps(config))


def _git(root: Path, *arguments: str) -> str | None:
  try:
    completed = subprocess.run(
      # A run that is killed here must not leave a lock in the repository.
      ["git", "--no-optional-locks", "-C", str(root), *arguments],
      capture_output=True, text=True, check=True, timeout=10,
    )  # fmt: skip
  except (OSError, subprocess.SubprocessError):
    return None
  return completed.stdout.strip()
