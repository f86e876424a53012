"""Messages between the verifier and a sandbox, and encoding of values as data.

The values of a candidate program are sent as JSON of builtin containers, strings and numbers. So a
comparison calls no method of the program. `decode` runs in sandboxes only: a program
may choose keys of sets and dicts with colliding hashes, to make `decode` take quadratic time.
"""

import json
import os
from typing import Any

# Integers of more bits are sent in hexadecimal, since Python limits conversions from decimal.
_INT_BITS = 13_000


class Closed(Exception):
  """The process on the other side has ended or closed the connection."""


def send(descriptor: int, message: Any) -> None:
  """Writes one message: its length in 8 bytes, then JSON.

  Raises:
    Closed: the other side is closed.
  """
  data = json.dumps(message).encode()
  data = memoryview(len(data).to_bytes(8, "big") + data)
  try:
    while data:
      data = data[os.write(descriptor, data) :]
  except (BrokenPipeError, ConnectionResetError) as error:
    raise Closed from error


def receive(descriptor: int, limit: int) -> Any:
  """Reads one message of at most `limit` bytes.

  Raises:
    Closed: the other side is closed.
    ValueError: the message is longer than `limit`, or is not JSON.
  """
  size = int.from_bytes(_read(descriptor, 8), "big")
  if size > limit:
    raise ValueError(f"a message has {size} bytes, more than the limit of {limit}")
  return json.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
  """Reads exactly `size` bytes; raises Closed if fewer arrive."""
  parts = []
  while size:
    try:
      part = os.read(descriptor, min(size, 1 << 20))
    except ConnectionResetError as error:
      raise Closed from error
    if not part:
      raise Closed
    parts.append(part)
    size -= len(part)
  return b"".join(parts)


def encode(value: Any) -> Any:
  """Encodes a value as JSON, for `decode`.

  None, bools, floats, strings and integers of up to `_INT_BITS` bits are unchanged. A list becomes
  the list of its encoded items. Other values become dicts {kind: content}. Subclasses of builtin
  types become the builtin type, and NumPy scalars become Python's.

  Raises:
    TypeError: a part is not None, a number, a string, bytes or a builtin container.
  """
  if value is None:
    return None
  for kind in (bool, float, str):
    if isinstance(value, kind):
      return kind(value)
  if isinstance(value, int):
    value = int(value)
    return value if value.bit_length() <= _INT_BITS else {"int": hex(value)}
  if isinstance(value, list):
    return [encode(item) for item in value]
  if isinstance(value, tuple):
    return {"tuple": [encode(item) for item in value]}
  if isinstance(value, set | frozenset):
    return {"set": [encode(item) for item in value]}
  if isinstance(value, dict):
    return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
  if isinstance(value, bytes):
    return {"bytes": value.hex()}
  if isinstance(value, complex):
    return {"complex": [value.real, value.imag]}
  if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
    return encode(value.item())
  raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def decode(value: Any) -> Any:
  """Decodes a value of `encode`.

  Raises:
    ValueError, TypeError, RecursionError: the value is not from `encode`.
  """
  if isinstance(value, list):
    return [decode(item) for item in value]
  if not isinstance(value, dict):
    return value
  ((kind, content),) = value.items()
  if kind == "int":
    return int(content, 16)
  if kind == "tuple":
    return tuple(map(decode, content))
  if kind == "set":
    return set(map(decode, content))
  if kind == "dict":
    return {decode(k): decode(v) for k, v in content}
  if kind == "bytes":
    return bytes.fromhex(content)
  if kind == "complex":
    return complex(*content)
  raise ValueError(f"a value has the unknown kind {kind!r}")
