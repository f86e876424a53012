"""Calls of user code: hanging, exiting and raising ones; stops during a wait."""

import concurrent.futures
import signal
import threading
import time

import pytest

from gspo_jax.system import preemption, workers


def sleep(seconds, value=None):
  time.sleep(seconds)
  return value


def spin():
  while True:
    pass


def leave(error):
  raise error


def test_calls_run_in_order_in_one_thread():
  pool, order = workers.Workers(1), []
  calls = [pool.submit(order.append, i, limit_s=9) for i in range(9)]
  pool.wait(calls)
  assert order == list(range(9))
  threads = {pool.run(threading.get_ident, limit_s=9).result() for _ in range(9)}
  assert len(threads) == 1 and threads != {threading.get_ident()}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OSError()])
def test_whatever_is_raised_is_the_result_of_its_call(error):
  pool = workers.Workers(1)
  assert pool.run(leave, error, limit_s=9).exception() is error
  assert pool.run(sleep, 0, 5, limit_s=9).result() == 5  # The thread goes on.


def test_a_call_beyond_its_limit_is_given_up_and_the_next_one_runs():
  pool, start = workers.Workers(1), time.monotonic()
  hangs, later = pool.submit(sleep, 30, limit_s=0.2), pool.submit(sleep, 0, 5, limit_s=9)
  pool.wait([hangs, later])
  assert time.monotonic() - start < 10 and later.result() == 5
  with pytest.raises(workers.TooLong, match=r"longer than 0\.2 s"):
    hangs.result()
  assert pool.run(sleep, 0, 6, limit_s=9).result() == 6


def test_time_in_the_queue_does_not_count():
  pool = workers.Workers(1)
  calls = [pool.submit(sleep, 0.2, i, limit_s=1.2) for i in range(8)]
  pool.wait(calls)
  assert [call.result() for call in calls] == [*range(8)]


def test_a_loop_beyond_its_limit_ends():
  pool, before = workers.Workers(1), threading.active_count()
  assert isinstance(pool.run(spin, limit_s=0.2).exception(), workers.TooLong)
  until = time.monotonic() + 10
  while threading.active_count() > before and time.monotonic() < until:
    time.sleep(0.01)
  assert threading.active_count() == before


def test_threads_that_hang_are_bounded(monkeypatch):
  monkeypatch.setattr(workers, "MOST_HANGING", 2)
  pool = workers.Workers(1)
  for _ in range(2):
    assert "longer" in str(pool.run(sleep, 5, limit_s=0.1).exception())
  assert "2 earlier calls still hang" in str(pool.run(sleep, 0, limit_s=9).exception())


def test_a_wait_for_the_first_call_leaves_the_others():
  pool = workers.Workers(2)
  calls = [pool.submit(sleep, 1, limit_s=9), pool.submit(sleep, 0, limit_s=9)]
  pool.wait(calls, concurrent.futures.FIRST_COMPLETED)
  assert [call.done() for call in calls] == [False, True]


def test_a_long_wait_without_a_limit_is_told_to_stop_too():
  assert workers.interruptible(sleep, 0, 5) == 5
  with pytest.raises(OSError, match="full"):
    workers.interruptible(leave, OSError("full"))
  released = threading.Event()
  with pytest.raises(preemption.Preempted), preemption.watch(None):
    threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM]).start()
    workers.interruptible(released.wait)
  released.set()


def test_a_wait_is_told_to_stop():
  """And calls in the queue never begin."""
  pool, done, released = workers.Workers(1), [], threading.Event()
  with pytest.raises(preemption.Preempted), preemption.watch(None):
    calls = [pool.submit(released.wait, limit_s=60), pool.submit(done.append, 1, limit_s=60)]
    threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM]).start()
    pool.wait(calls)
  assert calls[1].cancelled() and not calls[0].done()
  released.set()
  pool.run(sleep, 0, limit_s=60)
  assert not done
