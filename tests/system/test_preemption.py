"""The notice, and what comes of it; tests/runs/test_kills.py has whole runs."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.command_line import ROOT, environment

from gspo_jax.system import preemption


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


class Swallows:
  def __del__(self):  # Python prints and forgets what is raised here
    signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_was_swallowed_is_raised_at_the_next_check():
  with preemption.watch(grace_s=60):
    Swallows()
    with pytest.raises(KeyboardInterrupt):
      preemption.check()
    with pytest.raises(KeyboardInterrupt):  # and any other at once
      signal.raise_signal(signal.SIGINT)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stays_ignored_where_it_was():
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with preemption.watch(grace_s=60):
      signal.raise_signal(signal.SIGINT)
      with preemption.interrupts_wait():
        signal.raise_signal(signal.SIGINT)
      preemption.check()
  finally:
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_what_must_not_be_torn():
  reached = False
  with pytest.raises(KeyboardInterrupt), preemption.interrupts_wait():
    signal.raise_signal(signal.SIGINT)
    reached = True
  assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_watch_nothing_is_caught():
  preemption.check()
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


STUCK = """
import time
from gspo_jax.system import preemption
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
