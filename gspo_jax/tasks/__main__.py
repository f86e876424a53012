"""Writes problems of an embedded task as JSON lines, to try out files of problems:

python -m gspo_jax.tasks arithmetic:train --first=0 --rows=64 >> sums.jsonl

The problems of a split have a fixed random order. --first and --rows choose a range of this order.
"""

import json
import signal
import sys

if __name__ == "__main__":  # Ctrl-C, or a closed pipe, ends the process without a traceback.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)

import numpy as np

from gspo_jax.system.arguments import Parser
from gspo_jax.tasks import arithmetic, recurrence, word_problems


def main(argv: list[str] | None = None) -> None:
  parser = Parser(prog="python -m gspo_jax.tasks", description=__doc__)
  parser.add_argument("source", help="arithmetic:train, arithmetic:heldout, recurrence:train, ...")
  parser.add_argument(
    "--first", type=int, default=0, help="index of the first row to write, from 0"
  )
  parser.add_argument("--rows", type=int, default=64, help="number of rows to write")
  parser.add_argument("--digits", type=int, default=3, help="digits of an operand of arithmetic")
  parser.add_argument(
    "--lines", default="8,16,32", help="recurrence: lengths of responses in lines, with commas"
  )
  flags = parser.parse_args(argv)
  name, _, split = flags.source.partition(":")
  try:
    if name == "arithmetic":
      problems = arithmetic.problems(split, flags.digits)
    elif name == "recurrence":
      lines = tuple(map(int, flags.lines.split(",")))
      if not all(1 <= n <= 128 for n in lines):
        raise ValueError(f"--lines={flags.lines}: a response has 1 to 128 lines")
      problems = recurrence.problems(split, lines)
    elif name == "word_problems":
      problems = word_problems.problems(split)
    else:
      names = "arithmetic, recurrence, word_problems"
      raise ValueError(f"this command has no task {name!r}; choose one of {names}")
    if not (flags.first >= 0 and 0 < flags.rows <= len(problems) - flags.first):
      raise ValueError(
        f"--first={flags.first} --rows={flags.rows}: there are {len(problems)} rows; choose at "
        f"least one, with indices from 0 to {len(problems) - 1}"
      )
  except ValueError as error:
    parser.error(str(error))
  order = np.random.default_rng(0).permutation(len(problems))
  for index in order[flags.first : flags.first + flags.rows]:
    sys.stdout.write(json.dumps(problems[int(index)]) + "\n")


if __name__ == "__main__":
  main()
