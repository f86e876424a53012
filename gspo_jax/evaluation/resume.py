"""Log of an evaluation in progress. An interrupted evaluation resumes from its log."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.runs import integrity
from gspo_jax.system import hosts
from gspo_jax.system.files import seal, unseal, write_whole, writing

UNFINISHED = "unfinished.jsonl"  # Name of the log.


class ResumeLog:
  """Log of an evaluation's finished chunks: a line with the key, then one line per chunk.

  A chunk consists of some finished problems and the records of their responses (`Evaluator`). Each
  line has a checksum. An incomplete last line, from a killed process, is dropped. If a line is
  damaged, its chunk and all later chunks are dropped, and evaluated again.

  Args:
    directory: directory of the log; None to keep no log.
    key: `Evaluator.key` of this evaluation. A log with another key is overwritten.
  """

  def __init__(self, directory: Path | None, key: str):
    self._path = directory and directory / UNFINISHED
    self._chunks: list[dict[str, Any]] = []
    if self._path is None:
      return
    lines = hosts.run_on_first_host(self._read)
    if lines and lines[0] == dict(key=key):
      self._chunks = lines[1:]
    if not hosts.is_first():  # Only the first host writes.
      self._path = None
      return
    with writing(self._path):
      directory.mkdir(parents=True, exist_ok=True)
    lines = [dict(key=key), *self._chunks]
    write_whole(self._path, (seal(line) + "\n" for line in lines))

  def find(self, name: str) -> list[dict[str, Any]]:
    """Returns the logged chunks of the round called `name` (`Evaluator`)."""
    return [chunk for chunk in self._chunks if chunk["chunk"] == name]

  def add(self, chunk: Mapping[str, Any]) -> None:
    """Appends a chunk and syncs it to disk."""
    if self._path is None:
      return
    with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
      file.write(seal(chunk) + "\n")
      file.flush()
      os.fsync(file.fileno())

  def _read(self) -> list[dict[str, Any]]:
    """Returns the lines before the first damaged one. Warns if there is such a line."""
    content = self._path.read_text(errors="replace") if self._path.exists() else ""
    lines = []
    for number, line in enumerate(content.split("\n")[:-1], start=1):
      try:
        lines.append(unseal(line))
      except ValueError as error:
        rest = "problems from this line on are evaluated again"
        sys.stderr.write(f"{self._path}:{number}: {error}; {rest}\n")
        break
    return lines


def checksums(params: Any) -> list[int] | dict[str, str]:
  """Returns a checksum of each array, independent of the layout over devices.

  In a single process on CPU, NumPy sums an array's values, read as unsigned integers. This needs no
  compilation.
  """
  if sharding.platform() == "cpu" and jax.process_count() == 1:
    arrays = map(np.asarray, jax.tree.leaves(params))
    return [int(x.view(f"uint{8 * x.dtype.itemsize}").sum(dtype=np.uint32)) for x in arrays]
  return integrity.sums(params)
