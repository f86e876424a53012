"""What a server is asked for and what it answers, with every answer checked."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from gspo_jax.models.experts import routing
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import SamplingConfig

# What can be wrong with an answer, in the order of docs/engines.md.
KINDS = ("connection", "timeout", "health", "status", "body", "tokens", "version")
SLACK = 1e-3  # nats above 0 that rounding may put a log-probability


class Failed(Exception):
  """A server did not do what it was asked for; another one may, or the same one later.

  Attributes:
    kind: one of KINDS.
  """

  def __init__(self, kind: str, text: str):
    super().__init__(text)
    self.kind = kind


class Busy(Failed):
  """A server has as much to do as it takes, which is nothing against it."""


class Refused(Exception):
  """A server cannot do what the run needs, now or later, as it was started."""


@dataclasses.dataclass(frozen=True)
class Call:
  """A request to one server: `samples` continuations of the same tokens."""

  id: str
  tokens: tuple[int, ...]
  samples: int
  max_new_tokens: int
  sampling: SamplingConfig  # but for its `max_new_tokens`
  stop_ids: tuple[int, ...]
  seed: int
  routing: bool = False  # ask for the experts of every token


@dataclasses.dataclass(frozen=True)
class Part:
  """One continuation; the whole of a response or a stretch of it."""

  tokens: np.ndarray  # int32 [n], the stop token included
  logp: np.ndarray  # float32 [n]: after temperature and truncation
  version: np.ndarray  # int32 [n]: of the weights
  stopped: bool  # by a stop token
  aborted: bool  # somebody told the server to leave it
  # [tokens of the call + n - 1, l, k]: experts of every token that was fed; None: not sent
  experts: np.ndarray | None = None


@contextlib.contextmanager
def failing(text: str) -> Iterator[None]:
  """Whatever an answer makes us stumble over is a failure of its server, which `text` names."""
  try:
    yield
  except Failed:
    raise
  except Exception as error:  # a header of .npy is read as Python, with whatever that may raise
    raise Failed("body", f"{text}: {error!r:.80}") from error


def checked(
  parts: list[Part], call: Call, model: ModelConfig, oldest: int, newest: int
) -> list[Part]:
  """The parts, with experts of layers that have some, where these were asked for.

  Args:
    oldest, newest: versions of the weights that may have sampled them.

  Raises:
    Failed: they are not what was asked for.
  """
  if len(parts) != call.samples:
    raise Failed("tokens", f"{len(parts)} responses came for {call.samples}")
  kept = []
  for row, part in enumerate(parts):
    try:
      _check(part, call, model, oldest, newest)
      experts = _experts(part, call, model) if call.routing else None
    except Failed as error:
      raise Failed(error.kind, f"response {row}: {error}") from error
    kept.append(dataclasses.replace(part, experts=experts))
  return kept


def _check(part: Part, call: Call, model: ModelConfig, oldest: int, newest: int) -> None:
  n, tokens = len(part.tokens), part.tokens
  if n > call.max_new_tokens or (n == 0 and not part.aborted):
    raise Failed("tokens", f"{n} tokens came where 1 to {call.max_new_tokens} were asked for")
  if n and not 0 <= tokens.min() <= tokens.max() < model.vocab_size:
    raise Failed(
      "tokens", f"token ids reach {tokens.max()}, the model has 0 to {model.vocab_size - 1}"
    )
  if len(part.logp) != n:
    raise Failed("tokens", f"{len(part.logp)} log-probs came for {n} tokens")
  if not (np.isfinite(part.logp).all() and (part.logp <= SLACK).all()):
    raise Failed("tokens", "a log-prob is above 0 or not finite")
  ends = np.isin(tokens, call.stop_ids)
  if ends[:-1].any() or (n and bool(ends[-1]) != part.stopped):
    raise Failed("tokens", "a response does not end where its stop token is")
  if not (part.stopped or part.aborted or n == call.max_new_tokens):
    raise Failed("tokens", f"a response ended after {n} tokens, without a stop token")
  if n and not oldest <= part.version.min() <= part.version.max() <= newest:
    raise Failed(
      "version",
      f"weights {part.version.min()} to {part.version.max()} answered, not {oldest} to {newest}",
    )


def _experts(part: Part, call: Call, model: ModelConfig) -> np.ndarray | None:
  """[fed, l, k], in the storage dtype of routing."""
  experts, fed = part.experts, len(call.tokens) + len(part.tokens) - 1
  if not len(part.tokens):
    return None
  if experts is None:
    raise Failed("body", "no routed experts came")
  moe_layers = list(filter(model.is_moe, range(model.num_layers)))
  for count in (len(moe_layers), model.num_layers):  # some servers have rows for all layers
    if experts.size == fed * count * model.experts_per_token and experts.dtype.kind in "iu":
      experts = experts.reshape(fed, count, model.experts_per_token)
      experts = experts if count == len(moe_layers) else experts[:, moe_layers]
      if 0 <= experts.min() <= experts.max() < model.num_experts:
        return experts.astype(routing.storage_dtype(model.num_experts))
  raise Failed("body", f"experts of shape {part.experts.shape} came for {fed} tokens")
