"""Verifiers that fail: nothing is raised, and nothing is known about the response."""

import contextlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from support.configs import reward_config as config
from support.prompts import prompts
from support.sandboxes import PRINTS_2

from gspo_jax import rewards
from gspo_jax.settings.rewards import VERIFIERS
from gspo_jax.structs import Prompt
from gspo_jax.verifiers.pool import Failure

RAISED = [OSError(28, "No space left"), RecursionError(), MemoryError(), ValueError("a\nb")]
RAISED += [UnicodeError("surrogates"), KeyError("x"), StopIteration(), AssertionError()]


@pytest.fixture
def broken(monkeypatch):
  """Installs a verifier: "yes" is right, and a number raises the error of that index."""
  module, calls = types.ModuleType("broken"), []

  @contextlib.contextmanager
  def open_verifier():
    def verify(responses, prompts, finished):
      calls.append(len(responses))
      for response in responses:
        if response.isdigit():
          raise RAISED[int(response)]
      return ["right" if response == "yes" else "wrong" for response in responses], None

    yield verify

  module.OUTCOMES, module.open_verifier, module.calls = ("right", "wrong"), open_verifier, calls
  monkeypatch.setitem(sys.modules, "broken", module)
  monkeypatch.setitem(VERIFIERS, "string", "broken")
  return module


@pytest.mark.parametrize("number", range(len(RAISED)))
def test_what_a_verifier_raises_is_an_outcome_of_one_response(broken, number):
  responses = ["yes", "no", str(number), "yes", "yes"]
  with rewards.open_scorer(config(format="think", format_weight=0.5)) as score:
    scores = score(responses, prompts("abcde"))
  assert scores.reward.tolist() == scores.correct.tolist() == [1, 0, 0, 1, 1]
  assert scores.known.tolist() == [True, True, False, True, True]
  assert scores.outcomes == dict(right=3, wrong=1, crash=1, format_kept=0)
  (reason,) = scores.unknown.values()
  assert reason.startswith(f"crash: {type(RAISED[number]).__name__}") and "\n" not in reason


def test_a_response_that_could_not_be_sampled_has_no_verdict(broken):
  failed = Failure("crash", "6 calls failed")
  for key in (dict(format="think", format_weight=0.5), dict(false_positive=1.0)):
    with rewards.open_scorer(config(**key)) as score:
      scores = score(["yes", failed, "no"], prompts("abc"), finished=[True, False, True])
    assert scores.unknown == {1: "crash: 6 calls failed"} and scores.outcomes["crash"] == 1
    assert scores.reward[1] == scores.correct[1] == 0
    assert broken.calls.pop() == 2  # the verifier never sees it


def test_a_batch_is_not_verified_one_by_one_because_of_one_response(broken):
  with rewards.open_scorer(config()) as score:
    scores = score(["yes"] * 100 + ["0"] + ["no"] * 155, prompts(["a"] * 256))
  assert scores.outcomes == dict(right=100, wrong=155, crash=1)
  assert list(scores.unknown) == [100]
  assert len(broken.calls) == 1 + 2 * 8 and sum(broken.calls) < 3 * 256


def test_when_everything_fails_nothing_is_raised_either(broken):
  with rewards.open_scorer(config()) as score:
    scores = score(["0", "0", "1"], prompts("abc"))
  assert not scores.known.any() and not scores.reward.any()
  with pytest.raises(rewards.NoVerdictError) as error:
    rewards.require_verdicts([*scores.unknown.values()], 3, "a file")
  assert "any of 3 responses. Main reason, 2 times: crash: OSError: [Errno 28] " in str(error.value)
  assert "a file" in str(error.value) and "\n" not in str(error.value)
  rewards.require_verdicts([*scores.unknown.values()], 4, "")  # there is one
  rewards.require_verdicts([], 0, "")


def test_what_is_unknown_is_not_shaped_and_not_noisy(broken):
  shaped = dict(overlong_weight=1.0, overlong_max=10, overlong_buffer=5, format_weight=1.0)
  noise = dict(false_positive=1.0, false_negative=1.0)
  with rewards.open_scorer(config(format="think", **shaped, **noise)) as score:
    scores = score(["0", "1", "yes", "no"], prompts("abcd"), [99] * 4)
  assert scores.reward.tolist() == [0, 0, -1, 0]
  assert scores.outcomes["false_positive"] == scores.outcomes["false_negative"] == 1


