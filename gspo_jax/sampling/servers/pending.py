"""Responses that servers are at work on, with what has come of them so far."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from gspo_jax.sampling import stop_strings
from gspo_jax.sampling.requests import Request, Response
from gspo_jax.sampling.servers.calls import Call, Part
from gspo_jax.settings.sampling import SamplingConfig

STOP_PIECE = 64  # tokens of a call whose end only we can see: stop strings need a tokenizer
MOST_ABORTED = 100  # answers in a row without a token


class Pending:
  """One response of a request; its columns grow with every part."""

  def __init__(self, request: Request, number: int, sample: int):
    self.request, self.number, self.sample = request, number, sample
    self.tokens, self.version = np.zeros(0, np.int32), np.zeros(0, np.int32)
    self.logp = np.zeros(0, np.float32)
    self.experts: np.ndarray | None = None
    self.stopped = False
    self.tail: list[int] | None = None  # of `stop_strings.end`
    self.aborted = 0  # answers in a row without a token

  @property
  def left(self) -> int:
    return self.request.max_new_tokens - len(self.tokens)

  def add(self, part: Part, detokenize: Callable[[list[int]], str] | None) -> bool:
    """Appends a part, up to the token that completes a stop string. Whether it was the last."""
    self.aborted = 0 if len(part.tokens) else self.aborted + 1
    new = part.tokens.tolist()
    end, self.tail = stop_strings.end(self.request, self.tail, new, detokenize)
    self.stopped = part.stopped or end is not None
    self.tokens = np.concatenate([self.tokens, part.tokens[:end]])
    self.logp = np.concatenate([self.logp, part.logp[:end]])
    self.version = np.concatenate([self.version, part.version[:end]])
    if part.experts is not None:
      fed = self.request.prefix_length + len(self.tokens) - 1
      # A prefix is prefilled anew for every part; what counts is how each token was fed at first.
      seen = 0 if self.experts is None else len(self.experts)
      new = part.experts[seen:fed]
      self.experts = np.concatenate([self.experts, new]) if seen else new
    return self.stopped or not self.left

  def response(self, whole: bool, finished: bool) -> Response:
    """The response as far as it has come; `whole`: its distribution has all tokens."""
    full_logp = self.logp if whole else np.full_like(self.logp, np.nan)  # nobody says
    return Response(
      self.request,
      self.sample,
      self.tokens,
      self.logp,
      full_logp,
      self.version,
      stopped=finished and self.stopped,
      finished=finished,
      routing=self.experts,
    )


def call_for(
  together: Sequence[Pending], id_: str, sampling: SamplingConfig, routing: bool, piece: int
) -> Call:
  """The next call of responses that have the same tokens so far, for `piece` tokens at most; 0: for
  all that are left.

  Its seed is of the run's seed, the prompt, the number of the first response and the place in it:
  what goes on has other noise than what began.
  """
  first = together[0]
  request, tokens = first.request, (*first.request.prefix, *first.tokens.tolist())
  most = min(first.left, piece or first.left)
  most = min(most, STOP_PIECE) if request.stop_strings else most
  place = len(tokens) - len(request.prompt)
  noise = np.array([request.seed, first.sample, place, *request.prompt], "<i8").tobytes()
  seed = zlib.crc32(noise) & 0x7FFFFFFF
  return Call(id_, tokens, len(together), most, sampling, request.stop_ids, seed, routing)
