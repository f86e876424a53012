"""Cases in files of text, a line each."""

from pathlib import Path


def read(path: Path) -> list[tuple[str, ...]]:
  """Reads the rows below the descriptive first line; ;; parts fields, ¶ breaks a line."""
  lines = path.read_text().split("\n")[1:]
  return [tuple(line.replace("¶", "\n").split(" ;; ")) for line in lines if line]
