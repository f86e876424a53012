"""Metrics of groups: rewards, lengths, outcomes of the verifier, figures of conversations."""

import collections
from collections.abc import Container, Sequence

import numpy as np

from gspo_jax.models.head import NO_TOKEN
from gspo_jax.rollouts.groups import Group, spread
from gspo_jax.sampling import Trajectory
from gspo_jax.sampling.trajectory import means


def rollout_metrics(groups: Sequence[Group], outcomes: collections.Counter) -> dict[str, float]:
  """Of everything that was sampled, which with dynamic sampling is more than is trained on; rewards
  of what there is a verdict on."""
  trajectories = [one for group in groups for one in group.trajectories]
  judged = [group.reward_G[group.known_G] for group in groups]
  reward_X = np.concatenate(judged)
  lengths = [one.length for one in trajectories]
  row = {
    "reward/mean": float(reward_X.mean()),
    "reward/std": float(reward_X.std()),
    "groups_without_spread": float(np.mean([spread(one) == 0 for one in judged if len(one)])),
    "response_length/mean": float(np.mean(lengths)),
    "response_length/max": float(max(lengths)),
    "truncated_fraction": float(1 - np.mean([one.stopped for one in trajectories])),
  }
  if any(one.support is not None for one in trajectories):
    row |= support_metrics(trajectories)
  total = len(trajectories)
  if outcomes:
    row["verifier/unknown"] = 1 - len(reward_X) / total
  return row | {f"verifier/{name}": n / total for name, n in sorted(outcomes.items())}


def support_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Of sampled tokens with a support on record: how many tokens that has, and the probability that
  these have without truncation."""
  size, mass = [], []
  for one in trajectories:
    if one.support is not None:
      kept_n = (one.support != NO_TOKEN).sum(axis=1)
      size.append(kept_n[kept_n > 0])
      mass.append(np.exp(one.columns["full_logp"] - one.columns["logp"])[kept_n > 0])
  size, mass = np.concatenate(size), np.concatenate(mass)
  return {"sampling/support": float(size.mean()), "sampling/support_mass": float(mass.mean())}


def recorded_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Of the responses that come from files: how many, and their rewards and lengths there."""
  known = [group.known_G for group in groups]
  lengths = np.concatenate([[one.length for one in group.trajectories] for group in groups])
  return {
    "recorded/responses": float(np.concatenate(known).sum()),
    "recorded/reward": float(np.concatenate([g.reward_G[k] for g, k in zip(groups, known)]).mean()),
    "recorded/length": float(lengths[np.concatenate(known)].mean()),
  }


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Means over conversations; figures of those whose environment has not failed."""
  trajectories = [one for group in groups for one in group.trajectories]
  figures = means([one.figures for one in trajectories if not one.failure])
  row = {f"environment/{name}": value for name, value in figures.items()}
  row["environment/turns"] = float(np.mean([one.turn for one in trajectories]))
  sampled = sum(one.length for one in trajectories)
  following = sum(len(one.tokens) for one in trajectories)
  return row | {"environment/observation_fraction": 1 - sampled / following}


def partial_metrics(
  sampled: Sequence[Group],
  chosen: Sequence[Group],
  under_way: Sequence[Group],
  surplus: Container[int],
  version: int,
) -> dict[str, float]:
  """How old what is trained on is, against the `version` that sampled last; groups that
  this iteration has finished, beyond the `surplus` that was before it, and those that wait for a
  later one; tokens of all groups that are not yet trained on."""
  versions = [one.version[one.turns >= 0] for group in chosen for one in group.trajectories]
  version_X = np.concatenate(versions)
  waiting = [group for group in under_way if group.finished]
  carried = [one.length for group in under_way for one in group.trajectories]
  return {
    "partial/stale_tokens": float((version_X < version).mean()),
    "partial/oldest": float(version - version_X.min()),
    "partial/finished_groups": float(sum(id(g) not in surplus for g in [*sampled, *waiting])),
    "partial/waiting_groups": float(len(waiting)),
    "partial/tokens_in_flight": float(sum(carried)),
  }
