"""Environments as hostile input: a failure ends its own conversation alone."""

import dataclasses
import itertools
import json
import re
import signal
import threading
import time

import numpy as np
import pytest
from support.echo import STOP, WORKLOAD, Echo

from gspo_jax.sampling import Driver, Response, Trajectory, assemble, conversations
from gspo_jax.sampling.driver import new_groups
from gspo_jax.structs import Prompt
from gspo_jax.system import preemption

VOCABULARY = 64
LIMIT_S = 0.5


class Plain:
  """Says 5 after the first turn, and ends with the second."""

  time_limit_s = LIMIT_S

  def __init__(self, prompt):
    self.prompt, self.turns = prompt, 0

  def reset(self):
    return self.prompt.tokens

  def step(self, response):
    self.turns += 1
    return [5], 1.0, self.turns == 2


def talk(make, workers=0):
  """Trajectories of a group: the environment `make`, and beside it a plain one."""
  engine, kinds = Echo(), iter([make, Plain])
  engine.load(None, version=7)

  def create(prompt):
    return next(kinds)(prompt)

  create.time_limit_s = LIMIT_S
  prompt = Prompt("a", "", "", (4, 3))
  (group,) = new_groups([prompt], 2, 0, 4, create, vocab_size=VOCABULARY)
  options = dict(vocab_size=VOCABULARY, workers=workers, time_limit_s=LIMIT_S)
  workload = dataclasses.replace(WORKLOAD, several_turns=True)
  driver = Driver(engine, workload, max_turns=3, **options)
  driver.begin(group)
  assert {id(x) for x in driver.run()} == {id(x) for x in group}
  assert all(x.finished for x in group)
  json.dumps([x.get_state() for x in group], allow_nan=False)
  return group


def of(step=None, figures=None, **attributes):
  """An environment with other methods."""
  methods = dict(attributes)
  if step is not None:
    methods["step"] = lambda self, response: step() if callable(step) else step
  if figures is not None:
    methods["figures"] = lambda self: figures() if callable(figures) else figures
  return type("Hostile", (Plain,), methods)


def leave(error):
  raise error


class BadText(Exception):
  def __str__(self):
    raise RuntimeError("no text")

  __repr__ = __str__


