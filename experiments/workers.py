"""Worker processes and their jobs."""

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# They save a fifth of SmolLM2's update (docs/speed.md).
LARGE_PAGES = dict(GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
Answer = dict[str, Any]


def own_cores() -> list[int]:
  """Returns the cores available to this process."""
  if hasattr(os, "sched_getaffinity"):  # Linux
    return sorted(os.sched_getaffinity(0))
  return [*range(os.cpu_count() or 1)]


def command(cores: list[int]) -> list[str]:
  return [sys.executable, "-m", "experiments.worker", ",".join(map(str, cores))]


@dataclasses.dataclass
class Worker:
  """A process on its share of the cores, started by its first job."""

  cores: list[int]
  process: subprocess.Popen | None = None
  job: Any = None
  started: float = 0.0

  def begin(self, job: Any, values: dict[str, Any], workdir: Path) -> None:
    if self.process is None or self.process.poll() is not None:
      path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
      self.process = subprocess.Popen(
        command(self.cores),
        cwd=ROOT,
        env=LARGE_PAGES | os.environ | dict(PYTHONPATH=path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
    self.job, self.started = job, time.monotonic()
    message = dict(values=values, workdir=str(workdir), measure=job.measure)
    self.process.stdin.write(json.dumps(message) + "\n")
    self.process.stdin.flush()

  def answer(self) -> Answer:
    """Returns the answer; "interrupted" if the process died."""
    line = self.process.stdout.readline()
    if line:
      answer = json.loads(line)
      if answer["status"] != "done":  # The process ends now.
        self.process.wait()
      return answer
    code = self.process.wait()
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return dict(
      status="interrupted",
      reason=f"its process ended: {reason}",
      seconds=round(time.monotonic() - self.started, 1),
    )

  def stop(self) -> None:
    if self.process is not None and self.process.poll() is None:
      self.process.terminate()


class Workers:
  """Processes with equal shares of the cores."""

  def __init__(self, count: int):
    cores = own_cores()
    shares = [cores[i::count] or [cores[i % len(cores)]] for i in range(count)]
    self.all = [Worker(share) for share in shares]

  @property
  def idle(self) -> list[Worker]:
    return [worker for worker in self.all if worker.job is None]

  @property
  def busy(self) -> list[Worker]:
    return [worker for worker in self.all if worker.job is not None]

  def answers(self, timeout: float | None) -> Iterator[tuple[Any, Answer]]:
    """Waits up to `timeout` seconds for a first answer; yields jobs with answers."""
    with selectors.DefaultSelector() as selector:
      for worker in self.busy:
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
      for key, _ in selector.select(timeout):
        worker = key.data
        job, answer = worker.job, worker.answer()
        worker.job = None
        yield job, answer

  def stop(self, seconds: float) -> Iterator[tuple[Any, Answer]]:
    """Stops all workers with a checkpoint; kills the rest after some seconds."""
    for worker in self.all:
      worker.stop()
    deadline = time.monotonic() + seconds
    while self.busy and time.monotonic() < deadline:
      yield from self.answers(deadline - time.monotonic())
    for worker in self.busy:
      worker.process.kill()
      yield worker.job, worker.answer()
      worker.job = None

  def close(self) -> None:
    """Ends the idle processes."""
    for worker in self.all:
      if worker.process is not None and worker.process.poll() is None:
        worker.process.stdin.close()
        worker.process.wait()
