"""What the systems of benchmarks/iteration.py have in common: sizes, reward, record of a run."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Work:
  """An iteration: responses of so many tokens to prompts of so many, and updates on all of them."""

  prompts: int
  prompt: int  # tokens
  new: int  # tokens of a response
  group: int = 8
  updates: int = 4

  @property
  def rows(self) -> int:
    return self.prompts * self.group


TOY = Work(prompts=4, prompt=32, new=128)
WORK = dict(dense=TOY, moe=TOY, smollm2=Work(prompts=16, prompt=48, new=16))
OPTIMIZER = dict(learning_rate=1e-4, b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=1.0)
CLIP = dict(clip_low=3e-4, clip_high=4e-4)
DENSE = dict(
  vocab_size=512, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=32,
  intermediate_size=1024, num_experts=0, experts_per_token=0, moe_intermediate_size=0,
)  # fmt: skip
MOE = DENSE | dict(num_experts=16, experts_per_token=2, moe_intermediate_size=128)
MODELS = dict(dense=DENSE, moe=MOE)  # the others are published ones


def reward(response: str, answer: str) -> float:
  """Returns the share of words with an even number, a cheap varied reward."""
  words = response.split()
  return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


class Record:
  """Times of iterations and of their stages, and evidence of the work."""

  def __init__(self):
    self.begun: list[float] = []  # seconds since the epoch
    self.stages: list[dict[str, float]] = []
    self.losses: list[list[float]] = []  # Reported losses of each iteration's updates.
    self.grad_norms: list[float] = []
    self.sampled: list[int] = []  # tokens of responses, by iteration
    self.trained: list[int] = []  # tokens of prompts and responses that the updates went through
    self.updates = 0
    self.moved = 0.0  # |weights - weights at the start| / |weights at the start|

  def begin(self) -> None:
    """An iteration begins, and the one before it has ended."""
    self.begun.append(time.time())
    self.stages.append({})
    self.sampled.append(0)
    self.trained.append(0)

  @contextlib.contextmanager
  def stage(self, name: str) -> Iterator[None]:
    """Time of an inner stage counts for the outer one as well."""
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    self.stages[-1][name] = self.stages[-1].get(name, 0.0) + seconds

  def timed(self, name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments, **named):
      with self.stage(name):
        return function(*arguments, **named)

    return call


def distance(current: Sequence, start: Sequence) -> float:
  """|now - start| / |start| over all arrays together."""
  import numpy as np

  def norm(arrays) -> float:
    return float(np.sqrt(sum((x**2).sum() for x in arrays)))

  current, start = ([np.asarray(x) for x in arrays] for arrays in (current, start))
  return norm(a - b for a, b in zip(current, start, strict=True)) / norm(start)
