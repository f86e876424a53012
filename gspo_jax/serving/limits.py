"""What a server takes, and how it refuses the rest."""

import dataclasses
from typing import Annotated

from gspo_jax.settings import ranges
from gspo_jax.settings.ranges import PositiveFloat, PositiveInt, Range

Bytes = Annotated[int, Range(1_024, 2**32)]


class Refused(Exception):
  """A request that is answered with an error: an HTTP status, and a message that says what to
  change."""

  def __init__(self, status: int, message: str, param: str | None = None):
    super().__init__(message)
    self.status, self.message, self.param = status, message, param


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of requests. The message of a refusal names the flag of gspo_jax.serve, or the key."""

  window: PositiveInt  # tokens of a prompt and its response: the positions of a slot
  vocab_size: PositiveInt
  most_text: PositiveInt  # characters of a prompt: no window of tokens has more
  most_samples: PositiveInt  # n: responses to one prompt
  most_prompts: PositiveInt  # of one request to /v1/completions
  queue: PositiveInt  # responses that wait or are sampled, of all requests
  body_bytes: Bytes
  stop_ids: PositiveInt  # of a request, those of the tokenizer among them
  stop_strings: PositiveInt  # of a request
  stop_string_bytes: PositiveInt  # of each
  timeout_s: PositiveFloat  # until a request is given up

  def __post_init__(self):
    ranges.check(self, "limits")
