"""Command line: python -m gspo_jax.serve --config=configs/tiny.py --weights=DIR [--port=8000]

Samples for others over HTTP: for a trainer on other chips (engine.name=server), and for whoever
tries a checkpoint. The requests are vLLM's; docs/serving.md has them. Model, tokenizer, mesh,
engine and compute are those of the configuration, and so are the lengths: a prompt and its response
have data.max_prompt_tokens + sampling.max_new_tokens together. Needs `pip install -e '.[serve]'`.
"""

import dataclasses
import functools
import ipaddress
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.need("serve")

import jax
import jax.numpy as jnp
import uvicorn
from absl import app, flags, logging

import gspo_jax
from gspo_jax import paths, sharding
from gspo_jax.cli import flags as config_flag
from gspo_jax.data import tokenizer
from gspo_jax.models import hf, lora, transformer
from gspo_jax.runs.weights import initial
from gspo_jax.sampling import LocalEngine, Workload
from gspo_jax.sampling.requests import bucket
from gspo_jax.serving import app as http
from gspo_jax.serving.dialect import Ask
from gspo_jax.serving.limits import Limits, Refused
from gspo_jax.serving.loop import Job, Loop
from gspo_jax.settings.run import RunConfig
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig

TOKEN = "GSPO_JAX_SERVE_TOKEN"  # the environment variable; a flag would be seen by everybody

