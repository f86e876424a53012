"""The notice, and what comes of it; tests/runs/test_kills.py has whole runs."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.command_line import started

from gspo_jax.system import preemption, stops


def test_a_notice_is_raised_at_the_next_check_and_not_before():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(preemption.Preempted), preemption.watch(grace_s=60):
    preemption.check()
    os.kill(os.getpid(), signal.SIGTERM)
    reached = True  # nothing is torn from the middle of what it does
    for _ in range(2):  # and it stays raised, for whoever asks later
      with pytest.raises(preemption.Preempted):
        preemption.check()
  assert reached and signal.getsignal(signal.SIGTERM) == before
  preemption.check()  # nobody watches any more


@pytest.mark.usefixtures("hangups")
def test_every_signal_has_its_code_and_ctrl_c_has_no_end_of_grace():
  for number, code in (signal.SIGINT, 130), (signal.SIGHUP, 75), (signal.SIGTERM, 75):
    grace = 0 if code == 130 else 60
    with pytest.raises(preemption.Preempted) as stop, preemption.watch(grace):
      signal.raise_signal(number)
      preemption.check()
    assert stop.value.code == code


def test_what_is_ignored_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    with preemption.watch(grace_s=60):
      signal.raise_signal(signal.SIGHUP)
      preemption.check()
  finally:
    signal.signal(signal.SIGHUP, before)


def test_within_a_watch_another_one_is_the_same():
  with pytest.raises(preemption.Preempted), preemption.watch(grace_s=60):
    with preemption.watch(grace_s=0):
      signal.raise_signal(signal.SIGTERM)
    preemption.check()


def test_a_signal_after_the_last_check_is_not_forgotten():
  with pytest.raises(preemption.Preempted), preemption.watch(grace_s=60):
    signal.raise_signal(signal.SIGTERM)
    stops.listen()


def test_the_grace_is_what_the_platform_gives(monkeypatch):
  for name in "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID":
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(preemption, "BOARD", Path("/none"))
  assert preemption.grace(None) is None and preemption.grace(600.0) == 600
  monkeypatch.setenv("SLURM_JOB_ID", "1")
  assert preemption.grace(None) == 28 and preemption.grace(0.0) == 0


def test_without_a_watch_nothing_is_caught():
  preemption.check()
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


STUCK = """
import time
from gspo_jax.system import preemption
with preemption.watch(grace_s=1.0):
  preemption.describe_resume(lambda: "checkpoint 7")
  print("ready", flush=True)
  while True:
    time.sleep(0.05)  # never asks
"""


@pytest.mark.parametrize(
  "number, code",
  [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_a_process_that_cannot_save_ends_all_the_same(number, code):
  """So long after SIGTERM; or at a second Ctrl-C, for whose first one there is no such time."""
  process = started([sys.executable, "-c", STUCK])
  assert process.stdout.readline() == "ready\n"
  start = time.monotonic()
  process.send_signal(number)
  if number == signal.SIGINT:
    assert "Ctrl-C: the run saves and ends soon" in process.stderr.readline()
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(number)
  assert process.wait(60) == code and time.monotonic() - start > 0.9
  assert "the same command continues from checkpoint 7\n" in process.stderr.read()
