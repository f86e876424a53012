"""Adapts programs that use files to tests of standard input and output.

Code before the program copies the standard input to the input files. At the program's end, this
code copies the output files to the standard output, each after a mark. The code runs in the
program's process. A program that tampers with this code only changes its own output.
"""

from collections.abc import Sequence

MARK = "\0output file\0"  # Printed before the content of an output file.

# Code before the program. `_print_outputs` flushes files that the program did not close.
_PROLOGUE = """
def _use_files(inputs, outputs, mark):
  import atexit, gc, io, os
  text = b""
  while part := os.read(0, 1 << 20):
    text += part
  os.lseek(0, 0, os.SEEK_SET)
  for name in outputs:
    if os.path.exists(name):
      os.remove(name)
  for name in inputs:
    with open(name, "wb") as file:
      file.write(text)

  @atexit.register
  def _print_outputs():
    for item in gc.get_objects():
      if isinstance(item, io.IOBase):
        try:
          item.flush()
        except Exception:
          pass
    for name in outputs:
      if os.path.exists(name):
        with open(name, "rb") as file:
          text = mark + file.read()
        while text:
          text = text[os.write(1, text):]
"""


def with_files(program: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
  """Converts a program with files to one with standard input and output.

  Args:
    program: code of the program.
    inputs: names of its input files; each has the whole input.
    outputs: names of its output files.
  """
  arguments = f"{list(inputs)!r}, {list(outputs)!r}, {MARK.encode()!r}"
  run = f"exec(compile({program!r}, 'program', 'exec'), globals())"
  return f"{_PROLOGUE}\n_use_files({arguments})\n{run}\n"
