"""Checksums of arrays, computed on the devices before writing and after reading.

A checksum depends on dtype and values, not on the mesh. It is computed from an array in device
memory, so no file is read a second time.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sums(tree: Any) -> dict[str, str]:
  """Returns "DTYPE CHECKSUM" of each array, by name. Collective: call it on all hosts."""
  values = jax.device_get(_sums(tree))
  return {name: f"{leaf.dtype} {int(values[name]):08x}" for name, leaf in named(tree).items()}


def changed(written: Mapping[str, str], read: Mapping[str, str]) -> str | None:
  """Describes arrays with a changed checksum; None if there are none.

  At most three arrays are named. Arrays with a changed dtype are not compared.
  """
  wrong = [
    name
    for name, value in read.items()
    if written[name] != value and written[name].split()[0] == value.split()[0]
  ]
  return " and ".join(f"{name} is not what was written" for name in wrong[:3]) or None


def named(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a pytree, by dotted name such as `params.embed`."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def _sums(tree: Any) -> dict[str, jax.Array]:
  return {name: _sum(x) for name, x in named(tree).items()}


def _sum(x: jax.Array) -> jax.Array:
  """Hashes the bits of each value with MurmurHash3's finalizer; returns the sum modulo 2^32."""
  bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
  bits = (bits ^ bits >> 16) * np.uint32(0x85EBCA6B)
  bits = (bits ^ bits >> 13) * np.uint32(0xC2B2AE35)
  return jnp.sum(bits ^ bits >> 16, dtype=jnp.uint32)
