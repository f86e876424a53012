"""One line that says how much has come, how fast, and how long the rest will take."""

import io

import pytest

from gspo_jax.system.transfer import Transfer


class Terminal(io.StringIO):
  def isatty(self):
    return True


def moved(stream, seconds=40, **options):
  """4 GB at 100 MB/s, the first one already there."""
  current = [0.0]
  with Transfer(
    "reading org/model", 5 * 10**9, stream=stream, clock=lambda: current[0], **options
  ) as t:
    t.add(10**9, before=True)
    for _ in range(seconds):
      current[0] += 1.0
      t.add(10**8)
  return stream.getvalue()


def test_lines_of_a_log():
  assert moved(io.StringIO()).splitlines() == [
    "reading org/model: 1.10 of 5.00 GB  100 MB/s  left 0:39",  # what was there has no speed
    "reading org/model: 2.10 of 5.00 GB  100 MB/s  left 0:29",
    "reading org/model: 3.10 of 5.00 GB  100 MB/s  left 0:19",
    "reading org/model: 4.10 of 5.00 GB  100 MB/s  left 0:09",
    "reading org/model: 5.00 of 5.00 GB  100 MB/s  left 0:00",
  ]


def test_a_terminal_has_one_line():
  text = moved(Terminal())
  assert text.count("\n") == 1 and text.endswith("\n")
  assert text.split("\r")[-1] == "reading org/model: 5.00 of 5.00 GB  100 MB/s  left 0:00\x1b[K\n"


def test_nothing_of_what_takes_no_time_or_is_another_hosts():
  assert moved(io.StringIO(), active=False) == ""
  assert moved(io.StringIO(), seconds=0) == ""


def test_threads_whose_work_is_in_vain_end():
  transfer = Transfer("x", 1, stream=io.StringIO())
  transfer.close()
  with pytest.raises(RuntimeError, match="the transfer is closed"):
    transfer.add(1)
