"""Texts of trajectories for the samples log: rendered prompts, and turns of conversations."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_jax.data.replies import whole_text
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.sampling.trajectory import Trajectory

POLICY, ENVIRONMENT = "policy", "environment"  # Roles.


def transcripts(trajectories: Sequence[Trajectory], tok: Tokenizer) -> list[dict[str, Any]]:
  """Returns a dict for each trajectory: additional fields of its record.

  Field `rendered_prompt` is in the record of the first trajectory with sampled tokens, and in those
  of later trajectories with other prompts. Field `turns` is in records of conversations with
  observations.

  Args:
    trajectories: trajectories of one group.
    tok: tokenizer of the run.
  """
  rows, first = [], None
  for trajectory in trajectories:
    row: dict[str, Any] = {}
    if trajectory.length and trajectory.prompt != first:
      row["rendered_prompt"] = whole_text(tok, trajectory.prompt)
      first = trajectory.prompt if first is None else first
    if (trajectory.turns < 0).any():
      row["turns"] = _turns(trajectory, tok)
    rows.append(row)
  return rows


def _turns(trajectory: Trajectory, tok: Tokenizer) -> list[dict[str, str | int]]:
  """Returns role, text and number of tokens (`length`) of each turn and observation."""
  starts = np.flatnonzero(np.diff(trajectory.turns)) + 1
  spans = zip(np.split(trajectory.tokens, starts), np.split(trajectory.turns, starts))
  return [
    dict(
      role=POLICY if turns[0] >= 0 else ENVIRONMENT,
      text=whole_text(tok, ids.tolist()),
      length=len(ids),
    )
    for ids, turns in spans
  ]