def test_functions_of_the_users_say_why(monkeypatch):
  monkeypatch.chdir(Path(__file__).parents[1])
  function = config("support.user_rewards:by_length", time_limit_s=0.5)
  with rewards.open_scorer(function) as score:
    scores = score([*"abcd raise hang nan die ab none rows".split()], prompts(["wxyz"] * 8))
  returned = "crash: ValueError: support.user_rewards:by_length (user_rewards.py, line 7) returned"
  assert scores.unknown == {
    1: "crash: KeyError: 'raise' (user_rewards.py, line 10)",
    2: "timeout: it took longer than time_limit_s=0.5",
    3: f"{returned} nan: return a number from -1e+15 to 1e+15",
    4: "crash: its process died twice",
    6: f"{returned} None: return a number from -1e+15 to 1e+15",
    7: f"{returned} [0, 1]: return a number from -1e+15 to 1e+15",
  }
  np.testing.assert_array_equal(scores.reward, [1, 0, 0, 0, 0, 0.5, 0, 0])


def test_mathematics_that_cannot_be_decided_is_unknown(monkeypatch):
  with rewards.open_scorer(config("math", time_limit_s=1.0)) as score:
    responses = [r"\boxed{e^{e^{e^{e^e}}}}", r"\boxed{\sqrt{8}}", r"\boxed{\sqrt{2}}", "No idea."]
    scores = score(responses, prompts([r"2\sqrt{2}"] * 4))
    assert scores.outcomes == dict(right=1, wrong=1, unparsable=1, timeout=1, crash=0)
    assert scores.unknown == {0: "timeout: it took longer than time_limit_s=1"}
    # With a gold answer that nobody can read there is no verdict, unless it is repeated.
    gold = r"\frac{"
    scores = score(
      [r"\boxed{5}", "No idea.", r"\boxed{x+1}", "5"], prompts([gold, gold, gold, "5"])
    )
    assert scores.known.tolist() == [False, False, False, True]
    reason = r"crash: the gold answer '\\frac{' cannot be read as mathematics"
    assert set(scores.unknown.values()) == {reason}


@pytest.mark.parametrize("name, gold", [("string", " ... "), ("arithmetic", "five"), ("code", "5")])
def test_gold_answers_that_cannot_be_read(name, gold):
  with rewards.open_scorer(config(name)) as score:
    scores = score(["1:5", "?"], prompts([gold] * 2))
  assert list(scores.unknown) == [0, 1] and repr(gold) in scores.unknown[1]


def test_a_program_that_fails_is_wrong_and_not_unknown():
  programs = ["print(2)", "while True: pass", "raise ValueError", "x = bytearray(1 << 40)"]
  responses = [f"```python\n{program}\n```" for program in programs]
  with rewards.open_scorer(config("code", time_limit_s=1.0)) as score:
    scores = score(responses, prompts([PRINTS_2] * 4))
  assert scores.known.all() and scores.reward.tolist() == [1, 0, 0, 0]
  assert {k: v for k, v in scores.outcomes.items() if v} == dict(
    right=1, timeout=1, error=1, memory=1
  )


# Responses that were cut off.


def test_the_scorer_knows_what_was_cut_off():
  gold = prompts(["18"] * 3)
  with rewards.open_scorer(config("math")) as score:
    responses = ["3 * 6 is 18", "3 * 6 is 18", r"\boxed{18} and"]
    assert score(responses, gold, finished=[True, False, False]).correct.tolist() == [1, 0, 1]
    assert score(responses, gold).correct.tolist() == [1, 1, 1]
  with rewards.open_scorer(config("string")) as score:
    responses = ["so\n18", "so\n18", "<answer>18</answer>..."]
    assert score(responses, gold, None, [True, False, False]).correct.tolist() == [1, 0, 1]


def test_a_prompt_may_begin_the_thought():
  """Chat templates of reasoning models end with <think>; the response has no opening tag."""
  thinks = [Prompt("0", "q", "18", (1,), thinks=thinks) for thinks in (True, True, False)]
  responses = [r"3 * 6 is \boxed{18}, so", r"3 * 6</think>\boxed{18}", r"\boxed{18}"]
  for name in ("math", "string"):
    with rewards.open_scorer(config(name)) as score:
      texts = responses if name == "math" else ["18", "x</think>18", "18"]
      scores = score(texts, thinks)
    assert scores.correct.tolist() == [0, 1, 1]
    assert scores.outcomes["unparsable"] == 1
