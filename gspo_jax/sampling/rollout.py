"""Sampling of single-turn responses, a group for each prompt, as a `Rollout`."""

import operator
from collections.abc import Sequence

import numpy as np

from gspo_jax.models import transformer
from gspo_jax.sampling.driver import Driver, new_groups
from gspo_jax.sampling.engine import Engine
from gspo_jax.sampling.local.engine import LocalEngine
from gspo_jax.sampling.requests import Workload
from gspo_jax.sampling.trajectory import assemble
from gspo_jax.settings.model import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE, EngineConfig, SamplingConfig
from gspo_jax.structs import Prompt, Rollout


def generate(
  params: transformer.Params,
  model_config: ModelConfig,
  prompts: Sequence[Sequence[int]],
  *,
  group_size: int,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  stop_ids: tuple[int, ...] = (),
  seed: int = 0,
  pad_id: int = 0,
  compute: ComputeConfig = REFERENCE,
  engine: EngineConfig = LOCAL_ENGINE,
) -> Rollout:
  """Samples `group_size` responses to every prompt.

  Up to round-off, a response depends only on the weights, the sampling settings, `seed`, the
  prompt's tokens and the response's number. Responses to equal prompts have different numbers.
  Under a mesh (`jax.set_mesh`), the responses are split over the mesh's batch axes. Use
  `sample_rollout` for stop strings, recorded experts or several calls, `Driver` for several turns.

  Args:
    prompts: non-empty lists or arrays of token ids.
    temperature: temperature of the softmax; 0 for greedy decoding.
    stop_ids: token ids that end a response. The response includes its stop token.
    engine: settings such as the number of slots. By default, each response has a slot.

  Returns:
    A Rollout with `group_size` rows per prompt, in the prompts' order. The length of a row is the
    length of the longest prompt plus `max_new_tokens`.

  Raises:
    TypeError: a prompt is not a list of token ids, for example a string.
    ValueError: there are no prompts, a prompt is empty or has ids outside the vocabulary, a row has
      more positions than the model allows, or a setting is out of range.
  """
  group_size, max_new_tokens, seed = map(operator.index, (group_size, max_new_tokens, seed))
  prompts, stop_ids = _token_ids(prompts), tuple(stop_ids)
  lengths_P = [len(prompt) for prompt in prompts]
  if not lengths_P or group_size < 1:
    raise ValueError(f"{len(prompts)} prompts × group_size={group_size}: nothing to sample")
  if not 0 <= seed < 2**32:
    raise ValueError(f"seed={seed}: it must be at least 0 and below 2^32")
  if any(not 0 <= stop < model_config.vocab_size for stop in stop_ids):
    raise ValueError(f"stop_ids={stop_ids}: outside the vocabulary of {model_config.vocab_size}")
  if not min(lengths_P):
    raise ValueError(f"prompt {lengths_P.index(0)} is empty: give it at least one token")
  workload = Workload(
    SamplingConfig(temperature, top_k, top_p, min_p, max_new_tokens),
    prompt_length=max(lengths_P),
    trajectories=len(prompts) * group_size,
    group_size=group_size,
    stop_ids=stop_ids,
  )
  local = LocalEngine(model_config, engine, compute)
  local.load(params, version=0)
  return sample_rollout(local, workload, prompts, seed, pad_id)


def _token_ids(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
  """Returns prompts as lists. Raises TypeError if one is no list or array of integers."""
  arrays = [np.asarray(prompt) for prompt in prompts]
  for prompt, array in zip(prompts, arrays):
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
      raise TypeError(f"prompts={prompts!r:.60}: {prompt!r:.60} is no list of token ids")
  return [array.tolist() for array in arrays]


def sample_rollout(
  engine: Engine,
  workload: Workload,
  prompts: Sequence[Sequence[int]],
  seed: int = 0,
  pad_id: int = 0,
) -> Rollout:
  """Samples single turns through an engine with loaded weights.

  Args:
    engine: engine with loaded weights.
    workload: limits, group size, stop tokens, stop strings and sampling settings.
    prompts: lists of token ids.
    seed: seed of the PRNG keys.
    pad_id: token id of the padding.

  Returns:
    A Rollout with `workload.group_size` rows per prompt, in the prompts' order. Each row has
    `workload.window` positions.
  """
  driver = Driver(engine, workload)
  named = [Prompt(str(i), "", "", tuple(prompt)) for i, prompt in enumerate(prompts)]
  groups = new_groups(named, workload.group_size, seed, workload.prompt_length, make=None)
  for group in groups:
    driver.begin(group)
  for _ in driver.run():
    pass
  trajectories = [trajectory for group in groups for trajectory in group]
  return assemble(trajectories, workload.window, pad_id, workload.support)