ARRAY = np.array([1.0, 2.0])
STEPS = {  # The result of a step, or what it does; and the failure.
  "empty answer": (([], 0.0, False), r"empty.*at least one token, or done=True"),
  "token beyond the vocabulary": (([64], 0.0, False), "ids from 64 to 64.*0 to 63.*tokenizer"),
  "negative token": (([-1], 0.0, False), "ids from -1"),
  "huge token": (([10**30], 0.0, False), "ids from 1000"),
  "text": (("six", 0.0, False), "'six'.*list of token ids"),
  "bytes": ((b"six", 0.0, False), "b'six'.*list of token ids"),
  "surrogates": (("\ud800", 0.0, False), "list of token ids"),
  "no observation": ((None, 0.0, False), "None.*list of token ids"),
  "messages": (([dict(role="tool", content="")], 0.0, False), "list of token ids"),
  "a message": ((dict(role="tool"), 0.0, False), "list of token ids"),
  "fractions": (([1.5], 0.0, False), "list of token ids"),
  "batch of observations": ((np.ones((1, 2), int), 0.0, False), "list of token ids"),
  "NaN": (([5], float("nan"), True), "reward nan.*finite"),
  "infinite": (([5], float("inf"), False), "reward inf.*finite"),
  "huge": (([5], 1e30, True), r"reward 1e\+30.*finite.*1e\+15"),
  "huge whole number": (([5], 10**400, True), "reward 1000.*finite"),
  "no reward": (([5], None, True), "reward None.*finite"),
  "text as a reward": (([5], "1.0", True), "reward '1.0'.*finite"),
  "array as a reward": (([5], ARRAY, True), "reward array.*finite"),
  "complex reward": (([5], 1j, True), "reward 1j.*finite"),
  "no done": (([5], 1.0, None), "done=None.*True or False"),
  "done as text": (([5], 1.0, "False"), "done='False'"),
  "done as an array": (([5], 1.0, ARRAY), "done=array"),
  "two values": (([5], 1.0), "returned .*return observation, reward and done"),
  "five values": (([5], 1.0, True, False, {}), "return observation, reward and done"),
  "nothing": (lambda: None, "returned None"),
  "a generator": (lambda: (x for x in ([5], 1.0, True)), "returned <generator"),
  "raises": (
    lambda: leave(OSError("no network")),
    r"raised OSError\('no network'\).*instead \(\w+\.py, line \d+\)$",
  ),
  "exits": (lambda: leave(SystemExit(0)), "raised SystemExit"),
  "interrupts": (lambda: leave(KeyboardInterrupt()), "raised KeyboardInterrupt"),
  "out of memory": (lambda: leave(MemoryError()), "raised MemoryError"),
  "endless recursion": (lambda: _recurse(), "raised RecursionError"),
  "an error without text": (lambda: leave(BadText()), "RuntimeError in the text"),
  "an error of lone surrogates": (lambda: leave(OSError("\ud800" * 9)), "raised OSError"),
  "a long error": (lambda: leave(OSError("x" * 10**6)), r"raised OSError.*xxx\.\.\. \(\w+\.py"),
  "waits": (lambda: time.sleep(5), r"longer than 0\.5 s"),
  "loops": (lambda: _spin(), r"longer than 0\.5 s"),
  "observes slowly": (lambda: (_slow(), 0.0, False), r"longer than 0\.5 s"),
}
FIGURES = {
  "infinite": (dict(perplexity=float("inf")), "perplexity=inf.*finite"),
  "NaN": (dict(correct=float("nan")), "correct=nan"),
  "huge": (dict(cost=10**400), "cost=1000"),
  "text": (dict(steps="3"), "steps='3'"),
  "nothing": (dict(steps=None), "steps=None"),
  "nested": (dict(steps=dict(a=1)), "steps={'a': 1}"),
  "array": (dict(steps=ARRAY), "steps=array"),
  "a name that is none": ({3: 1.0}, "figure 3"),
  "a name of surrogates": ({"\ud800": 1.0}, "printable"),
  "a name of two lines": ({"a\nb": 1.0}, "printable"),
  "a long name": ({"a" * 1000: 1.0}, "1 to 100 characters"),
  "thousands": ({str(i): 1.0 for i in range(5000)}, "more than 100"),
  "no mapping": ([1, 2], r"figures\(\) raised AttributeError"),
  "raises": (lambda: leave(KeyError("steps")), r"figures\(\) raised KeyError\('steps'\)"),
  "exits": (lambda: leave(SystemExit(1)), "raised SystemExit"),
  "waits": (lambda: time.sleep(5), r"longer than 0\.5 s"),
}


def _recurse():
  return _recurse()


def _spin():
  while True:
    pass


def _slow():
  while True:
    time.sleep(0.1)
    yield 5


def assert_failed(trajectory, other, failure):
  assert re.search(failure, trajectory.failure, re.S), trajectory.failure
  assert trajectory.failure.isprintable() and len(trajectory.failure) < 500
  assert not trajectory.stopped and not trajectory.rewards.any()
  assert trajectory.figures["correct"] == 0
  assert not other.failure and other.stopped and other.rewards.sum() == 2
  assert other.tokens.tolist() == [3, 2, 1, STOP, 5, 4, 3, 2, 1, STOP]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_a_failure_of_its_own_conversation(name):
  step, failure = STEPS[name]
  trajectory, other = talk(of(step))
  assert_failed(trajectory, other, failure)
  assert "environment Hostile of prompt a, sample 0, turn 1, " in trajectory.failure
  assert trajectory.tokens.tolist() == [2, 1, STOP] and trajectory.turn == 1


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_a_failure_of_their_own_conversation(name):
  figures, failure = FIGURES[name]
  trajectory, other = talk(of(figures=figures))
  assert re.search(failure, trajectory.failure, re.S) and not other.failure
  assert "sample 0, turn 2, " in trajectory.failure and trajectory.rewards.sum() == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_fail_alike(workers):
  for name in ("exits", "waits", "huge"):
    trajectory, other = talk(of(STEPS[name][0]), workers)
    assert_failed(trajectory, other, STEPS[name][1])


