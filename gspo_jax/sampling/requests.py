"""Requests, responses and usage: data exchanged between an engine and the host loop."""

import dataclasses
from typing import Any

import numpy as np

from gspo_jax import sharding
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.sampling import SHORTEST_PREFILL, EngineConfig, SamplingConfig

# Smallest `Workload.piece` of a run with a token budget. Each piece of a response is sampled by a
# separate call. Each call may prefill the whole prefix again, so shorter pieces would waste work.
LEAST_PIECE = 64


@dataclasses.dataclass(frozen=True)
class Workload:
  """Limits of an engine's requests. A local engine's array shapes follow from these limits."""

  sampling: SamplingConfig  # Its `max_new_tokens` bounds all tokens after the prompt.
  prompt_length: int  # Maximum number of tokens of a prompt.
  trajectories: int  # Maximum number of trajectories in flight.
  group_size: int = 1  # Maximum number of trajectories in a group.
  slots: int = 0  # Default number of slots; 0: one for each trajectory.
  stop_ids: tuple[int, ...] = ()  # Token ids that end a turn. The stop token belongs to the turn.
  stop_strings: tuple[str, ...] = ()  # A turn ends at the token that completes one of them.
  several_turns: bool = False  # Whether observations and more turns may follow a turn.
  partial: bool = False  # Whether unfinished trajectories are resumed.
  record_routing: bool = False  # Whether to record the experts chosen in prefill and decoding.
  # Maximum number of tokens in a recorded support, the set of tokens inside top-k, top-p and min-p.
  # 0 means that no support is recorded.
  support: int = 0
  # The tokenizer's size, an exclusive upper bound on sampled token ids. A model may have more
  # embeddings than the tokenizer has tokens. 0 means no bound.
  vocabulary: int = 0
  piece: int = 0  # Maximum number of new tokens in one call to a server; 0 for no maximum.

  @property
  def window(self) -> int:
    """Maximum number of tokens of a prompt with all tokens after it."""
    return self.prompt_length + self.sampling.max_new_tokens

  @property
  def prefix_length(self) -> int:
    """Maximum number of tokens of a prefix: a prompt, or a trajectory to continue."""
    return self.window - 1 if self.several_turns or self.partial else self.prompt_length

  @property
  def samples(self) -> int:
    """Number of responses of a typical request.

    If trajectories have several turns, every turn after the first is a request for one response.
    """
    return 1 if self.several_turns else self.group_size


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a local engine's arrays for one workload.

  A shard is one of the parts into which the mesh's batch axes split slots and queue.
  """

  shards: int  # Number of shards.
  slots: int  # Number of responses decoded at once, over all shards.
  window: int  # Number of positions of a slot in the cache.
  rows: int  # Maximum number of prefixes in one prefill, per shard.
  entries: int  # Maximum number of prefixes in the queue, per shard.
  longest: int  # Maximum number of tokens of a prefix, restarted responses (refill.py) included.
  prompt: int  # Padded length of the longest prefix, restarted responses excluded.
  prefix: int  # Padded length of a prefix of `longest` tokens: the length of a queue entry.
  pages: int  # Number of pages for slots and queue, per shard; 0 for a dense cache.
  page: int  # Number of positions of a page.
  piece: int  # Maximum number of tokens in one forward pass of prefill, per shard.

  def at_once(self, length: int) -> int:
    """Returns how many prefixes fit into one prefill if padded to `length`, per shard."""
    return min(self.rows, max(1, self.piece // length))

  def bucket(self, prefix: int) -> int:
    """Returns the padded length of a prefix of `prefix` tokens."""
    return bucket(prefix, self.longest, self.piece)


def sizes(workload: Workload, config: EngineConfig, shards: int) -> Sizes:
  """Returns the sizes of a local engine's arrays for `shards` shards.

  Raises:
    ValueError: `engine.cache_tokens` is too small for one response on every shard.
  """
  slots = -(-config.slots_for(workload.trajectories, workload.slots) // shards)  # Slots per shard.
  rows, longest = -(-slots // workload.samples), workload.prefix_length
  if config.cache_tokens:  # Responses may be displaced (refill.py), and prefilled again in full.
    longest = max(longest, workload.window - 1)
  prefix = bucket(longest, longest, config.prefill_tokens)
  window, entries = max(workload.window, prefix), max(2, min(2 * rows, slots))
  pages, S = 0, config.page_tokens
  if paged(config):
    window = workload.window  # The padding of `prefix` takes no pages.
    most = slots * -(-window // S) + entries * -(-min(prefix, window) // S)
    pages = min(most, config.cache_tokens // shards // S) if config.cache_tokens else most
    least = -(-window // S) + 1  # A slot copies a prefix's last page, so this page exists twice.
    if pages < least:
      raise ValueError(
        f"engine.cache_tokens={config.cache_tokens} is {pages} pages of {S} positions for each of "
        f"{shards} shards, and one response of {window} positions takes up to {least} pages: set "
        f"the key to {least * S * shards} or more, or to 0"
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

  Prefill excludes the last token, the input of the first decode step. The remaining tokens are
  padded to a power of two of at least SHORTEST_PREFILL, but not beyond the longest prefix. If there
  are more than `piece`, they are padded to a multiple of `piece` instead. For example, a prefix of
  101 tokens has the padded length 128, or 110 if the longest prefix has 111 tokens.

  Args:
    prefix: number of tokens of the prefix.
    longest: number of tokens of the longest prefix.
    piece: maximum number of tokens in one forward pass.
  """
  length, longest = (max(n - 1, SHORTEST_PREFILL) for n in (prefix, longest))
  if length > piece:
    return -(-length // piece) * piece
  return min(1 << (length - 1).bit_length(), longest)


@dataclasses.dataclass(frozen=True)
class Request:
  """Request for responses to a prefix: a prompt, or a trajectory's tokens so far.

  A response's random numbers depend only on `seed`, the prompt, the response's sample number, and
  the positions of its tokens. Sample numbers tell the responses to one prompt apart.
  """

  prompt: tuple[int, ...]  # Token ids.
  max_new_tokens: int  # Maximum number of new tokens of each response; `prior` is not counted.
  samples: int = 1  # Number of responses.
  first_sample: int = 0  # Sample number of the first response. Later responses count up from it.
  seed: int = 0
  stop_ids: tuple[int, ...] = ()  # Token ids that end a response. The stop token belongs to it.
  stop_strings: tuple[str, ...] = ()  # A response ends at the token that completes one of them.
  prior: tuple[int, ...] = ()  # Earlier tokens after the prompt, sampled or observed.
  unfinished: int = 0  # Number of tokens at the end of `prior` that belong to the current turn.
  tag: Any = None  # Caller's label; engines do not use it.

  @property
  def prefix(self) -> tuple[int, ...]:
    return (*self.prompt, *self.prior)

  @property
  def prefix_length(self) -> int:
    return len(self.prompt) + len(self.prior)

  def check(self, longest: int, window: int, vocab_size: int, text_bytes: Any) -> None:
    """Raises ValueError if the request cannot be sampled.

    Args:
      longest: maximum number of tokens of a prefix.
      window: maximum number of tokens of a prefix with its response.
      vocab_size: exclusive upper bound on token ids.
      text_bytes: bytes of each token id's text, required for stop strings; None if unknown.
    """
    if not self.prompt:
      raise ValueError("a prompt is empty: give it at least one token")
    if self.max_new_tokens < 1 or self.samples < 1:
      raise ValueError(
        f"samples={self.samples} and max_new_tokens={self.max_new_tokens}: both must be at least 1"
      )
    length = self.prefix_length
    if length > longest or length + self.max_new_tokens > window:
      raise ValueError(
        f"a prefix of {length} tokens with max_new_tokens={self.max_new_tokens} is too long: the "
        f"limits are {longest} tokens for the prefix and {window} with the response"
      )
    least, most = min(self.prefix), max(self.prefix)
    if not 0 <= least <= most < vocab_size:  # Devices would clamp such ids.
      raise ValueError(
        f"a prefix has token ids from {least} to {most}: the model has 0 to {vocab_size - 1}"
      )
    if self.stop_strings and text_bytes is None:
      raise ValueError(
        f"stop_strings={list(self.stop_strings)} need the engine's argument `text_bytes`: pass "
        "stop_strings.text_bytes(tokenizer)"
      )


@dataclasses.dataclass(frozen=True)
class Response:
  """Sampled tokens of one response to a request."""

  request: Request
  sample: int  # Sample number: `first_sample`, `first_sample` + 1, ...
  tokens: np.ndarray  # New tokens, the stop token included, int32 [n].
  logp: np.ndarray  # Log-probs under the sampling distribution, float32 [n].
  full_logp: np.ndarray  # Log-probs without top-k, top-p and min-p, float32 [n]; NaN if unknown.
  version: np.ndarray  # Weight version of each token, int32 [n].
  stopped: bool  # Whether a stop token or stop string ended the response.
  finished: bool  # False if `Engine.stop` interrupted the response.
  # Experts chosen for all tokens of prefix and response except the last token, int8 or int16
  # [prefix + n - 1, l, k]; None if not recorded.
  experts: np.ndarray | None
  # Token ids in each sampling distribution, int32 [n, X], padded with -1; None if not recorded.
  support: np.ndarray | None = None
  failure: str = ""  # Reason why no more tokens could be sampled; "" if there was no failure.


@dataclasses.dataclass
class Usage:
  """Cost of sampling, as sums over any number of workloads."""

  tokens: int = 0  # Sampled tokens.
  flops: float = 0.0  # Model FLOPs for prefixes and sampled tokens.
  prefilled: int = 0  # Tokens computed in prefill, padding excluded.
  padded: int = 0  # Tokens computed in prefill, padding included; 0 for servers.
  steps: int = 0  # Decode steps; 0 for servers.
  slot_steps: int = 0  # Decode steps times slots, free slots included.
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0
  put_aside: int = 0  # Restarts of responses that were displaced for lack of pages (refill.py).
  # Size of the cache on all devices. Over several workloads, this is a maximum instead of a sum.
  cache_bytes: int = 0
  # Newest metrics of servers, by name; {} for a local engine, and on hosts other than the first.
  servers: dict[str, float] = dataclasses.field(default_factory=dict)

  def add(self, other: "Usage") -> None:
    """Adds the usage of a later workload."""
    most, servers = max(self.cache_bytes, other.cache_bytes), self.servers | other.servers
    for name in vars(self).keys() - {"servers"}:
      setattr(self, name, getattr(self, name) + getattr(other, name))
    self.cache_bytes, self.servers = most, servers

  def metrics(self) -> dict[str, float]:
    """Returns metrics by name, as in metrics.jsonl."""
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
  """Returns the workload of a run's RL phase.

  Args:
    c: configuration of the run.
    stop_ids: token ids that end a turn.
    several_turns: whether observations and more turns may follow a turn.
    vocabulary: the tokenizer's size; 0 for no bound on sampled token ids.
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
    # Sampling may end once `rl.token_budget` tokens have arrived. Tokens arrive from servers in
    # pieces, so small pieces keep the number of sampled tokens near the budget.
    piece=max(LEAST_PIECE, budget // (8 * c.rl.rows)) if budget else 0,
  )


def paged(config: EngineConfig) -> bool:
  """Whether the cache is paged.

  If `engine.cache` is "auto", the cache is paged on TPU, and on any platform if `cache_tokens` is
  set.
  """
  if config.cache == "auto":
    return bool(config.cache_tokens) or sharding.platform() == "tpu"
  return config.cache == "paged"
