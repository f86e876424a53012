"""The samples log: one JSON object for each training response of an iteration."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.rollouts.collector import Collected
from gspo_jax.sampling.transcript import transcripts

# Maximum number of response tokens listed in the records of an iteration. Further records have
# neither tokens nor values of tokens.
TOKENS = 200_000


def rollout_records(
  collected: Collected, arrays: Mapping[str, np.ndarray], tok: Tokenizer
) -> list[dict[str, Any]]:
  """Returns the records of all responses with sampled tokens, for JSON.

  Args:
    collected: groups of the iteration.
    arrays: dict from `learner.batch.sample_arrays`, with rows in the rollout's order.
    tok: tokenizer of the policy.
  """
  rollout, G = collected.rollout, collected.advantage_PG.shape[1]
  used_BL = rollout.mask > 0
  texts = {i: tok.decode([i]) for i in np.unique(rollout.tokens[used_BL]).tolist()}
  conversations = [row for g in collected.groups for row in transcripts(g.trajectories, tok)]
  records, token_count = [], 0
  advantages = arrays.get("advantage_B", collected.advantage_PG.reshape(-1))
  for row, used_L in enumerate(used_BL):
    if not used_L.any():  # Padding of a recorded group, for example.
      continue
    tokens = {name: x_BL[row][used_L] for name, x_BL in arrays.items() if x_BL.ndim == 2}
    advantage = tokens["advantage_BT"].mean() if "advantage_BT" in tokens else advantages[row]
    record = _summary(collected, row, G, float(advantage), tokens) | conversations[row]
    token_count += int(used_L.sum())
    ids_X = rollout.tokens[row][used_L].tolist()
    single_turn = rollout.response(row) == ids_X
    if single_turn:  # The records of single turns can be training data (data/recorded.py).
      # Encoding the texts again may give different tokens, so ids are logged, too.
      record["prompt_ids"] = rollout.tokens[row, : rollout.prompt_lengths[row]].tolist()
      record["response_ids"] = ids_X
    if token_count <= TOKENS:
      record |= dict(tokens=[texts[i] for i in ids_X]) | _token_columns(tokens)
    records.append(record)
  return records


def _summary(
  collected: Collected,
  row: int,
  group_size: int,
  advantage: float,
  tokens: Mapping[str, np.ndarray],
) -> dict[str, Any]:
  """Returns texts and metrics of one response.

  Args:
    row: index of the response in the rollout.
    tokens: arrays [X] over the response's sampled tokens, by name.
  """
  group, sample = collected.groups[row // group_size], row % group_size
  verdict = sample not in group.unknown
  record = dict(
    prompt_id=group.prompt.id,
    sample=sample,
    prompt=group.prompt.question,
    response=group.responses[sample],
    answer=group.prompt.answer[:1000],  # The tests of a program may be megabytes long.
    reward=float(group.reward_G[sample]) if verdict else None,
    advantage=round(advantage, 4),
    length=int(collected.rollout.lengths[row]),
    truncated=group.trajectories[sample].truncated,
    ratio=round(float(np.exp(tokens["log_ratio_BT"].mean())), 6),
    clipped=bool(tokens["clipped_BT"].any()),
    eval=False,
  )
  if not verdict:
    record["unknown"] = group.unknown[sample]
  if group.signals:
    signals = {name: float(value_G[sample]) for name, value_G in group.signals.items()}
    record["signals"] = signals if verdict else dict.fromkeys(signals)
  return record


def _token_columns(tokens: Mapping[str, np.ndarray]) -> dict[str, list]:
  """Converts the arrays [X] of a response's tokens to lists for JSON."""
  columns = dict(
    log_ratio=[round(x, 4) for x in tokens["log_ratio_BT"].tolist()],
    clipped_tokens=tokens["clipped_BT"].astype(int).tolist(),
  )
  if "old_value_BT" in tokens:
    columns["values"] = [round(x, 4) for x in tokens["old_value_BT"].tolist()]
  if "unit_BT" in tokens:
    columns |= _segment_columns(tokens["log_ratio_BT"], tokens["unit_BT"], tokens["gradient_BT"])
  return columns


def _segment_columns(
  log_ratio_X: np.ndarray, segment_X: np.ndarray, gradient_X: np.ndarray
) -> dict[str, list]:
  """Returns each token's segment number, and two columns with a value for each segment.

  The values are the geometric mean of the tokens' ratios, and the sum of the tokens' |gradient|.
  """
  size_U = np.maximum(np.bincount(segment_X), 1)
  mean_U = np.bincount(segment_X, log_ratio_X) / size_U
  gradient_U = np.bincount(segment_X, abs(gradient_X))
  return dict(
    segments=segment_X.tolist(),
    segment_ratio=[round(float(x), 6) for x in np.exp(mean_U)],
    segment_gradient=[float(f"{x:.4g}") for x in gradient_U],
  )
