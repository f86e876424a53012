"""Sampling with every option of a workload: conversations, stop strings, what is recorded."""

import dataclasses

import numpy as np

from gspo_jax.sampling import Driver, LocalEngine, Workload, assemble
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.local.scheduler import Scheduler
from gspo_jax.settings.sampling import LOCAL_ENGINE, EngineConfig, SamplingConfig
from gspo_jax.structs import Prompt

PROMPTS = ((5, 6, 7), (8,), (9, 10, 11, 12, 13), (14, 15))
RNG = np.random.default_rng(0)
LONGER = [tuple(RNG.integers(8, 64, n).tolist()) for n in (3, 40, 1, 17, 9, 24)]
ENGINE = {field.name for field in dataclasses.fields(EngineConfig)}


def scheduler(params, model, sampling, text_bytes=None, **options):
  """Options are keys of the engine and fields of the workload."""
  engine = {key: options.pop(key) for key in ENGINE & options.keys()}
  workload = Workload(sampling, **dict(prompt_length=48, trajectories=100, group_size=3) | options)
  config = dataclasses.replace(LOCAL_ENGINE, **engine)
  return Scheduler(params, 0, model, workload, config, text_bytes=text_bytes)


def run(scheduler, requests):
  """Responses, by their prompt and number."""
  for request in requests:
    scheduler.submit(request)
  return by_sample(responses(scheduler))


def responses(scheduler):
  """Yields responses to all requests, as they finish."""
  while scheduler.busy:
    yield from scheduler.step()


def by_sample(responses):
  return {(response.request.prompt, response.sample): response for response in responses}


def left_of(response):
  """Returns the request for the rest of a response."""
  partial, request = tuple(response.tokens.tolist()), response.request
  remaining = request.max_new_tokens - len(partial)
  return dataclasses.replace(
    request, max_new_tokens=remaining, samples=1, first_sample=response.sample, prior=partial
  )


def same(actual, expected, atol=1e-5):
  """Asserts that two dicts of responses are equal, likelihoods but for round-off."""
  assert actual.keys() == expected.keys()
  for key, response in actual.items():
    np.testing.assert_array_equal(response.tokens, expected[key].tokens)
    for name in ("logp", "full_logp"):
      np.testing.assert_allclose(getattr(response, name), getattr(expected[key], name), atol=atol)
    assert response.stopped == expected[key].stopped and response.finished
    if expected[key].experts is not None:
      np.testing.assert_array_equal(response.experts, expected[key].experts)


def sample(
  params,
  model,
  prompts=(),
  environments=None,
  *,
  group_size,
  max_new_tokens,
  temperature=1.0,
  truncation=(0, 1.0, 0.0),
  seed=0,
  pad_id=0,
  prompt_length=5,
  text_bytes=None,
  render=None,
  max_turns=1,
  workers=0,
  engine=LOCAL_ENGINE,
  usage=None,
  **options,
):
  """Samples `group_size` trajectories per prompt, or one per environment.

  Other options are those of the workload.
  """
  count = len(environments) // group_size if environments else len(prompts)
  workload = Workload(
    SamplingConfig(temperature, *truncation, max_new_tokens),
    prompt_length,
    trajectories=count * group_size,
    group_size=group_size,
    several_turns=environments is not None,
    **options,
  )
  local = LocalEngine(model, engine, text_bytes=text_bytes)
  local.load(params, version=0)
  turns = dict(max_turns=max_turns, workers=workers)
  driver = Driver(local, workload, vocab_size=model.vocab_size, **turns)
  remaining = iter(environments or ())
  make = (lambda prompt: next(remaining)) if environments else None
  tokens = [()] * count if environments else map(tuple, prompts)
  started = [Prompt(str(i), "", "", prompt) for i, prompt in enumerate(tokens)]
  groups = new_groups(started, group_size, seed, prompt_length, make, render)
  for group in groups:
    driver.begin(group)
  for _ in driver.run():
    pass
  if usage is not None:
    usage.add(local.usage)
  trajectories = [trajectory for group in groups for trajectory in group]
  length = max(len(trajectory.prompt) for trajectory in trajectories) + max_new_tokens
  return assemble(trajectories, length, pad_id, workload.support)
