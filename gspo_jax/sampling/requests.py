"""Requests, responses and usage: data exchanged between an engine and the host loop."""

import dataclasses
from typing import Any

import numpy as np

from gspo_jax import sharding
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.sampling import SHORTEST_PREFILL, EngineConfig, SamplingConfig

# Minimum tokens of a partial response. Each further call to a server prefills the prefix again.
LEAST_PIECE = 64


@dataclasses.dataclass(frozen=True)
class Workload:
  """Limits of future requests. They decide an engine's slots and compiled programs.

  Equal workloads share compiled programs. All lengths in sampling are derived here.
  """

  sampling: SamplingConfig  # `max_new_tokens` bounds all tokens after the prompt.
  prompt_length: int  # Maximum tokens of a prompt.
  trajectories: int  # Maximum number of trajectories in flight.
  group_size: int = 1  # Trajectories with the same prompt.
  stop_ids: tuple[int, ...] = ()  # Tokens that end a turn, as its last token.
  stop_strings: tuple[str, ...] = ()  # Texts that end a turn; the completing token is the last.
  several_turns: bool = False  # Whether observations and more turns may follow a turn.
  partial: bool = False  # Whether partial rollouts are resumed.
  record_routing: bool = False  # Whether to record the experts chosen in prefill and decoding.
  # Maximum tokens of a recorded support (the tokens in a sampling distribution), from
  # `sampling.top_k`; 0 to record no support.
  support: int = 0
  vocabulary: int = 0  # Exclusive upper bound on sampled ids: the tokenizer's size; 0 for none.
  piece: int = 0  # Maximum tokens of a server's partial response; 0 for whole responses.

  @property
  def window(self) -> int:
    """Positions of a slot: maximum tokens of a prompt and its continuation."""
    return self.prompt_length + self.sampling.max_new_tokens

  @property
  def prefix_length(self) -> int:
    """Maximum tokens of a prefix; resumed responses are prefilled again."""
    return self.window - 1 if self.several_turns or self.partial else self.prompt_length

  @property
  def samples(self) -> int:
    """Responses of a typical request. With several turns, each turn is a separate request."""
    return 1 if self.several_turns else self.group_size


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Shapes of an engine's arrays for one workload."""

  shards: int  # Devices over which slots and queue are split.
  slots: int  # Responses decoded at once, over all devices.
  window: int  # Positions of a slot.
  rows: int  # Maximum prefixes in one prefill call of a device.
  entries: int  # Prefixes in a device's queue.
  longest: int  # Maximum tokens of a prefix.
  prompt: int  # Padded length of a request's longest prefix.
  prefix: int  # Positions of a queue entry, enough for a displaced response's prefix too.
  pages: int  # Pages of a device for slots and queue; 0 if both are dense.
  page: int  # Positions of a page.
  piece: int  # Maximum tokens in one prefill call of a device.

  def at_once(self, length: int) -> int:
    """Returns the number of prefixes, padded to `length`, in one prefill call of a device."""
    return min(self.rows, max(1, self.piece // length))

  def bucket(self, prefix: int) -> int:
    """Returns the padded length of a prefix."""
    return bucket(prefix, self.longest, self.piece)


def sizes(workload: Workload, config: EngineConfig, shards: int) -> Sizes:
  """Returns an engine's shapes, with slots and queue split over `shards` devices.

  Raises:
    ValueError: `cache_tokens` are too few for one response on every device.
  """
  slots = -(-config.slots_for(workload.trajectories) // shards)  # Slots per device.
  rows, longest = -(-slots // workload.samples), workload.prefix_length
  if config.cache_tokens:  # Displaced responses are prefilled again, with all their tokens.
    longest = max(longest, workload.window - 1)
  prefix = bucket(longest, longest, config.prefill_tokens)
  window, entries = max(workload.window, prefix), max(2, min(2 * rows, slots))
  pages, S = 0, config.page_tokens
  if paged(config):
    window = workload.window  # Padding takes no pages.
    most = slots * -(-window // S) + entries * -(-min(prefix, window) // S)
    pages = min(most, config.cache_tokens // shards // S) if config.cache_tokens else most
    least = -(-window // S) + 1  # One more: a slot copies a waiting prefix's last, partial page.
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
  """Returns the padded length of a prefix without its last token.

  Above `piece` tokens, this length is a multiple of `piece`.
  """
  length, longest = (max(n - 1, SHORTEST_PREFILL) for n in (prefix, longest))
  if length > piece:
    return -(-length // piece) * piece
  return min(1 << (length - 1).bit_length(), longest)


@dataclasses.dataclass(frozen=True)
class Request:
  """Request for responses to one prefix: a prompt, or a trajectory's tokens so far.

  A response depends only on the weights, `seed`, the prompt, the sample number and the prefix.
  """

  prompt: tuple[int, ...]
  max_new_tokens: int  # Maximum new tokens of each response, without `prior`.
  samples: int = 1  # Number of responses.
  first_sample: int = 0  # Sample number of the first response.
  seed: int = 0
  stop_ids: tuple[int, ...] = ()  # Tokens that end a response.
  stop_strings: tuple[str, ...] = ()  # Texts that end a response; the completing token is the last.
  prior: tuple[int, ...] = ()  # Earlier tokens after the prompt, sampled or observed.
  unfinished: int = 0  # Number of tokens of the current turn, at the end of `prior`.
  tag: Any = None  # Caller's label, unused by engines.

  @property
  def prefix(self) -> tuple[int, ...]:
    return (*self.prompt, *self.prior)

  @property
  def prefix_length(self) -> int:
    return len(self.prompt) + len(self.prior)

  def check(self, longest: int, window: int, vocab_size: int, detokenize: Any) -> None:
    """Raises ValueError if the request cannot be sampled.

    Args:
      longest: maximum tokens of a prefix.
      window: maximum tokens of a prefix and a response.
      vocab_size: exclusive upper bound on token ids.
      detokenize: function from token ids to text, required for stop strings; None without one.
    """
    if not self.prompt:
      raise ValueError("a prompt is empty: it has at least one token")
    if self.max_new_tokens < 1 or self.samples < 1:
      raise ValueError(
        f"samples={self.samples} and max_new_tokens={self.max_new_tokens}: both are at least 1"
      )
    length = self.prefix_length
    if length > longest or length + self.max_new_tokens > window:
      raise ValueError(
        f"a prefix of {length} tokens with max_new_tokens={self.max_new_tokens} does not fit "
        f"prefixes of {longest} tokens in a window of {window}"
      )
    least, most = min(self.prefix), max(self.prefix)
    if not 0 <= least <= most < vocab_size:  # Devices would clamp such ids.
      raise ValueError(
        f"a prefix has token ids from {least} to {most}: the model has 0 to {vocab_size - 1}"
      )
    if self.stop_strings and detokenize is None:
      raise ValueError(f"stop_strings={list(self.stop_strings)} need detokenize")


@dataclasses.dataclass(frozen=True)
class Response:
  """Sampled tokens of one response to a request."""

  request: Request
  sample: int  # Sample number: `first_sample`, `first_sample` + 1, ...
  tokens: np.ndarray  # New tokens, the stop token included, int32 [n].
  logp: np.ndarray  # Log-probs under the sampling distribution, float32 [n].
  full_logp: np.ndarray  # Log-probs without top-k, top-p and min-p, float32 [n].
  version: np.ndarray  # Weight version of each token, int32 [n].
  stopped: bool  # Whether a stop token or stop string ended the response; False if truncated.
  finished: bool  # False if `Engine.stop` interrupted the response.
  # Experts of every token but the last, int8 or int16 [prefix + n - 1, l, k]; None if not recorded.
  experts: np.ndarray | None
  # Token ids in each sampling distribution, int32 [n, X], padded with -1; None if not recorded.
  support: np.ndarray | None = None
  failure: str = ""  # Reason for giving the response up after the tokens so far; "" without one.


@dataclasses.dataclass
class Usage:
  """Cost of sampling, as sums over any number of workloads."""

  tokens: int = 0  # Sampled tokens.
  flops: float = 0.0  # Model FLOPs for prefixes and sampled tokens.
  prefilled: int = 0  # Tokens of prefixes.
  padded: int = 0  # Tokens computed in prefill, padding included.
  steps: int = 0  # Decode steps.
  slot_steps: int = 0  # Decode steps times slots; `tokens` of these slot steps were useful.
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0
  put_aside: int = 0  # Responses displaced for lack of a free page, and restarted.
  cache_bytes: int = 0  # Maximum size of the cache, summed over devices.
  # Metrics of servers; {} for a local engine.
  servers: dict[str, float] = dataclasses.field(default_factory=dict)

  def add(self, other: "Usage") -> None:
    most, servers = max(self.cache_bytes, other.cache_bytes), self.servers | other.servers
    for name in vars(self).keys() - {"servers"}:
      setattr(self, name, getattr(self, name) + getattr(other, name))
    self.cache_bytes, self.servers = most, servers

  def metrics(self) -> dict[str, float]:
    """Returns metrics by their names in metrics.jsonl."""
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
  """Returns the workload of RL.

  Args:
    c: configuration of the run.
    stop_ids: tokens that end a turn.
    several_turns: whether observations and more turns may follow a turn.
    vocabulary: the tokenizer's size; 0 for no bound on sampled ids.
  """
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
    # Tokens count in the budget only after a piece has arrived, so pieces are small.
    piece=max(LEAST_PIECE, budget // (8 * c.rl.rows)) if budget else 0,
  )


def paged(config: EngineConfig) -> bool:
  """Whether the cache is paged; `auto` means on TPU or with `cache_tokens`."""
  if config.cache == "auto":
    return bool(config.cache_tokens) or sharding.platform() == "tpu"
  return config.cache == "paged"
