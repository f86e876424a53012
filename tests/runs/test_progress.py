"""Logs stay readable, and the time left is an honest guess."""

import io
import threading

from gspo_jax.runs.progress import Progress
from gspo_jax.system.text import clock_text


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_progress_in_a_log_is_plain_lines_at_intervals():
  clock, log = [0.0], io.StringIO()
  figures = {"reward/mean": 0.5, "clip_fraction/token": 0.125, "tokens_per_second": 8000.0}
  with Progress("rl", 60, interval=10, stream=log, clock=lambda: clock[0]) as progress:
    for step in range(1, 61):
      clock[0] += 2.0
      progress.update(step, figures | ({"eval/accuracy": 0.25} if step == 2 else {}))
  lines = log.getvalue().splitlines()
  assert not any(c < " " for c in log.getvalue() if c != "\n")
  assert len(lines) == 1 + 59 * 2 // 10 + 1  # the first, one per ten seconds, the last
  assert lines[0] == "rl 1/60  reward 0.500  clipped 0.125  8,000 tokens/s  left ?"
  assert lines[1] == (
    "rl 6/60  reward 0.500  accuracy 0.250  clipped 0.125  8,000 tokens/s  left 1:48"
  )
  assert lines[-1].startswith("rl 60/60") and lines[-1].endswith("left 0:00")


def test_time_left_does_not_count_compilation():
  clock, log = [0.0], io.StringIO()
  progress = Progress("rl", 10, interval=0, stream=log, clock=lambda: clock[0])
  for step, seconds in ((0, 0.0), (1, 100.0), (2, 1.0)):  # step 1 compiles
    clock[0] += seconds
    progress.update(step, {"reward/mean": 0.5})
  assert [line.split("left ")[1] for line in log.getvalue().splitlines()] == ["?", "?", "0:08"]


def test_progress_on_a_terminal_is_one_bar():
  screen = Terminal()
  with Progress("sft", 4, start=2, stream=screen) as progress:
    progress.update(3, {"loss": 1.25, "tokens_per_second": 99.0})
    progress.update(4, {"loss": 1.0, "tokens_per_second": 99.0})
  shown = screen.getvalue().split("\r")
  assert any("sft 3/4" in text and "loss 1.25" in text for text in shown)
  assert any("sft 4/4" in text and "left 0:00" in text for text in shown)


def test_clock_text():
  assert [clock_text(s) for s in (0, 61.4, 3600)] == ["0:00", "1:01", "1:00:00"]


def test_a_short_phase_shows_no_progress():
  clock, log, screen = [0.0], io.StringIO(), Terminal()
  for stream in (log, screen):
    with Progress("eval", 2, delay=5, stream=stream, clock=lambda: clock[0]) as progress:
      progress.update(1, {})
      progress.update(2, {})
  assert log.getvalue() == screen.getvalue() == ""
  progress = Progress("eval", 3, delay=5, stream=log, clock=lambda: clock[0])
  for step in (1, 2, 3):
    clock[0] += 4
    progress.update(step, {})
  assert [line[:8] for line in log.getvalue().splitlines()] == ["eval 2/3", "eval 3/3"]


def test_compilation_is_shown_until_the_first_step():
  clock, log = [0.0], io.StringIO()
  with Progress(
    "sft", 10, interval=1e6, stream=log, clock=lambda: clock[0], at_most=True
  ) as progress:
    progress.wait()
    clock[0] = 75.0
    progress.beat()
    for step in 1, 2:
      clock[0] += 2.0e6
      progress.update(step, {"loss": 2.0})
  assert log.getvalue().splitlines() == [
    "sft 0/10  compilation and first step; 0:00 so far",
    "sft 0/10  1:15 so far",
    "sft 1/10  loss 2  left ?",
    "sft 2/10  loss 2  left at most 4444:26:40",
  ]


def test_compilation_is_not_shown_after_the_first_step():
  log = io.StringIO()
  progress = Progress("rl", 10, interval=1e6, stream=log)
  before = set(threading.enumerate())
  progress.wait()
  (thread,) = set(threading.enumerate()) - before
  progress.update(1, {})
  thread.join(timeout=60)
  assert not thread.is_alive()
  assert "compiling" not in log.getvalue().splitlines()[-1]


def test_a_finished_phase_is_named():
  log = io.StringIO()
  Progress("rl", 10, start=10, stream=log).wait()
  assert log.getvalue() == "rl 10/10  finished before this start\n"
