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
NO_PART = ("provenance", "resume")  # of what makes a run another one
PACKAGES = "jax jaxlib libtpu flax optax orbax-checkpoint grain numpy gspo-jax".split()


def check(workdir: Path, config: Mapping[str, Any], flag: str = "--workdir") -> None:
  """Raises ValueError if the workdir, which `flag` names, holds a run of another configuration,
  unless `resume` is "force". Of several processes the first one's workdir counts. All call it."""

  def compare() -> None:
    if config["resume"] == "force" or not (was := begun(workdir)):
      return
    if changed := _changes(was, config):
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
  """Writes config.json. Of a run that goes on, prints which keys are others than before, and warns
  if it was begun with other code or packages. `start` tells of the weights that it begins with,
  `teacher` of those that it learns from, and `tokenizer` is the name of the one that it has."""
  of_weights = dict(start=start, teacher=teacher, tokenizer=tokenizer)
  made_with = provenance() | {name: about for name, about in of_weights.items() if about}
  if was := begun(workdir):
    for line in _changes(was, config):
      sys.stderr.write(f"this run goes on with another {line}\n")
    for line in difference(_code(was.get("provenance", {})), _code(made_with)):
      sys.stderr.write(f"warning: this run was begun with another {line}\n")
  text = json.dumps(_as_json(config) | dict(provenance=made_with), indent=2)
  write_whole(workdir / FILE, [text, "\n"])  # another process that looks finds nothing, or all


def _changes(was: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
  """Lines `key: old -> new` of what makes a run another one than that of a config.json."""
  was, now = ({k: v for k, v in c.items() if k not in NO_PART} for c in (was, _as_json(config)))
  return difference(was, now)


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
  """Lines `key: old -> new` for all that differs."""
  lines = []
  for key in sorted(old.keys() | new.keys()):
    a, b = old.get(key), new.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      lines += difference(a, b, f"{prefix}{key}.")
    elif a != b:
      lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
  return lines


def provenance() -> dict[str, Any]:
  """JSON: `commit` of the code (None where it is not a git checkout), whether there were changes
  beside it (`dirty`), `versions` by package, and the `command`."""
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


def _code(made_with: Mapping[str, Any]) -> dict[str, str | None]:
  """The packages and the commit."""
  return dict(made_with.get("versions", {}), commit=made_with.get("commit"))


def begun(workdir: Path | epath.Path) -> dict[str, Any]:
  """The config.json of a workdir; {} where there is none. Raises ValueError if it is damaged."""
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


def origin(workdir: Path | None, config: Mapping[str, Any], of: str) -> dict[str, Any]:
  """What a run that goes on began with, as `record` wrote it down: of `weights` ("start"), of its
  teacher ("teacher") or of its `tokenizer`. {} if nothing is recorded, or another one is
  configured now.

  A run that is named there may have come further since: this one keeps to what it found. Of several
  processes the first one's workdir counts: it is where config.json is written. All call it.
  """
  was = hosts.run_on_first_host(lambda: begun(workdir) if workdir is not None else {})
  key = dict(start="weights").get(of, of)
  before, now = (values.get("distillation", {}) | values for values in (was, config))
  about = was.get("provenance", {}).get(of, {}) if before.get(key) == now[key] else {}
  return dict(directory=about) if isinstance(about, str) else about


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  """The configuration as it is read back: tuples are lists."""
  return json.loads(json.dumps(config))


def _git(root: Path, *arguments: str) -> str | None:
  try:
    done = subprocess.run(
      # A run that dies meanwhile must not leave a lock in the repository.
      ["git", "--no-optional-locks", "-C", str(root), *arguments],
      capture_output=True, text=True, check=True, timeout=10,
    )  # fmt: skip
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
