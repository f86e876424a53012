"""Parses a compiled program's HLO text (`compiled.as_text()`) into instructions.

A program consists of computations. A computation is a list of instructions, such as the body of a
loop or of a fusion. Execution begins with the computation `Module.entry`. An instruction names its
operands, which are instructions of the same computation. Its attributes name the computations that
it calls. For example, `%loop = f32[8]{0} while(%x), body=%step` has the operand x and calls the
computation step.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path

# Bytes of an element by its type. Types f8... are not listed and have 1 byte. Any other type that
# is not listed has 4 bytes (`_array`).
_BYTES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s64=8, u64=8, f64=8, c64=8, c128=16)
_BYTES |= dict(s4=0.5, u4=0.5, f4e2m1fn=0.5)
_SHAPE = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.DOTALL)
_PACKAGE = Path(__file__).parents[1].as_posix()


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in the memory of one device."""

  dims: tuple[int, ...]
  bytes: float  # Size, including the padding to whole tiles in TPU layouts.
  space: int  # Memory space: 0 for HBM, 1 for a TPU's vector memory, above 1 for other memories.

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def hbm(self) -> float:
    """Bytes in HBM; 0 for an array in another memory."""
    return 0.0 if self.space else self.bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One instruction of a compiled program."""

  name: str  # Name without "%", unique in its computation.
  op: str  # Operation, e.g. "fusion".
  operands: tuple[str, ...]  # Names of the operands.
  shape: str  # Text of the result's shape: dtypes, dimensions and layouts.
  attributes: str  # Text after "op(": operands, attributes and metadata.
  root: bool  # Whether the instruction's result is the result of its computation.
  # All instructions of the same computation, by name.
  siblings: Mapping[str, "Instruction"] = dataclasses.field(repr=False)
  module: "Module" = dataclasses.field(repr=False)

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """Arrays of the result: several if the result is a tuple."""
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
    """Operands as instructions."""
    return [self.siblings[name] for name in self.operands if name in self.siblings]

  def called(self, *keys: str) -> str:
    """Returns the name of a called computation; "" if the instruction calls none.

    keys: attributes to look for, in this order.
    """
    for key in keys:
      if match := re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes):
        return match[1]
    return ""

  def body(self, *keys: str) -> list["Instruction"]:
    """Returns the instructions of a called computation; [] if the instruction calls none.

    keys: as in `called`.
    """
    return [*self.module.computations.get(self.called(*keys), {}).values()]

  def branch(self) -> list["Instruction"]:
    """Returns the instructions of a conditional's expected branch.

    The expected branch is the first branch with cuDNN's attention. Without such a branch, it is the
    branch for a false condition.
    """
    listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
    names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
    # `branch_computations` begins with the branch for a false condition, too.
    names = names or [self.called("false_computation"), self.called("true_computation")]
    bodies = [[*self.module.computations.get(name, {}).values()] for name in names]
    return next((body for body in bodies if any(x.cudnn for x in body)), bodies[0])

  @property
  def target(self) -> str:
    """Name of a custom call's implementation; "" for other instructions."""
    match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
    return match[1] if match else ""

  @property
  def cudnn(self) -> bool:
    """Whether the instruction is attention by cuDNN."""
    return self.op == "custom-call" and self.target.startswith("__cudnn$fmha")

  @property
  def path(self) -> str:
    """JAX's name stack: functions, transforms and named scopes, outermost first, joined by "/"."""
    match = re.search(r'op_name="([^"]*)"', self.attributes)
    return match[1] if match else ""

  @property
  def kernel(self) -> bool:
    """Whether the instruction is a Pallas kernel."""
    return self.op == "custom-call" and self.target in ("tpu_custom_call", "__gpu$xla.gpu.triton")

  @property
  def source(self) -> str:
    """FILE:LINE of the innermost call in this package, outside its module `sharding`.

    Helpers of `sharding` have callers in many files, so a line of `sharding` explains little. If
    all calls are in `sharding` or outside the package, FILE:LINE is that of the innermost call.
    Returns "" if the instruction has no call stack.
    """
    innermost, stack_frame = "", re.search(r"stack_frame_id=(\d+)", self.attributes)
    frame = int(stack_frame[1]) if stack_frame else 0  # 0 means no frame.
    while frame in self.module.frames:
      file, line, frame = self.module.frames[frame]
      innermost = innermost or f"{_short(file)}:{line}"
      if file.startswith(_PACKAGE) and not file.endswith("/sharding.py"):
        return f"{_short(file)}:{line}"
    return innermost


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program."""

  # Dict from a computation's name to its instructions, which are a dict by name.
  computations: dict[str, dict[str, Instruction]]
  entry: str  # Name of the computation at which execution begins.
  # Dict from a stack frame's id to its file, its line, and the calling frame's id (0 for none).
  frames: dict[int, tuple[str, int, int]]


def arrays(shape: str) -> tuple[Array, ...]:
  """Parses a shape's text, e.g. "(f32[8,128]{1,0}, s32[])", into its arrays."""
  return tuple(_array(*match) for match in _SHAPE.findall(shape))


