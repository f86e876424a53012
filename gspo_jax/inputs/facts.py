"""Facts about machine and data, for rules that depend on them."""

import os
from collections.abc import Callable, Sequence

import jax

from gspo_jax import rewards
from gspo_jax.data import embedded
from gspo_jax.inputs.data import Data
from gspo_jax.rewards import shaping
from gspo_jax.settings import rules
from gspo_jax.settings.run import RunConfig


def describe(
  c: RunConfig, data: Data, encode: Callable[[str], list[int]], has_tokenizer: bool
) -> rules.DataFacts:
  """Returns facts about machine and data for `rules.warnings`.

  At most 999 answers of each set of problems are examined.

  Args:
    c: configuration of the run.
    data: prompts of the run.
    encode: function from a text to the policy's tokens.
    has_tokenizer: whether the weights include a tokenizer.
  """
  checked = {}
  if c.samples_prompts and c.has_iterations and not c.environment.name:
    checked["data.train"] = data.train_prompts, c.reward.name, c.sampling.max_new_tokens
  for b in data.evaluations:
    if b.config.reward or not c.environment.name:
      checked[b.key] = b.problems, b.config.reward or c.reward.name, c.eval.max_new_tokens
  golds = {key: [prompts[i].answer for i in embedded.probe(len(prompts))]
    for key, (prompts, *_) in checked.items()}  # fmt: skip
  words = {key: rewards.frequent_word(checked[key][1], golds[key]) for key in checked}
  recorded = data.recordings.prompts if data.recordings else []
  trained = data.train_prompts if c.samples_prompts else recorded
  shared = [f"{b.shared} of {len(b.problems)} of {b.key}" for b in data.held_out if b.shared]
  return rules.DataFacts(
    prompts=len(trained),
    demonstrations=len(data.demonstrations),
    answers={key: _fitting_share(golds[key], encode, *checked[key][1:]) for key in checked},
    words={key: word for key, word in words.items() if word},
    format_tokens=sum(len(encode(tag)) for tag in shaping.TAGS[c.reward.format]),
    shared=", ".join(shared),
    memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
    processes=jax.process_count(),
    has_tokenizer=has_tokenizer,
  )


def _fitting_share(
  golds: Sequence[str], encode: Callable[[str], list[int]], verifier: str, limit: int
) -> float:
  """Returns the share of gold answers within `limit` tokens.

  The share is 1 if there are no gold answers. It is also 1 if right responses need not contain the
  gold answer: for tests of programs, and for a user's functions.
  """
  if verifier not in ("arithmetic", "recurrence", "math", "string") or not golds:
    return 1.0
  return sum(len(encode(gold)) <= limit for gold in golds) / len(golds)
