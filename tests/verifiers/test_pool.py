"""Worker processes that hang, die and are killed, and what becomes of the items in them."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from gspo_jax.verifiers import pool

# The function is `eval` here, so that an item can do what it likes to its worker.

EXIT = "__import__('os')._exit(3)"
SLEEP = "__import__('time').sleep(%s)"


def alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  with open(f"/proc/{pid}/stat") as stat:
    return stat.read().rpartition(")")[2].split()[0] != "Z"


def evaluator(workers=2, time_limit_s=10.0, **options):
  return pool.Pool("builtins:eval", workers, time_limit_s, warm_up="0", **options)


def kill(evaluate):
  for pid in evaluate.pids:
    os.kill(pid, signal.SIGKILL)


def test_results_come_in_order():
  with evaluator(workers=3) as evaluate:
    assert evaluate.map([f"{i} * 2" for i in range(500)]) == [2 * i for i in range(500)]
    assert evaluate.map([]) == []


@pytest.mark.parametrize(
  "hang",
  [
    SLEEP % 60,
    "9**9**9",  # never lets go of the interpreter lock
    "__import__('os').kill(__import__('os').getpid(), 19)",  # stops itself
  ],
)
def test_a_hanging_item_is_killed_alone(hang):
  with evaluator(workers=1, time_limit_s=0.5) as evaluate:
    (pid,) = evaluate.pids
    start = time.monotonic()
    # One worker: the items behind it wait for it.
    assert evaluate.map(["1", hang, "2", "3"]) == [1, "timeout", 2, 3]
    assert time.monotonic() - start < 40
    assert not alive(pid)


def test_what_a_hanging_item_has_started_ends_with_it(tmp_path):
  pid = tmp_path / "pid"
  starts = f"__import__('subprocess').run('echo $$ > {pid}; exec sleep 77', shell=True)"
  with evaluator(workers=1, time_limit_s=2.0) as evaluate:
    assert evaluate.map([starts]) == ["timeout"]
  deadline = time.monotonic() + 10
  while alive(int(pid.read_text())):
    assert time.monotonic() < deadline
    time.sleep(0.1)


def test_cpu_time_has_no_limit_of_its_own():
  """An item may have threads, and may start a process that later items use."""
  limit = "__import__('resource').getrlimit(__import__('resource').RLIMIT_CPU)[0]"
  with evaluator(workers=1) as evaluate:
    assert evaluate.map([limit]) == [resource.getrlimit(resource.RLIMIT_CPU)[0]]


def test_an_idle_worker_stays_however_long_it_is_idle():
  with evaluator(workers=1, time_limit_s=0.3) as evaluate:
    pids = evaluate.pids
    assert evaluate.map(["1"]) == [1]
    time.sleep(0.5 + pool.GRACE_S)
    assert evaluate.map(["2"]) == [2] and evaluate.pids == pids


def test_queueing_is_not_counted():
  with evaluator(workers=1, time_limit_s=0.6) as evaluate:
    results = evaluate.map([f"{SLEEP % 0.15} or {i}" for i in range(12)])
    assert results == list(range(12))


def test_an_item_that_kills_its_worker_is_a_crash():
  with evaluator() as evaluate:
    items = ["1", EXIT, "2", "__import__('os').kill(__import__('os').getpid(), 11)", "3"] * 3
    assert evaluate.map(items) == [1, "crash", 2, "crash", 3] * 3


def test_a_deadly_item_is_tried_twice(tmp_path):
  log = str(tmp_path / "log")
  note = (
    f"__import__('os').write(__import__('os').open({log!r}, {os.O_CREAT | os.O_APPEND | 1}), b'x')"
  )
  with evaluator(workers=1) as evaluate:
    assert evaluate.map(["1", f"{note} and {EXIT}", "2"]) == [1, "crash", 2]
  assert (tmp_path / "log").read_text() == "xx"


def test_a_worker_that_dies_once_is_no_fault_of_its_item(tmp_path):
  # The first attempt leaves a mark and dies, as if somebody else had killed the worker.
  mark = str(tmp_path / "mark")
  once = f"__import__('os').path.exists({mark!r}) or (__import__('os').mkdir({mark!r}), {EXIT})"
  with evaluator(workers=1) as evaluate:
    assert evaluate.map(["1", once, "2"]) == [1, True, 2]


def test_exceptions_are_crashes_and_keep_the_worker():
  with evaluator(workers=1) as evaluate:
    before = evaluate.pids
    assert evaluate.map(["1", "1/0", "no_such_name", "2"]) == [1, *["crash"] * 2, 2]
    assert evaluate.pids == before


def test_memory_is_limited():
  with evaluator(workers=1, memory_bytes=1 << 30) as evaluate:
    before = evaluate.pids
    assert evaluate.map(["1", "len(bytes(1 << 31))", "2"]) == [1, "crash", 2]
    assert evaluate.pids != before  # a fresh one
    assert evaluate.map(["len(bytes(1 << 28))"]) == [1 << 28]


def test_an_idle_worker_that_was_killed_is_replaced():
  with evaluator() as evaluate:
    kill(evaluate)
    assert evaluate.map(["1", "2", "3"]) == [1, 2, 3]


def test_an_interrupt_leaves_no_stale_results():
  with evaluator(workers=2) as evaluate:
    timer = threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
      evaluate.map([f"{SLEEP % 2} or 'stale'"])
    timer.join()
    assert evaluate.map(["4"]) == [4]


def test_close_ends_the_processes():
  evaluate = evaluator()
  pids = evaluate.pids
  evaluate.close()
  evaluate.close()
  assert not any(map(alive, pids))
  with pytest.raises(RuntimeError, match="closed"):
    evaluate.map(["1"])


@pytest.mark.parametrize(
  "function, message", [("no_such_module:f", "no_such_module"), ("os:_exit", "without a message")]
)
def test_workers_that_cannot_start_are_reported(function, message):
  with pytest.raises(RuntimeError, match=message):
    pool.Pool(function, 2, 1.0, warm_up=0)


def test_workers_import_no_jax_and_not_the_main_module():
  with evaluator(workers=1) as evaluate:
    imported = "__import__('gspo_jax.verifiers.math_answer') and [*__import__('sys').modules]"
    (modules,) = evaluate.map([imported])
    assert "gspo_jax.verifiers.math_answer" in modules
    assert not {"jax", "pytest", "conftest"} & set(modules)


def test_workers_do_not_outlive_a_killed_parent():
  program = """
    import threading
    from gspo_jax.verifiers import pool
    evaluate = pool.Pool("builtins:eval", 3, 1.0, warm_up="0")
    threading.Timer(0.3, lambda: print(*evaluate.pids, flush=True)).start()
    # One is busy for ever, one waits for something, one is idle.
    evaluate.map(["all(x == 0 for x in iter(int, 1))", "__import__('time').sleep(600)"])
  """
  command = [sys.executable, "-c", textwrap.dedent(program)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
  assert len(pids) == 3
  deadline = time.monotonic() + 20  # they may have 3 s
  while any(map(alive, pids)):
    assert time.monotonic() < deadline
    time.sleep(0.1)


class Doomed:
  """Kills workers as soon as they have been started, the first `count` of them."""

  def __init__(self, monkeypatch, count):
    self.left, start = count, pool._Worker.start

    def started(worker):
      start(worker)
      if self.left:
        self.left -= 1
        worker.process.kill()

    monkeypatch.setattr(pool._Worker, "start", started)


@pytest.mark.parametrize("killed", [1, 4])
def test_workers_that_are_killed_while_starting_are_started_again(monkeypatch, killed):
  with evaluator(workers=2) as evaluate:
    kill(evaluate)
    Doomed(monkeypatch, killed)
    assert evaluate.map(["1", "2", "3"]) == [1, 2, 3]


def test_where_none_starts_the_items_fail_and_the_next_call_tries_again(monkeypatch):
  with evaluator(workers=2) as evaluate:
    kill(evaluate)
    doomed = Doomed(monkeypatch, 1000)
    results = evaluate.map(["1", "2", "3"])
    assert results == ["crash"] * 3
    assert results[2].reason == "no verifier process starts: it died without a message"
    assert evaluate.map(["1"]) == ["crash"]
    doomed.left = 0
    assert evaluate.map(["1", "2", "3"]) == [1, 2, 3]


def test_no_room_for_a_process_is_no_end_either(monkeypatch):
  def full(*_, **__):
    raise OSError(11, "Resource temporarily unavailable")

  with evaluator(workers=2) as evaluate:
    kill(evaluate)
    with monkeypatch.context() as patch:
      patch.setattr(pool.subprocess, "Popen", full)
      results = evaluate.map(["1", "2"])
      assert results == ["crash"] * 2 and "temporarily unavailable" in results[0].reason
    assert evaluate.map(["1", "2"]) == [1, 2]


def test_failures_have_a_reason():
  with evaluator(workers=1, time_limit_s=0.5) as evaluate:
    raised, late, dead = evaluate.map(["{}['key']", SLEEP % 60, EXIT])
  assert (
    raised.reason == "KeyError: 'key'" and late.reason == "it took longer than time_limit_s=0.5"
  )
  assert dead.reason == "its process died twice"


def test_failures_are_their_names():
  failure = pool.Failure("crash", "for a\n  reason")
  assert failure == str(failure) == "crash" != "timeout" and failure.reason == "for a reason"


def test_close_ends_a_call_of_another_thread():
  evaluate, errors = evaluator(workers=1), []

  def call():
    try:
      evaluate.map(["__import__('time').sleep(60)"])
    except BaseException as error:
      errors.append(error)

  thread = threading.Thread(target=call)
  thread.start()
  while evaluate._workers[0].item is None:
    time.sleep(0.01)
  evaluate.close()
  thread.join(30)
  assert not thread.is_alive()
  assert isinstance(errors[0], RuntimeError) and "closed" in str(errors[0])


def test_closing_changes_no_worker_during_a_call_of_another_thread(monkeypatch):
  evaluate, wait = evaluator(workers=1), pool.connection.wait
  closing = threading.Thread(target=evaluate.close)

  def close_and_wait(pipes, timeout):
    if closing.ident is None:
      closing.start()
      closing.join(0.5)
    return wait(pipes, timeout)

  monkeypatch.setattr(pool.connection, "wait", close_and_wait)
  with pytest.raises(RuntimeError, match="closed"):
    evaluate.map(["__import__('time').sleep(60)"])
  closing.join(30)
  assert not closing.is_alive() and not evaluate.pids
