"""What benchmarks say of the machine they run on, and what they ask of it."""

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence


def busy_seconds() -> float:
  """Returns the machine's processor time since its start, on Linux."""
  try:
    with open("/proc/stat") as file:
      user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
  except OSError:
    return 0.0
  return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def environment(packages: Sequence[str]) -> str:
  """Describes cores, malloc and versions of installed packages."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  facts = [f"{cores} cores", f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}"]
  for package in packages:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      facts.append(f"{package} {importlib.metadata.version(package)}")
  return ", ".join(facts)


def installed(system: str, needs: Sequence[str]) -> bool:
  """Whether a compared system is installed; prints it if not."""
  missing = [name for name in needs if importlib.util.find_spec(name) is None]
  if missing:
    print(f"{system} is left out: {', '.join(missing)} not installed (benchmarks/peers.txt)")
  return not missing
