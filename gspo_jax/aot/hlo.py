"""Reads the text of a compiled program (`compiled.as_text()`) into instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path

_BYTES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s64=8, u64=8, f64=8, s4=0.5, u4=0.5)
_SHAPE = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.DOTALL)
_PACKAGE = Path(__file__).parents[1].as_posix()


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in the memory of one device."""

  dims: tuple[int, ...]
  bytes: float  # Includes the padding to whole tiles of TPU layouts.
  space: int  # Memory: 0 HBM; on TPU 1 vector memory, others scalars and semaphores.

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def hbm(self) -> float:
    """Bytes in HBM."""
    return 0.0 if self.space else self.bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  name: str
  op: str
  operands: tuple[str, ...]
  shape: str
  attributes: str  # Text after the operation: operands and attributes.
  root: bool
  siblings: Mapping[str, "Instruction"] = dataclasses.field(repr=False)  # Its computation.
  module: "Module" = dataclasses.field(repr=False)

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """Arrays of the result: several for a tuple."""
    return arrays(self.shape)

  @property
  def bytes(self) -> float:
    return sum(array.bytes for array in self.arrays)

  @property
  def hbm(self) -> float:
    """Bytes of the result in HBM."""
    return sum(array.hbm for array in self.arrays)

  @property
  def elements(self) -> int:
    return sum(array.elements for array in self.arrays)

  @functools.cached_property
  def inputs(self) -> list["Instruction"]:
    """Instructions of the operands."""
    return [self.siblings[name] for name in self.operands if name in self.siblings]

  def called(self, *keys: str) -> str:
    """Returns the computation named by one of these attributes, or ""."""
    for key in keys:
      if match := re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes):
        return match[1]
    return ""

  def body(self, *keys: str) -> list["Instruction"]:
    """Returns the instructions of the computation named by an attribute."""
    return [*self.module.computations.get(self.called(*keys), {}).values()]

  def branch(self) -> list["Instruction"]:
    """Returns the instructions of a conditional's branch with cuDNN, or of its "false" branch."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
    names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
    names = names or [self.called("false_computation"), self.called("true_computation")]
    bodies = [[*self.module.computations.get(name, {}).values()] for name in names]
    return next((body for body in bodies if any(x.cudnn for x in body)), bodies[0])

  @property
  def target(self) -> str:
    """Name of a custom call's implementation, or ""."""
    match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
    return match[1] if match else ""

  @property
  def cudnn(self) -> bool:
    """Whether it is attention by cuDNN."""
    return self.op == "custom-call" and self.target.startswith("__cudnn$fmha")

  @property
  def path(self) -> str:
    """JAX's names of functions, transforms and scopes, outermost first."""
    match = re.search(r'op_name="([^"]*)"', self.attributes)
    return match[1] if match else ""

  @property
  def kernel(self) -> bool:
    """Whether it is a Pallas kernel."""
    return self.op == "custom-call" and self.target in ("tpu_custom_call", "__gpu$xla.gpu.triton")

  @property
  def source(self) -> str:
    """FILE:LINE of the innermost call in this package.

    Frames of `sharding` are skipped: its helpers are called from everywhere. Without a call in the
    package it is the innermost frame, without frames "".
    """
    first, stack_frame = "", re.search(r"stack_frame_id=(\d+)", self.attributes)
    frame = int(stack_frame[1]) if stack_frame else 0  # Frames are numbered from 1.
    while frame in self.module.frames:
      file, line, frame = self.module.frames[frame]
      first = first or f"{_short(file)}:{line}"
      if file.startswith(_PACKAGE) and not file.endswith("/sharding.py"):
        return f"{_short(file)}:{line}"
    return first


@dataclasses.dataclass(frozen=True)
class Module:
  computations: dict[str, dict[str, Instruction]]
  entry: str
  frames: dict[int, tuple[str, int, int]]  # file, line, calling frame


def arrays(shape: str) -> tuple[Array, ...]:
  return tuple(_array(*match) for match in _SHAPE.findall(shape))


def _array(dtype: str, dims: str, layout: str) -> Array:
  sizes = [int(n) for n in dims.split(",") if n]
  each = 1 if dtype.startswith("f8") else _BYTES.get(dtype, 4)
  order, _, tiling = layout.partition(":")
  space = re.search(r"S\((\d+)\)", tiling)
  tile = re.search(r"T\(([\d,]+)\)", tiling)
  lying = [sizes[int(i)] for i in reversed(order.split(",")) if i] if order else list(sizes)
  if tile and lying:
    sides = [int(n) for n in tile[1].split(",")][-len(lying) :]
    tiled = zip(lying[-len(sides) :], sides)
    lying = lying[: -len(sides)] + [-(-n // side) * side for n, side in tiled]
  return Array(tuple(sizes), math.prod(lying) * each, int(space[1]) if space else 0)


def parse(text: str) -> Module:
  computations: dict[str, list[str]] = {}
  entry, lines = "", None
  for line in text.splitlines():
    if lines is None:
      header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
      if header:
        lines = computations.setdefault(header[2], [])
        entry = header[2] if header[1] else entry
    elif re.match(r"^\}(, |$)", line):  # Metadata of several lines ends otherwise.
      lines = None
    elif _INSTRUCTION.match(line.strip()):
      lines.append(line.strip())
    elif lines:
      lines[-1] += line
  module = Module({}, entry, _frames(text))
  for name, lines in computations.items():
    siblings = module.computations[name] = {}
    for line in lines:
      root, label, shape, op, attributes = _INSTRUCTION.match(line).groups()
      operands = tuple(re.findall(r"%([\w.\-]+)", attributes.split("), ")[0]))
      siblings[label] = Instruction(
        label, op, operands, shape, attributes, bool(root), siblings, module
      )
  return module


def _frames(text: str) -> dict[int, tuple[str, int, int]]:
  """Parses the tables of source locations at the end of a program."""

  def table(name: str) -> list[tuple[str, str]]:
    section = re.search(rf"^{name}\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^(\d+) (.*)$", section[1], re.MULTILINE) if section else []

  def number(key: str, row: str) -> int:
    value = re.search(rf"{key}=(\d+)", row)
    return int(value[1]) if value else 0

  files = {int(i): row.strip('"') for i, row in table("FileNames")}
  places = {
    int(i): (files.get(number("file_name_id", row), ""), number("line", row))
    for i, row in table("FileLocations")
  }
  return {
    int(i): (
      *places.get(number("file_location_id", row), ("", 0)),
      number("parent_frame_id", row) - 1,  # Parents are numbered from 1 in the text.
    )
    for i, row in table("StackFrames")
  }


def _short(file: str) -> str:
  """Shortens a path to its part from this package on, or to its last two parts."""
  if file.startswith(_PACKAGE):
    return file[len(_PACKAGE) - len("gspo_jax") :]
  return "/".join(file.split("/")[-2:])
