"""Checks of a server's answers, and of its log-probs after each publication (vLLM 0.32).

Even after a successful publication, a server may serve garbage, use keys and values of old weights,
or return log-probs of a wrong distribution. So responses to fixed prompts, the *probe*, are sampled
after every publication, and their log-probs are compared with the trainer's. Half of the probe is
sampled at the run's temperature, and half at a lower one. At temperature 1 alone, a server that
ignores the temperature would look right.
"""

import base64
import dataclasses
import functools
import io
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from gspo_jax import sharding
from gspo_jax.data import tokenizer as tokenizers
from gspo_jax.models import transformer
from gspo_jax.models.experts import routing
from gspo_jax.sampling.engine import ServersGone
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import SamplingConfig, ServerConfig
from gspo_jax.system import hosts

# Kinds of failures, in the order of docs/engines.md.
KINDS = ("connection", "timeout", "health", "request", "status", "body", "tokens", "version")
SLACK = 1e-3  # Largest accepted log-prob in nats: rounding may bring it above 0.
PUBLICATIONS = 2  # Number of publications on disk: a starting server may still read the older one.
PROMPTS = 8  # Number of the probe's prompts, half of them for each temperature.
# Maximum number of tokens of a prompt with its response in the probe. If the window has this size,
# prompts fill blocks (16 to 128 tokens) of a server's prefix cache, so this cache is tested too.
LONGEST = 256
TOKENS = 32  # Maximum number of tokens of a response in the probe.
COOLER = 0.7  # Second temperature, as a multiple of the first.


class Failed(Exception):
  """A request to a server failed. A retry may succeed, at another server or later.

  Attributes:
    kind: one of KINDS; "" if the server was excluded or the call was cancelled.
  """

  def __init__(self, kind: str, text: str):
    super().__init__(text)
    self.kind = kind


@dataclasses.dataclass(frozen=True)
class Call:
  """A request for one continuation of some tokens."""

  id: str
  tokens: tuple[int, ...]  # Input: prompt and tokens so far.
  max_new_tokens: int
  sampling: SamplingConfig  # Its `max_new_tokens` is not used.
  stop_ids: tuple[int, ...]
  seed: int
  routing: bool = False  # Whether the answer must include the experts of every token.


@dataclasses.dataclass(frozen=True)
class Part:
  """Answer to a call: a whole response, or a part of a response."""

  tokens: np.ndarray  # New tokens, the stop token included, int32 [n].
  logp: np.ndarray  # Log-probs after temperature and truncation, float32 [n].
  version: np.ndarray  # Weight version of each token, int32 [n].
  stopped: bool  # Whether a stop token ended the continuation.
  aborted: bool  # Whether an abort request ended the continuation.
  # Experts of the call's tokens and of all new tokens except the last, [call + n - 1, l, k].
  # None if `Call.routing` is False, or if there are no new tokens.
  experts: np.ndarray | None = None


def read_answer(answer: Any, call: Call, model: ModelConfig, oldest: int, newest: int) -> Part:
  """Reads and checks the answer to a call.

  Args:
    answer: JSON value of the answer.
    call: call that the server answered.
    model: configuration of the model.
    oldest, newest: minimum and maximum weight version that a token may have.

  Raises:
    Failed: the answer is not a valid continuation of the call.
  """
  try:
    (choice,) = answer["choices"]
    part = _read_choice(choice)
    check_part(part, call, model, oldest, newest)
    if not (call.routing and len(part.tokens)):
      return part
    return dataclasses.replace(part, experts=_read_experts(choice, call, part, model))
  except Failed:
    raise
  except Exception as error:  # Fields may be missing, and readers of .npy may raise anything.
    raise Failed("body", f"the answer cannot be used: {error!r:.80}") from error


def _read_choice(choice: Mapping[str, Any]) -> Part:
  tokens = np.array(choice["token_ids"] or [], np.int32)
  content = (choice["logprobs"] or {}).get("content") or []
  logp = np.array([entry["logprob"] for entry in content], np.float32)
  if [entry["token_id"] for entry in content] != tokens.tolist() or logp.shape != tokens.shape:
    raise Failed("tokens", "the tokens of the log-probs are not the tokens of the answer")
  version = np.full(len(tokens), -1, np.int32)  # Remains -1 for tokens without a version.
  for span in choice.get("weight_versions") or []:
    label = str(span["version"])  # Not a number before the first publication.
    version[int(span["start"]) : int(span["end"])] = int(label) if label.isdecimal() else -1
  reason = choice["finish_reason"]
  return Part(tokens, logp, version, reason == "stop", reason == "abort")


