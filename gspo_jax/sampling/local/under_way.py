"""Responses that have a place on the devices, and what the devices say of them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from gspo_jax.sampling import stop_strings
from gspo_jax.sampling.local.slots import Sampled
from gspo_jax.sampling.requests import Request, Response


class Entry(NamedTuple):
  """A prefix in the queue of a device, for responses that have no slot yet."""

  call: int  # first call of the decoder with its tokens
  waiting: int  # responses without a slot, as last reported
  end: int  # id after that of its last response, which is the last to get a slot


@dataclasses.dataclass
class Live:
  """A response that has a place on the devices."""

  request: Request
  sample: int
  shard: int
  experts: list[np.ndarray]  # experts of its prefix, filled once they are fetched
  call: int = 0  # the first call of `decode` that knows of it
  parts: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
  count: int = 0
  tail: list[int] | None = None  # see `stop_strings.end`

  @property
  def tokens(self) -> tuple[int, ...]:
    """Tokens sampled so far."""
    return tuple(int(token) for part in self.parts for token in part[0])

  def stopped_by(self, detokenize: Callable[[list[int]], str]) -> int | None:
    """Number of sampled tokens up to a stop string in the last part; None: no stop string."""
    new = self.parts[-1][0].tolist()
    end, self.tail = stop_strings.end(self.request, self.tail, new, detokenize)
    return None if end is None else self.count - len(new) + end

  def response(
    self, version: int, count: int | None = None, stopped: bool = False, finished: bool = False
  ) -> Response:
    """Returns the first `count` tokens; all of them by default."""
    columns = [None if xs[0] is None else np.concatenate(xs)[:count] for xs in zip(*self.parts)]
    nothing = np.zeros(0, np.float32)
    tokens, logp, full_logp, experts, support = columns or (
      np.zeros(0, np.int32), nothing, nothing, None, None,
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


def lives_of(request: Request) -> list[Live]:
  """Returns the responses of a request, without tokens."""
  return [Live(request, request.first_sample + i, 0, []) for i in range(request.samples)]


def by_response(out: Sampled) -> Iterator[tuple]:
  """Yields (id, tokens, logp, full_logp, experts, support) of each response with tokens; None:
  not recorded."""
  steps = int(out.steps)
  id_Z = out.id_nW[:steps].T.ravel()  # slot by slot, in the order of time
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


def to_go_on(lives: Iterable[Live]) -> Iterator[tuple[Request, list[Live]]]:
  """Yields requests for displaced responses, each with its responses.

  Responses of one request without tokens stay together; others have a request with their tokens.
  """

  def request_key(live: Live) -> tuple[int, int | None]:
    return id(live.request), live.sample if live.count else None

  for _, group in itertools.groupby(lives, request_key):
    alike = list(group)
    first = alike[0]
    request = dataclasses.replace(
      first.request,
      samples=len(alike),
      first_sample=first.sample,
      prior=(*first.request.prior, *first.tokens),
      max_new_tokens=first.request.max_new_tokens - first.count,
    )
    yield request, alike
