"""How busy the machine is, for benchmarks that leave out what others disturbed."""

import os


def busy_seconds() -> float:
  """Processor time of everything since the machine was started, where Linux tells."""
  try:
    with open("/proc/stat") as file:
      user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
  except OSError:
    return 0.0
  return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
