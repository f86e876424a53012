"""Damage of checkpoints: found by a list of every file's size and CRC-32, and set aside.

The list is made while a checkpoint is written, before the rename that completes it: each process
reads back what it wrote itself, the first one all that is left. When a checkpoint is restored, all
files are read again, each process its share of them. (On one core of a small machine CRC-32 runs at
2.7 GB/s and SHA-256 at 0.9; against accidents both are good.)
"""

import concurrent.futures
import contextlib
import json
import os
import sys
import zlib
from collections.abc import Iterable

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from gspo_jax.runs.mirror import files_below
from gspo_jax.system.files import seal, unseal, writing

SIZES = "sizes.json"  # within a checkpoint: its files, and their sizes in bytes and checksums
REPLACED = "replaced_"  # before its step: a checkpoint while the one that replaces it is written
METRICS = "metrics"  # what decides on the best one; read of every checkpoint when a run starts
ITEMS = ("state", "host", METRICS)  # Orbax writes beside them, to the last moment

Sums = dict[str, tuple[int, int | None]]  # size in bytes and CRC-32 by path within a checkpoint


def write_own(item: epath.Path) -> None:
  """Lists the files that this process wrote of the arrays, while Orbax still waits for others."""
  process = jax.process_index()
  found = checksums(item, files_below(item / f"ocdbt.process_{process}"))
  (item.parent / f"{process}.{SIZES}").write_text(seal(found))


def write_list(path: epath.Path) -> None:
  """Lists all files of a checkpoint whose items are finished: what processes have listed, and the
  rest. (A list that cannot be read costs time only.)"""
  known: Sums = {}
  for own in path.glob(f"*.{SIZES}"):
    with contextlib.suppress(ValueError):
      known |= {f"state/{name}": tuple(sums) for name, sums in unseal(own.read_text()).items()}
    own.unlink()
  files = {
    file.relative_to(path).as_posix(): file for item in ITEMS for file in _files(path / item)
  }
  known = {name: sums for name, sums in known.items() if name in files}
  rest = [file for name, file in files.items() if name not in known]
  (path / SIZES).write_text(seal(known | checksums(path, rest)))


def checksums(folder: epath.Path, files: Iterable[epath.Path]) -> Sums:
  """Sizes and checksums of files, by their path within the folder; several are read at once."""
  files = list(files)
  with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    sums = pool.map(_sums, files)
    return {file.relative_to(folder).as_posix(): s for file, s in zip(files, sums)}


def set_aside_short(directory: epath.Path) -> None:
  """Sets aside checkpoints with files shorter than they were, newest first, until one is not, and
  any whose metrics are damaged, for these are read before it is known which one is used.

  Raises:
    WriteError: they cannot be renamed.
    ValueError: none is left (`require_one`).
  """
  if not directory.exists():
    return
  newest = True
  for path in sorted(finished(directory), key=lambda path: int(path.name), reverse=True):
    wrong = _wrong_metrics(path) or (_wrong_size(path) if newest else None)
    if wrong is None:
      newest = False
    else:
      set_aside(path, wrong)


def require_one(directory: epath.Path) -> None:
  """Raises ValueError if all checkpoints of a directory have been set aside."""
  if not directory.exists() or finished(directory):
    return
  if damaged := sorted(
    path.name for path in directory.iterdir() if path.name.startswith("damaged_")
  ):
    raise ValueError(
      f"{directory} has no checkpoint left but {', '.join(damaged)}: put back one that is whole as "
      f"{directory}/<step>, or remove {directory} to begin this phase again"
    )


def set_aside(path: epath.Path, wrong: str) -> None:
  """Renames a checkpoint to `damaged_<step>`, and says why."""
  sys.stderr.write(f"checkpoint {path} is damaged and set aside: {wrong}\n")
  aside = path.parent / f"damaged_{path.name}"
  with writing(aside):
    if aside.exists():
      aside.rmtree()
    path.rename(aside)


def put_by(path: epath.Path) -> None:
  """Renames a checkpoint to `replaced_<step>`, until another one of its step is complete."""
  by = path.parent / f"{REPLACED}{path.name}"
  with writing(by):
    path.rename(by)


