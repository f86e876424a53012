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

  call: int  # of the decoder: the first that reports it
  waiting: int  # responses without a slot, as last reported
  end: int  # id after that of its last response, which is the last to get a slot


@dataclasses.dataclass
class Live:
  """A response that has a place on the devices."""

  request: Request
  sample: int
  shard: int
  prefix_routing: list[np.ndarray]  # filled when it has been fetched
  call: int = 0  # the first call of `decode` that knows of it
  parts: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
  count: int = 0

  @property
  def tokens(self) -> tuple[int, ...]:
    """What has been sampled of it."""
    return tuple(int(token) for part in self.parts for token in part[0])

  def stopped_by(self, detokenize: Callable[[list[int]], str]) -> int | None:
    """Number of sampled tokens that complete a stop string, if the last part completes one."""
    strings = self.request.stop_strings
    if not strings:
      return None
    longest = stop_strings.longest(strings)
    new, *_ = self.parts[-1]
    old: list[int] = []
    earlier = (tokens for tokens, *_ in itertools.islice(reversed(self.parts), 1, None))
    for piece in itertools.chain(earlier, [self.request.last_begun(longest)]):
      old[:0] = map(int, piece)
      if len(old) >= longest:
        break
    found = stop_strings.end(strings, old, new.tolist(), detokenize)
    return None if found is None else self.count - len(new) + found

  def response(
    self, version: int, count: int | None = None, stopped: bool = False, finished: bool = False
  ) -> Response:
    """Returns the first `count` tokens; all of them by default."""
    nothing = [np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)]
    columns = [np.concatenate([x, *xs]) for x, xs in zip(nothing, zip(*self.parts))] or nothing
    experts = None
    if self.prefix_routing:
      experts = np.concatenate([*self.prefix_routing, *(part[3] for part in self.parts)])
      experts = experts[: len(self.prefix_routing[0]) + (self.count if count is None else count)]
    support = None
    if self.parts and self.parts[0][4] is not None:
      support = np.concatenate([part[4] for part in self.parts])[:count]
    columns = [column[:count] for column in columns]
    versions = np.full(len(columns[0]), version, np.int32)
    ended = stopped, finished
    return Response(self.request, self.sample, *columns, versions, *ended, experts, support)


def lives_of(request: Request) -> list[Live]:
  """The responses of a request, of which nothing is sampled yet."""
  return [Live(request, request.first_sample + i, 0, []) for i in range(request.samples)]


def by_response(out: Sampled) -> Iterator[tuple]:
  """(id, tokens, logp, full_logp, experts, support) of each response with tokens in `out`; None for
  what is not recorded."""
  steps = int(out.steps)
  fields = [out.token_nW, out.logp_nW, out.full_logp_nW, out.route_nWlk, out.support_nWX]
  id_Z = out.id_nW[:steps].T.ravel()  # slot by slot, in the order of time
  used_Z = np.flatnonzero(id_Z >= 0)
  if not len(used_Z):
    return
  ids = id_Z[used_Z]
  cuts = np.flatnonzero(np.diff(ids)) + 1
  columns = []
  for x in fields:
    if x is None:
      columns.append([None] * (len(cuts) + 1))
      continue
    x = np.swapaxes(x[:steps], 0, 1)
    columns.append(np.split(x.reshape(-1, *x.shape[2:])[used_Z], cuts))
  starts = [0, *cuts.tolist()]
  yield from zip(ids[starts].tolist(), *columns)


def to_go_on(lives: Iterable[Live]) -> Iterator[tuple[Request, list[Live]]]:
  """Requests for what has lost its place, each with its responses: those of one request that had
  not begun together, any other one by itself with the tokens that it has."""
  of_one = lambda live: (id(live.request), live.sample if live.count else None)  # noqa: E731
  for _, alike in itertools.groupby(lives, of_one):
    alike = list(alike)
    first = alike[0]
    yield (
      dataclasses.replace(
        first.request,
        samples=len(alike),
        first_sample=first.sample,
        begun=(*first.request.begun, *first.tokens),
        max_new_tokens=first.request.max_new_tokens - first.count,
      ),
      alike,
    )
