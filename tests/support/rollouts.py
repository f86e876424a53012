"""Collectors of a small model, and what they collect."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np

from configs import common
from gspo_jax.data.sources import Prompts
from gspo_jax.rewards import Scores
from gspo_jax.rewards.signals import Signals
from gspo_jax.rollouts.collector import Collector
from gspo_jax.rollouts.groups import Group
from gspo_jax.rollouts.samples_log import rollout_records
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.sampling import LocalEngine, SingleTurn, Trajectory
from gspo_jax.settings.sampling import LOCAL_ENGINE
from gspo_jax.settings.training import RLConfig
from gspo_jax.structs import Prompt
from support.configs import config_of
from support.small_models import SHALLOW_MOE, initial

MODEL = SHALLOW_MOE  # One layer compiles faster than two.
PARAMS, OTHER = initial(MODEL), initial(MODEL, seed=1)
STOP = (1, 2, 3, 4)
P, G, NEW = 4, 3, 24
ENGINE = dataclasses.replace(LOCAL_ENGINE, slots=6, steps=2)
PROMPTS = Prompts([Prompt(str(i), "q", "a", (8 + i % 50, 9, 10)) for i in range(200)])
CONVERSATIONS = dict(environment__name="calculator", environment__max_turns=4)
OF_RL = {field.name for field in dataclasses.fields(RLConfig)}
SHORT = dict(extra_rounds="data__query_set__extra_rounds", routing="objective__volatility")


class Counting:
  """Says a token for every one that it hears of a turn, and is done after the third."""

  def __init__(self, prompt):
    self.prompt, self.heard = prompt, []

  def reset(self):
    return self.prompt.tokens

  def step(self, response):
    self.heard.append(list(response))
    return [20] * min(len(response), 3), len(response) / 8, len(self.heard) == 3

  def figures(self):
    return dict(heard=sum(map(len, self.heard)))


ENVIRONMENTS = dict(single=None, turns=Counting)


def letters(tokens):
  return "".join(chr(64 + token) for token in tokens)


def tokenizer(decode=letters):
  return SimpleNamespace(stop_ids=STOP, pad_id=0, vocab_size=64, decode=decode)


def score(responses, prompts, lengths, finished):
  """Right are responses of odd lengths."""
  reward = np.array([len(text) % 2 for text in responses], np.float32)
  return Scores(reward, dict(right=int(reward.sum()), wrong=int((1 - reward).sum())), reward)


def settings(**changes):
  """A configuration with changed keys; keys of `rl` need no section."""
  keys = dict(data__max_prompt_tokens=3, sampling__max_new_tokens=NEW)
  keys |= dict(rl__prompts=P, rl__group_size=G, rl__minibatches=2)
  for name, value in changes.items():
    keys[f"rl__{name}" if name in OF_RL else SHORT.get(name, name)] = value
  return dataclasses.replace(config_of(common.base, **keys), model=MODEL)


def collector(
  source=PROMPTS, judge=score, environment=None, tok=None, records=None, writer=None, **changes
):
  """A collector and its engine; without other settings, groups are put aside."""
  config = settings(**dict(extra_prompts=4) | (CONVERSATIONS if environment else {}) | changes)
  engine, tok = LocalEngine(MODEL, ENGINE), tok or tokenizer()
  signals = Signals(config.constraints, config.reward, {}) if config.constraints.enabled else None
  built = Collector(
    config, engine, tok, source, judge, environment, writer=writer, records=records, signals=signals
  )
  return built, engine


def alternating(step):
  """Weights of odd and even iterations."""
  return PARAMS if step % 2 else OTHER


def iterate(steps, running=None, weights=lambda step: PARAMS, first=1, **options):
  """Collects iterations; returns them, and the collector with its engine."""
  running, engine = running or collector(**options)
  out = []
  for step in range(first, first + steps):
    engine.load(weights(step), version=step)
    out.append(running.collect(step, Stopwatch()))
  return out, (running, engine)


def went_on(position, **options):
  """A collector resumed from another's checkpointed position."""
  after = collector(**options)
  after[0].set_position(json.loads(json.dumps(position())))
  return after


def goes_on(steps, more, running=None, **options):
  """Asserts equal batches of a resumed collector and the first one; returns them."""
  _, running = iterate(steps, running or collector(**options))
  position = running[0].position()
  expected, _ = iterate(more, running, first=steps + 1)
  out, _ = iterate(more, went_on(position, **options), first=steps + 1)
  for collected, same in zip(out, expected, strict=True):
    assert_same(collected, same)
  return expected


FIELDS = "tokens turns logp full_logp version rewards mask lengths stopped prompt_lengths".split()


def assert_same(collected, expected):
  assert (collected.step, collected.version) == (expected.step, expected.version)
  assert [g.prompt for g in collected.groups] == [g.prompt for g in expected.groups]
  assert [g.responses for g in collected.groups] == [g.responses for g in expected.groups]
  rollouts = collected.rollout, expected.rollout
  for field in FIELDS:
    np.testing.assert_array_equal(*(getattr(x, field) for x in rollouts), err_msg=field)
  for field in ("reward_PG", "advantage_PG", "advantage_BL"):
    np.testing.assert_array_equal(getattr(collected, field), getattr(expected, field))
  if expected.rollout.routing is not None:
    np.testing.assert_array_equal(*(x.routing for x in rollouts))
  mine, theirs = (
    {k: v for k, v in x.metrics.items() if not k.startswith(("time/", "tokens_per_second"))}
    for x in (collected, expected)
  )
  assert mine == theirs
  assert collected.usage.tokens == expected.usage.tokens


ALWAYS, NEVER, MIXED = [1, 1, 1], [0, 0, 0], [0, 1, 0]


def groups(**spec):
  """Scored groups: one letter and the correctness of its responses per prompt."""
  lists = []
  for name, correct in spec.items():
    trajectories = [Trajectory((5, 6), g, 0, SingleTurn(()), name) for g in range(G)]
    for g, trajectory in enumerate(trajectories):
      trajectory._extend(
        tokens=np.full(3, ord(name), np.int32), turns=np.zeros(3, np.int32),
        logp=np.full(3, -g, np.float32), full_logp=np.zeros(3, np.float32),
        version=np.zeros(3, np.int32), rewards=np.zeros(3, np.float32),
      )  # fmt: skip
      trajectory.finish(True)
    correct_G = np.array(correct, np.float32)
    shaped_G = correct_G - 0.1 * np.arange(3, dtype=np.float32)  # different everywhere
    responses = [f"{name}{g}" for g in range(G)]
    lists.append(
      Group(Prompt(name, name, "", (5, 6)), trajectories, responses, shaped_G, correct_G)
    )
  return lists


def dumped(collected, decode=letters):
  """Records of a batch, with an unchanged policy."""
  zeros = np.zeros(collected.rollout.logp.shape)
  arrays = dict(log_ratio_BT=zeros, clipped_BT=zeros > 0)
  return rollout_records(collected, arrays, tokenizer(decode))