def check_part(part: Part, call: Call, model: ModelConfig, oldest: int, newest: int) -> None:
  """Raises Failed unless the part is a valid continuation of the call."""
  n, tokens, version = len(part.tokens), part.tokens, part.version
  if n > call.max_new_tokens or (n == 0 and not part.aborted):
    raise Failed("tokens", f"the answer has {n} tokens, and not 1 to {call.max_new_tokens}")
  if n and not 0 <= tokens.min() <= tokens.max() < model.vocab_size:
    raise Failed(
      "tokens",
      f"the answer has token ids from {tokens.min()} to {tokens.max()}, and the model has 0 to "
      f"{model.vocab_size - 1}",
    )
  if not (np.isfinite(part.logp).all() and (part.logp <= SLACK).all()):
    raise Failed("tokens", "the answer has a log-prob that is above 0 or not finite")
  ends = np.isin(tokens, call.stop_ids)
  if ends[:-1].any() or (n and bool(ends[-1]) != part.stopped):
    raise Failed(
      "tokens",
      "the answer goes on after a stop token, or its finish_reason contradicts its last token",
    )
  if not (part.stopped or part.aborted or n == call.max_new_tokens):
    raise Failed(
      "tokens", f"the answer ends after {n} tokens, without a stop token and before its limit"
    )
  if n and not oldest <= version.min() <= version.max() <= newest:
    raise Failed(
      "version",
      f"the answer is from weights of versions {version.min()} to {version.max()}, not {oldest} to "
      f"{newest}",
    )


def _read_experts(
  choice: Mapping[str, Any], call: Call, part: Part, model: ModelConfig
) -> np.ndarray:
  """Returns the experts of a part (`Part.experts`) in the storage dtype."""
  if choice.get("routed_experts") is None:
    raise Failed(
      "body",
      "the answer has no routed experts: start the server with --enable-return-routed-experts",
    )
  file = io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True))
  experts = np.lib.format.read_array(file, allow_pickle=False)
  inputs, shape = len(call.tokens) + len(part.tokens) - 1, experts.shape
  moe_layers = list(filter(model.is_moe, range(model.num_layers)))
  for count in (len(moe_layers), model.num_layers):  # Some servers also send dense layers.
    if experts.size == inputs * count * model.experts_per_token and experts.dtype.kind in "iu":
      experts = experts.reshape(inputs, count, model.experts_per_token)
      experts = experts if count == len(moe_layers) else experts[:, moe_layers]
      if 0 <= experts.min() <= experts.max() < model.num_experts:
        return experts.astype(routing.storage_dtype(model.num_experts))
  raise Failed(
    "body",
    f"the answer's routed experts do not fit: shape {shape} and type {experts.dtype}, but there "
    f"are {inputs} tokens before the last one, {len(moe_layers)} layers with experts, and "
    f"{model.experts_per_token} experts per token with ids below {model.num_experts}",
  )


def publication_directory(server: ServerConfig, workdir: Path) -> Path:
  """Returns the directory of a run's published weights, the same after a resume.

  In `engine.server.directory`, each run has a folder, since runs delete old weights.
  """
  if not server.directory:
    return workdir.absolute() / "published"
  path = workdir.resolve()
  return Path(server.directory) / f"{path.name}-{zlib.crc32(os.fsencode(path)):08x}"


def write_weights(
  target: Path, params: Any, model: ModelConfig, tokenizer: epath.Path | None = None
) -> Path:
  """Writes a Hugging Face directory atomically; keeps the newest `PUBLICATIONS` directories.

  Collective: call it on all hosts.

  Args:
    target: directory to write.
    params: parameters in the sampler's dtypes.
    model: configuration of the model.
    tokenizer: directory of tokenizer files to copy; None for no files.

  Returns:
    `target`.

  Raises:
    ServersGone: the directory cannot be written.
  """
  from gspo_jax.models import hf  # Needs safetensors.

  partial = target.with_name(f"{target.name}.partial")

  def begin() -> None:
    for incomplete in target.parent.glob("weights_*.partial"):
      shutil.rmtree(incomplete, ignore_errors=True)
    partial.mkdir(parents=True)

  def complete() -> None:
    if tokenizer:  # FILES has no generation_config.json, which would change some servers' sampling.
      tokenizers.copy(tokenizer, partial, tokenizers.FILES)
    shutil.rmtree(target, ignore_errors=True)  # It may exist from before a resume.
    earlier = sorted(target.parent.glob("weights_*[0-9]"), key=lambda path: path.stat().st_mtime)
    os.rename(partial, target)
    for path in earlier[: 1 - PUBLICATIONS]:
      shutil.rmtree(path, ignore_errors=True)

  try:
    hosts.run_on_first_host(begin, ServersGone)
    hf.save(partial, params, model)  # Tensors keep their dtypes.
    hosts.run_on_first_host(complete, ServersGone)
  except OSError as error:
    path = error.filename or target.parent
    raise ServersGone(f"{path} cannot be written: {error.strerror or error}") from error
  return target


