"""A server in this process that speaks vLLM's dialect, samples from a small model, and misbehaves
when it is told to."""

import contextlib
import functools
import http.server
import json
import socket
import threading
import time
import urllib.parse

import jax
import numpy as np

from gspo_jax.models import hf, transformer

ROWS, WINDOW = 8, 24


@functools.partial(jax.jit, static_argnums=1)
def _logits(params, model, tokens_BT, position):
  return transformer.logits(params, model, tokens_BT)[:, position]


class FakeServer:
  """What it serves is set by attributes, which tests change as they go.

  Attributes:
    fault: called with the path and the body of every request; what it returns goes wrong.
    raw: log-probs are those before the temperature, as vLLM has them by default.
    reloads: False: new weights are taken with a 200 and not looked at.
    pace: seconds per token.
    token: that a request has to bring.
  """

  def __init__(self, port=0):
    self.model = self.params = None
    self.version, self.raw, self.reloads, self.pace, self.token = "default", False, True, 0.0, ""
    self.fault = lambda path, body: None
    self.connections = []
    self.seen, self.bodies, self.aborted, self._lock = [], [], set(), threading.Lock()
    handler = functools.partial(_Handler, self)
    self._http = _Listening(("127.0.0.1", port), handler)
    self.url = f"http://127.0.0.1:{self._http.server_port}"
    self.dead = False
    threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

  def die(self):
    """Refuses connections and leaves pending requests without answer."""
    if self.dead:
      return
    self.dead = True
    self._http.shutdown()
    self._http.server_close()
    for connection in self.connections:
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

  def answer(self, path, body):
    if path == "/inference/v1/generate":
      return self.generate(body)
    if path == "/collective_rpc":
      directory = body["kwargs"]["weights_path"]
      if self.reloads:
        self.params, self.model = hf.load(directory)
      return 200, dict(results=[None])
    if path == "/update_weight_version":
      self.version = body["new_version"]
      return 200, dict(success=True, new_version=self.version)
    if path == "/inference/v1/abort_requests":
      self.aborted |= set(body["request_ids"])
      return 200, None
    replies = dict(health=None, resume=None, pause=None, reset_prefix_cache=dict(success=True))
    name = path.strip("/")
    return (200, replies[name]) if name in replies else (404, dict(detail="Not Found"))

  def generate(self, body):
    prompt, want = body["token_ids"], body["sampling_params"]
    n, most, heat = want["n"], want["max_tokens"], want["temperature"]
    rng, stop = np.random.default_rng(want["seed"]), want["stop_token_ids"]
    tokens_BT = np.zeros((ROWS, WINDOW), np.int32)
    tokens_BT[:, : len(prompt)] = prompt
    out, versions = [([], []) for _ in range(n)], []
    reason = ["length"] * n
    for t in range(len(prompt), len(prompt) + most):
      time.sleep(self.pace)
      if f"generate-tokens-{body['request_id']}" in self.aborted:
        reason = [r if r == "stop" else "abort" for r in reason]
        break
      with self._lock:
        logits_BV = np.asarray(_logits(self.params, self.model, tokens_BT, t - 1), np.float64)
      versions.append(self.version)
      scaled_BV = logits_BV / (1.0 if self.raw else heat or 1.0)
      said_BV = scaled_BV - np.logaddexp.reduce(scaled_BV, axis=1, keepdims=True)
      noise = rng.gumbel(size=(ROWS, logits_BV.shape[1])) if heat else 0
      drawn = np.argmax(logits_BV / (heat or 1.0) + noise, axis=1)
      for row, (tokens, logp) in enumerate(out):
        if reason[row] == "length":
          tokens.append(int(drawn[row]))
          logp.append(float(said_BV[row, drawn[row]]))
          tokens_BT[row, t] = drawn[row]
          if drawn[row] in stop:
            reason[row] = "stop"
      if "length" not in reason:
        break
    choices = [choice(i, reason[i], *row, versions) for i, row in enumerate(out)]
    return 200, dict(request_id=body["request_id"], choices=choices)


def choice(index, reason, tokens, logp, versions):
  """A response as vLLM has it in its answer; `versions` of the tokens, or of more."""
  spans = [
    dict(version=version, start=t, end=t + 1) for t, version in enumerate(versions[: len(tokens)])
  ]
  content = [dict(token_id=token, logprob=p) for token, p in zip(tokens, logp)]
  return dict(
    index=index,
    finish_reason=reason,
    token_ids=tokens,
    weight_versions=spans,
    logprobs=dict(content=content),
  )


class _Listening(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 128  # With 5, a burst of connections waits for a second.


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True  # Otherwise each answer waits 40 ms.

  def __init__(self, fake, *args):
    self.fake = fake
    fake.connections.append(args[0])
    super().__init__(*args)

  def log_message(self, *_):
    pass

  def do_GET(self):
    self.respond(None)

  def do_POST(self):
    self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

  def respond(self, body):
    path = urllib.parse.urlsplit(self.path).path
    self.fake.seen.append(path)
    self.fake.bodies.append(body)
    if self.fake.token and self.headers["Authorization"] != f"Bearer {self.fake.token}":
      return self.send(401, dict(error="Unauthorized"))
    fault = self.fake.fault(path, body)
    if fault == "hang":
      time.sleep(60)
    if fault == "die":
      self.fake.die()
    if isinstance(fault, str) and fault.isdecimal():
      return self.send(int(fault), dict(error="the engine has died"))
    status, answer = self.fake.answer(path, body)
    if callable(fault):  # changes the answer
      answer = fault(answer)
    if not self.fake.dead:
      self.send(status, answer, cut=fault == "truncate")

  def send(self, status, answer, cut=False):
    content = answer if isinstance(answer, bytes) else b"" if answer is None else None
    content = json.dumps(answer).encode() if content is None else content
    with contextlib.suppress(OSError):  # the client may have left
      self.send_response(status)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content[: len(content) // 2] if cut else content)
    if cut:
      self.close_connection = True
