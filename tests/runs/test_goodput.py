"""Where the wall time went: stages, compilation, restarts, and the rest."""

import jax
import jax.numpy as jnp
import pytest

from gspo_jax.runs.goodput import Goodput, compile_seconds
from gspo_jax.runs.metrics import Stopwatch


def opened(now):
  return Goodput(clock=lambda: now[0])


def test_shares_are_of_the_time_since_the_start():
  now = [100.0]
  goodput = opened(now)
  goodput.resume({})
  now[0] = 110.0
  row = goodput.metrics({"time/sample": 4.0, "time/compile": 1.0, "time/save": 2.0})
  assert row["goodput/sample"] == 0.4 and row["goodput/compile"] == 0.1
  assert row["goodput/wait"] == pytest.approx(0.3)
  assert row["goodput"] == 0.4 and row["wall/seconds"] == 10.0
  now[0] = 120.0
  row = goodput.metrics({"time/update": 10.0})
  assert row["goodput/sample"] == 0.2 and row["goodput"] == 0.7


def test_what_no_kept_row_has_was_lost_by_the_restart():
  now = [100.0]
  first = opened(now)
  first.resume({})
  now[0] = 110.0
  kept = first.metrics({"time/sample": 5.0, "time/update": 5.0})
  now[0] = 115.0
  first.metrics({"time/sample": 5.0})  # of a row that no checkpoint covers
  now[0] = 130.0
  second = opened(now)
  second.resume(kept)
  second.resume(kept)  # another phase
  now[0] = 150.0
  row = second.metrics({"time/update": 20.0})
  assert row["wall/seconds"] == 50.0
  assert row["goodput/restart"] == 0.4  # 110 to 130
  assert row["goodput/sample"] == 0.1 and row["goodput/update"] == 0.5
  assert row["goodput/wait"] == pytest.approx(0)


def test_compiling_is_charged_to_itself():
  now, compiled = [0.0], [0.0]
  watch = Stopwatch(clock=lambda: now[0], compiled=lambda: compiled[0])
  with watch("update"):
    now[0], compiled[0] = 5.0, 3.0
  now[0], compiled[0] = 7.0, 4.0  # outside every stage
  assert watch.lap() == {"time/update": 2.0, "time/compile": 4.0}


def test_programs_are_heard_of_when_they_are_compiled():
  before = compile_seconds()
  jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x) @ x)(jnp.ones((7, 7))))
  assert compile_seconds() > before
