"""Metrics of groups: rewards, lengths, outcomes of the verifier, and environments."""

import collections
import itertools
from collections.abc import Container, Sequence

import numpy as np

from gspo_jax.models.head import NO_TOKEN
from gspo_jax.rollouts.groups import Group, alike, trajectories_of
from gspo_jax.sampling import Trajectory
from gspo_jax.sampling.trajectory import means
from gspo_jax.settings.run import RunConfig


def rollout_metrics(groups: Sequence[Group], outcomes: collections.Counter) -> dict[str, float]:
  """Computes metrics of all sampled groups, discarded groups included.

  Metrics of rewards are over responses with a verdict. `groups_without_spread` is the share of
  groups with equal rewards, among the groups with at least one verdict.

  Args:
    outcomes: number of responses by outcome of the verifier. Empty if the verifier reports no
      outcomes.
  """
  trajectories = trajectories_of(groups)
  rewards = [group.reward_G[group.known_G] for group in groups]
  reward_X = np.concatenate(rewards)
  lengths = [trajectory.length for trajectory in trajectories]
  row = {
    "reward/mean": float(reward_X.mean()),
    "reward/std": float(reward_X.std()),
    "reward/min": float(reward_X.min()),
    "reward/max": float(reward_X.max()),
    "groups_without_spread": float(np.mean([alike(x_X) for x_X in rewards if len(x_X)])),
    "response_length/mean": float(np.mean(lengths)),
    "response_length/max": float(max(lengths)),
    "truncated_fraction": float(np.mean([x.truncated for x in trajectories])),
  }
  row |= support_metrics(trajectories)
  total = len(trajectories)
  if outcomes:
    row["verifier/unknown"] = 1 - len(reward_X) / total
  return row | {f"verifier/{name}": n / total for name, n in sorted(outcomes.items())}


def support_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Computes metrics of supports: the tokens within top-k, top-p and min-p.

  `sampling/support` is the mean number of tokens in a support. `sampling/support_mass` is the mean
  probability of a support under the full distribution. Sampled tokens without a recorded support
  are excluded.
  """
  size, mass = [], []
  for trajectory in trajectories:
    if trajectory.support is not None:
      size_n, columns = (trajectory.support != NO_TOKEN).sum(axis=1), trajectory.columns
      size.append(size_n[size_n > 0])
      mass.append(np.exp(columns["full_logp"] - columns["logp"])[size_n > 0])
  if not size:
    return {}
  size, mass = np.concatenate(size), np.concatenate(mass)
  return {"sampling/support": float(size.mean()), "sampling/support_mass": float(mass.mean())}


def size_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Computes metrics of group sizes: numbers of responses to a prompt."""
  sizes = [len(group.trajectories) for group in groups]
  return {
    "group_size/mean": float(np.mean(sizes)),
    "group_size/min": float(min(sizes)),
    "group_size/max": float(max(sizes)),
    "group_size/responses": float(sum(sizes)),
  }


def round_metrics(
  sampled: Sequence[Group], chosen: Sequence[Group], rounds: int
) -> dict[str, float]:
  """Computes metrics of dynamic sampling.

  Args:
    sampled: groups of all rounds.
    chosen: the groups of `sampled` that are trained on. `dynamic_sampling/filled_groups` counts
      the chosen groups that are not mixed.
    rounds: number of rounds.
  """
  return {
    "dynamic_sampling/rounds": float(rounds),
    "dynamic_sampling/discarded_groups": float(len(sampled) - len(chosen)),
    "dynamic_sampling/filled_groups": float(sum(not group.mixed for group in chosen)),
  }


def recorded_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Computes number, mean reward and mean length of recorded responses.

  Blank responses, which pad groups, are excluded.
  """
  known_B = np.concatenate([group.known_G for group in groups])
  lengths_B = np.array([trajectory.length for trajectory in trajectories_of(groups)])
  return {
    "recorded/responses": float(known_B.sum()),
    "recorded/reward": float(np.concatenate([group.reward_G for group in groups])[known_B].mean()),
    "recorded/length": float(lengths_B[known_B].mean()),
  }


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Computes metrics of conversations.

  The metrics returned by environments (`figures`) are averaged over conversations without failure.
  They override `turns` and `observation_fraction`.
  """
  trajectories = trajectories_of(groups)
  sampled = sum(trajectory.length for trajectory in trajectories)
  total = sum(len(trajectory.tokens) for trajectory in trajectories)
  row = dict(
    turns=float(np.mean([trajectory.turn for trajectory in trajectories])),
    observation_fraction=1 - sampled / total,
  )
  row |= means([x.figures for x in trajectories if not x.failure])
  return {f"environment/{name}": value for name, value in row.items()}


def partial_metrics(
  sampled: Sequence[Group],
  chosen: Sequence[Group],
  in_flight: Sequence[Group],
  surplus: Container[int],
  version: int,
  config: RunConfig,
) -> dict[str, float]:
  """Computes metrics of partial rollouts.

  All names begin with `partial/`. `stale_tokens` is the share of trained tokens that weights older
  than `version` sampled. `oldest` is the maximum age of a trained token, in versions.
  `finished_groups` counts the groups finished in this iteration. `waiting_groups` counts the
  finished groups carried over to the next iteration. `tokens_in_flight` is the number of sampled
  tokens in all groups carried over.

  Args:
    sampled: groups scored in this iteration, all finished.
    chosen: the groups of `sampled` that are trained on.
    in_flight: groups carried over to the next iteration, finished or not.
    surplus: Python ids of groups finished in earlier iterations.
    version: version of the sampling weights at the start of sampling.
    config: configuration of the run.
  """
  trained = (
    trajectory
    for group in chosen
    for trajectory in itertools.compress(group.trajectories, group.trained_G(config))
  )
  version_X = np.concatenate([[], *(x.version[x.turns >= 0] for x in trained)])
  waiting = [group for group in in_flight if group.finished]
  tokens = sum(trajectory.length for trajectory in trajectories_of(in_flight))
  return {
    "partial/stale_tokens": float((version_X < version).sum() / max(len(version_X), 1)),
    "partial/oldest": float(version - version_X.min(initial=version)),
    "partial/finished_groups": float(sum(id(g) not in surplus for g in [*sampled, *waiting])),
    "partial/waiting_groups": float(len(waiting)),
    "partial/tokens_in_flight": float(tokens),
  }
