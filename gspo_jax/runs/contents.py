"""Checksums of weights, held-out problems and user functions named in a configuration.

A resumed run must find the same contents under these names. Otherwise the reference policy of the
KL penalty, the reward or the evaluated problems would change. For speed, only some blocks of
a large file are read. A repository of the hub is pinned to a commit, and needs no checksum.
`data.sources.Batches` compares the training data.
"""

import concurrent.futures
import fnmatch
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from etils import epath

from gspo_jax.rewards import user_source
from gspo_jax.runs.weight_source import RANDOM, WeightSource
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hub

_BLOCK = 2**16  # Bytes.
_BLOCKS = 256  # Number of evenly spaced blocks to read. A file of at most 16 MiB is read whole.
_REMOTE_BLOCKS = 4  # Number of blocks to read of a file in a bucket.
_THREADS = 16
_WEIGHTS = ("config.json", "*.safetensors")


def describe(
  config: RunConfig,
  sources: Sequence[WeightSource],
  problems: Mapping[str, Sequence[Prompt]],
  stop_ids: Sequence[int],
) -> dict[str, str]:
  """Returns a description of contents for each configuration key, such as "30 problems 0a1b2c3d".

  A key is absent if there is nothing to compare.

  Args:
    config: configuration of the run.
    sources: weights of the policy, and of a teacher.
    problems: held-out problems by configuration key.
    stop_ids: stop tokens of the tokenizer.
  """
  checksums = {key: user_source.checksum(name) for key, name in _functions(config)}
  weights = {source.key: _describe_weights(source) for source in sources}
  adapter = config.lora.adapter if config.lora.rank else ""
  weights["lora.adapter"] = _describe_directory(adapter, ("adapter_*",)) if adapter else ""
  lines = weights | {key: f"source {x}" if x else "" for key, x in checksums.items()}
  lines |= {key: _describe_problems(prompts) for key, prompts in problems.items()}
  lines["tokenizer"] = f"stop tokens {', '.join(map(str, stop_ids))}"
  return {key: line for key, line in lines.items() if line}


def _functions(config: RunConfig) -> Iterator[tuple[str, str]]:
  """Yields (key, value) of each key for a built-in or user function."""
  if config.job == "sft":
    return
  yield "reward.name", config.reward.name
  yield "environment.name", config.environment.name
  yield "objective.name", config.objective.name
  yield "objective.advantage", config.objective.advantage
  for name, benchmark, _ in config.benchmarks():
    yield f"eval.benchmarks.{name}.reward", benchmark.reward
  for kind, name, entry in config.constraints.entries():
    yield f"constraints.{kind}.{name}.signal", entry.signal


def _describe_problems(problems: Sequence[Prompt]) -> str:
  checksum = 0
  for prompt in problems:
    checksum = zlib.crc32(f"{prompt.content}{prompt.info}".encode(), checksum)
  return f"{len(problems)} problems {checksum:08x}"


def _describe_weights(source: WeightSource) -> str:
  if source.checkpoint:  # The host state has checksums of all arrays.
    return _describe_directory(str(source.checkpoint.path / "host"), ("metadata",))
  return "" if source.name == RANDOM else _describe_directory(source.name, _WEIGHTS)


def _describe_directory(name: str, patterns: Sequence[str]) -> str:
  """Describes a directory's files; "" for a hub repository or a missing directory.

  Args:
    name: directory or hub repository.
    patterns: file names to read, with wildcards.
  """
  if hub.is_id(name):
    return ""
  directory = hub.directory(name)
  if not directory.is_dir():
    return ""
  paths = [p for p in directory.iterdir() if any(fnmatch.fnmatch(p.name, x) for x in patterns)]
  checksum = 0
  for path in sorted(paths):
    size, read = _reader(path)
    spans = _spans(size, _REMOTE_BLOCKS if "://" in str(path) else _BLOCKS)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      blocks = list(pool.map(read, *zip(*spans)))
    for data in (f"{path.name} {size}".encode(), *blocks):
      checksum = zlib.crc32(data, checksum)
  return f"{len(paths)} files {checksum:08x}"


def _spans(size: int, blocks: int) -> list[tuple[int, int]]:
  """Returns (start, stop) of evenly spaced blocks, from the first byte to the last."""
  if size <= blocks * _BLOCK:
    return [(0, size)]
  starts = [i * (size - _BLOCK) // (blocks - 1) for i in range(blocks)]
  return [(start, start + _BLOCK) for start in starts]


def _reader(path: epath.Path) -> tuple[int, Callable[[int, int], bytes]]:
  """Returns a file's size, and a function to read its bytes from start to stop."""
  if "://" in str(path):
    return hub.bucket_reader(path)

  def read(start: int, stop: int) -> bytes:
    with path.open("rb") as file:
      file.seek(start)
      return file.read(stop - start)

  return os.stat(path).st_size, read  # `epath.Path.stat` fails for users without a name.
