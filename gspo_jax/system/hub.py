"""Repositories of the Hugging Face hub as directories: OWNER/NAME, or OWNER/NAME@REVISION.

What is small (configuration, tokenizer, index of the weights) is in the cache as soon as the
directory is asked for. A file of weights is either downloaded into the cache, or read in ranges.
`huggingface_hub` says where the cache is, whether the network may be used, and as whom: HF_HOME,
HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN are its environment variables.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import re
import shutil
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from etils import epath

from gspo_jax.system import hosts
from gspo_jax.system.files import place
from gspo_jax.system.transfer import Transfer

# As the hub names them; a path with a dot or a slash at its beginning is none.
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
AT_ONCE = 8  # files on their way: what `huggingface_hub` has


class HubError(ValueError):
  """A repository that cannot be read; says why, and what to do."""


def is_id(name: str) -> bool:
  """Returns if `name` is a repository's. An existing path is a path."""
  return bool(_ID.fullmatch(name)) and not os.path.exists(name)


def pinned(name: str, file: str = "config.json") -> str:
  """Returns OWNER/NAME@COMMIT for a repository's name, and a path unchanged.

  Of several processes the first one finds out, and all call this. Without a network it is the
  commit that the cache has of this revision.

  Args:
    file: that the repository has to have.

  Raises:
    HubError: there is no such repository, revision or file, or it cannot be reached.
  """
  may_be = _ID.fullmatch(name)
  return hosts.run_on_first_host(lambda: _resolved(name, file)) if may_be else name


def _resolved(name: str, file: str = "config.json") -> str:
  """Returns the result of `pinned`, for this process."""
  if not is_id(name):
    return name
  id_, revision = _ID.fullmatch(name).groups()
  if revision and _COMMIT.fullmatch(revision):
    return name
  from huggingface_hub import hf_hub_download

  with _raise_hub_errors(name, file):
    path = Path(hf_hub_download(id_, file, revision=revision, tqdm_class=_no_bar()))
  return f"{id_}@{path.parent.name}"  # the cache has a directory per commit


def directory(name: str) -> epath.Path:
  """Returns the directory of a name.

  A repository's is in the cache, with all small files; a path may be in a bucket (`gs://`).
  Raises ValueError if it cannot be read.
  """
  if is_id(name):
    return Repository.from_name(name).directory
  path = place(name)
  if "://" in name:
    with contextlib.suppress(FileNotFoundError), _read_from(path):
      next(path.iterdir(), None)  # `exists` is silent about missing rights
  return path


def bucket_reader(path: epath.Path) -> tuple[int, Callable[[int, int], bytes]]:
  """Returns size and reader of a file in a bucket, as `Repository.reader` does."""
  with _read_from(path):
    system, name = fsspec.core.url_to_fs(str(path))
    size = system.size(name)

  def read(start: int, stop: int) -> bytes:
    with _read_from(path):
      return system.cat_file(name, start=start, end=stop)

  return size, read


