"""Conversations: who said what is on record, and none of them depends on another."""

import dataclasses
import random
import time

import numpy as np
import pytest
from support import environments
from support.cases import long
from support.sampling import PROMPTS, run, sample, scheduler
from support.small_models import HYBRID_MOE, MOE, SHALLOW_MOE, forward, initial, next_logp

from gspo_jax.models.experts import routing
from gspo_jax.sampling import Request, Usage, generate
from gspo_jax.settings.sampling import LOCAL_ENGINE, SamplingConfig

MODEL = SHALLOW_MOE  # One layer compiles faster than two.
PARAMS = initial(MODEL)
STOP = tuple(range(12))  # a turn has about five tokens
TALK = dataclasses.replace(environments.TALK, max_turns=4, discount=1.0)
# Programs depend on all of them, so that most tests share these, and sixteen trajectories.
OPTIONS = dict(group_size=4, max_new_tokens=40, stop_ids=STOP)
SELDOM = (0,) * len(STOP)  # as many stop ids, one token in 64


class Parrot:
  """Repeats what it heard in other words, until it has heard a turn that begins with a number that
  three divides."""

  def __init__(self, prompt, pause=None):
    self.prompt, self.heard, self.said, self.rewards = prompt, [], [], []
    self._pause = pause

  def reset(self):
    return self.prompt

  def step(self, response):
    if self._pause:
      time.sleep(self._pause.random() / 100)
    self.heard.append(list(response))
    self.said.append([63 - token for token in response[:3]] + [16])
    self.rewards.append(len(response) / 4 - len(self.heard))
    return self.said[-1], self.rewards[-1], response[0] % 3 == 0


def talk(environments=None, prompts=PROMPTS, params=PARAMS, config=TALK, model=MODEL, **changes):
  environments = environments or [Parrot(p) for p in prompts for _ in range(4)]
  options = dict(OPTIONS, seed=7, prompt_length=5, record_routing=True) | changes
  turns = dict(max_turns=config.max_turns, workers=config.workers)
  return sample(params, model, environments=environments, **turns, **options), environments


@pytest.fixture(scope="module")
def base():
  return talk()


def test_a_row_is_the_conversation_and_only_what_the_policy_said_is_masked_in(base):
  out, environments = base
  turns_seen = set()
  for row, environment in enumerate(environments):
    start = out.prompt_lengths[row]
    assert tuple(out.tokens[row, :start]) == environment.prompt
    tokens, turns, rewards = [], [], []
    for i, heard in enumerate(environment.heard):
      if i:  # the last observation is nobody's to hear
        tokens, turns = (
          tokens + environment.said[i - 1],
          turns + [-1] * len(environment.said[i - 1]),
        )
        rewards += [0] * len(environment.said[i - 1])
      tokens, turns = tokens + heard, turns + [i] * len(heard)
      rewards += [0] * (len(heard) - 1) + [environment.rewards[i]]
    end = start + len(tokens)
    assert out.response(row) == tokens and out.ends[row] == end
    expected = np.full(out.turns.shape[1], -1)
    expected[start:end] = turns
    np.testing.assert_array_equal(out.turns[row], expected)
    np.testing.assert_array_equal(out.mask[row], expected >= 0)
    np.testing.assert_allclose(out.rewards[row, start:end], rewards)
    assert out.rewards[row].sum() == pytest.approx(sum(environment.rewards))
    assert out.lengths[row] == sum(map(len, environment.heard)) == out.mask[row].sum()
    turns_seen.add(len(environment.heard))
  assert turns_seen == {1, 2, 3, 4}
  assert not out.logp[out.mask == 0].any() and not out.full_logp[out.mask == 0].any()
  assert (out.logp[out.mask == 1] < 0).all()
  assert 0 < out.stopped.sum() < len(out.stopped)
  for row, environment in enumerate(environments):
    assert out.stopped[row] == (
      environment.heard[-1][0] % 3 == 0 and environment.heard[-1][-1] in STOP
    )


@pytest.fixture(
  scope="module",
  params=[MODEL, *long((MOE, HYBRID_MOE))],
  ids=["shallow", "moe", "hybrid"],
)
def deep(request):
  """A model of several layers, and its conversations."""
  model = request.param
  return model, talk(temperature=0.6, params=initial(model), model=model)[0]


def assert_trainers_logp(out, params, model, temperature):
  logp = next_logp(params, model, out.tokens, temperature=temperature)
  assert (np.abs(np.asarray(logp) - out.logp[:, 1:]) * out.mask[:, 1:]).max() < 1e-4


def test_logp_is_the_trainers_on_the_whole_conversation(base, deep):
  """At two temperatures, and with one and several layers."""
  assert_trainers_logp(base[0], PARAMS, MODEL, 1.0)
  model, out = deep
  assert_trainers_logp(out, initial(model), model, 0.6)


def test_routes_are_on_record_for_every_token_that_was_fed(deep):
  model, out = deep
  counts = forward(initial(model), model, out.tokens).routing_lBTk
  taken_BLlk = np.moveaxis(np.asarray(counts), 0, 2)
  for row, end in enumerate(out.ends):
    assert (out.routing[row, end - 1 :] == routing.NO_EXPERT).all()
    np.testing.assert_array_equal(out.routing[row, : end - 1], taken_BLlk[row, : end - 1])


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param(dict(slots=3), marks=pytest.mark.long),
    dict(workers=4),
    pytest.param(dict(workers=2, slots=3), marks=pytest.mark.long),
    pytest.param(dict(slots=5, steps=3), marks=pytest.mark.long),
  ],
  ids=str,
)
def test_no_conversation_depends_on_another(base, changes):
  order, pauses = [2, 0, 3, 1], random.Random(0) if "workers" in changes else None
  environments = [Parrot(PROMPTS[i], pauses) for i in order for _ in range(4)]
  workers = changes.pop("workers", 0)
  out, _ = talk(
    environments,
    config=dataclasses.replace(TALK, workers=workers),
    engine=dataclasses.replace(LOCAL_ENGINE, **changes),
  )
  for new, old in enumerate(order):
    for g in range(4):
      assert out.response(4 * new + g) == base[0].response(4 * old + g)
      np.testing.assert_allclose(
        out.logp[4 * new + g][out.mask[4 * new + g] > 0],
        base[0].logp[4 * old + g][base[0].mask[4 * old + g] > 0],
        atol=1e-5,
      )