def _array(dtype: str, dims: str, layout: str) -> Array:
  """Parses an array's type, dimensions and layout.

  Args:
    dtype: e.g. "bf16".
    dims: e.g. "8,128".
    layout: e.g. "1,0:T(8,128)S(1)". This is the order of the dimensions (fastest-varying first),
      the tile, and the memory space. Each part may be missing.
  """
  sizes = [int(n) for n in dims.split(",") if n]
  itemsize = 1 if dtype.startswith("f8") else _BYTES.get(dtype, 4)
  order, _, tiling = layout.partition(":")
  space = re.search(r"S\((\d+)\)", tiling)
  tile = re.search(r"T\(([\d,]+)\)", tiling)
  # Dimensions in memory, outermost first. A tile with n sides covers the last n dimensions.
  physical = [sizes[int(i)] for i in reversed(order.split(",")) if i] if order else list(sizes)
  if tile and physical:
    sides = [int(n) for n in tile[1].split(",")][-len(physical) :]
    tiled = zip(physical[-len(sides) :], sides)
    physical = physical[: -len(sides)] + [-(-n // side) * side for n, side in tiled]
  return Array(tuple(sizes), math.prod(physical) * itemsize, int(space[1]) if space else 0)


def parse(text: str) -> Module:
  """Parses the text of a compiled program."""
  computations: dict[str, list[str]] = {}
  entry, lines = "", None
  for line in text.splitlines():
    if lines is None:
      header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
      if header:
        lines = computations.setdefault(header[2], [])
        entry = header[2] if header[1] else entry
    # A computation ends with a line "}" or e.g. "}, execution_thread=...". An attribute may have
    # several lines, but none of them is "}" or begins with "}, ".
    elif re.match(r"^\}(, |$)", line):
      lines = None
    elif _INSTRUCTION.match(line.strip()):
      lines.append(line.strip())
    elif lines:  # Further lines of an instruction.
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
  """Parses the tables of stack frames and source locations in a program's text."""

  def table(name: str) -> list[tuple[str, str]]:
    section = re.search(rf"^{name}\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^(\d+) (.*)$", section[1], re.MULTILINE) if section else []

  def number(key: str, row: str) -> int:
    value = re.search(rf"{key}=(\d+)", row)
    return int(value[1]) if value else 0

  files = {int(i): row.strip('"') for i, row in table("FileNames")}
  locations = {
    int(i): (files.get(number("file_name_id", row), ""), number("line", row))
    for i, row in table("FileLocations")
  }
  return {
    int(i): (
      *locations.get(number("file_location_id", row), ("", 0)),
      number("parent_frame_id", row) - 1,  # The text has the calling frame's id plus 1.
    )
    for i, row in table("StackFrames")
  }


def _short(file: str) -> str:
  """Shortens a path to start at this package, or else to its last directory and file."""
  if file.startswith(_PACKAGE):
    return file[len(_PACKAGE) - len("gspo_jax") :]
  return "/".join(file.split("/")[-2:])
