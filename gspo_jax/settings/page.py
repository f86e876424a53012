"""The page of all keys: python -m gspo_jax.settings.page > docs/keys.md"""

import dataclasses
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from gspo_jax.system import stops

if __name__ == "__main__":
  stops.begin("ended")

from gspo_jax.settings import ranges
from gspo_jax.settings.run import RunConfig

HEAD = """\
# Keys of a configuration

Every key with its default, its range and its meaning. In a meaning, "0: none" explains the value 0,
and "|" separates alternatives. A file in `configs/` changes defaults, and `--config.KEY=VALUE`
sets a key ([configuration](running.md#configuration)). This page is generated from the declarations
in `gspo_jax/settings/`: `python -m gspo_jax.settings.page > docs/keys.md`.
"""


class Key(NamedTuple):
  """A key as its section declares it."""

  name: str  # Dotted name.
  default: Any
  kind: Any  # Type, with its range.
  meaning: str


def sections(section: Any = None, path: str = "") -> Iterator[tuple[str, Any, list[Key]]]:
  """Yields path, values and keys of each section. Entries of a mapping have the name NAME.

  Args:
    section: a configuration; None for the defaults, RunConfig().
    path: path of the section, with a dot at the end; "" for the top level.
  """
  section = RunConfig() if section is None else section
  keys, inner = [], []
  for field in dataclasses.fields(section):
    name, kind = f"{path}{field.name}", ranges.kinds(type(section))[field.name]
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(kind):
      inner += sections(value, f"{name}.")
    elif typing.get_origin(kind) is dict:
      inner += sections(typing.get_args(kind)[1](), f"{name}.NAME.")
    else:
      keys.append(Key(name, value, kind, field.metadata["meaning"]))
  yield path.rstrip("."), section, keys
  yield from inner


def by_name() -> dict[str, Key]:
  """Returns all keys, by dotted name."""
  return {key.name: key for _, _, keys in sections() for key in keys}


def page() -> str:
  """Returns the text of docs/keys.md."""
  lines = [HEAD]
  for path, section, keys in sections():
    about = " ".join((type(section).__doc__ or "").split())
    about = re.sub(r"docs/(\w+)\.md", r"[\1.md](\1.md)", about)
    lines += [f"## `{path}`\n" if path else "## The run\n", f"{about}\n"]
    lines += ["| key | default | may be | |", "| --- | --- | --- | --- |"]
    for key in keys:
      meaning = re.sub(r"docs/(\w+)\.md", r"[\1.md](\1.md)", key.meaning)
      default = "unset" if key.default is None else f"`{format_value(key.default)}`"
      cells = [
        f"`{key.name.removeprefix(f'{path}.')}`",
        default,
        ranges.describe(key.kind),
        meaning,
      ]
      lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines.append("")
  return "\n".join(lines).rstrip() + "\n"


def words(kind: Any) -> tuple[str, ...]:
  """Returns the permitted words of a key; () for other types."""
  if typing.get_origin(kind) is typing.Literal:
    return typing.get_args(kind)
  names = (x for x in getattr(kind, "__metadata__", ()) if isinstance(x, ranges.Name))
  return next((name.words for name in names), ())


def format_value(value: Any) -> str:
  """Formats a value for the command line."""
  return value if value and isinstance(value, str) else '""' if value == "" else str(value)


if __name__ == "__main__":
  sys.stdout.write(page())