def test_the_noise_of_a_turn_is_its_own(base):
  """Another seed or sample index: what differs is what should."""
  again, other = talk()[0], talk(seed=8)[0]
  np.testing.assert_array_equal(again.tokens, base[0].tokens)
  assert (again.tokens != other.tokens).any()
  assert len({tuple(again.response(row)) for row in range(4)}) > 1


def test_a_turn_is_what_is_left_of_the_response(base):
  """Its noise goes by prompt, index in the group and position, as if it had been begun before."""
  out, environments = base
  row = next(
    row for row, environment in enumerate(environments) if len(environment.heard) > 2 and row % 4
  )
  environment, start = environments[row], out.prompt_lengths[row]
  unfinished = tuple(
    environment.heard[0] + environment.said[0] + environment.heard[1] + environment.said[1]
  )
  sampling = SamplingConfig(1.0, 0, 1.0, 0.0, 40)
  options = dict(prompt_length=5, trajectories=1, group_size=1, stop_ids=STOP)
  s = scheduler(PARAMS, MODEL, sampling, several_turns=True, record_routing=True, **options)
  request = Request(
    environment.prompt,
    40 - len(unfinished),
    first_sample=row % 4,
    seed=7,
    stop_ids=STOP,
    prior=unfinished,
  )
  ((_, response),) = run(s, [request]).items()
  assert response.tokens.tolist() == environment.heard[2]
  np.testing.assert_allclose(
    response.logp, out.logp[row, start + len(unfinished) :][: len(environment.heard[2])], atol=1e-5
  )


def test_one_turn_is_what_generate_samples():
  """And so are the first turns of conversations; equal prompts are prefilled once."""
  usage = Usage()
  item, _ = talk(config=dataclasses.replace(TALK, max_turns=1), usage=usage)
  assert usage.prefilled == sum(len(p) - 1 for p in PROMPTS)
  plain = generate(PARAMS, MODEL, PROMPTS, seed=7, **OPTIONS)
  np.testing.assert_array_equal(item.tokens, plain.tokens)
  np.testing.assert_array_equal(item.lengths, plain.lengths)
  np.testing.assert_allclose(item.logp, plain.logp, atol=1e-5)
  np.testing.assert_array_equal(item.ends, plain.ends)


@dataclasses.dataclass
class Endless:
  """Never done; answers with `size` tokens."""

  size: int = 3

  def reset(self):
    return [5, 6]

  def step(self, response):
    return [20] * self.size, 1, False


def test_the_turn_limit_ends_a_conversation_and_its_last_observation_is_left_out():
  out, _ = talk([Endless()] * 16, config=dataclasses.replace(TALK, max_turns=2))
  finished = out.turns.max(1) == 1
  assert finished.any() and not out.stopped.any()
  for row in np.flatnonzero(finished):
    assert out.turns[row, out.ends[row] - 1] == 1 and out.rewards[row].sum() == 2


def test_the_length_limit_counts_observations_and_none_is_left_at_the_end():
  out, _ = talk([Endless(size=18)] * 16)
  following = out.ends - out.prompt_lengths
  assert following.max() <= 40 and not out.stopped.any()
  assert (out.turns[np.arange(16), out.ends - 1] >= 0).all()
  assert out.turns.max() >= 1 and (following < 40).any()  # an observation that did not fit


def test_a_turn_that_is_cut_off_is_not_the_end_even_if_the_environment_says_so():
  class Done(Endless):
    def step(self, response):
      return [], 1.0, True

  out, _ = talk([Done()] * 16, stop_ids=SELDOM)
  cut = out.lengths == 40
  assert cut.any() and not out.stopped[cut & (out.tokens[:, 41] != 0)].any()
  assert out.stopped[~cut].all()


def test_stop_strings_end_turns():
  letters = [b"#" if i > 40 else b"." for i in range(MODEL.vocab_size)]
  _, environments = talk(stop_strings=("#",), stop_ids=SELDOM, text_bytes=letters)
  for environment in environments:
    assert all(not any(token > 40 for token in heard[:-1]) for heard in environment.heard)
  assert any(len(environment.heard) > 1 for environment in environments)


def test_messages_are_rendered():
  class Messages(Endless):
    def reset(self):
      return [dict(role="system", content="ab"), dict(role="user", content="c")]

  def render(messages):
    return [ord(letter) - 90 for message in messages for letter in message["content"]]

  out, _ = talk([Messages()] * 16, render=render)
  assert out.tokens[0, :3].tolist() == [7, 8, 9]


class Broken(Endless):
  def step(self, response):
    raise OSError("no network")


@pytest.mark.long
def test_an_environment_that_raises_ends_its_own_trajectory():
  environments = [Endless() for _ in range(16)]
  environments[2] = Broken()
  (whole, _), (result, _) = talk([Endless() for _ in range(16)]), talk(environments)
  others = [row for row in range(16) if row != 2]
  np.testing.assert_array_equal(result.tokens[others], whole.tokens[others])
  assert result.turns[2].max() == 0 and not result.stopped[2] and not result.rewards[2].any()