def settle(directory: epath.Path) -> None:
  """Removes checkpoints that were put by and have been replaced, and puts back the others, of a
  process that ended before. Raises WriteError where that cannot be done."""
  if not directory.exists():
    return
  complete = {path.name for path in finished(directory)}
  for by in directory.glob(f"{REPLACED}*"):
    path = directory / by.name.removeprefix(REPLACED)
    with writing(path):
      if path.name in complete:
        by.rmtree()
        continue
      if path.exists():  # on gs://, half written
        path.rmtree()
      by.rename(path)


def damage(path: epath.Path) -> str | None:
  """Says what is wrong with a checkpoint, after reading all of it; None: nothing. All processes
  call it, read a share of the files each, and come to the same answer."""
  if wrong := _everywhere(_wrong_size(path)):
    return wrong
  listed = _listed(path)
  if any(sum_ is None for _, sum_ in listed.values()) and jax.process_index() == 0:
    sys.stderr.write(
      f"warning: {path} has no checksums; only the sizes of its files are compared\n"
    )
  mine = sorted(listed, key=listed.get)[jax.process_index() :: jax.process_count()]
  return _everywhere(_wrong_sum(path, {name: listed[name] for name in mine}))


def _everywhere(wrong: str | None) -> str | None:
  """What the first process that has something to say says."""
  if jax.process_count() == 1:
    return wrong
  text = np.zeros(2000, np.uint8)
  said = (wrong or "").encode()[: len(text)]
  text[: len(said)] = np.frombuffer(said, np.uint8)
  every = multihost_utils.process_allgather(text)
  return next(
    (bytes(one).rstrip(b"\0").decode(errors="replace") for one in every if one.any()), None
  )


def _wrong_sum(path: epath.Path, listed: Sums) -> str | None:
  wanted = {name: sums for name, sums in listed.items() if sums[1] is not None}
  try:
    found = checksums(path, [path / name for name in wanted])
  except OSError as error:
    return f"{error.filename or path}: {error.strerror or error}"
  wrong = sorted(name for name in wanted if found[name] != wanted[name])
  if not wrong:
    return None
  return " and ".join(f"{path / name} is not what was written" for name in wrong[:3])


def _wrong_size(path: epath.Path) -> str | None:
  try:
    for name, (size, _) in _listed(path).items():
      file = path / name
      found = file.stat().length if file.exists() else None
      if found != size:
        return f"{file} has {found} bytes instead of {size}" if file.exists() else f"no {file}"
  except (OSError, ValueError) as error:
    return f"{path / SIZES}: {error}"
  return None


def _wrong_metrics(path: epath.Path) -> str | None:
  try:
    listed = {n: sums for n, sums in _listed(path).items() if n.startswith(f"{METRICS}/")}
  except (OSError, ValueError) as error:
    return f"{path / SIZES}: {error}"
  return _wrong_sum(path, listed)


def _listed(path: epath.Path) -> Sums:
  """The list of a checkpoint; earlier ones have sizes only. Raises OSError or ValueError where it
  is gone or damaged."""
  text = (path / SIZES).read_text()
  try:
    return {name: (size, sum_) for name, (size, sum_) in unseal(text).items()}
  except ValueError:
    with contextlib.suppress(ValueError, RecursionError):
      sizes = json.loads(text)
      if isinstance(sizes, dict) and sizes and all(isinstance(x, int) for x in sizes.values()):
        return {name: (size, None) for name, size in sizes.items()}
    raise


def _sums(file: epath.Path) -> tuple[int, int]:
  size = crc = 0
  with file.open("rb") as opened:
    while block := opened.read(1 << 22):
      size, crc = size + len(block), zlib.crc32(block, crc)
  return size, crc


def finished(directory: epath.Path) -> list[epath.Path]:
  found = [path for path in directory.iterdir() if path.name.isdigit()]
  return [path for path in found if ocp.utils.is_checkpoint_finalized(path)]  # a file on gs://


def _files(folder: epath.Path) -> Iterable[epath.Path]:
  return files_below(folder) if folder.exists() else ()
