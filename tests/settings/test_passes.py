"""The passes before the updates that a run has, by its settings."""

import dataclasses

import numpy as np
import pytest
from support.configs import config_of
from support.small_models import DENSE, SMALLER_DENSE

from configs import tiny, tiny_distil, tiny_ppo
from gspo_jax.models import flops
from gspo_jax.settings import passes
from gspo_jax.structs import AdvantageInputs, CriticTargets, TrainBatch

CASES = {
  "as sampled": (tiny.get_config, dict(objective__old_logp="sampler"), [], []),
  "recomputed": (tiny.get_config, {}, ["old_policy"], []),
  "a penalty": (
    tiny.get_config,
    dict(objective__old_logp="behaviour", objective__kl_coef=0.1),
    ["old_policy", "reference"],
    ["reference policy"],
  ),
  "a penalty in the reward": (
    tiny.get_config,
    dict(objective__reward_kl_coef=0.1),
    ["old_policy", "reference"],
    ["reference policy"],
  ),
  "a critic": (
    tiny_ppo.get_config,
    dict(critic__kl_coef=0.1),
    ["old_policy", "reference", "values"],
    ["reference policy"],
  ),
  "a critic of what was cut off": (
    tiny_ppo.get_config,
    dict(critic__bootstrap=True),
    ["old_policy", "values"],
    [],
  ),
  "a teacher": (tiny_distil.get_config, {}, ["old_policy", "teacher"], ["teacher"]),
}


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(), ""),
    (dict(rl__lag=2), "recompute: the old policy of ratios is the policy before an iteration's"),
    (
      dict(rl__lag=2),
      "not the sampling weights, which are up to 2 iterations old; their difference",
    ),
    (
      dict(rl__lag=2, objective__old_logp="sampler"),
      "ratios is the sampling weights, which are up to 2 iterations old",
    ),
    (dict(rl__extra_prompts=2, objective__old_logp="behaviour"), "are older for carried-over"),
    (
      dict(rl__lag=2, rl__extra_prompts=2),
      "up to 2 iterations old and older for carried-over tokens; their",
    ),
    (dict(rl__lag=2, objective__name="spo", objective__kl_coef=None), ""),
  ],
)
def test_description_names_the_old_policy_of_ratios(changes, message):
  text = passes.describe_old_policy(config_of(tiny.get_config, **changes))
  assert message in text and bool(message) == bool(text)


@pytest.mark.parametrize(
  "engine, description",
  [
    (dict(dtype="", cache_dtype="float32"), ""),
    (dict(dtype="float32", cache_dtype="int8"), "engine.cache_dtype=int8"),
    (
      dict(dtype="bfloat16", cache_dtype="bfloat16"),
      "engine.dtype=bfloat16 engine.cache_dtype=bfloat16",
    ),
    (dict(name="server", cache_dtype="int8"), "servers with float32 weights, and caches of their"),
    ({}, ""),
  ],
)
def test_types_of_the_sampler_are_named_unless_they_are_the_trainers(engine, description):
  text = passes.sampler_types(engine, "float32")
  assert text.startswith(description) and bool(text) == bool(description)


@pytest.mark.parametrize("get_config, changes, names, frozen", CASES.values(), ids=CASES)
def test_passes_of_a_run(get_config, changes, names, frozen):
  c = config_of(get_config, **changes)
  c = dataclasses.replace(c, model=DENSE)
  assert [declared.name for declared in passes.iteration_passes(c)] == names
  models = passes.frozen_models(c, SMALLER_DENSE)
  assert list(models) == frozen
  assert all(m is (SMALLER_DENSE if n == "teacher" else DENSE) for n, m in models.items())
  assert "teacher" not in passes.frozen_models(c, None)
  structs = TrainBatch, CriticTargets, AdvantageInputs
  fields = {field.name for struct in structs for field in dataclasses.fields(struct)}
  assert fields >= {name for declared in passes.iteration_passes(c) for name in declared.fills}
  lengths = np.array([3, 3]), np.array([7, 9])
  policy, teacher = (
    flops.forward_flops(m, lengths[0][:1], *lengths) for m in (DENSE, SMALLER_DENSE)
  )
  forward = {name: policy for name in names} | dict(teacher=teacher)
  counted = sum(forward[name] for name in names)
  assert flops.iteration_flops(c, SMALLER_DENSE, *lengths).passes == counted
