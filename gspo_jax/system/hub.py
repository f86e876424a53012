"""Repositories of the Hugging Face hub, named OWNER/NAME or OWNER/NAME@REVISION.

`Repository.directory` downloads small files (configuration, tokenizer, index of the weights) to the
cache. `Repository.download` downloads files of weights to the cache, and `Repository.reader` reads
ranges of a file without the cache. Environment variables of `huggingface_hub` set the cache
(HF_HOME), the hub (HF_ENDPOINT, HF_HUB_OFFLINE) and the user (HF_TOKEN).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
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

# Names of repositories. A path that begins with a dot or a slash does not match.
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model")  # Files in `Repository.directory`.
# `huggingface_hub` would warn twice of each failed attempt. It reads this variable on import.
if "HF_HUB_VERBOSITY" not in os.environ:
  os.environ["HF_HUB_VERBOSITY"] = "error"
  logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
AT_ONCE = 8  # Number of concurrent downloads, as in `huggingface_hub`.


class HubError(ValueError):
  """A repository cannot be read; the message has the reason and the remedy."""


def is_id(name: str) -> bool:
  """Whether `name` has the form OWNER/NAME or OWNER/NAME@REVISION, and is no existing path."""
  return bool(_ID.fullmatch(name)) and not os.path.exists(name)


def pinned(name: str, file: str = "config.json") -> str:
  """Returns OWNER/NAME@COMMIT for a repository's name, and a path unchanged. Collective.

  The first process resolves the name. If there is no network, the cached commit of the revision is
  used. A name with a commit is returned unchanged and unchecked.

  Args:
    name: name of a repository, or a path.
    file: a file that the repository must have.

  Raises:
    HubError: there is no such repository, revision or file, or the hub cannot be reached.
  """
  if not _ID.fullmatch(name):
    return name
  return hosts.run_on_first_host(lambda: _resolve(name, file))


def _resolve(name: str, file: str = "config.json") -> str:
  """Returns the result of `pinned`, in this process alone."""
  if not is_id(name):
    return name
  id_, revision = _ID.fullmatch(name).groups()
  if revision and _COMMIT.fullmatch(revision):
    return name
  from huggingface_hub import hf_hub_download

  with _raise_hub_errors(name, file):
    path = Path(hf_hub_download(id_, file, revision=revision, tqdm_class=_no_bar()))
  return f"{id_}@{path.parent.name}"  # The cache has a directory per commit.


def directory(name: str) -> epath.Path:
  """Returns the directory of a repository or path.

  The directory of a repository is in the cache, and contains the files of SMALL. A path may be in a
  bucket (`gs://`). Raises ValueError if the repository or the bucket cannot be read.
  """
  if is_id(name):
    return Repository.from_name(name).directory
  path = place(name)
  if "://" in name:
    with contextlib.suppress(FileNotFoundError), _raise_file_errors(path):
      next(path.iterdir(), None)  # `exists` would not raise an error if reading is not permitted.
  return path


def bucket_reader(path: epath.Path) -> tuple[int, Callable[[int, int], bytes]]:
  """Returns a bucket file's size and a function to read a range (see `Repository.reader`)."""
  with _raise_file_errors(path):
    system, name = fsspec.core.url_to_fs(str(path))
    size = system.size(name)

  def read(start: int, stop: int) -> bytes:
    with _raise_file_errors(path):
      return system.cat_file(name, start=start, end=stop)

  return size, read


