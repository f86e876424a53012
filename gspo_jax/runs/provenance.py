"""Provenance of a run in config.json: configuration, commit and package versions."""

import dataclasses
import datetime
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

from gspo_jax.settings.run import RunConfig
from gspo_jax.system import hosts, jsons
from gspo_jax.system.files import write_whole

FILE = "config.json"
IGNORED = ("provenance", "resume")  # Keys of config.json that comparisons ignore.
# Maps each source's key in the section `provenance` to the configuration key that names the source.
ORIGINS = dict(start="weights", teacher="teacher", tokenizer="tokenizer")
PACKAGES = "jax jaxlib libtpu flax optax orbax-checkpoint grain numpy gspo-jax".split()


def check_configuration(
  workdir: Path | epath.Path, config: Mapping[str, Any], flag: str = "--workdir"
) -> dict[str, Any]:
  """Compares config.json with `config`. Returns the content of config.json; {} for a new run.

  Collective: call it on all hosts. Only the first host's workdir is read.

  Args:
    workdir: directory of the run.
    config: configuration of this start.
    flag: command-line flag of the directory, for the error message.

  Raises:
    ValueError: config.json is damaged; or it has another configuration, and `resume` is not
      "force".
  """

  def compare() -> dict[str, Any]:
    recorded = read(workdir)
    changed = changes(recorded, config)
    if changed and config["resume"] != "force":
      evaluate = config.get("job") == "eval" != recorded.get("job")
      hint = f" with --config.weights={workdir} to evaluate this run" if evaluate else ""
      raise ValueError(
        f"{workdir / FILE} belongs to a run of another configuration ({'; '.join(changed)}): use "
        f"another {flag}{hint}, or --config.resume=force to resume with the new "
        "configuration"
      )
    return recorded

  return hosts.run_on_first_host(compare)


def check_contents(workdir: Path, config: Mapping[str, Any], contents: Mapping[str, str]) -> None:
  """Raises ValueError if weights, held-out problems or functions have changed.

  If `resume` is "force", nothing is checked.

  Args:
    workdir: directory of the run.
    config: configuration of this start.
    contents: descriptions from `contents.describe`.
  """
  if config["resume"] == "force":
    return
  if changed := _changed_contents(read(workdir), contents):
    raise ValueError(
      f"the run in {workdir} was last started with other contents of {'; '.join(changed)}: restore "
      "the old contents, use another --workdir, or --config.resume=force to resume with the new "
      "ones"
    )


def _changed_contents(recorded: Mapping[str, Any], contents: Mapping[str, str]) -> list[str]:
  """Returns lines `key: old -> new` for changed keys. A key in one argument alone is ignored."""
  old = recorded.get("provenance", {}).get("contents", {})
  common = old.keys() & contents.keys()
  return difference({k: old[k] for k in common}, {k: contents[k] for k in common})


def record(
  workdir: Path,
  config: Mapping[str, Any],
  start: Mapping[str, Any] | None = None,
  teacher: Mapping[str, Any] | None = None,
  tokenizer: str = "",
  date: datetime.datetime | None = None,
  contents: Mapping[str, str] | None = None,
) -> None:
  """Writes config.json.

  For a resumed run, prints changed keys, and warnings about a changed commit or package version.

  Args:
    workdir: directory of the run.
    config: configuration of this start.
    start: origin of the initial weights; None or {} for random weights.
    teacher: origin of the teacher's weights; None if there is no teacher.
    tokenizer: name of the tokenizer; "" to record none.
    date: date of the run's first start; None to record no date.
    contents: descriptions from `contents.describe`; None to record none.
  """
  origins = dict(start=start, teacher=teacher, tokenizer=tokenizer, contents=contents)
  written = provenance() | {part: about for part, about in origins.items() if about}
  if date is not None:
    written["date"] = date.isoformat(timespec="seconds")
  if recorded := read(workdir):
    for line in [*changes(recorded, config), *_changed_contents(recorded, contents or {})]:
      sys.stderr.write(f"this run resumes with another {line}\n")
    for line in difference(_code(recorded.get("provenance", {})), _code(written)):
      sys.stderr.write(f"warning: this run resumes with another {line}\n")
  text = json.dumps(_as_json(config) | dict(provenance=written), indent=2)
  write_whole(workdir / FILE, [text, "\n"])  # Other processes may read the file meanwhile.


