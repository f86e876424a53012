"""One server, and what is known of it."""

import asyncio
import dataclasses
from typing import NamedTuple

from gspo_jax.sampling.servers.dialects import Dialect
from gspo_jax.sampling.servers.launch import Process


class Moved(Exception):
  """What a server had of a call is lost, since it was left out or took new weights meanwhile, which
  is no failure of either."""


class Post(NamedTuple):
  """A call on its way to a server."""

  call: str  # its id
  sent: str  # the id of this attempt
  samples: int


@dataclasses.dataclass(eq=False)
class Server:
  """One server and what is known of it."""

  url: str
  index: int
  reloads: bool = True  # False: new weights need a restart
  dialect: Dialect | None = None  # once it has been found out, until the server is left out
  usable: bool = False
  why: str = "it has not been asked yet"  # it is not usable
  refused: bool = False  # and will not be, as it was started
  version: int = -1  # of its weights
  failures: int = 0  # in a row
  resting: bool = False  # since it was busy a moment ago
  busy_since: float | None = None  # and has answered no call; on the monotonic clock
  disagreed: bool = False  # with the probe, after it took new weights in place
  restarted: bool = False  # for the newest weights
  process: Process | None = None
  posts: dict[asyncio.Task, Post] = dataclasses.field(default_factory=dict)
  # Not set while it has new weights and nobody knows yet whether they are right.
  settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

  @property
  def load(self) -> int:
    """Responses that it is asked for."""
    return sum(post.samples for post in self.posts.values())
