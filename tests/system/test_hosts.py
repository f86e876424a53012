"""Broadcasts of the first process, without a second one."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.system import hosts


@pytest.fixture
def shapes(monkeypatch):
  """Passes broadcasts through JAX, and returns their shapes."""
  sent = []

  def send(array):
    sent.append(array.shape)
    return np.asarray(jnp.asarray(array))

  monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
  monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", send)
  return sent


@pytest.mark.parametrize("size", [0, 2**31 - 1, 2**31, 2**32 + 5, 10**13])
def test_a_broadcast_has_any_size(shapes, size):
  assert hosts._broadcast_size(size) == size


def test_a_long_broadcast_is_sent_in_chunks(shapes, monkeypatch):
  monkeypatch.setattr(hosts, "CHUNK", 64)
  value = dict(numbers=list(range(100)), text="one")
  assert hosts.broadcast(value) == value
  assert len(shapes) > 3 and set(shapes[1:-1]) == {(64,)} and 0 < shapes[-1][0] <= 64
