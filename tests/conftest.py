"""The test harness: eight simulated devices, quick compilation, strict ranks."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compile time is most of the tests' time
jax.config.update("jax_numpy_rank_promotion", "raise")


# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def x64():
  """Runs one test in float64."""
  with jax.enable_x64(True):
    yield