def _reset(value):
  return dict(reset=lambda self: value() if callable(value) else value)


BEGINNINGS = {
  "raises": (_reset(lambda: {}["bad"]), r"KeyError: 'bad' \(test_conversations.py, line \d+\)"),
  "exits": (_reset(lambda: leave(SystemExit(0))), "SystemExit: 0"),
  "waits": (_reset(lambda: time.sleep(5)), r"longer than 0\.5 s"),
  "is empty": (_reset(()), r"Hostile.reset\(\) begins with 0 tokens.*max_prompt"),
  "is long": (_reset((5,) * 5), r"5 tokens or more.*data.max_prompt_tokens=4"),
  "has no end": (_reset(lambda: itertools.repeat(5)), "5 tokens or more"),
  "is nothing": (_reset(None), "returned None"),
  "is text": (_reset("go"), "returned 'go'"),
  "is of texts": (_reset(["go"]), r"returned \['go'\]: return messages or token ids"),
  "is Gym's": (_reset(([dict(role="user", content="")], {})), "return messages or token ids"),
  "is another tokenizer's": (_reset([64]), "ids from 64 to 64"),
  "needs a template": (_reset([dict(role="user", content="")]), "`render` is None"),
  "cannot be made": (dict(__init__=lambda self, prompt: leave(OSError("full"))), "OSError: full"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_an_environment_that_cannot_begin_fails_alone(name):
  changes, failure = BEGINNINGS[name]
  trajectory, other = talk(of(**changes))
  assert "the environment of prompt a cannot begin: " in trajectory.failure
  assert_failed(trajectory, other, failure)
  assert trajectory.prompt == () and not len(trajectory.tokens) and trajectory.turn == 0


@pytest.mark.parametrize("observation", [[5] * 40, itertools.repeat(5), np.full(9, 5)])
def test_an_answer_beyond_the_window_ends_the_conversation_with_its_rewards(observation):
  """It is no failure; it is counted, and the conversation is cut off."""
  (trajectory, _) = talk(of((observation, 0.5, False)))
  assert not trajectory.failure and not trajectory.stopped and trajectory.finished
  assert trajectory.tokens.tolist() == [2, 1, STOP] and trajectory.rewards.sum() == 0.5
  assert trajectory.figures["overlong_observation"] == 1
  _, plain = talk(Plain)
  assert plain.figures["overlong_observation"] == 0


def test_answers_of_other_types_are_read():
  """Arrays, generators, bools and NumPy's numbers; the observation of a last turn is ignored."""
  for step in (
    (None, True, np.True_),
    ("ignored", np.float32(1), 1),
    ([10**9], np.array(1.0), np.array(True)),
    [(), np.int64(1), True],
  ):
    trajectory, _ = talk(of(step, figures=dict(n=np.float64(3), flag=np.True_)))
    assert not trajectory.failure and trajectory.stopped
    assert trajectory.rewards.sum() == 1 and trajectory.figures["n"] == 3
  for observation in (np.array([5, 6]), (x for x in (5, 6)), (5, 6), [np.int32(5), 6]):
    trajectory, _ = talk(of((observation, 0.0, False)))
    assert trajectory.tokens[3:5].tolist() == [5, 6]


@pytest.mark.parametrize(
  "calls, failure", [(-1, "tool_calls=-1, and 0 were"), (10**12, "tool_calls=1")]
)
def test_counts_of_tool_calls_that_cannot_be_are_a_failure(calls, failure):
  assert failure in talk(of(tool_calls=calls))[0].failure


def test_tool_calls_fall():
  class Falls(Plain):
    tool_calls = 9

    def step(self, response):
      self.tool_calls -= 1
      return super().step(response)

  trajectory, _ = talk(Falls)
  assert "turn 2" in trajectory.failure and "tool_calls=7, and 8 were" in trajectory.failure


@pytest.mark.parametrize("fails", ["reset", "step", "waits", ""])
def test_turns_that_cannot_be_repeated_are_a_failure(fails):
  """A run resumed at this conversation would otherwise end each time."""

  class Once(Plain):
    def reset(self):
      return leave(OSError("gone")) if fails == "reset" else super().reset()

    def step(self, response):
      if fails == "waits":
        time.sleep(5)
      return leave(OSError("gone")) if fails == "step" else super().step(response)

  trajectory = talk(Plain)[1]
  trajectory.cut(7)
  restored = Trajectory.from_state(json.loads(json.dumps(trajectory.get_state())), None)
  assert (restored.turn, restored.finished, restored.tokens.tolist()) == (
    1,
    False,
    [3, 2, 1, STOP, 5, 4],
  )
  (failure,) = conversations.resume([(restored, Prompt("a", "", "", (4, 3)))], Once)
  assert bool(failure) == bool(fails)
  if fails:
    assert "prompt a cannot repeat its turns: " in failure
    restored.fail(failure)
    assert restored.finished and restored.turn == 2 and not restored.rewards[4:].any()
  else:
    assert restored.environment.turns == 1


@pytest.mark.parametrize("threads", [0, 4])
def test_environments_begin_and_resume_in_as_many_threads_as_workers(threads):
  """With workers, all four calls meet at the barrier; without, one thread never passes it."""
  barrier, order = threading.Barrier(4), []

  class Meets(Plain):
    def __init__(self, prompt):
      super().__init__(prompt)
      order.append(prompt.id)
      if threads:
        barrier.wait(10)

  prompts = [Prompt(name, "", "", (4, 3)) for name in "abcd"]
  groups = new_groups(prompts, 1, 0, 4, Meets, workers=threads)
  assert [x.failure for (x,) in groups] == [""] * 4
  assert sorted(order) == [*"abcd"] and (threads or order == [*"abcd"])
  pairs = [(x, prompt) for (x,), prompt in zip(groups, prompts)]
  assert conversations.resume(pairs, Meets, threads) == [""] * 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_call_that_hangs_is_left_when_the_run_is_told_to_stop(method, workers, monkeypatch):
  monkeypatch.setattr(conversations, "time_limit", lambda make: 60.0)
  monkeypatch.setitem(globals(), "LIMIT_S", 60.0)
  released = threading.Event()
  environment = of(**{method: lambda *_: released.wait()})
  with pytest.raises(preemption.Preempted), preemption.watch(None):
    threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM]).start()
    talk(environment, workers)
  released.set()