def changes(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
  """Returns lines `key: old -> new` for changed keys. [] for a new run.

  A configuration that an older version of the package recorded may lack keys. A missing key counts
  as having its default, since the older version behaved like the default.
  """
  if not recorded:
    return []
  defaults = _as_json(dataclasses.asdict(RunConfig()))
  old, new = (
    {k: v for k, v in _complete(c, defaults).items() if k not in IGNORED}
    for c in (recorded, _as_json(config))
  )
  return difference(old, new)


def _complete(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Adds missing keys with their defaults, in nested sections too."""

  def complete(value: Any, default: Any) -> Any:
    is_section = isinstance(value, Mapping) and isinstance(default, Mapping)
    return _complete(value, default) if is_section else value

  return dict(defaults) | {k: complete(v, defaults.get(k)) for k, v in values.items()}


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
  """Returns lines `key: old -> new` for all differences. Keys in nested mappings are dotted.

  Args:
    old: previous values.
    new: current values.
    prefix: beginning of every key, such as "model.".
  """
  lines = []
  for key in sorted(old.keys() | new.keys()):
    a, b = old.get(key), new.get(key)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      lines += difference(a, b, f"{prefix}{key}.")
    elif a != b:
      lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
  return lines


def provenance() -> dict[str, Any]:
  """Returns commit, package versions and command line, serialisable as JSON.

  Keys: `commit` (None outside a git checkout), `dirty` (whether tracked files differ from the
  commit), `versions` of packages, and `command`.
  """
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


def _code(provenance: Mapping[str, Any]) -> dict[str, str | None]:
  """Returns package versions and commit from a section `provenance`."""
  return dict(provenance.get("versions", {}), commit=provenance.get("commit"))


def read(workdir: Path | epath.Path) -> dict[str, Any]:
  """Reads a workdir's config.json; {} if absent. Raises ValueError for a damaged file."""
  path = workdir / FILE
  if not path.exists():
    return {}
  try:
    config = jsons.parse_object(path.read_bytes())
    if isinstance(config.get("provenance", {}), dict):
      return config
    error = "its provenance is not a JSON object"
  except (OSError, ValueError) as reason:
    error = reason
  raise ValueError(
    f"{path} is damaged ({error}): restore it, remove it if the "
    "configuration is the same as before, or use another --workdir"
  )


def recorded_origins(
  recorded: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
  """Returns the record in config.json about each source in ORIGINS.

  A resumed run keeps these sources, even if a repository or another run has a newer version. The
  record is {} for a new run, and for a source whose configured name has changed.
  """
  # The teacher's key is in section `distillation`. The other keys are in no section.
  old, new = (values.get("distillation", {}) | values for values in (recorded, config))
  origins = {}
  for part, key in ORIGINS.items():
    about = recorded.get("provenance", {}).get(part, {}) if old.get(key) == new.get(key) else {}
    # The record of the tokenizer is its name alone.
    origins[part] = dict(directory=about) if isinstance(about, str) else about
  return origins


def first_start(recorded: Mapping[str, Any]) -> datetime.datetime:
  """Returns the date of a run's first start; the first host's current date if none is recorded.

  Chat templates may write the date into prompts, so a resumed run must keep it. Collective: call it
  on all hosts. Raises ValueError if the recorded date is unreadable.
  """
  current = hosts.broadcast(datetime.datetime.now().isoformat(timespec="seconds"))
  text = recorded.get("provenance", {}).get("date") or current
  try:
    return datetime.datetime.fromisoformat(text)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{FILE} is damaged (provenance.date={text!r:.40}): restore it") from error


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the configuration after a JSON round trip: tuples become lists."""
  return json.loads(json.dumps(config))


def _git(root: Path, *arguments: str) -> str | None:
  try:
    completed = subprocess.run(
      # Without optional locks, a killed command leaves no lock file in the repository.
      ["git", "--no-optional-locks", "-C", str(root), *arguments],
      capture_output=True, text=True, check=True, timeout=10,
    )  # fmt: skip
  except (OSError, subprocess.SubprocessError):
    return None
  return completed.stdout.strip()