@contextlib.contextmanager
def _read_from(path: epath.Path) -> Iterator[None]:
  """Turns any error of a file system into a HubError."""
  try:
    yield
  except FileNotFoundError:
    raise
  except ImportError as error:
    raise HubError(f"{path}: pip install '.[gcs]' in the checkout reads it ({error})") from error
  except Exception as error:
    raise HubError(f"{path}: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Repository:
  """A repository at a commit."""

  id: str
  commit: str

  @classmethod
  def from_name(cls, name: str) -> "Repository":
    return cls(*_resolved(name).split("@"))

  @property
  def name(self) -> str:
    return f"{self.id}@{self.commit}"

  @functools.cached_property
  def directory(self) -> epath.Path:
    """Its place in the cache, filled with the small files."""
    from huggingface_hub import snapshot_download

    small = dict(allow_patterns=list(SMALL), tqdm_class=_no_bar())
    with _raise_hub_errors(self.name):
      return epath.Path(snapshot_download(self.id, revision=self.commit, **small))

  @functools.cached_property
  def files(self) -> list[str]:
    """Names of its files; those in the cache, if they include the weights' index."""
    from huggingface_hub import HfApi

    local = [path.name for path in self.directory.iterdir()]
    if {"model.safetensors", "model.safetensors.index.json"} & set(local):
      return local
    with _raise_hub_errors(self.name):
      return HfApi().list_repo_files(self.id, revision=self.commit)

  def download(self, files: Iterable[str]) -> None:
    """Puts files into the cache. What an earlier attempt left of one is continued, and all are
    compared with their SHA-256.

    Raises:
      HubError: the network or the hub fails, the disk is too small, or a file is not what it was.
    """
    with _raise_hub_errors(self.name):
      remotes = [_Remote.find(self, file) for file in files]
      cache = self.directory.parents[1]
      missing = sum(remote.size - remote.bytes_in_cache for remote in remotes)
      if missing > (free := shutil.disk_usage(cache).free):
        raise HubError(
          f"{self.name} needs {missing / 1e9:.1f} GB more in {cache}, where {free / 1e9:.1f} GB "
          "are free: set HF_HOME to a larger disk"
        )
      total = sum(remote.size for remote in remotes)
      with (
        concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool,
        # Closed before the pool, whose threads end with it.
        Transfer(f"downloading {self.id}", total, active=hosts.is_first()) as transfer,
      ):
        list(pool.map(functools.partial(_Remote.download, transfer=transfer), remotes))

  def reader(self, file: str) -> tuple[int, Callable[[int, int], bytes]]:
    """Returns a file's size, and a thread-safe function to read a range.

    Both raise HubError.
    """
    with _raise_hub_errors(self.name, file):
      remote = _Remote.find(self, file)
    return remote.size, remote.read


@dataclasses.dataclass
class _Remote:
  """A file of a repository: where it can be read for a while, and its place in the cache."""

  repository: Repository
  file: str
  url: str
  location: str  # signed: ranges need no further request to the hub
  size: int
  blob: Path

  @classmethod
  def find(cls, repository: Repository, file: str) -> "_Remote":
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    url = hf_hub_url(repository.id, file, revision=repository.commit)
    metadata = get_hf_file_metadata(url, retry_on_errors=True)
    folder = repo_folder_name(repo_id=repository.id, repo_type="model")
    blob = Path(constants.HF_HUB_CACHE) / folder / "blobs" / metadata.etag
    return cls(repository, file, url, metadata.location, metadata.size, blob)

  @property
  def partial(self) -> Path:
    return self.blob.with_name(f"{self.blob.name}.incomplete")

  @property
  def bytes_in_cache(self) -> int:
    """Bytes of the file in the cache."""
    files = [path for path in (self.blob, self.partial) if path.exists()]
    return files[0].stat().st_size if files else 0

  def read(self, start: int, stop: int) -> bytes:
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    def get() -> Any:
      at_hub = urllib.parse.urlsplit(self.url).netloc == urllib.parse.urlsplit(self.location).netloc
      headers = build_hf_headers() if at_hub else {}  # the token is for nobody else
      headers |= {"Range": f"bytes={start}-{stop - 1}"}
      return http_backoff("GET", self.location, headers=headers)

    with _raise_hub_errors(self.repository.name, self.file):
      response = get()
      if response.status_code in (401, 403):  # signatures are good for an hour
        self.location = self.find(self.repository, self.file).location
        response = get()
      hf_raise_for_status(response)
    return response.content if response.status_code == 206 else response.content[start:stop]

  def download(self, transfer: Transfer) -> None:
    """Puts the file into the cache. The library itself begins anew with a file that a process which
    was ended has left: so it is given the whole one, and does the rest."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    folder = self.blob.parents[1].name
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder / f"{self.blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
      if not self.blob.exists() and self.bytes_in_cache > self.size:
        self.partial.unlink()  # two processes wrote it: not all disks have locks
      transfer.add(self.bytes_in_cache, before=True)
      if not self.blob.exists():
        with _Counted(self.partial, transfer) as file:
          http_get(
            self.url, file, resume_size=file.tell(), headers=build_hf_headers(),
            expected_size=self.size, tqdm_class=_no_bar(),
          )  # fmt: skip
        self._verify()
        self.partial.rename(self.blob)
    hf_hub_download(self.repository.id, self.file, revision=self.repository.commit)

  def _verify(self) -> None:
    """Compares size and, if the hub has it, SHA-256."""
    with open(self.partial, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    is_digest = re.fullmatch("[0-9a-f]{64}", self.blob.name)
    if self.partial.stat().st_size != self.size or (is_digest and digest != self.blob.name):
      self.partial.unlink()
      raise HubError(
        f"{self.file} of {self.repository.name} did not arrive as it is on the hub, and was removed"
        ": try again"
      )


class _Counted(io.BufferedWriter):
  """A file that is continued, and whose bytes are counted."""

  def __init__(self, path: Path, transfer: Transfer):
    super().__init__(io.FileIO(path, "ab"))
    self._transfer = transfer

  def write(self, content: bytes) -> int:
    count = super().write(content)
    self._transfer.add(count)
    return count


@functools.cache
def _no_bar() -> type:
  """Hides the library's progress bars: `Transfer` shows progress."""
  from tqdm import tqdm

  class NoBar(tqdm):
    def __init__(self, *args, **kwargs):
      kwargs.pop("name", None)
      super().__init__(*args, **kwargs | dict(disable=True))

  return NoBar


@contextlib.contextmanager
def _raise_hub_errors(name: str, file: str = "") -> Iterator[None]:
  """Turns errors of `huggingface_hub` and its HTTP client into a HubError."""
  import httpx2

  try:
    yield
  except HubError:
    raise
  except (httpx2.HTTPError, OSError) as error:
    raise HubError(_reason(error, name, file)) from error


def _reason(error: BaseException, name: str, file: str) -> str:
  """Returns the error's cause and a remedy."""
  import httpx2
  from huggingface_hub import constants, errors

  id_, _, revision = name.partition("@")
  page, cache = f"{constants.ENDPOINT}/{id_}", f"the cache, {constants.HF_HUB_CACHE}"
  login = "set HF_TOKEN, or log in with `hf auth login`"
  status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
  if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
    return _reason(error.__cause__, name, file)
  if isinstance(error, errors.GatedRepoError):
    return f"{id_} is gated: ask for access at {page}, and {login}"
  if isinstance(error, errors.RepositoryNotFoundError):
    return (
      f"{id_} is no directory here, and {constants.ENDPOINT} has no such repository, or a private "
      f"one: {login}"
    )
  if isinstance(error, errors.RevisionNotFoundError):
    return f"{id_} has no revision {revision!r}: {page}/tree/main lists the existing ones"
  if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
    return f"{name} is not (whole) in {cache}, and HF_HUB_OFFLINE is set: unset it, or set HF_HOME"
  if isinstance(error, errors.EntryNotFoundError):
    return f"{name} has no {file}: {page}/tree/main lists the existing ones"
  if status in (401, 403):
    return f"{page} may not be read ({status}): {login}"
  if isinstance(error, httpx2.HTTPError | ConnectionError):
    reason = f"status {status}" if status else f"{type(error).__name__}: {error}"
    return (
      f"{id_} is no directory here, is not (whole) in {cache}, and {constants.ENDPOINT} does not "
      f"answer as it should ({reason}): try again; the download so far is kept"
    )
  path = getattr(error, "filename", None) or constants.HF_HUB_CACHE
  return f"{path}: {getattr(error, 'strerror', None) or error}; HF_HOME names the cache"
