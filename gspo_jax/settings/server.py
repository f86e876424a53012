"""Section `engine.server`."""

import dataclasses
from typing import Annotated

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import NonNegativeInt, PositiveInt, Range, Seconds, key


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Servers of engine.name=server: how they are reached, told of new weights and checked.
  docs/engines.md"""

  directory: str = key(
    "", 'of published weights, which all servers see; "": published/ of the workdir'
  )
  token_variable: str = key("GSPO_ENGINE_TOKEN", "of the environment: a bearer token; unset: none")
  in_flight: PositiveInt = key(256, "responses that one server is asked for at once")
  timeout_s: Seconds = key(
    3600.0,
    "of a request, longer than the longest response takes; a server that does not answer /health "
    "is left out long before",
  )
  publish_s: Seconds = key(900.0, "of a request with new weights or a probe")
  wait_s: Seconds = key(300.0, "with no server left, until the run ends")
  retries: NonNegativeInt = key(5, "of a request, on other servers where there are any")
  tolerance: Annotated[float, Range(0, 100)] = key(
    0.0,
    "mean |difference| of a probe's log-probs from the trainer's, in nats, beyond which a server "
    "is not used; 0: 0.005 where sampler and trainer compute in float32, 0.1 in bfloat16",
  )

  def __post_init__(self):
    ranges.check(self, "engine.server")
