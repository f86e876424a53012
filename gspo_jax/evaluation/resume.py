"""The memory of an evaluation in progress, so that an interruption costs one chunk at most."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.system import hosts
from gspo_jax.system.files import seal, unseal, write_whole, writing


class Unfinished:
  """The chunks of the evaluation in progress: a line with its key, then one line per chunk.

  A file with another key is started anew. The lines are whole or missing: the last one of a process
  that was killed has no end, and is cut off. They are sealed: what follows a damaged one is made
  again.
  """

  def __init__(self, directory: Path | None, key: str):
    self._path = directory and directory / "unfinished.jsonl"
    self._chunks: list[dict[str, Any]] = []
    if self._path is None:
      return
    here = jax.process_index() == 0 and self._path.exists()
    lines = self._read(hosts.told(self._path.read_text(errors="replace") if here else ""))
    if lines and lines[0] == dict(key=key):
      self._chunks = lines[1:]
    if jax.process_index() == 0:
      with writing(self._path):
        directory.mkdir(parents=True, exist_ok=True)
      kept = [dict(key=key), *self._chunks]
      write_whole(self._path, (seal(line) + "\n" for line in kept))

  def find(self, name: str) -> list[dict[str, Any]]:
    """Those that were added under this name."""
    return [chunk for chunk in self._chunks if chunk["chunk"] == name]

  def add(self, chunk: Mapping[str, Any]) -> None:
    if self._path is None or jax.process_index():
      return
    with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
      file.write(seal(chunk) + "\n")
      file.flush()
      os.fsync(file.fileno())

  def _read(self, content: str) -> list[dict[str, Any]]:
    """The lines up to the first damaged one, of which it tells."""
    found = []
    for number, line in enumerate(content.split("\n")[:-1], start=1):
      try:
        found.append(unseal(line))
      except ValueError as error:
        if jax.process_index() == 0:
          sys.stderr.write(f"{self._path}:{number}: {error}; the rest is evaluated again\n")
        break
    return found


def checksums(params: Any) -> list[int]:
  """Each array's bits, added up modulo 2^32: the same for every layout over devices."""
  if sharding.platform() == "cpu" and jax.process_count() == 1:  # nothing to compile
    arrays = map(np.asarray, jax.tree.leaves(params))
    return [int(x.view(f"uint{8 * x.dtype.itemsize}").sum(dtype=np.uint32)) for x in arrays]
  return [int(x) for x in jax.device_get(_checksums(params))]


@jax.jit
def _checksums(params: Any) -> list[jax.Array]:
  unsigned = lambda x: jnp.dtype(f"uint{8 * x.dtype.itemsize}")  # noqa: E731
  bits = [jax.lax.bitcast_convert_type(x, unsigned(x)) for x in jax.tree.leaves(params)]
  return [jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32) for x in bits]
