"""Where the wall time went: stages, compilation, restarts, and the rest."""

import jax
import jax.numpy as jnp
import pytest

from gspo_jax.runs.goodput import Goodput, compile_seconds
from gspo_jax.runs.metrics import Stopwatch


def opened(clock):
  return Goodput(clock=lambda: clock[0])


def test_shares_are_of_the_time_since_the_start():
  clock = [100.0]
  goodput = opened(clock)
  goodput.resume({})
  clock[0] = 110.0
  row = goodput.metrics({"time/sample": 4.0, "time/compile": 1.0, "time/save": 2.0})
  assert row["goodput/sample"] == 0.4 and row["goodput/compile"] == 0.1
  assert row["goodput/wait"] == pytest.approx(0.3)
  assert row["goodput"] == 0.4 and row["wall/seconds"] == 10.0
  clock[0] = 120.0
  row = goodput.metrics({"time/update": 10.0})
  assert row["goodput/sample"] == 0.2 and row["goodput"] == 0.7


def test_time_without_a_covered_row_is_restart():
  clock = [100.0]
  first = opened(clock)
  first.resume({})
  clock[0] = 110.0
  row = first.metrics({"time/sample": 5.0, "time/update": 5.0})
  clock[0] = 115.0
  first.metrics({"time/sample": 5.0})  # This row is beyond the checkpoint.
  clock[0] = 130.0
  second = opened(clock)
  second.resume(row)
  second.resume(row)  # another phase
  clock[0] = 150.0
  row = second.metrics({"time/update": 20.0})
  assert row["wall/seconds"] == 50.0
  assert row["goodput/restart"] == 0.4  # 110 to 130
  assert row["goodput/sample"] == 0.1 and row["goodput/update"] == 0.5
  assert row["goodput/wait"] == pytest.approx(0)


def test_compiling_is_charged_to_itself():
  clock, compiled = [0.0], [0.0]
  watch = Stopwatch(clock=lambda: clock[0], compiled=lambda: compiled[0])
  with watch("update"):
    clock[0], compiled[0] = 5.0, 3.0
  clock[0], compiled[0] = 7.0, 4.0  # outside every stage
  assert watch.lap() == {"time/update": 2.0, "time/compile": 4.0}


def test_compilation_is_measured():
  before = compile_seconds()
  jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x) @ x)(jnp.ones((7, 7))))
  assert compile_seconds() > before
