"""What sampling is asked for, what comes back, and what it cost."""

import dataclasses
from typing import Annotated, Any, Literal

import numpy as np

from gspo_jax import ranges
from gspo_jax.ranges import NonNegativeInt, PositiveInt, Range

SHORTEST = 16  # tokens that a prefill is padded to at least


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """How sampling is carried out; none of it changes what is sampled beyond round-off."""

  slots: NonNegativeInt  # responses decoded at once, over all devices; 0: all that are asked for
  steps: PositiveInt  # of decoding between two looks of the host
  prefill_tokens: Annotated[int, Range(SHORTEST)]  # of a device at once; longer prompts in pieces
  cache_dtype: Literal["float32", "bfloat16"]  # of keys and values

  def __post_init__(self):
    ranges.check(self, "engine")
    if self.prefill_tokens & (self.prefill_tokens - 1):
      raise ValueError(f"engine.prefill_tokens={self.prefill_tokens} must be a power of two")

  def for_rows(self, rows: int) -> "EngineConfig":
    """No more slots than there are responses."""
    return dataclasses.replace(self, slots=min(self.slots or rows, rows))


DEFAULT = EngineConfig(slots=0, steps=16, prefill_tokens=4096, cache_dtype="float32")


@dataclasses.dataclass(frozen=True)
class Request:
  """Responses to one prompt, or what is left of one that was begun.

  A response depends on the weights, `seed`, the prompt and its index in the group alone.
  """

  prompt: tuple[int, ...]
  max_new_tokens: int  # of each response, those in `begun` not counted
  samples: int = 1
  first_sample: int = 0  # index in the group of the first of them
  seed: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()  # it also ends with the token that completes one of them
  begun: tuple[int, ...] = ()  # tokens after the prompt that are there already
  tag: Any = None  # for whoever asked

  @property
  def context(self) -> tuple[int, ...]:
    return (*self.prompt, *self.begun)

  @property
  def context_length(self) -> int:
    return len(self.prompt) + len(self.begun)


@dataclasses.dataclass(frozen=True)
class Response:
  request: Request
  sample: int  # index in the group
  tokens: np.ndarray  # int32 [n]: sampled now, the stop token included
  logp: np.ndarray  # float32 [n]: under the distribution they were drawn from
  full_logp: np.ndarray  # float32 [n]: under the one without top-k, top-p and min-p
  stopped: bool  # by a stop token or a stop string; False: by its length, or not yet finished
  finished: bool  # False: `Scheduler.stop` came before its end
  # int8 or int16 [context + n - 1, l, k]: experts of every token that was fed; None: not recorded
  routing: np.ndarray | None

  @property
  def length(self) -> int:
    """Sampled tokens."""
    return len(self.tokens)


@dataclasses.dataclass
class Usage:
  """What sampling cost; sums, which several runs add up."""

  tokens: int = 0  # sampled
  prefilled: int = 0  # tokens of contexts
  padded: int = 0  # tokens that prefilling computed, padding included
  steps: int = 0  # of decoding
  slot_steps: int = 0  # of decoding, over all slots; `tokens` of them were of use
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0
  cache_bytes: int = 0  # the largest, over all devices

  def add(self, other: "Usage") -> None:
    most = max(self.cache_bytes, other.cache_bytes)
    for field in dataclasses.fields(self):
      setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
    self.cache_bytes = most

  def metrics(self) -> dict[str, float]:
    """By the names of metrics.jsonl."""
    return {
      "sampling/slot_utilisation": self.tokens / max(self.slot_steps, 1),
      "sampling/prefill_utilisation": self.prefilled / max(self.padded, 1),
      "tokens_per_second/decode": self.tokens / max(self.decode_seconds, 1e-9),
      "sampling/decode_steps": float(self.steps),
      "sampling/cache_gib": self.cache_bytes / 2**30,
      "time/sample/prefill": self.prefill_seconds,
      "time/sample/decode": self.decode_seconds,
    }