def read_weights(directory: Path) -> Any:
  """Reads published weights. The trainer's weights may already be newer."""
  from gspo_jax.models import hf  # Needs safetensors.

  mesh = None if sharding.without_mesh() else jax.sharding.get_mesh()
  return hf.load(directory, mesh=mesh)[0]


class Probe:
  """Fixed prompts, and the trainer's forward pass over their responses.

  Args:
    model: configuration of the model.
    compute: the sampler's compute settings.
    window: maximum number of tokens of a prompt with its response.
    temperature: temperature of the run. If it is 0, the probe is sampled at 1 instead.
    routing: whether answers must include the chosen experts. `read_answer` checks these experts.
  """

  def __init__(
    self,
    model: ModelConfig,
    compute: ComputeConfig,
    window: int,
    temperature: float,
    routing: bool = False,
  ):
    self._model = model
    # Plain attention accepts any length, unlike kernels.
    self._compute = dataclasses.replace(compute, attention="plain", remat="none", logits_chunk=0)
    length = min(window, LONGEST, model.max_position_embeddings)
    self.new = max(1, min(TOKENS, length // 2))
    prompt = max(1, length - self.new)
    rng = np.random.default_rng(0)
    self._prompts = rng.integers(0, model.vocab_size, (PROMPTS, prompt)).astype(np.int32)
    first = temperature or 1.0
    self._temperatures = first, COOLER * first
    self._routing = routing

  def calls(self, name: str) -> list[Call]:
    """Returns the probe's calls, without stop tokens. Their ids begin with `name`."""
    return [
      Call(
        f"{name}-probe-{i}",
        tuple(prompt.tolist()),
        self.new,
        SamplingConfig(self._temperatures[2 * i // PROMPTS], 0, 1.0, 0.0, self.new),
        (),
        seed=i,
        routing=self._routing,
      )
      for i, prompt in enumerate(self._prompts)
    ]

  def differences(self, params: Any, parts: list[Part]) -> np.ndarray:
    """Returns absolute differences between a server's and the trainer's log-probs, [N, T], in nats.

    Collective: call it on all hosts.

    Args:
      params: parameters published to the server.
      parts: the server's answers to `calls`: N responses of T tokens.
    """
    new_NT = np.stack([part.tokens for part in parts])
    server_NT = np.stack([part.logp for part in parts])
    tokens_NL = np.concatenate([self._prompts, new_NT], axis=1)
    static = self._model, self._compute, self._temperatures
    if sharding.without_mesh():
      first_NT, second_NT = jax.device_get(_logp(params, tokens_NL, *static))
    else:  # Pads to the same number of batch rows on every device.
      mesh = jax.sharding.get_mesh()
      shards = sharding.batch_shards(mesh)
      rows = np.resize(tokens_NL, (-(-PROMPTS // shards) * shards, tokens_NL.shape[1]))
      first_NT, second_NT = sharding.fetch(_logp(params, sharding.put_batch(rows, mesh), *static))
    half = PROMPTS // 2
    trainer_NT = np.concatenate([first_NT[:half], second_NT[half:PROMPTS]])
    return abs(trainer_NT[:, -self.new - 1 : -1] - server_NT)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _logp(
  params: Any,
  tokens_BT: jax.Array,
  model: ModelConfig,
  compute: ComputeConfig,
  temperatures: tuple[float, ...],
) -> list[jax.Array]:
  """Returns the log-prob of each next token, [B, T], for each temperature."""
  out = transformer.forward(params, model, tokens_BT, compute=compute)
  targets_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1)))
  token_logp = functools.partial(transformer.token_logp, params, model, out.hidden_BTD, targets_BT)
  return [token_logp(temperature=t, compute=compute)[0] for t in temperatures]
