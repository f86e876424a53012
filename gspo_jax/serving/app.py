"""The HTTP side: routes, who may ask, how much, and what an error looks like.

Nothing here touches the engine: requests go to its thread (`Loop`), and long texts are made in
others.
"""

import asyncio
import dataclasses
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gspo_jax.sampling import Trajectory
from gspo_jax.serving import answers, dialect
from gspo_jax.serving.limits import Limits, Refused
from gspo_jax.serving.loop import Job, Loop
from gspo_jax.serving.metrics import Metrics

BODY_S = 60.0  # a body that has not come by then is refused
OTHER = "other"  # in metrics, of requests that reach no route: their paths may be anything
OPEN = {"/health", "/ping"}  # to everybody, since they say nothing of the model


@dataclasses.dataclass
class Server:
  """What the routes share.

  Args:
    tokenizer: of prompts as text, and of the text of responses (data/tokenizer.py).
    token: that clients send as `Authorization: Bearer`; "": anybody may ask.
    info: what /version and /server_info say.
  """

  loop: Loop
  limits: Limits
  tokenizer: Any
  model: str
  token: str = ""
  info: dict[str, Any] = dataclasses.field(default_factory=dict)
  queued: int = 0  # responses; changed by the event loop alone

  def __post_init__(self):
    self.metrics = Metrics(self.loop)
    self.started = int(time.time())


def make(server: Server) -> ASGIApp:
  """The ASGI application."""
  routes = {
    "GET /health /ping": health,
    "GET /metrics": metrics,
    "GET /version": version,
    "GET /server_info": server_info,
    "GET /load": load,
    "GET /v1/models": models,
    "GET /is_paused": is_paused,
    "GET /weight_info": weight_info,
    "POST /inference/v1/generate": generate,
    "POST /v1/completions": completions,
    "POST /pause": pause,
    "POST /resume": resume,
    "POST /abort_requests /inference/v1/abort_requests": abort_requests,
    "POST /collective_rpc": collective_rpc,
    "POST /reset_prefix_cache": reset_prefix_cache,
    "POST /update_weight_version": update_weight_version,
  }
  app = Starlette(
    routes=[
      Route(path, functools.partial(_answer, server, handler), methods=[key.split()[0]])
      for key, handler in routes.items()
      for path in key.split()[1:]
    ],
    exception_handlers={HTTPException: functools.partial(_http_error, server)},
  )
  return _guarded(app, server) if server.token else app


