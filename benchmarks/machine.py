"""What benchmarks say of the machine they run on, and what they ask of it."""

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence


def busy_seconds() -> float:
  """Processor time of everything since the machine was started, where Linux tells."""
  try:
    with open("/proc/stat") as file:
      user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
  except OSError:
    return 0.0
  return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def environment(packages: Sequence[str]) -> str:
  """Cores, settings of malloc, and the versions of those packages that are there."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  facts = [f"{cores} cores", f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}"]
  for package in packages:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      facts.append(f"{package} {importlib.metadata.version(package)}")
  return ", ".join(facts)


def installed(system: str, needs: Sequence[str]) -> bool:
  """Whether a system that is compared with can run here; says so if not."""
  missing = [name for name in needs if importlib.util.find_spec(name) is None]
  if missing:
    print(f"{system} is left out: {', '.join(missing)} not installed (benchmarks/peers.txt)")
  return not missing
