"""Traces of the configured steps of one stage of one iteration."""

import jax
import pytest

from gspo_jax.runs.profiler import Profiler
from gspo_jax.settings.training import ProfileConfig


@pytest.fixture
def traced(monkeypatch):
  """Records calls of the profiler, and steps between them."""
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  return calls


def go(calls, **config):
  profiler = Profiler(ProfileConfig(**config), "profile")
  for iteration in (1, 2, 3):
    with profiler("all", iteration):
      for stage in ("sample", "update"):
        with profiler(stage, iteration):
          for _ in range(4):
            calls.append(f"{stage} {iteration}")
            profiler.count(stage, 2 if stage == "sample" else 1)
  return (
    calls[calls.index("start") + 1 : calls.index("stop")] if calls.count("start") == 1 else calls
  )


def test_a_window_has_the_configured_steps_of_one_stage(traced):
  assert go(traced, iteration=2, stage="update", steps=3) == ["update 2"] * 3
  assert traced.count("stop") == 1


def test_steps_of_decoding_come_several_at_once(traced):
  assert go(traced, iteration=1, stage="sample", steps=3) == ["sample 1"] * 2


def test_without_steps_it_is_the_stage_or_the_iteration(traced):
  assert go(traced, iteration=3, stage="sample") == ["sample 3"] * 4
  traced.clear()
  assert go(traced, iteration=3) == ["sample 3"] * 4 + ["update 3"] * 4
  traced.clear()
  assert go(traced, iteration=2, stage="update", steps=9) == ["update 2"] * 4


def test_nothing_is_traced_by_default(traced):
  assert "start" not in go(traced)


def test_an_error_ends_the_trace(traced):
  profiler = Profiler(ProfileConfig(iteration=1), "profile")
  with pytest.raises(RuntimeError), profiler("all", 1):
    raise RuntimeError
  assert traced == ["start", "stop"]


def test_a_port_in_use_is_named(monkeypatch):
  def refuse(port):
    raise RuntimeError("address in use")

  monkeypatch.setattr(jax.profiler, "start_server", refuse)
  with pytest.raises(ValueError, match=r"profile\.port=9999: RuntimeError: address in use; choose"):
    Profiler(ProfileConfig(port=9999), "profile")
