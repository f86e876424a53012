"""The notice, and what comes of it; tests/test_kills.py has whole runs."""

import os
import signal
import subprocess
import sys
import time

import pytest
from runs import ROOT, environment

from gspo_jax import preemption


def test_a_notice_is_raised_at_the_next_check_and_not_before():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.watch(grace_s=60):
    preemption.check()
    os.kill(os.getpid(), signal.SIGTERM)
    reached = True  # nothing is torn from the middle of what it does
    for _ in range(2):  # and it stays raised, for whoever asks later
      with pytest.raises(preemption.Preempted):
        preemption.check()
  assert reached and signal.getsignal(signal.SIGTERM) == before
  preemption.check()  # nobody watches any more


def test_without_a_watch_nothing_is_caught():
  preemption.check()
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


STUCK = """
import time
from gspo_jax import preemption
with preemption.watch(grace_s=1.0):
  print("ready", flush=True)
  while True:
    time.sleep(0.05)  # never asks
"""


def test_a_process_that_cannot_save_in_time_ends_all_the_same():
  process = subprocess.Popen(
    [sys.executable, "-c", STUCK], cwd=ROOT, env=environment(), text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip
  assert process.stdout.readline() == "ready\n"
  begun = time.monotonic()
  process.terminate()
  assert process.wait(30) == preemption.EXIT_CODE == 75
  assert time.monotonic() - begun > 0.9
  assert "what is not saved is left behind" in process.stderr.read()
