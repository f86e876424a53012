"""Groups of conversations: sampling them, their rewards, and the advantages of their turns."""

import collections
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gspo_jax import objectives as O
from gspo_jax.data.prompt_filter import Groups
from gspo_jax.run import Context
from gspo_jax.sampling import Usage, conversation, converse
from gspo_jax.structs import Prompt, Rollout


def sample_groups(
  context: Context, params: Any, prompts: list[Prompt], usage: Usage, seed: int
) -> Groups:
  """G conversations about each prompt; what they are worth is what their environments say."""
  c, tok = context.config, context.tokenizer
  environments = [context.environment(p) for p in prompts for _ in range(c.rl.group_size)]
  rollout = converse(
    params,
    c.model,
    environments,
    config=c.environment,
    group_size=c.rl.group_size,
    max_new_tokens=c.sampling.max_new_tokens,
    temperature=c.sampling.temperature,
    top_k=c.sampling.top_k,
    top_p=c.sampling.top_p,
    min_p=c.sampling.min_p,
    stop_ids=tok.stop_ids,
    detokenize=tok.decode,
    render=lambda messages: tok.encode(tok.chat(messages)),
    seed=seed,
    pad_id=tok.pad_id,
    prompt_length=c.data.max_prompt_tokens,
    record_routing=c.objective.needs_sampler_routing,
    compute=c.compute,
    engine=c.engine,
    usage=usage,
  )
  reward_B = rollout.rewards.sum(1)
  figures = [conversation.figures(*pair) for pair in zip(environments, reward_B)]
  correct_B = np.array([one["correct"] for one in figures], np.float32)
  if jax.process_count() > 1:
    # Every host runs all environments, and the tokens have to be the same on all of them.
    multihost_utils.assert_equal(
      rollout.tokens, "an environment says different things on two hosts"
    )
  return Groups(
    prompts,
    rollout,
    [tok.decode(rollout.response(row)) for row in range(len(reward_B))],
    reward_B.reshape(-1, c.rl.group_size),
    correct_B.reshape(-1, c.rl.group_size),
    collections.Counter(),
    {name: sum(one[name] for one in figures) for name in figures[0]},
  )


def advantages(context: Context, rollout: Rollout) -> np.ndarray:
  """float32 [B, L]: of each sampled token that of its turn (`turn_advantages`); 0 elsewhere."""
  c = context.config
  turns_BL, U = rollout.turns, c.environment.max_turns
  reward_BU, valid_BU = (np.zeros((len(turns_BL), U), np.float32) for _ in range(2))
  row_X, column_X = np.nonzero(turns_BL >= 0)
  turn_X = turns_BL[row_X, column_X]
  np.add.at(reward_BU, (row_X, turn_X), rollout.rewards[row_X, column_X])
  valid_BU[row_X, turn_X] = 1
  by_group = lambda x_BU: x_BU.reshape(-1, c.rl.group_size, U)  # noqa: E731
  advantage_PGU = O.turn_advantages(
    by_group(reward_BU),
    by_group(valid_BU),
    discount=c.environment.discount,
    normalize=c.objective.advantage,
  )
  advantage_BL = np.zeros(turns_BL.shape, np.float32)
  advantage_BL[row_X, column_X] = np.asarray(advantage_PGU).reshape(-1, U)[row_X, turn_X]
  return advantage_BL


def metrics(groups: Groups) -> dict[str, float]:
  """Means over conversations; nothing where responses are not conversations."""
  rollout = groups.rollout
  if rollout.turns is None:
    return {}
  row = {f"environment/{name}": float(n) for name, n in groups.figures.items()}
  row = {name: n / len(groups.responses) for name, n in row.items()}
  following = rollout.ends - rollout.prompt_lengths
  row["environment/turns"] = float((rollout.turns.max(1) + 1).mean())
  row["environment/observation_fraction"] = 1 - float(rollout.lengths.sum() / following.sum())
  return row
