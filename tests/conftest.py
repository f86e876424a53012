"""The test harness: eight simulated devices, quick compilation, strict ranks."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's older emitters halve the time to compile; what they make is slower, which small tests do not
# feel. Runs that tests start inherit this.
os.environ.setdefault(
  "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
# Runs that tests start share what they compile, and leave nothing in the user's cache. Processes of
# pytest-xdist inherit the directory of the one that starts them.
if "PYTEST_XDIST_WORKER" not in os.environ:
  os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gspo_jax_tests_")
  atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import jax
import pytest
from jax import experimental

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compile time is most of the tests' time
jax.config.update("jax_numpy_rank_promotion", "raise")


# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
  """Linux gives a process 65,530 memory mappings, and every compiled program takes some: a process
  that runs out of them dies within the compiler."""
  yield
  if MAPS.exists() and len(MAPS.read_text().splitlines()) > 20_000:
    jax.clear_caches()


@pytest.fixture
def x64():
  """Runs one test in float64."""
  enabled = jax.enable_x64 if hasattr(jax, "enable_x64") else experimental.enable_x64  # before 0.8
  with enabled(True):
    yield
