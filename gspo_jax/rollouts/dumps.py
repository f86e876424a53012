"""Dumps of rollouts: what a person wants to read of each response that was trained on."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gspo_jax.rollouts.collector import Collected

TOKENS = 200_000  # of one dump that are written by themselves, with their log-ratios


def rollout_records(
  collected: Collected,
  log_ratio_BT: np.ndarray,
  clipped_BT: np.ndarray,
  decode: Callable[[list[int]], str],
  old_value_BT: np.ndarray | None = None,
  advantage_B: np.ndarray | None = None,
  advantage_BT: np.ndarray | None = None,
  segments: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[dict[str, Any]]:
  """Returns a JSON object for each response.

  Args:
    log_ratio_BT: log π_new/π_old after the iteration's updates, in the order of the rollout.
    clipped_BT: the tokens whose objective the loss clipped, there.
    decode: from tokens to text.
    old_value_BT: of a critic.
    advantage_B, advantage_BT: those that were made on the devices; a response's advantage is the
      mean over tokens where these have some. None: those of the rollout.
    segments: the number of each token's segment, and the derivative of the loss by its log π.
  """
  rollout, G = collected.rollout, collected.advantage_PG.shape[1]
  used_BL = rollout.mask > 0
  texts = {i: decode([i]) for i in np.unique(rollout.tokens[used_BL]).tolist()}
  records, written = [], 0
  of_responses = collected.advantage_PG.flat if advantage_B is None else advantage_B
  for row, advantage in enumerate(of_responses):
    group, sample = collected.groups[row // G], row % G
    used_L = used_BL[row]
    if not used_L.any():  # a recorded group may have fewer responses
      continue
    ratio_X, clipped_X = log_ratio_BT[row][used_L], clipped_BT[row][used_L]
    if advantage_BT is not None:
      advantage = advantage_BT[row][used_L].mean()
    record = dict(
      prompt_id=group.prompt.id,
      sample=sample,
      prompt=group.prompt.question,
      response=group.responses[sample],
      answer=group.prompt.answer[:1000],  # the tests of a program take megabytes
      reward=None if sample in group.unknown else float(group.reward_G[sample]),
      advantage=round(float(advantage), 4),
      length=int(rollout.lengths[row]),
      truncated=not bool(rollout.stopped[row]),
      ratio=round(float(np.exp(ratio_X.mean())), 6),
      clipped=bool(clipped_X.any()),
      eval=False,
    )
    if sample in group.unknown:
      record["unknown"] = group.unknown[sample]
    if group.signals:
      known = sample not in group.unknown
      measured = {n: float(value_G[sample]) for n, value_G in group.signals.items()}
      record["signals"] = measured if known else dict.fromkeys(measured)
    written += len(ratio_X)
    ids_X = rollout.tokens[row][used_L].tolist()
    whole = rollout.response(row) == ids_X  # one turn, which may be read again (data/recorded.py)
    if whole:
      record["prompt_ids"] = rollout.tokens[row, : rollout.prompt_lengths[row]].tolist()
    if written <= TOKENS:
      if whole:  # what a text is encoded to need not be the tokens that it was decoded from
        record["response_ids"] = ids_X
      record["tokens"] = [texts[i] for i in ids_X]
      record["log_ratio"] = [round(x, 4) for x in ratio_X.tolist()]
      record["clipped_tokens"] = clipped_X.astype(int).tolist()
      if old_value_BT is not None:
        record["values"] = [round(x, 4) for x in old_value_BT[row][used_L].tolist()]
      if segments is not None:
        record |= _of_segments(ratio_X, *(x_BT[row][used_L] for x_BT in segments))
    records.append(record)
  return records


def _of_segments(
  ratio_X: np.ndarray, segment_X: np.ndarray, gradient_X: np.ndarray
) -> dict[str, list]:
  """The segment of each token, and of each segment its ratio and Σ |derivative| (`by_segment`)."""
  size_U = np.maximum(np.bincount(segment_X), 1)
  mean_U = np.bincount(segment_X, ratio_X) / size_U
  gradient_U = np.bincount(segment_X, abs(gradient_X))
  return dict(
    segments=segment_X.tolist(),
    segment_ratio=[round(float(x), 6) for x in np.exp(mean_U)],
    segment_gradient=[float(f"{x:.4g}") for x in gradient_U],
  )
