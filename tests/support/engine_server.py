"""A server in this process with this project's engine behind it; experts come with the tokens."""

import base64
import io

import numpy as np

from gspo_jax.sampling import LocalEngine, Request, SamplingConfig, Workload
from support.fake_server import ROWS, WINDOW, FakeServer, choice


class EngineServer(FakeServer):
  """Samples one request at a time, with slots and a cache, from a model with experts."""

  def generate(self, body):
    want = body["sampling_params"]
    truncation = (want[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    # One window and any prefix: few programs are compiled.
    workload = Workload(
      SamplingConfig(*truncation, max_new_tokens=WINDOW // 2),
      prompt_length=WINDOW // 2,
      trajectories=ROWS,
      stop_ids=tuple(want["stop_token_ids"]),
      partial=True,
      record_routing=True,
    )
    request = Request(
      tuple(body["token_ids"]),
      want["max_tokens"],
      samples=want["n"],
      seed=want["seed"],
      stop_ids=workload.stop_ids,
    )
    responses = []
    with self._lock:
      version = self.version
      engine = LocalEngine(self.model)
      engine.load(self.params, version=0)
      engine.start(workload)
      engine.submit(request)
      while engine.busy:
        responses += engine.step()
    choices = [_choice(response, version) for response in responses]
    return 200, dict(request_id=body["request_id"], choices=choices)


def _choice(response, version):
  tokens, reason = response.tokens.tolist(), "stop" if response.stopped else "length"
  versions = [version] * len(tokens)
  body = choice(response.sample, reason, tokens, response.logp.tolist(), versions)
  file = io.BytesIO()
  np.save(file, response.experts)
  return body | dict(routed_experts=base64.b64encode(file.getvalue()).decode())
