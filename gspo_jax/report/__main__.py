"""Command line: python -m gspo_jax.report DIR [OTHER_DIR ... --output=compare.html]

Writes the report of a run, or a comparison of several runs, as one HTML page.
"""

import sys
from collections.abc import Sequence

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.begin_command("train")

from gspo_jax.report.page import write_report
from gspo_jax.system.arguments import Parser, local_path
from gspo_jax.system.files import WriteError


def main(arguments: Sequence[str] | None = None) -> None:
  """Writes a report, and prints its path."""
  parser = Parser(
    prog="python -m gspo_jax.report",
    description="Writes the report of a run, or a comparison of several runs, as one HTML page.",
  )
  parser.add_argument(
    "workdirs", metavar="DIR", type=local_path, nargs="+", help="directory of a run"
  )
  parser.add_argument(
    "--max_rollouts", type=int, default=10_000, help="maximum number of responses on the page"
  )
  parser.add_argument(
    "--output", help="path of the page; DIR/report.html if not set; required for several runs"
  )
  options = parser.parse_args(arguments)
  for workdir in options.workdirs:
    if not (workdir / "metrics.jsonl").exists():
      parser.error(f"{workdir} has no metrics.jsonl: name the directory of a run")
  try:
    path = write_report(*options.workdirs, output=options.output, max_rollouts=options.max_rollouts)
  except (ValueError, WriteError) as error:
    parser.error(str(error))
  sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
  main()
