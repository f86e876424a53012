"""Writes the report of a run: one HTML page with the run's curves and logged responses.

`python -m gspo_jax.report DIR` reads `config.json`, `metrics.jsonl` and `rollouts/*.jsonl` in the
run's directory DIR, and writes DIR/report.html. The page needs no network and no other files. If
several directories are named, the page compares their runs. `data.py` builds charts and tables,
`rollouts.py` reads the responses, and `static/` has HTML, CSS and JavaScript.
"""

import html
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gspo_jax.report.data import Run, describe
from gspo_jax.report.rollouts import read_rollouts
from gspo_jax.runs import metrics, provenance
from gspo_jax.runs.metrics import Row
from gspo_jax.system.files import WriteError, write_whole
from gspo_jax.system.text import visible

MAX_RUNS = 8  # The colours of more runs would be hard to distinguish.
EVERY_S = 30.0  # Minimum seconds between two updates of the report during a run.
PAUSE = 50  # Minimum pause between two updates, as a multiple of the time that an update takes.


class RunningReport:
  """Keeps the report.html of a run up to date while it trains.

  Args:
    workdir: directory of the run.
    active: whether this process writes the report. In a run of several processes, `active` must be
      True in exactly one process.
    clock: function that returns the time in seconds.
  """

  def __init__(
    self,
    workdir: Path,
    active: bool = True,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._workdir, self._active, self._clock, self._due = workdir, active, clock, clock()
    self._warned = False

  def update(
    self, stages: Callable[[str], AbstractContextManager[None]], force: bool = False
  ) -> None:
    """Writes the report if it is due.

    Args:
      stages: function from a stage's name to a context manager, which measures the stage's time.
      force: whether to write the report even if it is not due.
    """
    start = self._clock()
    if not self._active or (start < self._due and not force):
      return
    with stages("report"):
      self.write()
    end = self._clock()
    self._due = end + max(EVERY_S, PAUSE * (end - start))

  def write(self) -> Path | None:
    """Writes the report; returns its path. If a file cannot be read, warns once and returns None.

    Raises:
      WriteError: the report cannot be written.
    """
    try:
      return write_report(self._workdir)
    except WriteError:
      raise
    except Exception as error:  # Old files have any content, which must not end the training.
      if not self._warned:
        sys.stderr.write(f"warning: report.html is not updated: {visible(str(error))}\n")
      self._warned = True
      return None


def write_report(
  *workdirs: str | os.PathLike, output: str | os.PathLike | None = None, max_rollouts: int = 10_000
) -> Path:
  """Writes the report of one or several runs atomically; returns its path.

  Args:
    *workdirs: directories of the runs.
    output: path of the report. None means DIR/report.html, for one run only.
    max_rollouts: maximum number of responses on the page.

  Raises:
    ValueError: there are too many runs, a run is repeated, `output` is None for several runs, or a
      file is malformed.
    WriteError: the report cannot be written.
  """
  folders = [Path(workdir) for workdir in workdirs]
  if len(folders) > MAX_RUNS:
    raise ValueError(
      f"{len(folders)} runs are too many for one page: name at most {MAX_RUNS} directories"
    )
  if len(folders) > 1 and output is None:
    raise ValueError(
      "a report of several runs needs a path: set --output, e.g. --output=compare.html"
    )
  runs = [
    Run(name, read_metrics(folder / "metrics.jsonl"), provenance.read(folder))
    for folder, name in zip(folders, unique_names(folders))
  ]
  rollouts = read_rollouts([folder / "rollouts" for folder in folders], max_rollouts)
  path = Path(output or folders[0] / "report.html")
  write_whole(path, [render(describe(runs), rollouts)])
  return path


def read_metrics(path: Path) -> list[Row]:
  """Reads the rows of metrics.jsonl.

  Raises:
    ValueError: a row has an unknown phase, or a value is neither a number nor null.
  """
  rows = metrics.read_rows(path)
  for row in rows:
    location = f"{path}: the row of step {row['step']}"
    if row.get("phase") not in metrics.PHASES:
      phases = ", ".join(metrics.PHASES)
      raise ValueError(
        f"{location} has phase={row.get('phase')!r:.40}, not one of {phases}: set one of them"
      )
    for name, value in row.items():
      if name != "phase" and not isinstance(value, int | float | None):
        raise ValueError(f"{location} has {name}={value!r:.40}, which is no number: set null")
  return rows


def unique_names(folders: Sequence[Path]) -> list[str]:
  """Returns a name of each directory: the shortest unique end of its path.

  Raises:
    ValueError: a directory is repeated.
  """
  parts = [folder.resolve().parts for folder in folders]
  names = []
  for folder, path in zip(folders, parts):
    if parts.count(path) > 1:
      raise ValueError(f"{folder} is named twice: name each directory once")
    ends = (path[-count:] for count in itertools.count(1))
    name = next(end for end in ends if sum(p[-len(end) :] == end for p in parts) == 1)
    names.append("/".join(name).replace("//", "/"))
  return names


def render(report: Row, rollouts: Row) -> str:
  """Fills the page's template with data and scripts, and returns the HTML text.

  A single pass inserts all values, since inserted data may contain `{{name}}` too.
  """
  folder = Path(__file__).parent / "static"
  values = {path.stem: path.read_text("utf-8") for path in folder.glob("*.js")}
  values |= {
    "style": (folder / "style.css").read_text("utf-8"),
    "title": html.escape(report["name"]),
    "report_data": _embed(report),
    "rollouts_data": _embed(rollouts),
  }
  template = (folder / "page.html").read_text("utf-8")
  return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _embed(value: Any) -> str:
  """Returns JSON for a script element, without `<`, `>` and `&`."""
  text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
