"""An engine without a model, and a workload for it."""

import numpy as np

from gspo_jax.sampling import Response, Usage, Workload
from gspo_jax.settings.sampling import SamplingConfig

STOP = 9
WORKLOAD = Workload(SamplingConfig(1.0, 0, 1.0, 0.0, 12), 4, 6, 2, stop_ids=(STOP,), partial=True)


class Echo:
  """Continues a prefix with its last token, counted down; a token of each request in every step."""

  def __init__(self):
    self.usage, self.version = Usage(), None
    self.calls = []

  def load(self, params, version):
    self.version = version

  def release(self):
    self.version = None

  def start(self, workload):
    self.usage, self.workload, self.under_way = Usage(), workload, []
    self.calls.append("start")

  def submit(self, request):
    self.calls.append(request)
    self.under_way += [(request, request.first_sample + g, []) for g in range(request.samples)]

  @property
  def busy(self):
    return bool(self.under_way)

  def step(self):
    for request, sample, tokens in self.under_way:
      before = [*request.prefix, *tokens][-1]
      first = not request.prior and not tokens
      tokens.append(STOP if before == 1 else before - 1 + sample * first)
      self.usage.tokens += 1
    over = [entry for entry in self.under_way if self.over(*entry)]
    self.under_way = [entry for entry in self.under_way if not self.over(*entry)]
    return [self.response(*entry, finished=True) for entry in over]

  def over(self, request, sample, tokens):
    return tokens[-1] == STOP or len(tokens) == request.max_new_tokens

  def stop(self):
    interrupted, self.under_way = self.under_way, []
    self.calls.append("stop")
    return [self.response(*entry, finished=False) for entry in interrupted]

  def response(self, request, sample, tokens, finished):
    logp = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    version = np.full(len(tokens), self.version, np.int32)
    stopped = finished and tokens[-1] == STOP
    return Response(
      request, sample, np.array(tokens, np.int32), logp, logp, version, stopped, finished, None
    )