def test_a_conversation_that_cannot_begin_is_padding():
  """Also as the first row of a batch with recorded experts."""
  failed, other = talk(of(**_reset(None)))
  other.experts = np.ones((len(other.prompt) + len(other.tokens) - 1, 1, 2), np.int8)
  rollout = assemble([failed, other], 16, pad_id=0)
  assert (rollout.ends[0], rollout.lengths[0], rollout.prompt_lengths[0]) == (0, 0, 0)
  assert (rollout.routing[0] == -1).all() and (rollout.routing[1, : rollout.ends[1] - 1] == 1).all()


def test_a_failure_after_an_observation_keeps_the_recorded_experts():
  zeros, experts = np.zeros(2, np.float32), np.ones((3, 1, 2), np.int8)
  trajectory = Trajectory((1, 2), 0, 0, environment=None)
  trajectory.add(Response(None, 0, [3, 4], zeros, zeros, zeros, True, True, experts))
  trajectory.end_turn(1.0)
  trajectory.observe([5, 6, 7])
  trajectory.fail("the server is gone")
  rollout = assemble([trajectory], 8, pad_id=0)
  assert (rollout.ends[0], rollout.lengths[0]) == (7, 2)
  assert (rollout.routing[0, :3] == 1).all() and (rollout.routing[0, 3:] == -1).all()
