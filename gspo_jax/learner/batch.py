"""From what was sampled to the mini-batches of an iteration, and back to its order."""

from collections.abc import Sequence

import jax
import numpy as np

from gspo_jax import sharding
from gspo_jax.learner import by_age, packing
from gspo_jax.models.experts import routing
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.structs import Rollout, TrainBatch


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
  routing_BTlk = rollout.routing
  if routing_BTlk is not None:  # whatever padding holds was not chosen by anybody
    kept = segments_BT[:, :, None, None] > 0
    if version is not None and not replays_sampler:
      kept &= (fed_to(rollout.version) == version)[:, :, None, None]
    routing_BTlk = np.where(kept, routing_BTlk, routing_BTlk.dtype.type(routing.NO_EXPERT))
  mask_BT, current_BT = rollout.mask, None
  if mask_truncated:
    mask_BT = mask_BT * rollout.stopped[:, None].astype(mask_BT.dtype)
  if version is not None:
    current_BT = rollout.version == version
    if replays_sampler:  # of older tokens too, so that those after them are of another network
      current_BT &= (current_BT | (rollout.version < 0)).all(axis=1, keepdims=True)
    current_BT = current_BT.astype(mask_BT.dtype)
  return TrainBatch(
    tokens_BT=rollout.tokens,
    segments_BT=segments_BT,
    mask_BT=mask_BT,
    advantage_B=advantage_PG.reshape(-1).astype(np.float32),
    old_logp_BT=None,
    sampler_logp_BT=rollout.logp,
    current_BT=current_BT,
    unit_BT=unit_BL,
    advantage_BT=advantage_BL,
    reward_BT=reward_BL,
    age_B=by_age.ages(rollout, version) if ages else None,
    sampler_routing_BTlk=routing_BTlk,
    support_BTX=rollout.support,
    prompt_B=rollout.prompt_lengths if shared_prompts else None,
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
) -> list[TrainBatch]:
  """Mini-batches of whole groups on the devices, packed if `packed`.

  The first one is marked. Where there are fewer than `prompts` groups, padding takes the place of
  the missing ones, evenly in all mini-batches.
  """
  missing = prompts * group_size - len(batch.tokens_BT)
  if missing:
    place = _places(prompts, group_size, parts)
    batch = jax.tree.map(lambda x: x[place], _widened(batch, missing))
  cut = [np.split(x, parts) for x in jax.tree.leaves(batch)]
  structure = jax.tree.structure(batch)
  batches = [jax.tree.unflatten(structure, leaves) for leaves in zip(*cut)]
  first = lambda i, one: np.full(len(one.tokens_BT), i == 0)  # noqa: E731
  batches = [one.replace(first_B=first(i, one)) for i, one in enumerate(batches)]
  if packed:
    batches = [packing.plan(one, sharding.batch_shards(mesh)) for one in batches]
  return [sharding.put_batch(one, mesh) for one in batches]


def _widened(batch: TrainBatch, rows: int) -> TrainBatch:
  """The batch with so many rows of padding after it."""
  nothing = dict(sampler_routing_BTlk=routing.NO_EXPERT, support_BTX=NO_TOKEN)  # 0 would be one

  def widen(path, x):
    room = ((0, rows), *((0, 0),) * (x.ndim - 1))
    return np.pad(x, room, constant_values=nothing.get(path[0].name, 0))

  return jax.tree_util.tree_map_with_path(widen, batch)


def epochs(batches: Sequence[TrainBatch], number: int) -> list[TrainBatch]:
  """Mini-batches in the order of an iteration's updates: the same ones `number` times.

  The marked one is so in the first epoch only: later it meets weights that updates have changed.
  """
  again = [one.replace(first_B=one.first_B & False) for one in batches] if number > 1 else []
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
