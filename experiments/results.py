"""Stores runs in results.csv, and up to fifty points of each in curves.csv."""

import gzip
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import statistics
from experiments.report import Results
from gspo_jax.runs.metrics import read_rows

DONE, FAILED, DIVERGED, INTERRUPTED = "done", "failed", "nan", "interrupted"
SETTLED = (DONE, DIVERGED)  # Never repeated.
TEXTS = ("experiment", "stage", "condition", "status", "reason", "run", "start", "changes")
TEXTS += ("commit", "versions")
FIRST = ("experiment", "stage", "condition", "seed", "status", "reason", "run", "start", "changes")
KEY = ["stage", "condition", "seed"]
POINTS = 50
# Sampled tokens; operations of all passes; the sum of iterations' mean KL (k3), in nats per token.
CUMULATIVE = ("tokens", "flops", "path")
# Metrics of iterations: results.csv has their means, and curves.csv their curves.
COLUMNS = (
  r"reward/mean|by_length/reward/.*|response_length/mean|truncated_fraction|groups_without_spread",
  r"(clip_fraction|clipped)/.*|ratio/(mean|std|deviation|min|max)|kl/k[13]|entropy|grad_norm",
  r"router/volatility/.*|mismatch/sequence/abs/mean|updates_skipped|clip_range",
)


class Store:
  """The two CSV files of a folder.

  Values are rounded when added, so a report of a new run equals that of the files.
  """

  def __init__(self, folder: Path):
    self.folder = folder
    self.runs = _read(folder / "results.csv")
    self.curves = _read(folder / "curves.csv")

  def row(self, job: Any) -> Mapping[str, Any] | None:
    """Returns the line of a job; None without a line of this configuration."""
    if self.runs.empty:
      return None
    runs = self.runs
    rows = runs[(runs.stage == job.stage) & (runs.condition == job.condition)]
    rows = rows[(rows.seed == job.seed) & (rows.run == job.run)]
    return None if rows.empty else rows.iloc[0].to_dict()

  def status(self, job: Any) -> str:
    row = self.row(job)
    return row["status"] if row else ""

  def settled(self, job: Any) -> bool:
    return self.status(job) in SETTLED

  def outcome(self, job: Any, column: str) -> float:
    """Returns a settled job's column; 0 if the run diverged."""
    row = self.row(job)
    return float(row[column]) if row["status"] == DONE else 0.0

  def add_row(self, row: Mapping[str, Any], curve: pd.DataFrame | None = None) -> None:
    """Adds or replaces the line of a condition and seed, and writes."""
    key = [row[name] for name in KEY]
    if not self.runs.empty:
      self.runs = self.runs[(self.runs[KEY] != key).any(axis=1)]
    self.runs = pd.concat([self.runs, pd.DataFrame([row])], ignore_index=True)
    if not self.curves.empty:
      self.curves = self.curves[(self.curves[KEY] != key).any(axis=1)]
    if curve is not None and not curve.empty:
      about = pd.DataFrame([key] * len(curve), columns=KEY, index=curve.index)
      new = pd.concat([about, curve], axis=1)
      self.curves = pd.concat([self.curves, new], ignore_index=True)
    self.save()

  def curve(self, row: Mapping[str, Any]) -> pd.DataFrame | None:
    """Returns the points of a line."""
    if self.curves.empty:
      return None
    selected = (self.curves[KEY] == [row[name] for name in KEY]).all(axis=1)
    return self.curves[selected].drop(columns=KEY).dropna(axis=1, how="all")

  def save(self) -> None:
    self.folder.mkdir(parents=True, exist_ok=True)
    rest = sorted(set(self.runs) - {*FIRST})
    _write(self.runs[[*(c for c in FIRST if c in self.runs), *rest]], self.folder / "results.csv")
    if not self.curves.empty:
      _write(self.curves, self.folder / "curves.csv", [*KEY, "step"])

  def results(self, jobs: Iterable[Any]) -> Results:
    """Returns lines and curves of these jobs, without those of earlier declarations."""
    runs, curves = _read(self.folder / "results.csv"), _read(self.folder / "curves.csv")
    keys = {(*job.key, job.run) for job in jobs}
    runs = runs[[key in keys for key in zip(*(runs[name] for name in (*KEY, "run")))]]
    if not curves.empty:
      keys = {*zip(*(runs[name] for name in KEY))}
      curves = curves[[key in keys for key in zip(*(curves[name] for name in KEY))]]
    return Results(runs, curves)


def empty() -> pd.DataFrame:
  return pd.DataFrame({name: pd.Series(dtype=object) for name in FIRST})


def others(folder: Path) -> list[Store]:
  """Returns the other experiments' results: their runs may be reused."""
  beside = folder.parent.glob("e*_*/results.csv")
  return [Store(path.parent) for path in beside if path.parent != folder]


def reusable(
  job: Any, stores: Iterable[Store], home: Path
) -> tuple[dict[str, Any], pd.DataFrame | None] | None:
  """Returns line and curve of the run in another experiment, or None.

  Its cold start must be that in `home`: one from other code or another machine differs.
  """
  cold_start = job.cold_start
  for store in stores:
    runs = store.runs
    rows = runs[(runs.run == job.run) & (runs.status == DONE)]
    start = runs[(runs.run == cold_start.run) & (runs.status == DONE)]
    if len(rows) and len(start) and same_start(start.iloc[0], cold_start.workdir(home)):
      row = rows.iloc[0].dropna().to_dict()
      return row, store.curve(row)
  return None


