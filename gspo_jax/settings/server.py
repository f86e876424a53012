"""Section `engine.server`: how servers are reached, told of new weights and checked."""

import dataclasses
from typing import Annotated

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import NonNegativeInt, PositiveInt, Range, Seconds


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Keys that `engine.name=server` looks at. docs/engines.md."""

  directory: str = ""  # of published weights, which all servers see; "": published/ of the workdir
  token_variable: str = "GSPO_ENGINE_TOKEN"  # of the environment: a bearer token; unset: none
  in_flight: PositiveInt = 256  # responses that one server is asked for at once
  # From sending a request to its answer; longer than the longest response takes. A server that does
  # not even answer /health is left out long before.
  timeout_s: Seconds = 3600.0
  publish_s: Seconds = 900.0  # of a request with new weights or a probe; timeout_s bounds it too
  wait_s: Seconds = 300.0  # with no server left, until the run ends
  retries: NonNegativeInt = 5  # of a request, on other servers where there are any
  # Mean |difference| of the probe's log-probs, in nats, beyond which a server is not used; 0: 0.005
  # where sampler and trainer compute in float32, 0.1 in bfloat16
  tolerance: Annotated[float, Range(0, 100)] = 0.0

  def __post_init__(self):
    ranges.check(self, "engine.server")


DEFAULT = ServerConfig()
