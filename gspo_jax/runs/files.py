"""Files that are never seen half written, whenever the process that writes them is killed."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: str | os.PathLike, texts: Iterable[str]) -> None:
  """Writes texts, one after another, beside `path` and moves the file there: a reader finds the old
  file or the new one. What UTF-8 cannot hold (lone surrogates) is escaped."""
  path = Path(path)
  temporary = path.with_name(path.name + ".tmp")
  with open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
    file.writelines(texts)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
