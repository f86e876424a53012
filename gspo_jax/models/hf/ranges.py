"""Reads remote safetensors files in ranges of bytes.

A file has three parts: the length of the header in 8 bytes, the header, and the bytes of the
tensors. The header is a JSON object from names of tensors to their type, shape and offsets
(https://github.com/huggingface/safetensors#format).
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, KeysView
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = dict(F64=np.float64, F32=np.float32, F16=np.float16, BF16=ml_dtypes.bfloat16)
DTYPES |= dict(U8=np.uint8)  # For MXFP4 alone.
_FIRST = 2**18  # Bytes of the first read, which covers the headers of most files.
_LONGEST = 10**8  # Maximum bytes of a header, as in the library safetensors.

Read = Callable[[int, int], bytes]  # (start, stop) -> bytes of a file


class RangedFile:
  """An opened file with some of the methods of `safetensors.safe_open`.

  The constructor reads and checks the header. Values are read on demand.

  Args:
    size: bytes of the file.
    read: returns the file's bytes from `start` to `stop`.

  Raises:
    ValueError: the file is not a complete safetensors file.
  """

  def __init__(self, size: int, read: Read):
    self.size, self._read = size, read
    first = read(0, min(size, _FIRST))
    length = struct.unpack("<Q", first[:8])[0] if size > 8 else 0
    self.start = 8 + length
    if not 0 < length < _LONGEST or self.start > size:
      raise ValueError("it has no header")
    more = read(len(first), self.start) if self.start > len(first) else b""
    header = json.loads((first + more)[8 : self.start])
    if not isinstance(header, dict):
      raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    self._header: dict[str, dict[str, Any]] = header
    try:
      places = sorted(self._place(name) for name in header)
    except (KeyError, TypeError, ValueError, IndexError) as error:
      raise ValueError(f"its header is damaged: {error}") from error
    ends = [0, *(stop for _, stop in places)]
    if [start for start, _ in places] != ends[:-1] or self.start + ends[-1] != size:
      raise ValueError(f"the tensors of its header do not fill its {size} bytes")

  @property
  def elements(self) -> int:
    """Returns the number of elements of all tensors."""
    return sum(math.prod(entry["shape"]) for entry in self._header.values())

  def _place(self, name: str) -> tuple[int, int]:
    """Returns start and stop of a tensor's bytes, counted from the header's end."""
    entry = self._header[name]
    start, stop = entry["data_offsets"]
    dtype = DTYPES.get(entry["dtype"])  # `Files.check_headers` refuses other types.
    if dtype and stop - start != math.prod(entry["shape"]) * np.dtype(dtype).itemsize:
      raise ValueError(f"the {stop - start} bytes of {name} do not match its shape and type")
    return start, stop

  def keys(self) -> KeysView[str]:
    return self._header.keys()

  def get_slice(self, name: str) -> "Tensor":
    entry = self._header[name]
    start = self.start + self._place(name)[0]
    return Tensor(self._read, entry["dtype"], tuple(entry["shape"]), start)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A lazy tensor: indexing it reads all rows of the slice as one range of bytes."""

  read: Read
  dtype: str
  shape: tuple[int, ...]
  start: int  # Offset of the tensor's bytes in the file.

  def get_shape(self) -> tuple[int, ...]:
    return self.shape

  def get_dtype(self) -> str:
    return self.dtype

  def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
    dtype, inner = np.dtype(DTYPES[self.dtype]), self.shape[1:]
    if not self.shape:  # A scalar has no axis to slice.
      return np.frombuffer(self.read(self.start, self.start + dtype.itemsize), dtype).reshape(())
    row = math.prod(inner) * dtype.itemsize
    rows = range(*slices[0].indices(self.shape[0]))
    content = self.read(self.start + rows.start * row, self.start + rows.stop * row)
    if len(content) != len(rows) * row:
      raise ValueError(f"{len(content)} bytes were received instead of {len(rows) * row}")
    return np.frombuffer(content, dtype).reshape(len(rows), *inner)[:, *slices[1:]]