def _guarded(app: ASGIApp, server: Server) -> ASGIApp:
  """Lets nobody through who does not know the token."""
  message = "this server wants its token: send the header Authorization: Bearer TOKEN"

  async def guard(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["path"] not in OPEN:
      given = dict(scope["headers"]).get(b"authorization", b"")
      if not secrets.compare_digest(given, f"Bearer {server.token}".encode()):
        server.metrics.requests.labels(OTHER, 401).inc()
        await _error(Refused(401, message))(scope, receive, send)
        return
    await app(scope, receive, send)

  return guard


async def _answer(
  server: Server, handler: Callable[[Server, Request], Awaitable[Response]], request: Request
) -> Response:
  try:
    # Browsers send it with whatever a page posts, and a page of another site may post to loopback.
    if request.method == "POST" and "origin" in request.headers:
      raise Refused(403, "requests of web pages are not taken: leave out the header Origin")
    response = await handler(server, request)
  except Refused as refused:
    response = _error(refused)
  except ClientDisconnect:
    response = Response(status_code=499)  # which nobody reads
  except Exception:  # Starlette answers and uvicorn logs it
    server.metrics.requests.labels(request.url.path, 500).inc()
    raise
  server.metrics.requests.labels(request.url.path, response.status_code).inc()
  return response


def _error(refused: Refused) -> JSONResponse:
  kind = HTTPStatus(refused.status).phrase
  about = dict(message=refused.message, type=kind, param=refused.param, code=refused.status)
  headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
  return JSONResponse(dict(error=about), refused.status, headers)


async def _http_error(server: Server, _: Request, error: HTTPException) -> JSONResponse:
  server.metrics.requests.labels(OTHER, error.status_code).inc()
  return _error(Refused(error.status_code, str(error.detail)))


async def _body(server: Server, request: Request) -> bytes:
  """The body, as far as it may be one. Raises `Refused`."""
  most, body = server.limits.body_bytes, bytearray()
  try:
    async with asyncio.timeout(BODY_S):
      async for chunk in request.stream():
        body += chunk
        if len(body) > most:
          raise Refused(413, f"the body is longer than {most} bytes (--max_body_mib)")
  except TimeoutError as error:
    raise Refused(408, f"the body did not come within {BODY_S:g} s") from error
  return bytes(body)


async def _object(server: Server, request: Request) -> dict[str, Any]:
  kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
  if kind != "application/json":  # pages of other sites may send anything else unasked
    raise Refused(415, "send the header Content-Type: application/json")
  return await run_in_threadpool(dialect.read_object, await _body(server, request))


# Responses.


async def generate(server: Server, request: Request) -> Response:
  body = await _object(server, request)
  given = body, server.limits, server.tokenizer, server.model
  ask, form = await run_in_threadpool(dialect.generate, *given)
  (done,) = await _sample(server, request, form.request_id, [ask])
  decode = server.tokenizer.decode
  return await _written(
    answers.generate, form, server.model, (ask, done), dict(server.loop.labels), decode
  )


async def completions(server: Server, request: Request) -> Response:
  body = await _object(server, request)
  given = body, server.limits, server.tokenizer, server.model
  asks, form = await run_in_threadpool(dialect.completions, *given)
  done = await _sample(server, request, form.request_id, asks)
  return await _written(
    answers.completions,
    form,
    server.model,
    list(zip(asks, done)),
    dict(server.loop.labels),
    server.tokenizer.decode,
  )


async def _written(function: Callable[..., dict], *arguments: Any) -> Response:
  return await run_in_threadpool(lambda: JSONResponse(function(*arguments)))


async def _sample(
  server: Server, request: Request, name: str, asks: Sequence[dialect.Ask]
) -> list[list[Trajectory]]:
  """Trajectories of each prompt. Raises `Refused`, and ClientDisconnect where nobody waits."""
  loop, limits = server.loop, server.limits
  count = sum(ask.samples for ask in asks)
  if count > limits.queue:
    raise Refused(
      400, f"{count} responses are more than the {limits.queue} that a server takes (--max_queue)"
    )
  if server.queued + count > limits.queue:
    raise Refused(
      429,
      f"{count} responses are too many: {server.queued} wait or are sampled, and {limits.queue} "
      "may (--max_queue); ask again later",
    )
  begun, ids = time.perf_counter(), [f"{name}-{i}" if i else name for i in range(len(asks))]
  jobs = [Job.of(id_, ask, name) for id_, ask in zip(ids, asks)]
  server.queued += count
  server.metrics.queued.set(server.queued)
  for job in jobs:
    loop.submit(job)
  sampled = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
  gone = asyncio.create_task(_gone(request))
  try:
    waiting = {sampled, gone}
    await asyncio.wait(waiting, timeout=limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if sampled.done():
      found = sampled.result()
    elif gone.done():
      raise ClientDisconnect
    else:
      raise Refused(504, f"not finished within {limits.timeout_s:g} s (--timeout_s)")
  finally:
    gone.cancel()
    if left := [job for job in jobs if not job.future.done()]:
      loop.send("cancel", left)
      sampled.cancel()
    server.queued -= count
    server.metrics.queued.set(server.queued)
  server.metrics.seconds.observe(time.perf_counter() - begun)
  for one in (one for trajectories in found for one in trajectories):
    reason = "abort" if not one.finished else "stop" if one.stopped else "length"
    server.metrics.finished.labels(reason).inc()
  return found


async def _gone(request: Request) -> None:
  """Returns when the client has left."""
  while (await request.receive())["type"] != "http.disconnect":
    pass


# Control.


async def pause(server: Server, request: Request) -> Response:
  mode = request.query_params.get("mode", "abort")
  if mode not in ("keep", "abort", "wait"):
    raise Refused(400, f"mode={mode!r:.60} must be keep, abort or wait", "mode")
  await _sent(server, "pause", mode)
  return JSONResponse(dict(status="paused"))


async def resume(server: Server, request: Request) -> Response:
  await _sent(server, "resume")
  return JSONResponse(dict(status="resumed"))


async def is_paused(server: Server, request: Request) -> Response:
  return JSONResponse(dict(is_paused=server.loop.paused))


async def abort_requests(server: Server, request: Request) -> Response:
  ids = (await _object(server, request)).get("request_ids")
  if ids is not None and not (isinstance(ids, list) and all(isinstance(i, str) for i in ids)):
    raise Refused(400, "request_ids must be a list of texts", "request_ids")
  count = await _sent(server, "abort", ids or None)
  return JSONResponse(dict(status="aborted", aborted=count))


async def collective_rpc(server: Server, request: Request) -> Response:
  body = await _object(server, request)
  if body.get("method") != "reload_weights":
    raise Refused(
      400, f"method={body.get('method')!r:.60} is not offered, only reload_weights", "method"
    )
  kwargs = body.get("kwargs")
  path = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
  if not (isinstance(path, str) and path):
    raise Refused(400, "kwargs.weights_path must be a directory that this server sees", "kwargs")
  try:
    await _sent(server, "reload", path)
  except Exception as error:
    server.metrics.reloads.labels("failed").inc()
    status = 400 if isinstance(error, ValueError | OSError) else 500
    text = f"{type(error).__name__}: {error}" if status == 500 else str(error)
    raise Refused(status, f"the weights are the old ones: {text[:2000]}", "weights_path") from error
  server.metrics.reloads.labels("done").inc()
  return JSONResponse(dict(results=[None]))


async def reset_prefix_cache(server: Server, request: Request) -> Response:
  """There is none from one request to the next."""
  return JSONResponse(dict(success=True))


async def update_weight_version(server: Server, request: Request) -> Response:
  label = (await _object(server, request)).get("new_version")
  if not isinstance(label, str) or not 0 < len(label) <= 200:
    raise Refused(400, "new_version must be a text of 1 to 200 characters", "new_version")
  await _sent(server, "label", label)
  return JSONResponse(dict(success=True, new_version=label))


async def weight_info(server: Server, request: Request) -> Response:
  return JSONResponse(dict(weight_version=server.loop.label))


async def _sent(server: Server, name: str, *arguments: Any) -> Any:
  return await asyncio.shield(asyncio.wrap_future(server.loop.send(name, *arguments)))


# State.


async def health(server: Server, request: Request) -> Response:
  if server.loop.failed or not server.loop.alive:
    raise Refused(503, server.loop.failed or "the thread of the engine has ended")
  return Response()


async def metrics(server: Server, request: Request) -> Response:
  return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


async def version(server: Server, request: Request) -> Response:
  return JSONResponse(server.info)


async def server_info(server: Server, request: Request) -> Response:
  """Where a client of vLLM looks for how log-probs are meant."""
  routed = server.info.get("enable_return_routed_experts")
  config = dict(
    model_config=dict(max_model_len=server.limits.window, **server.info),
    aux_output_config=dict(enable_return_routed_experts=routed),
  )
  return JSONResponse(dict(vllm_config=config))


async def load(server: Server, request: Request) -> Response:
  return JSONResponse(dict(server_load=server.queued))


async def models(server: Server, request: Request) -> Response:
  card = dict(id=server.model, object="model", created=server.started, owned_by="gspo_jax")
  return JSONResponse(
    dict(object="list", data=[card | dict(root=server.model, max_model_len=server.limits.window)])
  )
