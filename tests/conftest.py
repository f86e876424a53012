"""The test harness: eight simulated devices, quick compilation, strict ranks."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's older emitters halve the time to compile, and one part per program takes a third off. What
# comes out is slower, which small tests do not feel. Child processes inherit this.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
  " --xla_cpu_parallel_codegen_split_count=1",
)
# Tests, and runs that they start, share compiled programs and leave nothing in the user's cache.
# Processes of pytest-xdist inherit the directory. GSPO_JAX_TESTS_CACHE names one that stays, for
# several calls of pytest.
if "PYTEST_XDIST_WORKER" not in os.environ:
  cache = os.environ.get("GSPO_JAX_TESTS_CACHE")
  os.environ["XDG_CACHE_HOME"] = cache or tempfile.mkdtemp(prefix="gspo_jax_tests_")
  if not cache:
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import jax
import pytest
from jax import experimental

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compile time is most of the tests' time
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.config.jax_compilation_cache_dir is None:
  compiled = Path(os.environ["XDG_CACHE_HOME"], "gspo_jax", "compiled")
  jax.config.update("jax_compilation_cache_dir", str(compiled))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones
# JAX keeps millions of objects, which Python would look through several times a minute.
gc.set_threshold(20_000, 20, 50)


# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of 25 seconds and more come first, so that both processes end at about the same time.
LONGEST = tuple(
  f"tests/{name}.py"
  for name in (
    *("test_main", "cli/test_command_line", "runs/test_start", "sampling/test_scheduler"),
    *("learner/test_step", "learner/test_objective", "learner/test_layout", "sampling/test_server"),
    *("models/test_families", "models/test_routing", "models/test_moe", "models/test_lora"),
    *("models/test_attention", "models/test_transformer", "verifiers/mathematics/test_pairs"),
  )
)


def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


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


@pytest.fixture
def hangups():
  """Restores the default action of SIGHUP, which nohup ignores."""
  previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield
  signal.signal(signal.SIGHUP, previous)
