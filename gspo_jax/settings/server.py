"""Section `engine.server`: how servers are reached, started, told of new weights and checked."""

import dataclasses
from typing import Annotated, Literal

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import NonNegativeInt, PositiveInt, Range, Seconds


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Keys that `engine.name=server` looks at. docs/engines.md."""

  # vllm: /inference/v1/generate | vllm_completions: /v1/completions | sglang | auto: the first of
  # these that a server has
  dialect: Literal["auto", "vllm", "vllm_completions", "sglang"] = "auto"
  directory: str = ""  # of published weights, which all servers see; "": published/ of the workdir
  # What starts the server of a URL here, in a shell: {host}, {port}, {index} of the URL, {weights};
  # "": somebody else does, and starts it again if it has to be
  command: str = ""
  # False: new weights are brought by a restart with `command`; for servers that answer 200 to a
  # reload and stay as they were
  reloads: bool = True
  token_variable: str = "GSPO_ENGINE_TOKEN"  # of the environment: a bearer token; unset: none
  in_flight: PositiveInt = 256  # responses that one server is asked for at once
  # From sending a request to its answer; longer than the longest response takes. A server that does
  # not even answer /health is left out long before.
  timeout_s: Seconds = 3600.0
  # Until a server that is being started answers, and of each request with new weights or a probe
  start_s: Seconds = 900.0
  wait_s: Seconds = 300.0  # with no server left, until the run ends
  retries: NonNegativeInt = 5  # of a request, on other servers where there are any
  # Mean |difference| of the probe's log-probs, in nats, beyond which a server is not used; 0: 0.005
  # where sampler and trainer compute in float32, 0.1 in bfloat16
  tolerance: Annotated[float, Range(0, 100)] = 0.0

  def __post_init__(self):
    ranges.check(self, "engine.server")
    if not (self.reloads or self.command):
      raise ValueError(
        "engine.server.reloads=False needs engine.server.command, which starts servers again"
      )


DEFAULT = ServerConfig()
