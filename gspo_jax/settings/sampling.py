"""Sections `sampling`, `engine`, `engine.server` and `environment`."""

import dataclasses
import urllib.parse
from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.model import ComputeConfig
from gspo_jax.settings.ranges import (
  Fraction,
  Name,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveInt,
  PositiveSeconds,
  Range,
  Seconds,
  Temperature,
  Workers,
  key,
)
from gspo_jax.tasks.environments import ENVIRONMENTS

MAX_CANDIDATES = 1024  # Maximum number of recorded candidates of a sampled token (4 KiB).


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Distribution of the tokens to train on, and ends of responses. docs/objectives.md"""

  temperature: Temperature = key(1.0, "0: greedy, refused by RL")
  top_k: NonNegativeInt = key(
    0, f"keep the k likeliest tokens, recorded for updates, k at most {MAX_CANDIDATES:,}; 0: all"
  )
  top_p: ranges.PositiveFraction = key(
    1.0, "keep the likeliest tokens up to this total probability; needs top_k; 1: all"
  )
  min_p: ranges.FractionBelowOne = key(
    0.0, "smallest probability relative to the likeliest token; needs top_k; 0: all"
  )
  max_new_tokens: PositiveInt = key(
    10, 'largest number of tokens of a response, by default for "8991:1998" and the stop token'
  )
  stop_strings: tuple[str, ...] = key((), "texts that end a response or a turn, like stop tokens")

  def __post_init__(self):
    ranges.check(self, "sampling")

  @property
  def untruncated(self) -> bool:
    """Whether tokens are drawn from the whole vocabulary."""
    return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


SHORTEST_PREFILL = 16  # Smallest number of tokens of a padded prefill.


Prefill = Annotated[int, Range(SHORTEST_PREFILL, 2**20)]


Positions = Annotated[int, Range(0, 2**40)]


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Requests to the servers of engine.name=server, their weights and checks. docs/engines.md"""

  directory: str = key(
    "", 'directory of published weights, readable by all servers; "": published/ of the workdir'
  )
  in_flight: PositiveInt = key(256, "concurrent responses of a server")
  timeout_s: PositiveSeconds = key(
    3600.0,
    "time limit of a request; set it above the time of the longest response. A server that does "
    "not answer /health is excluded earlier",
  )
  publish_s: PositiveSeconds = key(900.0, "time limit of a request with new weights or a probe")
  wait_s: Seconds = key(300.0, "time without any usable server before the run ends")
  tolerance: Annotated[float, Range(0, 100)] = key(
    0.0,
    "largest mean |difference| of log-probs between a server and the trainer, in nats; 0: 0.005 "
    "for a sampler in float32, else 0.1",
  )

  def __post_init__(self):
    ranges.check(self, "engine.server")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Engine of rollouts and evaluations. Its keys change results by round-off alone, which is large
  for types of 16 bits or less. docs/sampling.md"""

  slots: NonNegativeInt = key(0, "concurrent responses over all devices; 0: all of a batch")
  steps: PositiveInt = key(16, "decoding steps between two host transfers")
  prefill_tokens: Prefill = key(4096, "prompt tokens of a device at once; longer prompts are split")
  cache_dtype: Literal["float32", "bfloat16", "int8"] = key(
    "float32",
    "dtype of cached keys and values, not of states; int8: with a scale per position and head",
  )
  cache: Literal["auto", "dense", "paged"] = key(
    "auto",
    "dense: a row of the whole window per slot | paged: pages allocated on demand | auto: paged on "
    "TPU, and with cache_tokens",
  )
  cache_tokens: Positions = key(
    0,
    "positions of all pages, over all devices; 0: enough for whole windows. With fewer, responses "
    "without a free page are restarted later (metric sampling/put_aside)",
  )
  page_tokens: PositiveInt = key(128, "positions of a page; TPU: a multiple of 16, int8: of 32")
  dtype: Literal["", "float32", "bfloat16"] = key(
    "", 'dtype of the sampler; "": compute.dtype. Another one increases the mismatch'
  )
  weights_dtype: Literal["", "int8"] = key(
    "", '"": dtype | int8: matrices of layers, with a scale per output channel'
  )
  name: Literal["local", "server"] = key(
    "local",
    "local: slots on the mesh | server: external servers, with the keys dtype, urls and server",
  )
  urls: tuple[str, ...] = key((), "addresses of servers, http://host:port. docs/engines.md")
  server: ServerConfig = ServerConfig()

  def __post_init__(self):
    ranges.check(self, "engine")
    for url in self.urls:
      parts = urllib.parse.urlsplit(url)
      if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"engine.urls={self.urls!r}: {url!r} is not like http://host:port")
    served, dense = self.name == "server", self.cache == "dense"
    wrong = [
      (
        served != bool(self.urls),
        "{name}, {urls}: engine.name='server' needs URLs, and 'local' has none; change one of them",
      ),
      (len({url.rstrip("/") for url in self.urls}) < len(self.urls), "{urls} names a server twice"),
      (self.prefill_tokens & (self.prefill_tokens - 1), "{prefill_tokens} must be a power of two"),
      (
        served and self.weights_dtype,
        "{name}, {weights_dtype}: servers round weights by an option of their own; leave it out",
      ),
      (
        dense and self.cache_tokens,
        "{cache_tokens} is for pages, and engine.cache='dense' has none: change one of them",
      ),
    ]
    ranges.refuse(self, "engine", wrong)

  def compute(self, trainer: ComputeConfig) -> ComputeConfig:
    """Returns the trainer's compute settings, with the engine's `dtype` if it is set."""
    return dataclasses.replace(trainer, dtype=self.dtype or trainer.dtype)

  def slots_for(self, trajectories: int) -> int:
    """Returns the number of slots in use for a number of trajectories."""
    return min(self.slots or trajectories, trajectories)


LOCAL_ENGINE = EngineConfig()


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
  """Environment of conversations. docs/multi_turn.md"""

  name: Annotated[str, Name(("", *ENVIRONMENTS))] = key(
    "", '"": no environment; responses of one turn are scored by the verifier'
  )
  max_turns: PositiveInt = key(1, "turns of the policy; longer conversations are truncated")
  discount: Fraction = key(1.0, "discount of the rewards of later turns or lines")
  workers: Workers = key(
    0, "threads of environments; 0: one step at a time, for environments without waiting"
  )
  token_cost: NonNegativeFloat = key(
    0.0, "cost of a sampled token, subtracted from the reward of its turn"
  )
  call_cost: NonNegativeFloat = key(
    0.0, "cost of a tool call, subtracted from the reward of its turn"
  )
  charge: Literal["all", "right"] = key(
    "all", "all conversations have costs | only right ones, so that giving up early gains nothing"
  )

  def __post_init__(self):
    ranges.check(self, "environment")

  @property
  def costs(self) -> bool:
    """Whether tokens or calls have a cost (rollouts/costs.py)."""
    return self.token_cost > 0 or self.call_cost > 0
