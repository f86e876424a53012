"""From what was sampled to what is trained on, and back to what a person wants to read of it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gspo_jax import multi_turn, sharding
from gspo_jax.config import RLConfig
from gspo_jax.data.prompt_filter import Groups
from gspo_jax.learner import packing
from gspo_jax.models import routing
from gspo_jax.run import Context
from gspo_jax.structs import Rollout, TrainBatch

TOKENS = 200_000  # of one dump that are written with their log-ratios
BY_SEQUENCE = ("gspo", "gspo_token")  # objectives that clip whole responses


def train_batch(context: Context, rollout: Rollout, advantage_PG: np.ndarray) -> TrainBatch:
  """The rollout as the learner sees it, padded to one length for the whole run.

  The sampler's log-probabilities stand in for the old policy's; whoever recomputes replaces them.
  """
  c = context.config
  length = c.data.max_prompt_tokens + c.sampling.max_new_tokens
  pad = lambda x, value=0: np.pad(  # noqa: E731
    x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=value
  )
  segments_BT = (np.arange(length)[None] < rollout.ends[:, None]).astype(np.int32)
  routes_BTlk = rollout.routing
  if routes_BTlk is not None:  # whatever padding holds was not chosen by anybody
    kept = segments_BT[:, :, None, None] > 0
    routes_BTlk = np.where(kept, pad(routes_BTlk), routes_BTlk.dtype.type(routing.NO_ROUTE))
  unit_BT = advantage_BT = None
  if rollout.turns is not None:
    unit_BT = pad(np.where(rollout.mask > 0, rollout.turns, -1), -1)
    advantage_BT = pad(multi_turn.advantages(context, rollout))
  # Conversations may begin differently. What was carried over went through the prompt again, with
  # other weights, so that each response may have other routes there.
  alike = context.environment is None and not (c.rl.partial and routes_BTlk is not None)
  logp_BT = pad(rollout.logp)
  return TrainBatch(
    tokens_BT=pad(rollout.tokens, context.tokenizer.pad_id),
    segments_BT=segments_BT,
    mask_BT=pad(rollout.mask),
    advantage_B=advantage_PG.reshape(-1).astype(np.float32),
    old_logp_BT=logp_BT,
    sampler_logp_BT=logp_BT,
    unit_BT=unit_BT,
    advantage_BT=advantage_BT,
    sampler_routing_BTlk=routes_BTlk,
    prompt_B=rollout.prompt_lengths if alike else None,
  )


def fill_up(batch: TrainBatch, rl: RLConfig) -> TrainBatch:
  """P groups: rows that are padding for those that are missing, evenly in all mini-batches."""
  missing = rl.prompts * rl.group_size - len(batch.tokens_BT)
  if not missing:
    return batch
  widen = lambda x: np.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))  # noqa: E731
  return jax.tree.map(lambda x: widen(x)[_places(rl)], batch)


def _places(rl: RLConfig) -> np.ndarray:
  """Which row of a rollout, made P groups long, each row of the batch is."""
  group_P = np.argsort(np.arange(rl.prompts) % rl.minibatches, kind="stable")
  return (group_P[:, None] * rl.group_size + np.arange(rl.group_size)).reshape(-1)


def place(context: Context, batch: TrainBatch) -> TrainBatch:
  """A mini-batch, packed if the run packs, on the devices."""
  if context.config.rl.packed:
    batch = packing.plan(batch, sharding.batch_shards(context.mesh))
  return sharding.put_batch(batch, context.mesh)


def blank(context: Context) -> TrainBatch:
  """A mini-batch on the devices that is like all others of the run in everything but its values."""
  c = context.config
  prompts = c.rl.prompts // c.rl.minibatches
  B, L = prompts * c.rl.group_size, c.data.max_prompt_tokens + c.sampling.max_new_tokens
  real_BL, one_B = np.zeros((B, L), np.float32), np.ones(B, np.int32)
  layers = sum(map(c.model.is_moe, range(c.model.num_layers)))
  routing_BLlk = turns_BL = None
  if layers and c.objective.needs_sampler_routing:
    shape = (B, L, layers, c.model.experts_per_token)
    routing_BLlk = np.zeros(shape, routing.storage_dtype(c.model.num_experts))
  if context.environment is not None:
    turns_BL = np.full((B, L), -1, np.int32)
  rollout = Rollout(
    tokens=real_BL.astype(np.int32),
    mask=real_BL,
    logp=real_BL,
    full_logp=real_BL,
    prompt_lengths=one_B,
    lengths=one_B,
    stopped=one_B > 0,
    routing=routing_BLlk,
    turns=turns_BL,
    rewards=real_BL,
  )
  advantage_PG = np.zeros((prompts, c.rl.group_size), np.float32)
  return place(context, train_batch(context, rollout, advantage_PG))


def split(batch: TrainBatch, parts: int) -> list[TrainBatch]:
  """Mini-batches of whole groups, in order; prompts come shuffled."""
  cut = [np.split(x, parts) for x in jax.tree.leaves(batch)]
  structure = jax.tree.structure(batch)
  return [jax.tree.unflatten(structure, leaves) for leaves in zip(*cut)]


def log_ratios(
  minibatches: Sequence[TrainBatch], new_logp: Sequence[jax.Array], rows: int, rl: RLConfig
) -> np.ndarray:
  """log π_new/π_old of each token, [rows, T], in the order of the rollout."""
  fetched = [
    sharding.fetch((new, b.old_logp_BT, b.order_B)) for new, b in zip(new_logp, minibatches)
  ]
  ratio_BT = np.concatenate([packing.in_order(new - old, order) for new, old, order in fetched])
  if rows < len(ratio_BT):
    ratio_BT = ratio_BT[np.argsort(_places(rl))]
  return ratio_BT[:rows]


def rollout_records(
  context: Context,
  groups: Groups,
  advantage_PG: np.ndarray,
  minibatches: Sequence[TrainBatch],
  new_logp: Sequence[jax.Array],
) -> list[dict[str, Any]]:
  """What a person wants to read of each response that was trained on.

  Args:
    new_logp: of the mini-batches' tokens, after the iteration's updates: `ratio`, `clipped` and
      `log_ratio` tell what became of the response, in comparison with the policy that wrote it.
  """
  c, prompts, rollout, group = context.config, groups.prompts, groups.rollout, advantage_PG.shape[1]
  ratio_BT = log_ratios(minibatches, new_logp, len(groups.responses), c.rl)
  used_BL = rollout.mask > 0
  texts = {i: context.tokenizer.decode([i]) for i in np.unique(rollout.tokens[used_BL]).tolist()}
  records, written = [], 0
  for row, response in enumerate(groups.responses):
    advantage, used_L = float(advantage_PG.flat[row]), used_BL[row]
    ratio_X = ratio_BT[row, : len(used_L)][used_L]
    low, high = -np.log1p(-min(c.objective.clip_low, 0.999)), np.log1p(c.objective.clip_high)
    moved = ratio_X.mean(keepdims=True) if c.objective.name in BY_SEQUENCE else ratio_X
    clipped = moved > high if advantage > 0 else moved < -low
    record = dict(
      prompt_id=prompts[row // group].id,
      sample=row % group,
      prompt=prompts[row // group].question,
      response=response,
      answer=prompts[row // group].answer[:1000],  # the tests of a program take megabytes
      reward=float(groups.reward_PG.flat[row]),
      advantage=round(advantage, 4),
      length=int(rollout.lengths[row]),
      truncated=not bool(rollout.stopped[row]),
      ratio=round(float(np.exp(ratio_X.mean())), 6),
      clipped=bool(clipped.any()) and advantage != 0,
      eval=False,
    )
    written += len(ratio_X)
    if written <= TOKENS:
      record["tokens"] = [texts[i] for i in rollout.tokens[row][used_L].tolist()]
      record["log_ratio"] = [round(x, 4) for x in ratio_X.tolist()]
    records.append(record)
  return records
