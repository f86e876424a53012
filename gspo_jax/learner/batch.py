"""From what was sampled to the mini-batches of an iteration, and back to its order."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.learner import packing
from gspo_jax.learner.metrics import ages as ages_of
from gspo_jax.models.experts import routing
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.objectives.advantages import alike
from gspo_jax.sampling.delimiters import Delimiters, step_ends
from gspo_jax.sampling.parts import breaks, segment_ids
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import ModelInputs, Rollout, TrainBatch


def place(
  c: RunConfig,
  mesh: jax.sharding.Mesh,
  rollout: Rollout,
  *,
  reward_PG: np.ndarray,
  advantage_PG: np.ndarray,
  advantage_BL: np.ndarray | None,
  known_B: np.ndarray,
  version: int,
  breaks_V: np.ndarray | None = None,
  delimiters: Delimiters | None = None,
) -> list[TrainBatch]:
  """The mini-batches of an iteration, on the devices.

  Args:
    advantage_BL: of each token, where turns or lines have rewards of their own.
    known_B: on which responses there is a verdict.
    version: of the weights before the updates.
    breaks_V: line breaks in the text of each token, for segments that are lines.
    delimiters: what ends a segment that is a step.
  """
  older = has_older(rollout, version)
  # Conversations may begin differently. What was put aside went through the prompt again, with
  # other weights, so that each trajectory of a group may have other experts there. With a lag
  # those of servers may too, which take new weights under way; their record (`rl.replay`)
  # makes the same updates with any engine. Older tokens without a lag may be of either.
  moved = c.rl.partial or (c.objective.replay == "R3" if c.rl.lag else older)
  shared = not c.environment.name and not (moved and rollout.routing is not None)
  reward_BL, mixed_B = None, None
  if c.objective.kl_groups == "mixed":
    alike_P1 = np.asarray(alike(reward_PG, known_B.reshape(reward_PG.shape)))
    mixed_B = np.repeat(~alike_P1, reward_PG.shape[1])
  if not c.distillation.alone:  # a teacher needs no verdict
    rollout = judged(rollout, known_B)
  if c.estimator.needs & {"critic", "reference"}:  # advantages are made of it on the devices
    reward_BL = of_tokens(rollout, reward_PG, in_parts=advantage_BL is not None)
  batch = train_batch(
    rollout,
    advantage_PG,
    advantage_BL,
    segments_of(c.objective, rollout, breaks_V, delimiters),
    shared_prompts=shared,
    version=version if c.rl.partial or c.rl.lag or c.job == "offline" or older else None,
    ages=c.rl.ages > 0,
    replays_sampler=c.objective.replay == "R3",
    mask_truncated=c.rl.mask_truncated,
    reward_BL=reward_BL,
  ).replace(
    mixed_B=mixed_B,
    cut_off_B=~rollout.stopped if c.critic.bootstrap else None,
    turn_BT=rollout.turns if c.estimator.needs >= {"critic", "turns"} else None,
  )
  return minibatches(
    batch,
    c.rl.minibatches,
    c.rl.prompts,
    c.rl.group_size,
    mesh=mesh,
    packed=c.rl.packed,
    response_tokens=c.sampling.max_new_tokens,
  )


def has_older(rollout: Rollout, version: int) -> bool:
  """Whether other weights than those of `version` have sampled some token. That may be so without a
  lag too: in batches on record, or left from a run with a lag that is gone on with."""
  return bool(((rollout.version >= 0) & (rollout.version != version)).any())


def judged(rollout: Rollout, known_B: np.ndarray) -> Rollout:
  """The rollout without the responses on which there is no verdict: an advantage of 0 would still
  count in the means of a loss, and in its penalties."""
  return dataclasses.replace(rollout, mask=rollout.mask * known_B[:, None])


def of_tokens(rollout: Rollout, reward_PG: np.ndarray, in_parts: bool) -> np.ndarray:
  """The reward of each token that counts in `rollout`: of turns or lines where these have rewards
  of their own, else of the response at its end."""
  live_B = (rollout.mask > 0).any(axis=1)
  if in_parts:
    return rollout.rewards * live_B[:, None]
  return at_the_end(np.where(live_B, reward_PG.reshape(-1), 0), rollout.mask)


def at_the_end(reward_B: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
  """float32 [B, L]: each reward at the last token that is trained on, 0 elsewhere."""
  L = mask_BL.shape[1]
  last_B = L - 1 - np.argmax(mask_BL[:, ::-1] > 0, axis=1)
  at_BL = (np.arange(L) == last_B[:, None]) & (mask_BL > 0)
  return np.where(at_BL, reward_B[:, None], 0).astype(np.float32)


def segments_of(
  objective: ObjectiveConfig,
  rollout: Rollout,
  breaks_V: np.ndarray | None,
  delimiters: Delimiters | None,
) -> np.ndarray | None:
  """Parts of each trajectory that have an importance ratio of their own; None: there are none."""
  unit, turn_BT, ends_BT = objective.segment_unit, rollout.turns, None
  if unit is None:
    return None
  if unit == "line":
    ends_BT = breaks(rollout.tokens, breaks_V) > 0
  if unit == "step":
    ends_BT = step_ends(delimiters, rollout.tokens, rollout.mask, turn_BT)
  size = objective.segment_tokens
  return segment_ids(rollout.mask, turn_BT=turn_BT, size=size, ends_BT=ends_BT)


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
  reward_BL: np.ndarray | None = None,
  ages: bool = False,
) -> TrainBatch:
  """The rollout as the learner sees it; its old log-probabilities are still to be decided.

  Args:
    advantage_BL: of each token, where they differ within a trajectory.
    unit_BL: segments of each trajectory, where they have importance ratios of their own.
    shared_prompts: the trajectories of a group begin with the same tokens, for which the sampler
      used the same experts.
    version: of the weights before the updates, where older ones may have sampled some tokens. What
      sampler and trainer are compared by is then left out for these; None: all are of one version.
    replays_sampler: experts stay on record for all tokens in any case, since they are replayed.
    mask_truncated: leave responses that were cut off out of the loss.
    reward_BL: of each token, for a critic.
    ages: say how old each response is, against `version`.
  """
  length = rollout.tokens.shape[1]
  segments_BT = (np.arange(length)[None] < rollout.ends[:, None]).astype(np.int32)
  experts_BTlk = rollout.routing
  if experts_BTlk is not None:  # whatever padding holds was not chosen by anybody
    kept = segments_BT[:, :, None, None] > 0
    if version is not None and not replays_sampler:
      kept &= (fed_to(rollout.version) == version)[:, :, None, None]
    experts_BTlk = np.where(kept, experts_BTlk, experts_BTlk.dtype.type(routing.NO_EXPERT))
  mask_BT, current_BT = rollout.mask, None
  if mask_truncated:
    mask_BT = mask_BT * rollout.stopped[:, None].astype(mask_BT.dtype)
  if version is not None:
    current_BT = rollout.version == version
    if replays_sampler:  # of older tokens too, so that those after them are of another network
      current_BT &= (current_BT | (rollout.version < 0)).all(axis=1, keepdims=True)
    current_BT = current_BT.astype(mask_BT.dtype)
  inputs = ModelInputs(
    tokens_BT=rollout.tokens,
    segments_BT=segments_BT,
    sampler_experts_BTlk=experts_BTlk,
    support_BTX=rollout.support,
    prompt_B=rollout.prompt_lengths if shared_prompts else None,
  )
  return TrainBatch(
    inputs,
    mask_BT=mask_BT,
    advantage_B=advantage_PG.reshape(-1).astype(np.float32),
    old_logp_BT=None,
    sampler_logp_BT=rollout.logp,
    current_BT=current_BT,
    unit_BT=unit_BL,
    advantage_BT=advantage_BL,
    reward_BT=reward_BL,
    age_B=ages_of(rollout, version) if ages else None,
  )


def fed_to(version_BL: np.ndarray) -> np.ndarray:
  """Version of the weights that each token was first fed to, from those that sampled the tokens:
  what was fed gave the next sampled token. -1 where none follows. int32 [B, L] -> [B, L]."""
  length = version_BL.shape[1]
  place_BL = np.where(version_BL >= 0, np.arange(length), length)
  after_BL = np.minimum.accumulate(
    np.pad(place_BL, ((0, 0), (0, 1)), constant_values=length)[:, ::-1], 1
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
  """Mini-batches of whole groups on the devices, packed if `packed`.

  The first one is marked. Where there are fewer than `prompts` groups, padding takes the place of
  the missing ones, evenly in all mini-batches.
  """
  missing = prompts * group_size - len(batch.mask_BT)
  if missing:
    place = _places(prompts, group_size, parts)
    batch = jax.tree.map(lambda x: x[place], _widened(batch, missing))
  cut = [np.split(x, parts) for x in jax.tree.leaves(batch)]
  structure = jax.tree.structure(batch)
  batches = [jax.tree.unflatten(structure, leaves) for leaves in zip(*cut)]
  of_each_B = np.ones(len(batches[0].mask_BT), bool)
  batches = [batch.replace(first_B=of_each_B & (i == 0)) for i, batch in enumerate(batches)]
  if packed:
    shards = sharding.batch_shards(mesh)
    batches = [packing.plan(batch, shards, group_size, response_tokens) for batch in batches]
  return [sharding.put_batch(batch, mesh) for batch in batches]


def _widened(batch: TrainBatch, rows: int) -> TrainBatch:
  """The batch with so many rows of padding after it."""
  nothing = dict(sampler_experts_BTlk=routing.NO_EXPERT, support_BTX=NO_TOKEN)  # 0 would be one

  def widen(path, x):
    room = ((0, rows), *((0, 0),) * (x.ndim - 1))
    return np.pad(x, room, constant_values=nothing.get(path[-1].name, 0))

  return jax.tree_util.tree_map_with_path(widen, batch)


def epochs(batches: Sequence[TrainBatch], number: int) -> list[TrainBatch]:
  """Mini-batches in the order of an iteration's updates: the same ones `number` times.

  The marked one is so in the first epoch only: later it meets weights that updates have changed.
  """
  again = [batch.replace(first_B=batch.first_B & False) for batch in batches]
  return [*batches, *again * (number - 1)]


def _places(prompts: int, group_size: int, parts: int) -> np.ndarray:
  """Rows of a rollout, made `prompts` groups long, in the order of the batch."""
  group_P = np.argsort(np.arange(prompts) % parts, kind="stable")
  return (group_P[:, None] * group_size + np.arange(group_size)).reshape(-1)


def in_rollout_order(
  values: Sequence[jax.Array], batches: Sequence[TrainBatch], rows: int, group_size: int
) -> np.ndarray:
  """Fetches [B, ...] values of mini-batches as [rows, ...] in the order of the rollout that they
  were made from, without the padding."""
  pairs = [sharding.fetch((value, batch.order_B)) for value, batch in zip(values, batches)]
  all_B = np.concatenate([packing.in_order(value, order) for value, order in pairs])
  if rows < len(all_B):
    place = _places(len(all_B) // group_size, group_size, len(batches))
    all_B = all_B[np.argsort(place)]
  return all_B[:rows]