flags.adopt_module_key_flags(config_flag)
_WEIGHTS = flags.DEFINE_string(
  "weights", None, "Hugging Face directory, a run or its checkpoint, or random; default: config's."
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", f"Address; beyond loopback it needs ${TOKEN}.")
_PORT = flags.DEFINE_integer("port", 8000, "0: any that is free, which is printed.", 0, 65_535)
_NAME = flags.DEFINE_string("model_name", "", "What clients call the model; default: the weights.")
_SLOTS = flags.DEFINE_integer(
  "slots", 0, "Responses decoded at once; 0: engine.slots, or 32 if that is 0.", 0
)
_ROUTED = flags.DEFINE_bool(
  "enable_return_routed_experts", False, "Answer with the experts of every token, too."
)
_MAX_N = flags.DEFINE_integer("max_n", 256, "Responses to one prompt.", 1)
_MAX_PROMPTS = flags.DEFINE_integer("max_prompts", 64, "Prompts of a request for completions.", 1)
_MAX_QUEUE = flags.DEFINE_integer("max_queue", 4096, "Responses that wait or are sampled.", 1)
_MAX_STOP_IDS = flags.DEFINE_integer("max_stop_ids", 16, "Stop tokens of a request.", 1)
_MAX_BODY = flags.DEFINE_integer("max_body_mib", 16, "MiB of a request's body.", 1, 1024)
_TIMEOUT = flags.DEFINE_float("timeout_s", 3600.0, "Seconds that a request may take.", 0.001)
_GRACE = flags.DEFINE_integer(
  "grace_s", 30, "Seconds that requests have to be finished in after SIGTERM.", 0
)


def main(argv: list[str]) -> None:
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  config_flag.compiled_programs_stay()
  config = config_flag.configured()
  try:
    serve(_with_weights(config, _WEIGHTS.value or config.weights))
  except (ValueError, OSError, Refused) as error:
    config_flag.refuse(error)


def serve(config: RunConfig) -> None:
  """Serves until SIGTERM or Ctrl-C. Raises ValueError or OSError for what cannot be served."""
  if not config.weights:
    raise ValueError("--weights must be given: a Hugging Face directory, a run, or random")
  paths.check_weights(config)
  if config.distributed:
    raise ValueError(
      "distributed=True: a server has the devices of one host; start one on each, and give the "
      "trainer all of their addresses"
    )
  token = os.environ.get(TOKEN, "")
  _check_host(_HOST.value, token)
  config = with_slots(config, _SLOTS.value)
  tok, mesh, make_engine = parts(config)
  window = config.data.max_prompt_tokens + config.sampling.max_new_tokens
  limits = Limits(
    window=window,
    vocab_size=config.model.vocab_size,
    most_text=window * max(map(len, tok.token_bytes())),
    most_samples=_MAX_N.value,
    most_prompts=_MAX_PROMPTS.value,
    queue=_MAX_QUEUE.value,
    body_bytes=_MAX_BODY.value * 2**20,
    stop_ids=_MAX_STOP_IDS.value,
    stop_strings=16,
    stop_string_bytes=256,
    timeout_s=_TIMEOUT.value,
  )
  work = workload(config, limits, _ROUTED.value)
  listening = _listen(_HOST.value, _PORT.value)
  loop = Loop(
    make_engine,
    functools.partial(read_weights, config, mesh),
    work,
    functools.partial(jax.set_mesh, mesh),
  )
  loop.start(config.weights)
  warm_up(loop, work, config.engine)
  name = _NAME.value or config.weights
  info = dict(
    version=gspo_jax.__version__,
    engine="gspo_jax",
    logprobs_mode="processed_logprobs",  # after temperature and truncation; there is no other
    enable_return_routed_experts=_ROUTED.value,
  )
  server = http.Server(loop, limits, tok, name, token, info)
  options = uvicorn.Config(
    http.make(server),
    log_level="info" if flags.FLAGS["verbosity"].value > 0 else "warning",
    timeout_graceful_shutdown=_GRACE.value,
    server_header=False,
  )
  host, port = listening.getsockname()[:2]
  line = (
    f"gspo_jax.serve: {name} at http://{f'[{host}]' if ':' in host else host}:{port} with "
    f"{work.trajectories} slots of {limits.window} tokens; SIGTERM ends it\n"
  )
  run(uvicorn.Server(options), listening, line)
  loop.close()


def run(server: Any, listening: socket.socket, line: str) -> None:
  """Serves from the moment that it says `line` until a signal comes, even if that is at once."""

  # uvicorn has handlers of its own while it runs, and raises the signal that it got once more when
  # it has ended as it should; before them, it looks at this.
  def end(*_: Any) -> None:
    server.should_exit = True

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
  sys.stderr.write(line)
  sys.stderr.flush()
  server.run(sockets=[listening])


def parts(
  config: RunConfig, devices: list | None = None
) -> tuple[tokenizer.Tokenizer, jax.sharding.Mesh, Callable[[], LocalEngine]]:
  """Tokenizer, mesh, and what makes an engine on it.

  Raises:
    ValueError: they do not fit together; says what to change.
  """
  tok = tokenizer.load_for(config.tokenizer, config.model.vocab_size)
  mesh = sharding.make_mesh(config.mesh, devices)
  transformer.check(config.model, config.sampler_compute, shared_prompts=False)
  rules, dtypes = _as_sampled(config, mesh)
  layout = transformer.shardings(config.model, rules, mesh)
  publish = sharding.publisher(layout, dtypes, lora.merged)
  make_engine = functools.partial(
    LocalEngine, config.model, config.engine, config.compute, publish, tok.decode
  )
  return tok, mesh, make_engine


def _as_sampled(config: RunConfig, mesh: jax.sharding.Mesh) -> tuple[sharding.Rules, Any]:
  """Layout and types of the parameters that responses are sampled with."""
  rules = sharding.rollout_rules(config.mesh, mesh, config.model.num_experts)
  return rules, transformer.dtypes(config.model, config.sampler_compute.dtype)


def with_slots(config: RunConfig, slots: int) -> RunConfig:
  """The configuration with so many slots; 0: its own, or 32."""
  engine = dataclasses.replace(config.engine, slots=slots or config.engine.slots or 32)
  return dataclasses.replace(config, engine=engine)


def workload(config: RunConfig, limits: Limits, record_routing: bool) -> Workload:
  """All requests to come, whose programs are compiled once: any distribution, any stop tokens, any
  lengths within the window."""
  if limits.window > config.model.max_position_embeddings:
    raise ValueError(
      f"data.max_prompt_tokens + sampling.max_new_tokens = {limits.window} exceeds "
      f"model.max_position_embeddings={config.model.max_position_embeddings}: lower one"
    )
  return Workload(
    SamplingConfig(1.0, 0, 1.0, 0.0, config.sampling.max_new_tokens),
    prompt_length=config.data.max_prompt_tokens,
    trajectories=config.engine.slots,
    group_size=min(config.rl.group_size, config.engine.slots),
    stop_ids=tuple(range(limits.stop_ids)),  # their number is what counts
    partial=True,
    record_routing=record_routing,
    own_sampling=True,
  )


def warm_up(loop: Loop, work: Workload, engine: EngineConfig) -> None:
  """Has everything compiled before anybody waits for it: decoding, and a prefill of each length
  that prefixes are padded to. Raises `Refused` if sampling fails."""
  lengths = {}
  for n in range(1, work.window):
    lengths[bucket(n, work.prefix_length, engine.prefill_tokens)] = n
  one = dataclasses.replace(work.sampling, max_new_tokens=1)
  jobs = [
    Job.of(f"warm-up-{n}", Ask((0,) * n, 1, one, 0, (), frozenset(), ())) for n in lengths.values()
  ]
  for job in jobs:
    loop.submit(job)
  for job in jobs:
    job.future.result()


def read_weights(config: RunConfig, mesh: jax.sharding.Mesh, weights: str) -> Any:
  """Parameters of the configured model, all of them finite: those of a Hugging Face directory as
  they are sampled with, others as they are trained.

  Raises:
    ValueError: there are none, or those of another model.
    OSError: they cannot be read.
  """
  config = _with_weights(config, weights)
  paths.check_weights(config)
  if _published(weights):  # float32 beside the sampler's copy would be three times as much
    rules, dtypes = _as_sampled(config, mesh)
    params, _ = hf.load(weights, mesh=mesh, rules=rules, dtype=dtypes)
  else:
    params = initial(config, mesh)
  for path, good in jax.tree.leaves_with_path(jax.device_get(_finite(params))):
    if not good:
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      raise ValueError(f"weights={weights!r}: {name} has values that are not finite")
  return params


def _published(weights: str) -> bool:
  """Whether these are a Hugging Face directory: the config.json of a run is another."""
  try:
    return weights != "random" and bool(hf.load_config(weights))
  except (ValueError, OSError):
    return False


@jax.jit
def _finite(tree: Any) -> Any:
  return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


def _with_weights(config: RunConfig, weights: str) -> RunConfig:
  return dataclasses.replace(config, weights=weights)


def _check_host(host: str, token: str) -> None:
  try:
    near = ipaddress.ip_address(host).is_loopback
  except ValueError:
    near = host == "localhost"
  if not near and not token:
    raise ValueError(
      f"--host={host}: whoever reaches this address could replace the weights; set {TOKEN} to a "
      f"secret (for example {secrets.token_urlsafe(9)}...), which clients send as "
      "Authorization: Bearer"
    )


def _listen(host: str, port: int) -> socket.socket:
  """A socket, bound before the weights are read: a port that is taken is told at once."""
  try:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, reuse_port=False)
  except OSError as error:
    raise ValueError(f"--host={host} --port={port}: {error.strerror or error}") from error


if __name__ == "__main__":
  app.define_help_flags()
  app.run(main, flags_parser=lambda argv: config_flag.parse(argv))
