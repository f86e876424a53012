"""Requests, responses and the cost of sampling: what an engine and the host loop exchange."""

import dataclasses
from typing import Any

import numpy as np

from gspo_jax import sharding
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.sampling import SHORTEST, EngineConfig, SamplingConfig

LEAST_PIECE = 64  # tokens of a piece: each is a call, and goes through its prefix again


@dataclasses.dataclass(frozen=True)
class Workload:
  """The kind of requests to come: an engine sizes its slots and compiles its programs by it.

  Equal workloads compile nothing anew. The one place where the lengths of sampling are derived.
  """

  sampling: SamplingConfig  # max_new_tokens: all that follows the prompt, observations included
  prompt_length: int  # tokens of the longest prompt
  trajectories: int  # under way at once, at most
  group_size: int = 1  # trajectories that begin with the same prompt
  stop_ids: tuple[int, ...] = ()  # tokens that end a turn; they belong to it
  stop_strings: tuple[str, ...] = ()  # the token that completes one ends a turn too
  several_turns: bool = False  # an environment answers, and the trajectory goes on
  partial: bool = False  # trajectories may be put aside and gone on with
  record_routing: bool = False  # keep the experts that prefill and decoding chose
  # Keep the tokens that each one was drawn from, so many at most, which are those of
  # `sampling.top_k`; 0: do not.
  support: int = 0
  vocabulary: int = 0  # ids from here on are none of the tokenizer's; 0: all are
  piece: int = 0  # tokens after which a server has to say what it has sampled; 0: at the end

  @property
  def window(self) -> int:
    """Positions of a slot: the longest prompt and its longest continuation."""
    return self.prompt_length + self.sampling.max_new_tokens

  @property
  def prefix_length(self) -> int:
    """Tokens of the longest prefix; continued responses are prefilled again."""
    return self.window - 1 if self.several_turns or self.partial else self.prompt_length

  @property
  def samples(self) -> int:
    """Responses of a typical request. Turns come back one by one, each to a place in the queue."""
    return 1 if self.several_turns else self.group_size


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Shapes of an engine's arrays for one workload."""

  shards: int  # devices that slots and queue are split over
  slots: int  # responses decoded at once, over all devices
  window: int  # positions of a slot
  rows: int  # prefixes that a device prefills at once, at most
  entries: int  # prefixes in a device's queue
  longest: int  # tokens of a prefix
  prompt: int  # positions that the longest prefix of a request is padded to
  prefix: int  # positions of an entry: no less, since what was put aside comes back
  pages: int  # pages of a device for slots and queue; 0: both are dense
  page: int  # positions of a page
  piece: int  # tokens that a device prefills at once

  def at_once(self, length: int) -> int:
    """Prefixes, padded to this length, in one prefill call of a device."""
    return min(self.rows, max(1, self.piece // length))

  def bucket(self, prefix: int) -> int:
    """Length to pad a prefix to."""
    return bucket(prefix, self.longest, self.piece)


def sizes(workload: Workload, config: EngineConfig, shards: int) -> Sizes:
  """Shapes for `shards` devices, with slots and queue split over them.

  Raises:
    ValueError: `cache_tokens` are not enough for one response on every device.
  """
  slots = -(-config.slots_for(workload.trajectories) // shards)  # per device
  rows, longest = -(-slots // workload.samples), workload.prefix_length
  if config.cache_tokens:  # displaced responses come back
    longest = max(longest, workload.window - 1)
  prefix = bucket(longest, longest, config.prefill_tokens)
  window, entries = max(workload.window, prefix), max(2, min(2 * rows, slots))
  pages, S = 0, config.page_tokens
  if paged(config):
    window = workload.window  # padding takes no pages
    most = slots * -(-window // S) + entries * -(-min(prefix, window) // S)
    pages = min(most, config.cache_tokens // shards // S) if config.cache_tokens else most
    least = -(-window // S) + 1  # the queue has a page of its own of each prefix
    if pages < least:
      raise ValueError(
        f"engine.cache_tokens={config.cache_tokens} is {pages} pages of {S} for each of {shards} "
        f"devices, and one response of {window} positions takes up to {least}: set it to "
        f"{least * S * shards} at least, or to 0"
      )
  return Sizes(
    shards=shards,
    slots=slots * shards,
    window=window,
    rows=rows,
    entries=entries,
    longest=longest,
    prompt=bucket(workload.prefix_length, longest, config.prefill_tokens),
    prefix=prefix,
    pages=pages,
    page=S,
    piece=config.prefill_tokens,
  )


def bucket(prefix: int, longest: int, piece: int) -> int:
  """Padded length of a prefix without its last token; whole pieces beyond `piece`."""
  length, longest = (max(n - 1, SHORTEST) for n in (prefix, longest))
  if length > piece:
    return -(-length // piece) * piece
  return min(1 << (length - 1).bit_length(), longest)


@dataclasses.dataclass(frozen=True)
class Request:
  """Responses that continue one prefix: a prompt, or what a trajectory holds so far.

  A response depends on the weights, `seed`, the prompt, its number and the prefix, and on nothing
  else.
  """

  prompt: tuple[int, ...]
  max_new_tokens: int  # per response, without `prior`
  samples: int = 1
  first_sample: int = 0  # number of the first of them, of the responses to this prompt
  seed: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()  # it also ends with the token that completes one of them
  prior: tuple[int, ...] = ()  # tokens after the prompt, sampled or observed earlier
  unfinished: int = 0  # last ones of `prior`, in the turn under way
  tag: Any = None  # returned with the responses

  @property
  def prefix(self) -> tuple[int, ...]:
    return (*self.prompt, *self.prior)

  @property
  def prefix_length(self) -> int:
    return len(self.prompt) + len(self.prior)

  def check(self, longest: int, window: int, vocab_size: int, detokenize: Any) -> None:
    """Raises ValueError if the request does not fit `longest`, the window, the vocabulary or
    lacks `detokenize`."""
    if not self.prompt:
      raise ValueError("a prompt is empty: it has at least one token")
    if self.max_new_tokens < 1 or self.samples < 1:
      raise ValueError(f"{self.samples} samples of {self.max_new_tokens} tokens: nothing")
    length = self.prefix_length
    if length > longest or length + self.max_new_tokens > window:
      raise ValueError(
        f"a prefix of {length} tokens with max_new_tokens={self.max_new_tokens} does not fit "
        f"prefixes of {longest} tokens in a window of {window}"
      )
    least, most = min(self.prefix), max(self.prefix)
    if not 0 <= least <= most < vocab_size:  # devices would clamp them
      raise ValueError(
        f"a prefix has token ids from {least} to {most}: the model has 0 to {vocab_size - 1}"
      )
    if self.stop_strings and detokenize is None:
      raise ValueError(f"stop_strings={list(self.stop_strings)} need detokenize")


@dataclasses.dataclass(frozen=True)
class Response:
  """Tokens sampled for one of the responses of a request."""

  request: Request
  sample: int  # its number: `first_sample`, `first_sample` + 1, ...
  tokens: np.ndarray  # int32 [n]: sampled now, the stop token included
  logp: np.ndarray  # float32 [n]: under the distribution they were drawn from
  full_logp: np.ndarray  # float32 [n]: under the one without top-k, top-p and min-p
  version: np.ndarray  # int32 [n]: of the weights that sampled each token
  stopped: bool  # ended by a stop token or string; False: by its length, or unfinished
  finished: bool  # False: `Engine.stop` came before its end
  # int8 or int16 [prefix + n - 1, l, k]: experts of every token that was fed; None: not recorded
  experts: np.ndarray | None
  # int32 [n, X]: tokens that each one was drawn from, -1 where they are fewer; None: not recorded
  support: np.ndarray | None = None


@dataclasses.dataclass
class Usage:
  """Cost of sampling; sums, which several workloads add up."""

  tokens: int = 0  # sampled
  flops: float = 0.0  # model operations for prefixes and sampled tokens
  prefilled: int = 0  # tokens of prefixes
  padded: int = 0  # tokens that prefilling computed, padding included
  steps: int = 0  # decode steps
  slot_steps: int = 0  # decode steps over all slots; `tokens` of them were of use
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0
  put_aside: int = 0  # responses that were begun again, since there was no page for them
  cache_bytes: int = 0  # the largest, over all devices
  servers: dict[str, float] = dataclasses.field(default_factory=dict)  # how they stand; no slots

  def add(self, other: "Usage") -> None:
    most, servers = max(self.cache_bytes, other.cache_bytes), self.servers | other.servers
    for name in vars(self).keys() - {"servers"}:
      setattr(self, name, getattr(self, name) + getattr(other, name))
    self.cache_bytes, self.servers = most, servers

  def metrics(self) -> dict[str, float]:
    """By the names of metrics.jsonl."""
    row = {
      "tokens_per_second/decode": self.tokens / max(self.decode_seconds, 1e-9),
      "time/sample/decode": self.decode_seconds,
    }
    if self.servers:
      return row | {f"engine/{name}": value for name, value in self.servers.items()}
    return row | {
      "sampling/slot_utilisation": self.tokens / max(self.slot_steps, 1),
      "sampling/prefill_utilisation": self.prefilled / max(self.padded, 1),
      "sampling/decode_steps": float(self.steps),
      "sampling/cache_gib": self.cache_bytes / 2**30,
      "sampling/put_aside": float(self.put_aside),
      "time/sample/prefill": self.prefill_seconds,
    }


def workload(
  c: RunConfig, stop_ids: tuple[int, ...], several_turns: bool, vocabulary: int = 0
) -> Workload:
  """Returns RL's requests to the engine; several_turns: an environment answers."""
  budget = c.rl.token_budget
  return Workload(
    c.sampling,
    prompt_length=c.data.max_prompt_tokens,
    trajectories=c.rl.rows,
    group_size=c.rl.group_size,
    stop_ids=stop_ids,
    stop_strings=c.sampling.stop_strings,
    several_turns=several_turns,
    partial=c.rl.partial,
    record_routing=c.objective.needs_sampler_routing,
    support=c.support,
    vocabulary=vocabulary,
    # So many tokens of each response may be sampled before anybody knows.
    piece=max(LEAST_PIECE, budget // (8 * c.rl.rows)) if budget else 0,
  )


def paged(config: EngineConfig) -> bool:
  """Returns if the cache is in pages: `auto` on TPU, and with `cache_tokens`."""
  if config.cache == "auto":
    return bool(config.cache_tokens) or sharding.platform() == "tpu"
  return config.cache == "paged"
