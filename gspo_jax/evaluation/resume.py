"""The memory of an evaluation in progress, so that an interruption costs one chunk at most."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.runs.files import write_whole


class Unfinished:
  """The chunks of the evaluation in progress: a line with its key, then one line per chunk.

  A file with another key is started anew. The lines are whole or missing: the last one of a process
  that was killed has no end, and is cut off.
  """

  def __init__(self, directory: Path | None, key: str):
    self._path = directory and directory / "unfinished.jsonl"
    self._chunks: list[dict[str, Any]] = []
    if self._path is None:
      return
    lines = _from_first_process(self._path).split(b"\n")[:-1]
    if lines and json.loads(lines[0]) == dict(key=key):
      self._chunks = [json.loads(line) for line in lines[1:]]
    if jax.process_index() == 0:
      directory.mkdir(parents=True, exist_ok=True)
      kept = [json.dumps(dict(key=key)), *map(json.dumps, self._chunks)]
      write_whole(self._path, (line + "\n" for line in kept))

  def find(self, name: str) -> list[dict[str, Any]]:
    """Those that were added under this name."""
    return [chunk for chunk in self._chunks if chunk["chunk"] == name]

  def add(self, chunk: Mapping[str, Any]) -> None:
    if self._path is None or jax.process_index():
      return
    with open(self._path, "a", encoding="utf-8") as file:
      file.write(json.dumps(chunk) + "\n")
      file.flush()
      os.fsync(file.fileno())


def _from_first_process(path: Path) -> bytes:
  """The file as process 0 sees it (nothing if there is none): all processes must go on at the same
  chunk."""
  content = path.read_bytes() if jax.process_index() == 0 and path.exists() else b""
  if jax.process_count() == 1:
    return content
  from jax.experimental import multihost_utils

  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  if not size:
    return b""
  padded = np.zeros(size, np.uint8)
  padded[: len(content)] = np.frombuffer(content, np.uint8)
  return multihost_utils.broadcast_one_to_all(padded).tobytes()


@jax.jit
def checksums(params: Any) -> list[jax.Array]:
  """Each array's bits, added up modulo 2^32: the same for every layout over devices."""
  unsigned = lambda x: jnp.dtype(f"uint{8 * x.dtype.itemsize}")  # noqa: E731
  bits = [jax.lax.bitcast_convert_type(x, unsigned(x)) for x in jax.tree.leaves(params)]
  return [jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32) for x in bits]