def same_start(row: Mapping[str, Any], workdir: Path) -> bool:
  """Whether a line belongs to a directory's cold start."""
  if not (workdir / "checkpoints").is_dir():
    return False
  stored, _ = collect(workdir, "sft", ())

  def numbers(row):
    return (row.get("steps"), f"{row.get('held_out_loss', np.nan):.6g}")

  return numbers(stored) == numbers(row)


def collect(
  workdir: Path, phase: str, columns: tuple[str, ...]
) -> tuple[dict[str, Any], pd.DataFrame]:
  """Collects the line and the curve of a run, also of an interrupted one.

  Args:
    phase: "sft" or "rl".
    columns: regular expressions of further metrics.
  """
  rows = [row for row in read_rows(workdir / "metrics.jsonl") if row["phase"] == phase]
  about: dict[str, Any] = {}
  config = workdir / "config.json"
  if config.exists():
    made_with = json.loads(config.read_text())["provenance"]
    about["commit"] = (made_with["commit"] or "") + ("+" if made_with["dirty"] else "")
    versions = made_with["versions"]
    about["versions"] = " ".join(f"{k}={versions[k]}" for k in ("python", "jax") if k in versions)
  if not rows:
    return about, pd.DataFrame()
  frame = pd.DataFrame(rows).sort_values("step").set_index("step").drop(columns="phase")
  frame = frame.apply(pd.to_numeric)
  if phase == "sft":
    last = frame.iloc[-1]
    about |= dict(steps=int(frame.index[-1]), held_out_loss=last.get("held_out_loss", np.nan))
    return about, pd.DataFrame()
  updates = frame[frame.index > 0]
  about["steps"] = int(frame.index[-1])
  pattern = re.compile("|".join(f"(?:{x})" for x in (*COLUMNS, *columns)))
  names = sorted(name for name in frame if pattern.fullmatch(name))
  about |= {name: updates[name].mean() for name in names}
  if "reward/mean" in updates and len(updates):
    tenth = max(1, len(updates) // 10)
    about["reward/first"] = updates["reward/mean"].iloc[:tenth].mean()
    about["reward/last"] = updates["reward/mean"].iloc[-tenth:].mean()
  if "eval/accuracy" in frame:
    accuracies = frame["eval/accuracy"].dropna()
    about["eval/start"], about["eval/final"] = accuracies.iloc[0], accuracies.iloc[-1]
    about["eval/area"] = statistics.area(accuracies.index, accuracies)
    if "eval/greedy" in frame:
      about["eval/greedy"] = frame["eval/greedy"].dropna().iloc[-1]
  counted = _counted(frame)
  frame = frame.assign(**counted)
  about |= {name: frame[name].iloc[-1] for name in counted}
  return about, thinned(frame[[*names, *counted]], frame.get("eval/accuracy"))


def _counted(frame: pd.DataFrame) -> dict[str, pd.Series]:
  """Returns totals since the first iteration (CUMULATIVE)."""
  totals = dict(tokens="total/tokens", flops="total/flops")
  counts = {
    name: frame[column].ffill().fillna(0) for name, column in totals.items() if column in frame
  }
  return counts | ({"path": frame["kl/k3"].fillna(0).cumsum()} if "kl/k3" in frame else {})


def thinned(frame: pd.DataFrame, accuracy: pd.Series | None) -> pd.DataFrame:
  """Averages metrics over equal stretches of iterations, at most POINTS.

  Each mean is at the last iteration. Cumulative columns keep their last value, and evaluations
  their own iterations.
  """
  width = max(1, -(-int(frame.index.max()) // POINTS))
  place = -(-frame.index // width) * width
  means = frame.groupby(np.minimum(place, frame.index.max())).mean()
  for name in frame.columns.intersection(CUMULATIVE):
    means[name] = frame[name].groupby(np.minimum(place, frame.index.max())).last()
  if accuracy is not None:
    means = means.join(accuracy.dropna().rename("eval/accuracy"), how="outer")
  return means.rename_axis("step").reset_index()


def archive(workdir: Path) -> None:
  """Reduces a recorded run to config.json, compressed metrics and its log."""
  import shutil

  metrics = workdir / "metrics.jsonl"
  if metrics.exists():
    with gzip.open(workdir / "metrics.jsonl.gz", "wb") as file:
      file.write(metrics.read_bytes())
  for path in workdir.iterdir():
    if path.is_dir():
      shutil.rmtree(path)
    elif path.name not in ("config.json", "metrics.jsonl.gz", "log.txt"):
      path.unlink()


def _read(path: Path) -> pd.DataFrame:
  if not path.exists():
    return empty()
  kinds = dict.fromkeys(TEXTS, str)
  # "nan" is a status.
  frame = pd.read_csv(path, dtype=kinds, keep_default_na=False, na_values=[""])
  texts = [name for name in TEXTS if name in frame]
  return frame.assign(**{name: frame[name].fillna("") for name in texts})


def _write(frame: pd.DataFrame, path: Path, order: list[str] = KEY) -> None:
  temporary = path.with_suffix(".tmp")
  frame = frame.sort_values(order, kind="stable")
  frame.to_csv(temporary, index=False, float_format="%.6g", lineterminator="\n")
  os.replace(temporary, path)
