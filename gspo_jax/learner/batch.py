"""Turns a rollout into the mini-batches of an iteration, and maps arrays back to rollout order.

A token is older if weights of an earlier iteration sampled it. A unit is a segment of a response
(sampling/parts.py). Each unit has its own importance ratio.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.data.tokenizer import Tokenizer, line_breaks
from gspo_jax.learner import packing
from gspo_jax.learner.metrics import ages as ages_of
from gspo_jax.models.experts import routing
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.sampling.delimiters import Delimiters, delimiters, step_ends
from gspo_jax.sampling.parts import breaks, segment_ids
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import MetricInputs, ModelInputs, Rollout, TrainBatch

Segments = Callable[[Rollout], np.ndarray | None]


class Scored(Protocol):
  """A rollout with its rewards and advantages (`rollouts.collector.Collected`)."""

  rollout: Rollout
  step: int  # Number of the iteration, and version of the weights before its updates.
  reward_PG: np.ndarray
  known_B: np.ndarray  # bool: the reward function returned a verdict on the response.
  advantage_PG: np.ndarray
  advantage_BL: np.ndarray | None  # None if all tokens of a response have the same advantage.


def place(
  c: RunConfig, mesh: jax.sharding.Mesh, scored: Scored, segments: Segments | None = None
) -> list[TrainBatch]:
  """Builds the mini-batches of an iteration, and moves them to the devices.

  Args:
    segments: function returned by `make_segments`. None means a loss without segments.
  """
  rollout, version = scored.rollout, scored.step
  older = has_older(rollout, version)
  shared = shares_prompts(c, rollout, older)
  if not c.distillation.alone:  # Distillation alone needs no verdicts.
    rollout = with_verdict(rollout, scored.known_B)
  batch = train_batch(
    rollout,
    scored.advantage_PG,
    scored.advantage_BL,
    segments and segments(rollout),
    shared_prompts=shared,
    version=version if c.rl.partial or c.rl.lag or c.job == "offline" or older else None,
    ages=c.rl.ages > 0,
    replays_sampler=c.objective.replay == "R3",
    mask_truncated=c.rl.mask_truncated,
  )
  return minibatches(
    batch.with_fields(**optional_fields(c, scored, rollout)),
    c.rl.minibatches,
    c.rl.prompts,
    c.rl.group_size,
    mesh=mesh,
    packed=c.rl.packed,
    response_tokens=c.sampling.max_new_tokens,
  )


def shares_prompts(c: RunConfig, rollout: Rollout, older: bool) -> bool:
  """Whether a group's trajectories begin with the same tokens and experts.

  In conversations (`environment.name`), the first tokens may differ. In all other runs, only the
  sampler's experts may differ, if different weights prefill one group's prompt. For example, a
  resumed partial rollout prefills again, or servers load new weights in a run with lag.
  The result does not depend on `engine.name`, so replayed batches (`rl.replay`) give equal updates.

  Args:
    older: result of `has_older`.
  """
  # In a run with lag, only R3 reads the experts of older tokens.
  may_differ = c.rl.partial or (c.objective.replay == "R3" if c.rl.lag else older)
  return not c.environment.name and not (may_differ and rollout.routing is not None)


def optional_fields(c: RunConfig, scored: Scored, rollout: Rollout) -> dict[str, np.ndarray]:
  """Returns the optional fields of `TrainBatch` that the configuration needs, by name."""
  fields = {}
  if c.kl_by_group:
    fields["mixed_B"] = in_teaching_group(scored, c.objective.loss.by_token)
  if c.estimator.needs & {"critic", "reference"}:  # The devices compute advantages from rewards.
    in_parts = bool(c.advantage_sources.keys() & {"turns", "lines"})
    fields["reward_BT"] = token_rewards(rollout, scored.reward_PG, in_parts)
  if c.critic.bootstrap:
    fields["cut_off_B"] = ~rollout.stopped
  if c.estimator.needs >= {"critic", "turns"}:
    fields["turn_BT"] = rollout.turns
  return fields


def in_teaching_group(scored: Scored, by_token: bool) -> np.ndarray:
  """Whether the group of each response has a nonzero advantage, bool [B].

  Args:
    by_token: whether the loss reads advantages of tokens.
  """
  nonzero_PG = scored.advantage_PG != 0
  if by_token and scored.advantage_BL is not None:
    nonzero_PG = (scored.advantage_BL != 0).any(axis=1).reshape(nonzero_PG.shape)
  return np.repeat(nonzero_PG.any(axis=1), nonzero_PG.shape[1])


def has_older(rollout: Rollout, version: int) -> bool:
  """Whether weights of a version other than `version` sampled some of the tokens.

  If `rl.lag` is 0, such tokens occur only in resumed partial rollouts, in recorded batches
  (`rl.replay`), and in batches from the checkpoint of a run with lag.
  """
  return bool(((rollout.version >= 0) & (rollout.version != version)).any())


def with_verdict(rollout: Rollout, known_B: np.ndarray) -> Rollout:
  """Sets the mask of responses without a verdict to 0.

  An advantage of 0 would not suffice, since the tokens would still count in the denominator of the
  loss, in the KL penalty and in the entropy bonus.
  """
  return dataclasses.replace(rollout, mask=rollout.mask * known_B[:, None])


def token_rewards(rollout: Rollout, reward_PG: np.ndarray, in_parts: bool) -> np.ndarray:
  """Returns each token's reward, float32 [B, L]; 0 for untrained responses.

  If `in_parts` is True, each turn or line has a reward, at its last token (`rollout.rewards`).
  Otherwise a response has one reward, at its last trained token.
  """
  live_B = (rollout.mask > 0).any(axis=1)
  if in_parts:
    return rollout.rewards * live_B[:, None]
  return at_the_end(np.where(live_B, reward_PG.reshape(-1), 0), rollout.mask)


def at_the_end(reward_B: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
  """Places rewards at the last trained tokens of responses, [B, L]."""
  L = mask_BL.shape[1]
  last_B = L - 1 - np.argmax(mask_BL[:, ::-1] > 0, axis=1)
  end_BL = (np.arange(L) == last_B[:, None]) & (mask_BL > 0)
  return np.where(end_BL, reward_B[:, None], 0).astype(np.float32)


def make_segments(objective: ObjectiveConfig, tokenizer: Tokenizer) -> Segments | None:
  """Builds a function (rollout) -> segment number of each token, int32 [B, L].

  Each segment has its own importance ratio. Returns None for a loss without segments.
  """
  unit = objective.segment_unit
  if unit is None:
    return None
  breaks_V = line_breaks(tokenizer) if unit == "line" else None
  marks = delimiters(objective.segment_delimiters, tokenizer) if unit == "step" else None
  return lambda rollout: segments_of(objective, rollout, breaks_V, marks)


def segments_of(
  objective: ObjectiveConfig,
  rollout: Rollout,
  breaks_V: np.ndarray | None,
  marks: Delimiters | None,
) -> np.ndarray:
  """Numbers the segments of each response, int32 [B, L], from 0.

  Args:
    objective: section `objective`, with `segment_unit`, and `segment_tokens` for unit "tokens".
    breaks_V: number of line breaks in each token's text; None if segments are not lines.
    marks: delimiters between reasoning steps; None if segments are not steps.
  """
  unit, ends_BT = objective.segment_unit, None
  if unit == "line":
    ends_BT = breaks(rollout.tokens, breaks_V) > 0
  if unit == "step":
    ends_BT = step_ends(marks, rollout.tokens, rollout.mask, rollout.turns)
  size = objective.segment_tokens
  return segment_ids(rollout.mask, turn_BT=rollout.turns, size=size, ends_BT=ends_BT)


def train_batch(
  rollout: Rollout,
  advantage_PG: np.ndarray,
  advantage_BL: np.ndarray | None = None,
  unit_BL: np.ndarray | None = None,
  *,
  shared_prompts: bool,
  version: int | None = None,
  replays_sampler: bool = False,
  mask_truncated: bool = False,
  ages: bool = False,
) -> TrainBatch:
  """Returns the rollout as inputs of an update, in host arrays.

  Args:
    advantage_BL: advantage of each token. None means one advantage per response.
    unit_BL: segment number of each token. None means a loss without segments.
    shared_prompts: whether a group's trajectories begin with the same tokens and experts.
    version: version of the weights before the updates. `MetricInputs.current_BT` marks the tokens
      of this version. None means that these weights sampled all tokens.
    replays_sampler: whether updates replay the sampler's experts (R3), older tokens included.
    mask_truncated: whether the loss excludes truncated responses.
    ages: whether metrics are split by the age of responses. If so, `version` must be set.
  """
  mask_BT = rollout.mask
  if mask_truncated:
    mask_BT = mask_BT * rollout.stopped[:, None].astype(mask_BT.dtype)
  length = rollout.tokens.shape[1]
  segments_BT = (np.arange(length)[None] < rollout.ends[:, None]).astype(np.int32)
  inputs = ModelInputs(
    tokens_BT=rollout.tokens,
    segments_BT=segments_BT,
    sampler_experts_BTlk=sampler_experts(rollout, segments_BT, version, replays_sampler),
    support_BTX=rollout.support,
    prompt_B=rollout.prompt_lengths if shared_prompts else None,
  )
  metric_inputs = MetricInputs(
    current_tokens(rollout, version, replays_sampler), ages_of(rollout, version) if ages else None
  )
  return TrainBatch(
    inputs,
    mask_BT=mask_BT,
    advantage_B=advantage_PG.reshape(-1).astype(np.float32),
    old_logp_BT=rollout.logp,
    sampler_logp_BT=rollout.logp,
    unit_BT=unit_BL,
    advantage_BT=advantage_BL,
    metric_inputs=metric_inputs,
  )


def sampler_experts(
  rollout: Rollout, segments_BT: np.ndarray, version: int | None, replays_sampler: bool
) -> np.ndarray | None:
  """Returns the sampler's experts, with NO_EXPERT for padding.

  If `version` is set and updates do not replay the experts, tokens first read by weights of another
  version have NO_EXPERT, too. The result is None if the sampler recorded no experts.
  """
  experts_BTlk = rollout.routing
  if experts_BTlk is None or version is None or replays_sampler:
    return experts_BTlk  # Padding has NO_EXPERT already, and a copy may take 50 GB.
  chosen_BT = (segments_BT > 0) & (fed_to(rollout.version) == version)
  no_expert = experts_BTlk.dtype.type(routing.NO_EXPERT)
  return np.where(chosen_BT[:, :, None, None], experts_BTlk, no_expert)


def current_tokens(
  rollout: Rollout, version: int | None, replays_sampler: bool
) -> np.ndarray | None:
  """Returns the mask of tokens sampled by `version`; None if `version` is None.

  If `replays_sampler` is True, rows with an older token are excluded.
  """
  if version is None:
    return None
  current_BT = rollout.version == version
  # Replayed experts of older weights change the log-probs of all later tokens in the row.
  if replays_sampler:
    current_BT &= (current_BT | (rollout.version < 0)).all(axis=1, keepdims=True)
  return current_BT.astype(rollout.mask.dtype)


def fed_to(version_BL: np.ndarray) -> np.ndarray:
  """Returns the version of the first weights to read each token, int32 [B, L].

  The sampler reads a token in order to sample the next token. So the result is the version of the
  next sampled token, or -1 if no sampled token follows.

  Args:
    version_BL: version of the weights that sampled each token, -1 for other tokens.
  """
  length = version_BL.shape[1]
  index_BL = np.where(version_BL >= 0, np.arange(length), length)
  after_BL = np.minimum.accumulate(
    np.pad(index_BL, ((0, 0), (0, 1)), constant_values=length)[:, ::-1], 1
  )
  after_BL = after_BL[:, ::-1][:, 1:]
  padded_BL = np.pad(version_BL, ((0, 0), (0, 1)), constant_values=-1)
  return np.take_along_axis(padded_BL, after_BL, axis=1)


def minibatches(
  batch: TrainBatch,
  parts: int,
  prompts: int,
  group_size: int,
  mesh: jax.sharding.Mesh,
  packed: bool,
  response_tokens: int = 0,
) -> list[TrainBatch]:
  """Splits a batch into mini-batches of whole groups, and moves them to the devices.

  If the batch has fewer than `prompts` groups, empty groups are spread evenly over mini-batches.

  Args:
    batch: the batch of an iteration, in host arrays.
    parts: number of mini-batches.
    prompts: number of groups in all mini-batches.
    packed: whether several sequences share a row (packing.py).
    response_tokens: maximum response length. If it is 0, packed sequences share no prompt.
  """
  missing = prompts * group_size - len(batch.mask_BT)
  if missing:
    place = _places(prompts, group_size, parts)
    batch = jax.tree.map(lambda x: x[place], _pad_rows(batch, missing))
  pieces = [np.split(x, parts) for x in jax.tree.leaves(batch)]
  structure = jax.tree.structure(batch)
  batches = [jax.tree.unflatten(structure, leaves) for leaves in zip(*pieces)]
  all_B = np.ones(len(batches[0].mask_BT), bool)
  batches = [batch.replace(first_B=all_B & (i == 0)) for i, batch in enumerate(batches)]
  if packed:
    shards = sharding.batch_shards(mesh)
    batches = [packing.plan(batch, shards, group_size, response_tokens) for batch in batches]
  return [sharding.put_batch(batch, mesh) for batch in batches]


def _pad_rows(batch: TrainBatch, rows: int) -> TrainBatch:
  """Appends empty sequences to a batch."""
  # Arrays are padded with 0, except these two, in which 0 would be an expert or a token.
  empty = dict(sampler_experts_BTlk=routing.NO_EXPERT, support_BTX=NO_TOKEN)

  def widen(path, x):
    widths = ((0, rows), *((0, 0),) * (x.ndim - 1))
    return np.pad(x, widths, constant_values=empty.get(path[-1].name, 0))

  return jax.tree_util.tree_map_with_path(widen, batch)


def epochs(batches: Sequence[TrainBatch], number: int) -> list[TrainBatch]:
  """Repeats mini-batches for all epochs, in the order of updates.

  In later epochs, `first_B` is False, since earlier updates have changed the weights.
  """
  later_epoch = [batch.replace(first_B=batch.first_B & False) for batch in batches]
  return [*batches, *later_epoch * (number - 1)]


def _places(prompts: int, group_size: int, parts: int) -> np.ndarray:
  """Returns the rollout's row for each row of the mini-batches.

  Group p is in mini-batch p modulo `parts`, so empty groups at the end are spread evenly.
  """
  group_P = np.argsort(np.arange(prompts) % parts, kind="stable")
  return (group_P[:, None] * group_size + np.arange(group_size)).reshape(-1)


def in_rollout_order(
  values: Sequence[jax.Array], batches: Sequence[TrainBatch], rows: int, group_size: int
) -> np.ndarray:
  """Fetches arrays of all mini-batches, joined in rollout order [rows, ...].

  Args:
    values: array [B, ...] of each mini-batch.
    batches: the mini-batches.
    rows: number of rows in the rollout; empty sequences after these are dropped.
    group_size: number of responses in a group.
  """
  pairs = [sharding.fetch((value, batch.order_B)) for value, batch in zip(values, batches)]
  all_B = np.concatenate([packing.in_order(value, order) for value, order in pairs])
  if rows < len(all_B):
    place = _places(len(all_B) // group_size, group_size, len(batches))
    all_B = all_B[np.argsort(place)]
  return all_B[:rows]


def sample_arrays(
  c: RunConfig,
  rollout: Rollout,
  batches: Sequence[TrainBatch],
  reviews: Sequence[Mapping[str, Any]],
) -> dict[str, np.ndarray]:
  """Fetches arrays for the samples log, as a dict by name, in rollout order.

  Args:
    reviews: one dictionary per mini-batch, from the pass of `passes.make_review`.
  """
  columns = {name: [review[name] for review in reviews] for name in reviews[0]}
  for name in ("unit_BT", "advantage_BT") if c.objective.loss.by_token else ("unit_BT",):
    columns[name] = [getattr(batch, name) for batch in batches]
  if c.estimator.on_devices:  # Otherwise the responses' advantages were computed on the host.
    columns["old_value_BT"] = [batch.critic_targets.old_value_BT for batch in batches]
    columns["advantage_B"] = [batch.advantage_B for batch in batches]
  fetch = functools.partial(
    in_rollout_order, batches=batches, rows=len(rollout.tokens), group_size=c.rl.group_size
  )
  return {name: fetch(values) for name, values in columns.items() if values[0] is not None}