@contextlib.contextmanager
def _raise_file_errors(path: epath.Path) -> Iterator[None]:
  """Converts errors of a file system to HubError, except FileNotFoundError."""
  try:
    yield
  except FileNotFoundError:
    raise
  except ImportError as error:
    raise HubError(
      f"{path}: reading it needs the extra gcs, pip install '.[gcs]' ({error})"
    ) from error
  except Exception as error:
    raise HubError(f"{path}: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Repository:
  """A repository at a commit."""

  id: str
  commit: str

  @classmethod
  def from_name(cls, name: str) -> "Repository":
    return cls(*_resolve(name).split("@"))

  @property
  def name(self) -> str:
    return f"{self.id}@{self.commit}"

  @functools.cached_property
  def directory(self) -> epath.Path:
    """Directory in the cache, with the files of SMALL."""
    from huggingface_hub import snapshot_download

    small = dict(allow_patterns=list(SMALL), tqdm_class=_no_bar())
    with _raise_hub_errors(self.name):
      return epath.Path(snapshot_download(self.id, revision=self.commit, **small))

  @functools.cached_property
  def files(self) -> list[str]:
    """Names of the repository's files.

    If the weights or their index are in the cache, only cached files are named. The hub is not
    asked then.
    """
    from huggingface_hub import HfApi

    local = [path.name for path in self.directory.iterdir()]
    if {"model.safetensors", "model.safetensors.index.json"} & set(local):
      return local
    with _raise_hub_errors(self.name):
      return HfApi().list_repo_files(self.id, revision=self.commit)

  def download(self, files: Iterable[str]) -> None:
    """Downloads files to the cache. Partial files of earlier attempts are continued.

    Raises:
      HubError: the network or the hub fails, the disk is too small, or a file has another size or
        SHA-256 than at the hub.
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
        # After an error the transfer closes before the pool. `Transfer.add` then raises errors that
        # end the pool's threads.
        Transfer(f"downloading {self.id}", total, active=hosts.is_first()) as transfer,
      ):
        list(pool.map(functools.partial(_Remote.download, transfer=transfer), remotes))

  def reader(self, file: str) -> tuple[int, Callable[[int, int], bytes]]:
    """Returns a file's size, and a function to read a range.

    The function takes start and stop in bytes, and is thread-safe. This method and the function
    raise HubError if the hub cannot be read.
    """
    with _raise_hub_errors(self.name, file):
      remote = _Remote.find(self, file)
    return remote.size, remote.read


@dataclasses.dataclass
class _Remote:
  """A file of a repository, at the hub and in the cache."""

  repository: Repository
  file: str
  url: str
  # URL of the file's bytes: a URL of the hub itself, or a signed URL of the storage behind the hub.
  # A signed URL is valid for about an hour.
  location: str
  size: int
  blob: Path  # Path of the whole file in the cache.

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
    """Size of the whole or partial file in the cache; 0 if there is none."""
    files = [path for path in (self.blob, self.partial) if path.exists()]
    return files[0].stat().st_size if files else 0

  def read(self, start: int, stop: int) -> bytes:
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    def get() -> Any:
      at_hub = urllib.parse.urlsplit(self.url).netloc == urllib.parse.urlsplit(self.location).netloc
      headers = build_hf_headers() if at_hub else {}  # The token is for the hub alone.
      headers |= {"Range": f"bytes={start}-{stop - 1}"}
      return http_backoff("GET", self.location, headers=headers)

    with _raise_hub_errors(self.repository.name, self.file):
      response = get()
      if response.status_code in (401, 403):  # The signature has expired.
        self.location = self.find(self.repository, self.file).location
        response = get()
      hf_raise_for_status(response)
    return response.content if response.status_code == 206 else response.content[start:stop]

  def download(self, transfer: Transfer) -> None:
    """Downloads the file to the cache.

    After an interruption, `hf_hub_download` would restart the download. So this method writes the
    file to its path in the cache, and `hf_hub_download` only adds the file to the revision.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    folder = self.blob.parents[1].name
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder / f"{self.blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
      if not self.blob.exists() and self.bytes_in_cache > self.size:
        self.partial.unlink()  # Two processes wrote this file, on a file system without locks.
      transfer.add(self.bytes_in_cache, before=True)
      if not self.blob.exists():
        with _CountingFile(self.partial, transfer) as file:
          http_get(
            self.url, file, resume_size=file.tell(), headers=build_hf_headers(),
            expected_size=self.size, tqdm_class=_no_bar(),
          )  # fmt: skip
        self._verify()
        self.partial.rename(self.blob)
    hf_hub_download(self.repository.id, self.file, revision=self.repository.commit)

  def _verify(self) -> None:
    """Compares the file's size with the hub's, and the SHA-256 if the hub names one.

    If one of the two differs, removes the file and raises HubError.
    """
    with open(self.partial, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    is_digest = re.fullmatch("[0-9a-f]{64}", self.blob.name)
    if self.partial.stat().st_size != self.size or (is_digest and digest != self.blob.name):
      self.partial.unlink()
      raise HubError(
        f"{self.file} of {self.repository.name} was damaged on its way from the hub, and was "
        "removed: try again"
      )


class _CountingFile(io.BufferedWriter):
  """A file for appending. Counts the written bytes in a transfer."""

  def __init__(self, path: Path, transfer: Transfer):
    super().__init__(io.FileIO(path, "ab"))
    self._transfer = transfer

  def write(self, content: bytes) -> int:
    count = super().write(content)
    self._transfer.add(count)
    return count


@functools.cache
def _no_bar() -> type:
  """Returns a class of hidden progress bars for the library, since `Transfer` shows progress."""
  from tqdm import tqdm

  class NoBar(tqdm):
    def __init__(self, *args, **kwargs):
      kwargs.pop("name", None)
      super().__init__(*args, **kwargs | dict(disable=True))

  return NoBar


@contextlib.contextmanager
def _raise_hub_errors(name: str, file: str = "") -> Iterator[None]:
  """Converts errors of `huggingface_hub` and its HTTP client to HubError."""
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
      f"{id_} is neither a local directory nor a public repository of {constants.ENDPOINT}: "
      f"correct the name or, for a private repository, {login}"
    )
  if isinstance(error, errors.RevisionNotFoundError):
    return f"{id_} has no revision {revision!r}: {page}/tree/main lists the existing ones"
  if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
    return (
      f"{name} is not completely in {cache}, and HF_HUB_OFFLINE is set: unset HF_HUB_OFFLINE, or "
      "set HF_HOME to another cache"
    )
  if isinstance(error, errors.EntryNotFoundError):
    return f"{name} has no {file}: {page}/tree/main lists the existing ones"
  if status in (401, 403):
    return f"{page} may not be read ({status}): {login}"
  if isinstance(error, httpx2.HTTPError | ConnectionError):
    reason = f"status {status}" if status else f"{type(error).__name__}: {error}"
    return (
      f"{id_} is not a local directory and not completely in {cache}, and {constants.ENDPOINT} "
      f"does not answer as expected ({reason}): check the network and try again (the downloaded "
      "part is kept), or name a local copy's directory"
    )
  path = getattr(error, "filename", None) or constants.HF_HUB_CACHE
  return f"{path}: {getattr(error, 'strerror', None) or error}; HF_HOME sets the cache directory"
