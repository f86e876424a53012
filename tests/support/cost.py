"""Whether a function takes time that grows with the length of its input, and no faster."""

import gc
import time

LENGTHS = (800, 3200, 12_800, 51_200, 204_800, 819_200)  # Factors of four.
LEAST = 0.004  # Seconds; shorter times vary more on a busy machine.


def assert_linear(read, make):
  """Asserts linear cost of `read(*make(length))`.

  Four times the length may take at most eight times as long; quadratic cost takes sixteen times.
  Times below `LEAST` do not count; the first length with a bound above that is the last.
  """
  last = 0.0
  for length in LENGTHS:
    if last > 8 * LEAST:
      return
    arguments = make(length)
    bound = 8 * max(last, LEAST)
    current = seconds(read, arguments)
    for _ in range(8):  # The machine may stutter.
      current = min(current, seconds(read, arguments)) if current > bound else current
    assert current <= bound, (
      f"{make(20)}...: length {length} takes {current:.3f} s, a quarter {last:.3f} s"
    )
    last = current


def seconds(read, arguments):
  """CPU time of this thread, without collections of garbage: others may be busy."""
  gc.disable()
  try:
    start = time.thread_time()
    read(*arguments)
    return time.thread_time() - start
  finally:
    gc.enable()
