"""Reads tensors in MXFP4 as bfloat16.

MXFP4 has numbers of 4 bits. Each block of 32 numbers has a power of two as its factor (OCP
Microscaling Formats, v1.0, §5.2). Files have two tensors for a tensor NAME [..., n]. NAME_blocks
[..., n / 32, 16] has two numbers in each byte, the first in the low half. NAME_scales [..., n / 32]
has the factors' exponents of 2, plus 127.
"""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

BLOCK = 32
# Suffix of each of the two tensors -> number of NAME's elements per element of this tensor.
PARTS = {"_blocks": 2, "_scales": BLOCK}
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])

Names = Mapping[str, tuple[str, str]]


def names_in(tensors: Mapping[str, object], names: Names) -> dict[str, tuple[str, str]]:
  """Returns `names`; axes of tensors in MXFP4 are reordered, with inputs last.

  The blocks of 32 numbers are along the axis of inputs.

  tensors: names of the tensors in the files.
  """

  def axes_of(name: str, axes: str) -> str:
    *outer, rows, columns = axes.split()
    stored = f"{name.format(l=0, E=0)}_blocks" in tensors
    return " ".join([*outer, columns, rows]) if stored else axes

  return {
    key: (name, axes_of(name, axes) if " " in axes else axes) for key, (name, axes) in names.items()
  }


def stored(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Returns names and shapes of a tensor's two parts."""
  groups = (*shape[:-1], shape[-1] // BLOCK)
  return {f"{name}_blocks": (*groups, BLOCK // 2), f"{name}_scales": groups}


def read(
  part: Callable[[str, tuple[slice, ...]], np.ndarray], name: str, slices: tuple[slice, ...]
) -> np.ndarray:
  """Reads a slice of a tensor, bfloat16.

  part: reads a slice of a tensor in the files, NAME_blocks or NAME_scales.
  """
  *outer, inner = slices
  first, end = inner.start // BLOCK, -(-inner.stop // BLOCK)
  groups = (*outer, slice(first, end))
  bytes_ = part(f"{name}_blocks", (*groups, slice(0, BLOCK // 2)))
  exponents = part(f"{name}_scales", groups).astype(np.int32) - 127
  values = np.stack([_VALUES[bytes_ & 15], _VALUES[bytes_ >> 4]], axis=-1)
  values = np.ldexp(values, exponents[..., None, None]).astype(ml_dtypes.bfloat16)
  values = values.reshape(*exponents.shape[:-1], -1)
  return values[..., inner.start - first * BLOCK : inner.stop - first * BLOCK]
