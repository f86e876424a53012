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


@ranges.section("sampling")
class SamplingConfig:
  """Distribution of sampled tokens in training, and the end of a response. docs/objectives.md"""

  temperature: Temperature = key(1.0, "temperature of sampling; 0: greedy, which RL refuses")
  top_k: NonNegativeInt = key(
    0,
    "sample from this number of likeliest tokens; 0: from all tokens. RL allows at most "
    f"{MAX_CANDIDATES:,}, since it records these tokens at each position.",
  )
  top_p: ranges.PositiveFraction = key(
    1.0,
    "sample from the likeliest tokens up to this total probability; needs top_k; 1: from all "
    "tokens",
  )
  min_p: ranges.FractionBelowOne = key(
    0.0,
    "smallest probability of a token, divided by that of the likeliest token; needs top_k; 0: no "
    "bound",
  )
  max_new_tokens: PositiveInt = key(
    10, 'largest number of tokens of a response. The default fits "8991:1998" and the stop token.'
  )
  stop_strings: tuple[str, ...] = key((), "texts that end a response or a turn, as stop tokens do")

  @property
  def untruncated(self) -> bool:
    """Whether tokens are drawn from the whole vocabulary."""
    return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


SHORTEST_PREFILL = 16  # Smallest number of tokens of a padded prefill.


Prefill = Annotated[int, Range(SHORTEST_PREFILL, 2**20)]


Positions = Annotated[int, Range(0, 2**40)]


@ranges.section("engine.server")
class ServerConfig:
  """Servers, for engine.name=server: requests, weights and checks. docs/engines.md"""

  directory: str = key(
    "", 'directory of published weights, readable by all servers; "": published/ in the workdir'
  )
  in_flight: PositiveInt = key(256, "largest number of concurrent responses on each server")
  timeout_s: PositiveSeconds = key(
    3600.0,
    "time limit of a request in seconds. Set it above the time of the longest response. A server "
    "that does not answer /health is excluded earlier.",
  )
  publish_s: PositiveSeconds = key(
    900.0, "time limit in seconds of a request that publishes weights or probes a server"
  )
  wait_s: Seconds = key(300.0, "time without any usable server before the run ends, in seconds")
  tolerance: Annotated[float, Range(0, 100)] = key(
    0.0,
    "largest accepted mean |difference| between log-probs of a server and the trainer, in nats. "
    "0 means 0.005 for a sampler in float32, else 0.1.",
  )


@ranges.section("engine")
class EngineConfig:
  """Engine of rollouts and evaluations. Except for `name`, these keys change results by round-off
  alone, unless responses are carried over. Round-off is large for dtypes of 16 bits or less.
  docs/sampling.md"""

  slots: NonNegativeInt = key(
    0, "largest number of responses decoded at once, over all devices; 0: all responses of a batch"
  )
  steps: PositiveInt = key(16, "number of decoding steps between two transfers to the host")
  prefill_tokens: Prefill = key(
    4096, "largest number of prompt tokens that a device prefills at once; longer prompts are split"
  )
  cache_dtype: Literal["float32", "bfloat16", "int8"] = key(
    "float32",
    "dtype of cached keys and values, but not of the states of linear attention. int8 has a "
    "scale for each position and head.",
  )
  cache: Literal["auto", "dense", "paged"] = key(
    "auto",
    "dense: a slot has memory for a whole window | paged: pages are allocated on demand | auto: "
    "paged on TPU or if cache_tokens is set, else dense",
  )
  cache_tokens: Positions = key(
    0,
    "number of positions of all pages, over all devices; 0: enough for whole windows. If there "
    "are fewer, responses may have to wait for free pages. The prompt of such a response and its "
    "tokens so far are then prefilled again (metric sampling/put_aside).",
  )
  page_tokens: PositiveInt = key(
    128,
    "number of positions of a page. On TPU, it must be a multiple of 16, or of 32 for a cache in "
    "int8.",
  )
  dtype: Literal["", "float32", "bfloat16"] = key(
    "",
    'dtype of the sampler; "": compute.dtype. A dtype other than the trainer\'s increases the '
    "mismatch.",
  )
  weights_dtype: Literal["", "int8"] = key(
    "",
    '"": engine.dtype | int8: matrices of layers are in int8, with a scale for each output channel',
  )
  name: Literal["local", "server"] = key(
    "local",
    "local: slots on the devices of the mesh | server: external servers. In this section, only "
    "the keys dtype, urls and server affect them.",
  )
  urls: tuple[str, ...] = key((), "addresses of servers, as http://host:port. docs/engines.md")
  server: ServerConfig = ServerConfig()

  def __post_init__(self):
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
        "{name}, {weights_dtype}: servers have their own option for rounding weights; leave "
        "weights_dtype empty",
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

  def slots_for(self, trajectories: int, default: int = 0) -> int:
    """Returns the number of slots in use for a number of trajectories."""
    return min(self.slots or default or trajectories, trajectories)


LOCAL_ENGINE = EngineConfig()


@ranges.section("environment")
class EnvironmentConfig:
  """Environment of conversations. docs/multi_turn.md"""

  name: Annotated[str, Name(("", *ENVIRONMENTS))] = key(
    "", 'environment of conversations; "": none, and the verifier scores responses of one turn'
  )
  max_turns: PositiveInt = key(
    1, "largest number of turns of the policy; longer conversations are truncated"
  )
  discount: Fraction = key(
    1.0,
    "factor γ per turn or line. The reward of the n-th later turn or line counts γ^n in a return.",
  )
  workers: Workers = key(
    0,
    "number of threads that run environments. 0 means one step at a time, for environments that "
    "never wait.",
  )
  token_cost: NonNegativeFloat = key(
    0.0, "cost of a sampled token, subtracted from the reward of the token's turn"
  )
  call_cost: NonNegativeFloat = key(
    0.0, "cost of a tool call, subtracted from the reward of the call's turn"
  )
  charge: Literal["all", "right"] = key(
    "all",
    "all: all conversations have costs | right: only right conversations have costs, so that "
    "giving up early gains nothing",
  )

  @property
  def costs(self) -> bool:
    """Whether tokens or calls have a cost (rollouts/costs.py)."""
    return self.token_cost > 0 or self.call_cost > 0
