"""Host records of responses in flight on the devices, and of prefixes in the devices' queues."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.sampling import stop_strings
from gspo_jax.sampling.local.slots import Sampled
from gspo_jax.sampling.requests import Request, Response


class Entry(NamedTuple):
  """A prefix in a device's queue, with responses still to start in a slot."""

  call: int  # Index of the first `decode` call after the prefill.
  waiting: int  # Number of responses still to start, after the last collected call.
  # Exclusive upper bound on ids of the prefix's responses, which start in ascending order of id.
  # For example, responses 8 to 11 have `end` 12. If `waiting` is 1, response 11 is still to start.
  end: int


@dataclasses.dataclass
class LiveResponse:
  """An unfinished response, on the devices or displaced (refill.py)."""

  request: Request
  sample: int  # Sample number.
  shard: int  # Index of the response's shard (scheduler.py).
  # Experts of the prefix, in a list shared by all responses to the prefix. The list is empty until
  # the experts are fetched, and remains empty if they are not recorded.
  experts: list[np.ndarray]
  call: int = 0  # Index of the first `decode` call after the prefill.
  # Arrays from each `decode` call, as yielded by `split_by_response` after the id.
  parts: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
  count: int = 0  # Number of sampled tokens.
  tail: bytes | None = None  # State of the search for stop strings (`stop_strings.end`).

  @property
  def tokens(self) -> tuple[int, ...]:
    """Tokens sampled so far."""
    return tuple(int(token) for part in self.parts for token in part[0])

  def stopped_by(self, text_bytes: Sequence[bytes] | None) -> int | None:
    """Looks for a stop string in the tokens of the last call.

    Returns the response's number of tokens up to the end of the string; None if there is no string.
    """
    new = self.parts[-1][0].tolist()
    end, self.tail = stop_strings.end(self.request, self.tail, new, text_bytes)
    return None if end is None else self.count - len(new) + end

  def response(
    self, version: int, count: int | None = None, stopped: bool = False, finished: bool = False
  ) -> Response:
    """Returns a Response with the first `count` tokens; None means all tokens."""
    columns = [None if xs[0] is None else np.concatenate(xs)[:count] for xs in zip(*self.parts)]
    no_logp = np.zeros(0, np.float32)
    tokens, logp, full_logp, experts, support = columns or (
      np.zeros(0, np.int32), no_logp, no_logp, None, None,
    )  # fmt: skip
    if self.experts:
      experts = np.concatenate([*self.experts, *([] if experts is None else [experts])])
    return Response(
      self.request,
      self.sample,
      tokens,
      logp,
      full_logp,
      np.full(len(tokens), version, np.int32),
      stopped,
      finished,
      experts,
      support,
    )


def new_responses(request: Request) -> list[LiveResponse]:
  """Returns new, empty responses to a request."""
  return [LiveResponse(request, request.first_sample + i, 0, []) for i in range(request.samples)]


def split_by_response(out: Sampled) -> Iterator[tuple]:
  """Yields (id, tokens, logp, full_logp, experts, support) of each response with new tokens.

  The arrays have one entry per new token; experts and support are None if not recorded.
  """
  steps = int(out.steps)
  id_Z = out.id_nW[:steps].T.ravel()  # Ordered by slot, then by time.
  used_Z = np.flatnonzero(id_Z >= 0)
  if not len(used_Z):
    return
  ids = id_Z[used_Z]
  cuts = np.flatnonzero(np.diff(ids)) + 1
  columns = []
  for x in (out.token_nW, out.logp_nW, out.full_logp_nW, out.experts_nWlk, out.support_nWX):
    if x is None:
      columns.append([None] * (len(cuts) + 1))
      continue
    x = np.swapaxes(x[:steps], 0, 1)
    columns.append(np.split(x.reshape(-1, *x.shape[2:])[used_Z], cuts))
  starts = [0, *cuts.tolist()]
  yield from zip(ids[starts].tolist(), *columns)


def restart_requests(lives: Iterable[LiveResponse]) -> Iterator[tuple[Request, list[LiveResponse]]]:
  """Yields new requests for displaced responses, each with its responses.

  Responses to one request share a new request if they have no tokens yet. A response with tokens
  has a separate request, with these tokens in `prior`.
  """

  def request_key(live: LiveResponse) -> tuple[int, int | None]:
    return id(live.request), live.sample if live.count else None

  for _, group in itertools.groupby(lives, request_key):
    same_request = list(group)
    first = same_request[0]
    request = dataclasses.replace(
      first.request,
      samples=len(same_request),
      first_sample=first.sample,
      prior=(*first.request.prior, *first.tokens),
      max_new_tokens=first.request.max_new_tokens - first.count,
    )
    yield request, same_request
