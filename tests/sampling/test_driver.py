"""The host loop with an engine that is none of ours."""

import dataclasses

import numpy as np
import pytest
from support.echo import STOP, WORKLOAD, Echo

from gspo_jax.sampling import Driver, Trajectory
from gspo_jax.sampling.driver import new_groups
from gspo_jax.structs import Prompt
from gspo_jax.system import workers


class Twice:
  """Says 5 after the first turn and ends with the second."""

  def __init__(self, prompt):
    self.prompt, self.heard = prompt, []

  def reset(self):
    return self.prompt.tokens

  def step(self, response):
    self.heard.append(response)
    return [5], float(len(response)), len(self.heard) == 2


def started(make=None, first=3, **options):
  engine = Echo()
  engine.load(None, version=7)
  (group,) = new_groups([Prompt("a", "", "", (4, first))], 2, 0, 4, make, tags=["a"])
  workload = dataclasses.replace(WORKLOAD, several_turns=bool(make))
  driver = Driver(engine, workload, max_turns=3, **options)
  driver.begin(group)
  return engine, driver, group


@pytest.mark.parametrize("make, turn", [(None, 0), (Twice, 0), (Twice, 1)])
def test_a_response_that_cannot_be_sampled_ends_its_trajectory(make, turn):
  engine, driver, (failed, other) = started(make)
  respond = engine.response

  def fails(request, sample, tokens, finished):
    response = respond(request, sample, tokens, finished)
    if sample or bool(request.prior) != bool(turn):
      return response
    nothing = {name: getattr(response, name)[:0] for name in ("tokens", "logp", "version")}
    return dataclasses.replace(response, **nothing, stopped=False, failure="6 calls failed")

  engine.response = fails
  assert set(driver.run()) == {failed, other}
  assert other.finished and not other.failure
  again = Trajectory.from_state(failed.get_state(), None)
  for each in (failed, again):
    assert each.finished and each.failure == "6 calls failed"
    assert each.turn == turn and (each.length > 0) == bool(turn)


class Begins:
  """Begins with a token of its own, whatever the prompt."""

  def __init__(self, token):
    self.token = token

  def reset(self):
    return [self.token]


def test_no_two_trajectories_that_begin_alike_have_one_number():
  prompts = [Prompt(str(i), "", "", (token,)) for i, token in enumerate((7, 8, 7, 7))]
  groups = new_groups(prompts, 2, 0, 4, None, tags="abcd")
  assert [[trajectory.sample for trajectory in group] for group in groups] == [
    [0, 1],
    [0, 1],
    [2, 3],
    [4, 5],
  ]
  assert [trajectory.tag for group in groups for trajectory in group] == list("aabbccdd")
  tokens = iter((1, 2, 2, 2, 3, 1))  # environments may begin as they like
  groups = new_groups(prompts[:3], 2, 0, 4, lambda prompt: Begins(next(tokens)))
  assert [[trajectory.sample for trajectory in group] for group in groups] == [
    [0, 1],
    [2, 3],
    [2, 3],
  ]
  assert [trajectory.tag for group in groups for trajectory in group] == list("001122")


def test_a_group_is_one_request_and_a_single_turn_one_response():
  engine, driver, group = started()
  assert [trajectory.sample for trajectory in driver.run()] == [0, 1]
  start, request, stop = engine.calls
  assert (start, stop) == ("start", "stop") and request.samples == 2
  assert group[0].tokens.tolist() == [2, 1, STOP] and group[1].tokens.tolist() == [3, 2, 1, STOP]
  assert all(
    trajectory.finished and trajectory.stopped and trajectory.turn == 1 for trajectory in group
  )
  assert group[0].version.tolist() == [7] * 3 and group[0].columns["logp"].tolist() == [-1, -2, -3]


def test_turns_go_back_and_forth():
  engine, driver, group = started(Twice)
  done = list(driver.run())
  assert {id(trajectory) for trajectory in done} == {id(trajectory) for trajectory in group}
  trajectory = group[0]
  assert trajectory.tokens.tolist() == [2, 1, STOP, 5, 4, 3, 2, 1, STOP]
  assert trajectory.turns.tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 1]
  assert trajectory.version.tolist() == [7, 7, 7, -1, 7, 7, 7, 7, 7]
  assert trajectory.rewards.tolist() == [0, 0, 3, 0, 0, 0, 0, 0, 5]
  assert trajectory.environment.heard == [[2, 1, STOP], [4, 3, 2, 1, STOP]]
  later = engine.calls[2]
  assert later.prior == (2, 1, STOP, 5) and later.max_new_tokens == 8 and later.unfinished == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_what_is_put_aside_goes_on_where_it_was(steps):
  """In the middle of a turn, and between two of them; the environment hears whole turns."""
  _, driver, expected = started(Twice)
  list(driver.run())
  engine, driver, group = started(Twice)
  rounds = 0
  while not all(trajectory.finished for trajectory in group):
    count = iter(range(100))
    list(driver.run(lambda count=count: next(count) == steps))
    rounds += 1
    driver = Driver(engine, driver._workload, max_turns=3)
    engine.load(None, version=7 + rounds)
    driver.begin(group)
    for request in (x for x in engine.calls[-2:] if not isinstance(x, str)):
      turn = list(request.prior)[len(request.prior) - request.unfinished :]
      assert request.tag[0].turn_tokens == turn
  assert rounds > 1
  for trajectory, whole in zip(group, expected):
    assert trajectory.tokens.tolist() == whole.tokens.tolist()
    assert trajectory.environment.heard == whole.environment.heard
    assert trajectory.rewards.tolist() == whole.rewards.tolist()
    versions = trajectory.version[trajectory.turns >= 0]
    assert versions[0] == 7 and versions[-1] > 7 and (np.diff(versions) >= 0).all()


class LateCall(workers.Call):
  """Is done from the second look on: as if a thread had answered between two of them."""

  looks = 0

  def done(self):
    self.looks += 1
    return self.looks > 1 and super().done()


def test_no_conversation_is_lost_whose_environment_answers_between_two_looks(monkeypatch):
  monkeypatch.setattr(workers, "Call", LateCall)
  _, driver, group = started(Twice, workers=2)
  assert {id(trajectory) for trajectory in driver.run()} == {id(trajectory) for trajectory in group}
  assert all(trajectory.finished for trajectory in group)


def test_usage_is_the_engines():
  engine, driver, group = started()
  list(driver.run())
  assert engine.usage.tokens == sum(trajectory.length for trajectory in group) == 7
