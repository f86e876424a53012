"""Verifier with a user's function, named `package.module:function`, in worker processes.

The function takes the text of a response and the record of its prompt: a dict of texts with `id`,
`question`, `answer`, and the other fields of the data row. The function returns the reward: a bool
or a number of absolute value up to `LARGEST_REWARD`. A response is right if its reward is at least
`reward.right_from` (1 if this key is unset).

A call that exceeds the time limit is a timeout. A call that raises an exception or returns any
other value is a crash. After a timeout or a crash, the response has no verdict, so it is neither
right nor wrong. The function's memory is not limited, since the function may load a model.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from gspo_jax.settings.rewards import LARGEST_REWARD
from gspo_jax.system import user_code
from gspo_jax.verifiers import pool

OUTCOMES = ("right", "wrong", "timeout", "crash")
UNKNOWN = ("timeout", "crash")
# The function is loaded once, since `load` searches the working directory, and the user's function
# may change that directory.
_load = functools.cache(user_code.load)


@contextlib.contextmanager
def open_verifier(name: str, workers: int, time_limit_s: float) -> Iterator[Callable]:
  """Opens a verifier with the user's function.

  Args:
    name: `package.module:function`.
    workers: number of processes.
    time_limit_s: time limit of a call, in seconds.

  Raises:
    RuntimeError: the function cannot be imported; the message has the traceback.
  """
  function = f"{__name__}:call"
  with pool.Pool(function, workers, time_limit_s, warm_up=[name], memory_bytes=None) as processes:

    def verify(responses, prompts, finished):
      results = processes.map([[name, r, record(p)] for r, p in zip(responses, prompts)])
      failed = [isinstance(result, pool.Failure) for result in results]
      outcomes = [result if bad else "wrong" for result, bad in zip(results, failed)]
      return outcomes, [0.0 if bad else result for result, bad in zip(results, failed)]

    yield verify


def record(prompt: Any) -> dict[str, str]:
  """Returns the prompt's record for the user's function.

  The record has the fields of the data row. The fields id, question and answer are the prompt's.
  """
  return dict(prompt.info) | dict(id=prompt.id, question=prompt.question, answer=prompt.answer)


def call(item: list[Any]) -> float:
  """Calls the user's function in a worker process.

  Args:
    item: `[name, response, record]`. `[name]` alone only imports the function, and returns 0.

  Raises:
    ValueError: the returned value is not a number, or is NaN or beyond `LARGEST_REWARD`.
  """
  name, *arguments = item
  function = _load(name, name)
  if not arguments:
    return 0.0
  try:
    result = function(*arguments)
  except Exception as error:  # User code may raise anything.
    error.add_note(user_code.describe_error(error, name))  # The pool reports the last line.
    raise
  try:
    value = math.nan if isinstance(result, str | bytes) else float(result)
  except Exception:  # The result may be of any type.
    value = math.nan
  if not abs(value) <= LARGEST_REWARD:  # NaN fails too.
    text = " ".join(repr(result).split())[:40]  # The pool reports the last line.
    raise ValueError(
      f"{name}{user_code.place(name)} returned {text}: return a number from {-LARGEST_REWARD:g} to "
      f"{LARGEST_REWARD:g}"
    )
  return value
