"""Large pages for large arrays, on Linux: on CPU a third of an update may go into page faults."""

import os
import sys
from pathlib import Path

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SETTING, ARENAS = "glibc.malloc.hugetlb", "glibc.malloc.arena_max"


def restart_with() -> None:
  """Starts this process again, under its id, with a malloc that asks for pages of 2 MiB.

  XLA allocates the buffers of a program anew at every call, and the kernel clears them page by page
  as they are first touched. glibc (2.35 and later) reads the setting before the program runs, so it
  cannot be made from within. Nothing happens where it is made already (`GLIBC_TUNABLES`, of which
  glibc.malloc.hugetlb=0 keeps small pages), or where the kernel gives large pages always or never.

  Threads share one arena per core instead of eight: what each of these keeps of freed memory is
  larger with larger pages, a tenth of a small run's.
  """
  tunables = os.environ.get("GLIBC_TUNABLES", "")
  if SETTING in tunables or not _on_request():
    return
  os.environ["GLIBC_TUNABLES"] = settings(tunables)
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def settings(tunables: str = "") -> str:
  """GLIBC_TUNABLES with what is missing in it."""
  ours = {SETTING: 1, ARENAS: os.cpu_count()}
  missing = [f"{name}={value}" for name, value in ours.items() if name not in tunables]
  return ":".join(filter(None, [tunables, *missing]))


def _on_request() -> bool:
  try:
    library, version = os.confstr("CS_GNU_LIBC_VERSION").split()
    recent = tuple(map(int, version.split("."))) >= (2, 35)
    return library == "glibc" and recent and "[madvise]" in MODE.read_text()
  except (OSError, ValueError, AttributeError):  # no glibc, or no such pages
    return False
