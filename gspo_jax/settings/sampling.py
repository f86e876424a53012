"""Sections `sampling`, `engine` and `environment`."""

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
  Range,
  Temperature,
  Workers,
)
from gspo_jax.settings.server import DEFAULT as SERVER
from gspo_jax.settings.server import ServerConfig
from gspo_jax.tasks.environments import ENVIRONMENTS

MOST_KEPT = 1024  # tokens of a support that is put on record: 4 KiB for each sampled token


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The sampling distribution and when to end."""

  temperature: Temperature  # 0: greedy
  top_k: NonNegativeInt  # keep the k likeliest tokens; 0: all
  top_p: ranges.PositiveFraction  # keep the smallest set of probability >= top_p; 1: all
  min_p: ranges.FractionBelowOne  # keep tokens so much as likely as the likeliest; 0: all
  max_new_tokens: PositiveInt  # per response

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
class EngineConfig:
  """Section `engine`: ways to sample; none of them changes what is sampled beyond round-off, which
  is much for a `dtype` or a `cache_dtype` of 16 bits."""

  slots: NonNegativeInt  # responses decoded at once, over all devices; 0: all that are asked for
  steps: PositiveInt  # decode steps per call, between two looks of the host
  prefill_tokens: Prefill  # of a device at once; longer prompts in pieces
  cache_dtype: Literal["float32", "bfloat16"]  # of keys and values
  # In rows of the whole window, or in pages that responses take as they grow; auto: pages on TPU,
  # and where `cache_tokens` says how many.
  cache: Literal["auto", "dense", "paged"] = "auto"
  cache_tokens: Positions = 0  # positions of all pages, over all devices; 0: all windows whole
  page_tokens: PositiveInt = 128  # positions of a page; the TPU's kernel wants a multiple of 16
  dtype: Literal["", "float32", "bfloat16"] = ""  # as compute.dtype, of the sampler; "": the same
  # Slots on the mesh of the trainer, or servers of others, which have their own ways to sample
  name: Literal["local", "server"] = "local"
  urls: tuple[str, ...] = ()  # of servers, http://host:port
  server: ServerConfig = SERVER

  def __post_init__(self):
    ranges.check(self, "engine")
    if (self.name == "server") != bool(self.urls):
      raise ValueError(
        f"engine.name={self.name!r}, engine.urls={self.urls!r}: servers need their URLs, and "
        "engine.name='local' has none"
      )
    for url in self.urls:
      parts = urllib.parse.urlsplit(url)
      if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"engine.urls={self.urls!r}: {url!r} is not like http://host:port")
    if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
      raise ValueError(f"engine.urls={self.urls!r} names a server twice")
    if self.prefill_tokens & (self.prefill_tokens - 1):
      raise ValueError(f"engine.prefill_tokens={self.prefill_tokens} must be a power of two")
    if self.cache == "dense" and self.cache_tokens:
      raise ValueError(
        f"engine.cache_tokens={self.cache_tokens} is for pages, and engine.cache='dense' has none: "
        "leave one of them out"
      )

  def compute(self, trainer: ComputeConfig) -> ComputeConfig:
    """Precision and formulations of the sampler: the trainer's, but for a `dtype` of its own."""
    return dataclasses.replace(trainer, dtype=self.dtype or trainer.dtype)

  def slots_for(self, trajectories: int) -> int:
    """Slots that are used for so many trajectories: no more than there are."""
    return min(self.slots or trajectories, trajectories)


DEFAULT = EngineConfig(slots=0, steps=16, prefill_tokens=4096, cache_dtype="float32")


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
  """Section `environment`: with whom responses are conversations, if at all. docs/multi_turn.md."""

  name: Annotated[str, Name(("", *ENVIRONMENTS))]  # "": none; a verifier looks at one response
  max_turns: PositiveInt  # of the policy; a conversation that is not over by then is cut off
  stop_strings: tuple[str, ...]  # they end a turn, as stop tokens do
  discount: Fraction  # of rewards of later turns in the advantage of an earlier one
  workers: Workers  # threads that environments run in; 0: none, if they do not wait
  token_cost: NonNegativeFloat  # of a sampled token, taken from the reward of its turn
  call_cost: NonNegativeFloat  # of a tool call, the same
  charge: Literal["all", "right"]  # who pays: every conversation | those that are right

  def __post_init__(self):
    ranges.check(self, "environment")

  @property
  def costs(self) -> bool:
    """Whether conversations pay for what they take (costs.py)."""
    return self.token_cost > 0 or self.call_cost > 0
