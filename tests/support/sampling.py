"""Sampling with every option of a workload: conversations, stop strings, what is recorded."""

from gspo_jax.sampling import Driver, LocalEngine, Workload, assemble
from gspo_jax.sampling.driver import new_groups
from gspo_jax.settings.sampling import DEFAULT, SamplingConfig
from gspo_jax.structs import Prompt

PROMPTS = ((5, 6, 7), (8,), (9, 10, 11, 12, 13), (14, 15))


def sample(
  params,
  model,
  prompts=(),
  environments=None,
  *,
  group_size,
  max_new_tokens,
  temperature=1.0,
  seed=0,
  pad_id=0,
  prompt_length=5,
  stop_ids=(),
  stop_strings=(),
  detokenize=None,
  render=None,
  max_turns=1,
  workers=0,
  record_routing=False,
  truncation=(0, 1.0, 0.0),
  support=0,
  engine=DEFAULT,
  usage=None,
):
  """A rollout of `group_size` trajectories for each prompt, or of one for each environment."""
  count = len(environments) // group_size if environments else len(prompts)
  workload = Workload(
    SamplingConfig(temperature, *truncation, max_new_tokens),
    prompt_length,
    trajectories=count * group_size,
    group_size=group_size,
    stop_ids=stop_ids,
    stop_strings=stop_strings,
    several_turns=environments is not None,
    record_routing=record_routing,
    support=support,
  )
  local = LocalEngine(model, engine, detokenize=detokenize)
  local.load(params, version=0)
  turns = dict(max_turns=max_turns, workers=workers)
  driver = Driver(local, workload, vocab_size=model.vocab_size, **turns)
  left = iter(environments or ())
  make = (lambda prompt: next(left)) if environments else None
  tokens = [()] * count if environments else map(tuple, prompts)
  told = [Prompt(str(i), "", "", one) for i, one in enumerate(tokens)]
  groups = new_groups(told, group_size, seed, prompt_length, make, render)
  for group in groups:
    driver.begin(group)
  for _ in driver.run():
    pass
  if usage is not None:
    usage.add(local.usage)
  length = max(len(one.prompt) for group in groups for one in group) + max_new_tokens
  return assemble([one for group in groups for one in group], length, pad_id, support)
