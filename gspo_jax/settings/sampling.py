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

MOST_KEPT = 1024  # tokens of a support that is put on record: 4 KiB for each sampled token


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The distribution of responses to train on, and when they end. docs/objectives.md"""

  temperature: Temperature = key(1.0, "0: greedy, not to train on")
  top_k: NonNegativeInt = key(
    0, f"keep the k likeliest tokens, {MOST_KEPT:,} at most, kept for the updates; 0: all"
  )
  top_p: ranges.PositiveFraction = key(
    1.0, "keep the smallest set of probability >= top_p, with top_k; 1: all"
  )
  min_p: ranges.FractionBelowOne = key(
    0.0, "keep tokens so much as likely as the likeliest, with top_k; 0: all"
  )
  max_new_tokens: PositiveInt = key(10, 'per response: "8991:1998" and the end')
  stop_strings: tuple[str, ...] = key((), "texts that end a response or a turn, as stop tokens do")

  def __post_init__(self):
    ranges.check(self, "sampling")

  @property
  def whole(self) -> bool:
    """Whether no token is left out."""
    return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


SHORTEST = 16  # tokens that a prefill is padded to at least


Prefill = Annotated[int, Range(SHORTEST, 2**20)]


Positions = Annotated[int, Range(0, 2**40)]


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Servers of engine.name=server: how they are reached, told of new weights and checked.
  docs/engines.md"""

  directory: str = key(
    "", 'of published weights, which all servers see; "": published/ of the workdir'
  )
  token_variable: str = key("GSPO_ENGINE_TOKEN", "of the environment: a bearer token; unset: none")
  in_flight: PositiveInt = key(256, "responses that one server is asked for at once")
  timeout_s: PositiveSeconds = key(
    3600.0,
    "of a request, longer than the longest response takes; a server that does not answer /health "
    "is left out long before",
  )
  publish_s: PositiveSeconds = key(900.0, "of a request with new weights or a probe")
  wait_s: Seconds = key(300.0, "with no server left, until the run ends")
  retries: NonNegativeInt = key(5, "of a request, on other servers where there are any")
  tolerance: Annotated[float, Range(0, 100)] = key(
    0.0,
    "mean |difference| of a probe's log-probs from the trainer's, in nats, beyond which a server "
    "is not used; 0: 0.005 where sampler and trainer compute in float32, 0.1 in bfloat16",
  )

  def __post_init__(self):
    ranges.check(self, "engine.server")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Ways to sample. None of them changes what is sampled beyond round-off, which is much for a
  dtype or a cache_dtype of 16 bits. docs/sampling.md"""

  slots: NonNegativeInt = key(0, "responses decoded at once, over all devices; 0: all of a batch")
  steps: PositiveInt = key(16, "of decoding between two looks of the host")
  prefill_tokens: Prefill = key(4096, "of a device at once; longer prompts go in pieces")
  cache_dtype: Literal["float32", "bfloat16"] = key("float32", "of keys and values")
  cache: Literal["auto", "dense", "paged"] = key(
    "auto",
    "dense: rows of the whole window | paged: responses take pages as they grow | auto: paged on "
    "TPU, and with cache_tokens",
  )
  cache_tokens: Positions = key(
    0,
    "positions of all pages, over all devices; 0: whole windows. With fewer, responses that find "
    "no page are put aside and begun again: sampling/put_aside",
  )
  page_tokens: PositiveInt = key(128, "positions of a page; TPU: a multiple of 16")
  dtype: Literal["", "float32", "bfloat16"] = key(
    "", 'as compute.dtype, of whatever samples; "": the same. Another makes the mismatch larger'
  )
  name: Literal["local", "server"] = key(
    "local", "slots on the trainer's mesh, or servers of others, with dtype, urls and server"
  )
  urls: tuple[str, ...] = key((), "of servers: http://host:port. docs/engines.md")
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
        "{name}, {urls}: servers need their URLs, and engine.name='local' has none",
      ),
      (len({url.rstrip("/") for url in self.urls}) < len(self.urls), "{urls} names a server twice"),
      (self.prefill_tokens & (self.prefill_tokens - 1), "{prefill_tokens} must be a power of two"),
      (
        dense and self.cache_tokens,
        "{cache_tokens} is for pages, and engine.cache='dense' has none: leave one of them out",
      ),
    ]
    ranges.refuse(self, "engine", wrong)

  def compute(self, trainer: ComputeConfig) -> ComputeConfig:
    """Precision and formulations of the sampler: the trainer's, but for a `dtype` of its own."""
    return dataclasses.replace(trainer, dtype=self.dtype or trainer.dtype)

  def slots_for(self, trajectories: int) -> int:
    """Slots that are used for so many trajectories: no more than there are."""
    return min(self.slots or trajectories, trajectories)


DEFAULT = EngineConfig()


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
  """The other side of responses that are conversations. docs/multi_turn.md"""

  name: Annotated[str, Name(("", *ENVIRONMENTS))] = key(
    "", '"": none: responses of one turn, which the verifier judges'
  )
  max_turns: PositiveInt = key(
    1, "of the policy; a conversation that is not over by then is cut off"
  )
  discount: Fraction = key(1.0, "of rewards of later turns (or lines)")
  workers: Workers = key(0, "threads that environments run in; 0: none, for those that never wait")
  token_cost: NonNegativeFloat = key(0.0, "of a sampled token, from the reward of its turn")
  call_cost: NonNegativeFloat = key(0.0, "of each tool call, the same")
  charge: Literal["all", "right"] = key(
    "all", "who pays; right: right conversations alone, so that nobody gains by giving up sooner"
  )

  def __post_init__(self):
    ranges.check(self, "environment")

  @property
  def costs(self) -> bool:
    """Whether conversations pay for what they take (costs.py)."""
    return self.token_cost > 0 or self.call_cost > 0
